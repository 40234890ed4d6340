"""Verifies cached tokens in vLLM's V2 model runner: draws at given rows of logits and compares with the cached tokens.

`verify_hook.py` calls `verify_rows` in vLLM's worker. With Triton, one kernel (`verify_kernel.py`) computes hash,
noise, argmax and log-probs in one read of the logits. Without it, `verify_rows_with_torch` computes the same with the
noise of `engine/sampling`, on whatever device the logits are.

Guarantees: inputs and outputs stay on the device of the logits, and nothing waits for the device; the drawn token is
the one that decoding would draw from the same logits; log-probs are those of the sampled distribution, where greedy
requests use temperature 1.

Shapes: r rows of logits (any positions of any sequences), v vocabulary, 2 the cached token and the final one.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from sortedrl.engine.sampling.noise import gumbel


@dataclass(slots=True, kw_only=True, frozen=True)
class CachedRows:
    """Logits, and what determines the draw at each row. All tensors are on one device."""

    logits_rv: torch.Tensor  # as the model computes them, or divided by the temperature and filtered (`is_shaped`)
    temperatures_r: torch.Tensor  # float32; 0 is greedy
    seeds_r: torch.Tensor  # int64
    positions_r: torch.Tensor  # int64: index of the last token that the model has read
    cached_r: torch.Tensor  # int64: the tokens to verify
    tolerances_r: torch.Tensor  # float32: how far a kept token's score may be below the best
    is_shaped: bool = False


@dataclass(slots=True, kw_only=True, frozen=True)
class VerifiedRows:
    """Column 0: the cached token. Column 1: the same token if it is kept, otherwise the drawn one."""

    tokens_r2: torch.Tensor  # int32
    logprobs_r2: torch.Tensor  # float32


def verify_rows(rows: CachedRows) -> VerifiedRows:
    """Draw at every row, and keep the cached token if it is drawn or within its tolerance."""
    if has_triton():
        from sortedrl.engine.vllm.verify_kernel import verify_rows_with_triton

        return verify_rows_with_triton(rows)
    return verify_rows_with_torch(rows)


def has_triton() -> bool:
    """Whether vLLM is installed and finds a Triton that it can use."""
    if importlib.util.find_spec("vllm") is None:
        return False
    from vllm.triton_utils import HAS_TRITON  # pyright: ignore[reportMissingImports]

    return HAS_TRITON


def verify_rows_with_torch(rows: CachedRows) -> VerifiedRows:
    scaled_rv = rows.logits_rv.float()
    is_random_r1 = (rows.temperatures_r > 0).unsqueeze(1)
    if not rows.is_shaped:
        scaled_rv = scaled_rv / torch.where(is_random_r1, rows.temperatures_r.unsqueeze(1), 1.0)
    noise_rv = gumbel(rows.seeds_r, rows.positions_r, scaled_rv.shape[1])
    scores_rv = scaled_rv + torch.where(is_random_r1, noise_rv, 0.0)
    best_r, drawn_r = scores_rv.max(-1)
    gap_r = best_r - scores_rv.gather(1, rows.cached_r.unsqueeze(1)).squeeze(1)
    is_kept_r = (drawn_r == rows.cached_r) | (gap_r <= rows.tolerances_r)
    tokens_r2 = torch.stack([rows.cached_r, torch.where(is_kept_r, rows.cached_r, drawn_r)], 1)
    logprobs_r2 = scaled_rv.log_softmax(-1).gather(1, tokens_r2)
    return VerifiedRows(tokens_r2=tokens_r2.to(torch.int32), logprobs_r2=logprobs_r2)
