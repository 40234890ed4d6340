# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Verification of cached tokens inside vLLM's V2 model runner, in the place of its prompt log-probs.

`worker.py` calls `install_verification` in vLLM's worker; nothing else of the runner is replaced, and vLLM decodes with
its own sampler. A replay sends its cached answer as part of the prompt and asks for prompt log-probs. vLLM then
computes the whole prompt again (it does not read the prefix cache for such requests), and calls this class after every
step with the hidden states. Rows that predict cached tokens are gathered over all requests of the step, go through the
output head in chunks of vLLM's own size, and through `verify_rows`.

Guarantees: results stay on the device, and vLLM copies them to the host together with its own outputs; the number of
chunks depends on the step's schedule alone, as it must under tensor parallelism, where computing logits is a
collective; temperature and filters are those that vLLM's sampler applies, by vLLM's own functions.

Shapes: r rows, v vocabulary, t tokens of a step, d hidden size, 2 the cached token and the final one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.prompt_logprob import CHUNK_SIZE, PromptLogprobsWorker

from sortedrl.engine.vllm.sampling_args import SamplingArgs
from sortedrl.engine.vllm.verify_rows import CachedRows, VerifiedRows, verify_rows


@dataclass(slots=True, kw_only=True, frozen=True)
class _Piece:
    """The part of one request's prompt that a step has computed."""

    request_id: str
    slot: int
    num_before: int  # rows of this piece that predict tokens of the real prompt: nothing is verified there
    num_verified: int  # rows that predict cached tokens
    first_row: int  # the first of those among the hidden states of the step
    tolerance: float
    is_last: bool

    @property
    def num_rows(self) -> int:
        return self.num_before + self.num_verified


def install_verification(runner: Any) -> None:
    """Put a `ReplayVerifier` into a V2 model runner. A worker that does not sample has nothing to replace."""
    old = runner.prompt_logprobs_worker
    if old is not None:
        runner.prompt_logprobs_worker = ReplayVerifier(runner, old)


