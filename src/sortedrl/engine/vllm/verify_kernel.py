# pyright: reportMissingImports=false, reportIndexIssue=false
"""The Triton kernel of `verify_rows.py`: hash, noise, argmax and log-probs of a row in one pass over its logits.

Only `verify_rows.py` imports it, where vLLM finds Triton. The noise is vLLM's own function, so a replay meets
the noise with which vLLM's V2 sampler decodes, to the last bit. One program reads one row in blocks. It keeps the best
noisy score, and the maximum and the sum of a softmax that is rescaled when a block has a larger maximum. The logits are
read once, and the cached token's logit a second time.

Guarantees: `bytes_per_row` is what a row costs in device memory traffic, by the blocks above; the launch depends on
shapes alone, so workers of tensor parallelism, which have the same shapes, launch the same.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from sortedrl.engine.vllm.verify_rows import CachedRows, VerifiedRows

BLOCK = 4096
_INPUT_BYTES = 4 + 8 + 8 + 8 + 4  # temperature, seed, position, cached token, tolerance
_OUTPUT_BYTES = 2 * 4 + 2 * 4  # two tokens, two log-probs


@triton.jit
def _verify_kernel(
    tokens_ptr,
    logprobs_ptr,
    logits_ptr,
    logits_stride,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    cached_ptr,
    tolerances_ptr,
    vocab,
    IS_SHAPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    cached = tl.load(cached_ptr + row)
    logits_row = logits_ptr + row * logits_stride
    divisor = 1.0 if IS_SHAPED else tl.where(temperature == 0.0, 1.0, temperature)

    best = float("-inf")
    drawn = tl.full((), 0, tl.int64)
    drawn_logit = float("-inf")
    top = float("-inf")  # of the softmax: the largest logit
    total = 0.0  # and the sum of exp(logit - top)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        is_token = tokens < vocab
        scaled = tl.load(logits_row + tokens, mask=is_token, other=float("-inf")).to(tl.float32)
        if divisor != 1.0:
            scaled = scaled / divisor
        score, index = gumbel_noised_argmax(
            scaled, tokens, is_token, seed, position, temperature, False, False, APPLY_TEMPERATURE=False
        )
        # Strictly greater: of equal scores the smallest token wins, as in vLLM's sampler.
        is_better = score > best
        best = tl.where(is_better, score, best)
        drawn = tl.where(is_better, start + index, drawn)
        here = tl.sum(tl.where(tokens == start + index, scaled, 0.0))
        drawn_logit = tl.where(is_better, here, drawn_logit)
        new_top = tl.maximum(top, tl.max(scaled))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # all tokens so far may be filtered
        total = total * tl.exp(top - shift) + tl.sum(tl.where(is_token, tl.exp(scaled - shift), 0.0))
        top = new_top

    one = tl.arange(0, 1)
    cached_logit = tl.load(logits_row + cached + one).to(tl.float32)
    if divisor != 1.0:
        cached_logit = cached_logit / divisor
    cached_score, _ = gumbel_noised_argmax(
        cached_logit, cached + one, one == 0, seed, position, temperature, False, False, APPLY_TEMPERATURE=False
    )
    normalizer = top + tl.log(total)
    cached_logprob = tl.sum(cached_logit) - normalizer
    is_kept = (drawn == cached) | (best - cached_score <= tl.load(tolerances_ptr + row))
    tl.store(tokens_ptr + 2 * row, cached.to(tl.int32))
    tl.store(tokens_ptr + 2 * row + 1, tl.where(is_kept, cached, drawn).to(tl.int32))
    tl.store(logprobs_ptr + 2 * row, cached_logprob)
    tl.store(logprobs_ptr + 2 * row + 1, tl.where(is_kept, cached_logprob, drawn_logit - normalizer))


def verify_rows_with_triton(rows: CachedRows) -> VerifiedRows:
    num_rows, vocab = rows.logits_rv.shape
    logits_rv = rows.logits_rv if rows.logits_rv.stride(1) == 1 else rows.logits_rv.contiguous()
    tokens_r2 = torch.empty(num_rows, 2, dtype=torch.int32, device=logits_rv.device)
    logprobs_r2 = torch.empty(num_rows, 2, dtype=torch.float32, device=logits_rv.device)
    if num_rows:
        kernel: Any = _verify_kernel
        kernel[(num_rows,)](
            tokens_r2,
            logprobs_r2,
            logits_rv,
            logits_rv.stride(0),
            rows.temperatures_r.contiguous(),
            rows.seeds_r.contiguous(),
            rows.positions_r.contiguous(),
            rows.cached_r.contiguous(),
            rows.tolerances_r.contiguous(),
            vocab,
            IS_SHAPED=rows.is_shaped,
            BLOCK=BLOCK,
        )
    return VerifiedRows(tokens_r2=tokens_r2, logprobs_r2=logprobs_r2)


def bytes_per_row(vocab: int, itemsize: int) -> int:
    """Bytes that the kernel reads and writes for one row, where `itemsize` is that of a logit."""
    return (vocab + 1) * itemsize + _INPUT_BYTES + _OUTPUT_BYTES