class ReplayVerifier(PromptLogprobsWorker):
    def __init__(self, runner: Any, old: PromptLogprobsWorker) -> None:
        super().__init__(old.max_num_reqs, old.device, logprobs_mode=old.logprobs_mode)
        self._runner = runner
        self._arguments: dict[str, SamplingArgs] = {}  # of requests that are being verified

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> None:
        super().add_request(req_id, req_idx, sampling_params)
        if sampling_params.prompt_logprobs is not None:
            arguments = SamplingArgs.from_extra_args(sampling_params.extra_args)
            assert arguments is not None, f"request {req_id} asks for prompt log-probs and is not of this engine"
            self._arguments[req_id] = arguments

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self._arguments.pop(req_id, None)

    def compute_prompt_logprobs(
        self,
        logits_fn: Callable[[torch.Tensor], torch.Tensor],
        hidden_states: torch.Tensor,
        input_batch: Any,
        all_token_ids: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        prompt_lens: np.ndarray,
    ) -> dict[str, LogprobsTensors]:
        pieces = self._pieces(input_batch, prompt_lens)
        if not pieces:
            return {}
        verified = self._verify(pieces, logits_fn, hidden_states, input_batch, all_token_ids)
        complete: dict[str, LogprobsTensors] = {}
        start = 0
        for piece in pieces:
            rows = slice(start, start + piece.num_verified)
            start = rows.stop
            parts = self.in_progress_prompt_logprobs[piece.request_id]
            if piece.num_rows:
                parts.append(_as_logprobs(verified, rows, piece.num_before))
            if piece.is_last and parts:
                complete[piece.request_id] = LogprobsTensors.cat(parts)
                parts.clear()
        return complete

    def _pieces(self, batch: Any, prompt_lens: np.ndarray) -> list[_Piece]:
        pieces: list[_Piece] = []
        for index, request_id in enumerate(batch.req_ids):
            slot = int(batch.idx_mapping_np[index])
            if not self.uses_prompt_logprobs[slot]:
                continue
            num_prompt = int(prompt_lens[slot])
            begin = int(batch.num_computed_prefill_tokens_np[index])
            after = begin + int(batch.num_scheduled_tokens[index])
            # Past its prompt, or resumed after a preemption that came when its prompt was complete.
            if begin >= num_prompt or num_prompt < batch.prefill_len_np[index]:
                continue
            arguments = self._arguments[request_id]
            end = min(after, num_prompt - 1)  # the hidden state at index i predicts token i + 1
            first = min(max(begin, num_prompt - arguments.num_cached - 1), max(begin, end))
            pieces.append(
                _Piece(
                    request_id=request_id,
                    slot=slot,
                    num_before=first - begin,
                    num_verified=max(0, end - first),
                    first_row=int(batch.query_start_loc_np[index]) + first - begin,
                    tolerance=arguments.tolerance,
                    is_last=after >= num_prompt,
                )
            )
        return pieces

    def _verify(
        self,
        pieces: list[_Piece],
        logits_fn: Callable[[torch.Tensor], torch.Tensor],
        hidden_td: torch.Tensor,
        batch: Any,
        all_tokens: torch.Tensor,
    ) -> VerifiedRows:
        """The verified rows of all pieces, one after the other."""
        counts = [piece.num_verified for piece in pieces]
        slots_np = np.repeat(np.array([piece.slot for piece in pieces], dtype=np.int32), counts)
        tolerances_np = np.repeat(np.array([piece.tolerance for piece in pieces], dtype=np.float32), counts)
        rows_np = np.concatenate(
            [piece.first_row + np.arange(count) for piece, count in zip(pieces, counts, strict=True)]
        )
        rows_r = async_tensor_h2d(rows_np, self.device, torch.int64)
        slots_r = async_tensor_h2d(slots_np, self.device, torch.int32)
        tolerances_r = async_tensor_h2d(tolerances_np, self.device, torch.float32)
        tokens_r2 = torch.empty(len(rows_np), 2, dtype=torch.int32, device=self.device)
        logprobs_r2 = torch.empty(len(rows_np), 2, dtype=torch.float32, device=self.device)
        states = self._runner.sampler.sampling_states
        for start in range(0, len(rows_np), CHUNK_SIZE):
            chunk = slice(start, start + CHUNK_SIZE)
            at_r, slots_c = rows_r[chunk], slots_r[chunk]
            positions_r = batch.positions[at_r].to(torch.int64)
            logits_rv, is_shaped = _shape(logits_fn(hidden_td[at_r]), states, slots_c, slots_np[chunk])
            done = verify_rows(
                CachedRows(
                    logits_rv=logits_rv,
                    temperatures_r=states.temperature.gpu[slots_c],
                    seeds_r=states.seeds.gpu[slots_c],
                    positions_r=positions_r,
                    cached_r=all_tokens[slots_c, positions_r + 1].to(torch.int64),
                    tolerances_r=tolerances_r[chunk],
                    is_shaped=is_shaped,
                )
            )
            tokens_r2[chunk], logprobs_r2[chunk] = done.tokens_r2, done.logprobs_r2
        return VerifiedRows(tokens_r2=tokens_r2, logprobs_r2=logprobs_r2)


def _shape(
    logits_rv: torch.Tensor, states: Any, slots_r: torch.Tensor, slots_np: np.ndarray
) -> tuple[torch.Tensor, bool]:
    """Temperature and filters by vLLM's functions, as its sampler applies them; temperature alone is the kernel's."""
    is_filtered = (states.min_p.np != 0.0) | (states.top_k.np != states.vocab_size) | (states.top_p.np != 1.0)
    if not is_filtered[slots_np].any():
        return logits_rv, False
    shaped_rv = torch.empty_like(logits_rv, dtype=torch.float32).copy_(logits_rv)
    states.apply_temperature(shaped_rv, slots_r, slots_np)
    states.apply_min_p(shaped_rv, slots_r, slots_np)
    return states.apply_top_k_top_p(shaped_rv, slots_r, slots_np), True


def _as_logprobs(verified: VerifiedRows, rows: slice, num_before: int) -> LogprobsTensors:
    """Verified rows in vLLM's form, after rows of zeros for tokens that are not verified."""
    tokens_r2, logprobs_r2 = verified.tokens_r2[rows], verified.logprobs_r2[rows]
    if num_before:
        tokens_r2 = torch.cat([tokens_r2.new_zeros(num_before, 2), tokens_r2])
        logprobs_r2 = torch.cat([logprobs_r2.new_zeros(num_before, 2), logprobs_r2])
    return LogprobsTensors(tokens_r2, logprobs_r2, tokens_r2.new_zeros(len(tokens_r2)))
