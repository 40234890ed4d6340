# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Our code inside vLLM's worker process: replay, loading of weights, and in V1 shared noise in place of its sampler.

vLLM loads this module by name in its worker's process; no other module imports it. Importing `transfer/gloo.py` makes
weight transfer over gloo known to the worker. `NoiseRows` is a logits processor,
because that is how a worker learns which request is in which row. `SortedWorker` is the worker's extension; the
front end calls its methods through `collective_rpc`. In vLLM's V2 model runner only replay is ours
(`verify_hook.py`), because its sampler draws with the shared noise by itself; the rest of this module is for V1.

Guarantees: a token is argmax(logits / T + noise) with the noise of `engine/sampling`, and its log-prob is that of
softmax(logits / T), as in every other engine; after `sorted_take_weights`, or a transfer and `sorted_tie_head`, every
layer computes with the new weights, a tied head included; the worker ends when the process that owns the engine ends.

Shapes: r rows of logits, or ranks of an adapter, v vocabulary, t tokens of one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.sample.sampler import Sampler

from sortedrl.engine.base import Sampling
from sortedrl.engine.sampling.draw import Draw, TokenSampler, make_sampler, shape_logits
from sortedrl.engine.vllm.abort_flag import AbortFlag, StepAborter
from sortedrl.engine.vllm.owner import end_with_owner, end_with_starter
from sortedrl.engine.vllm.sampling_args import SamplingArgs
from sortedrl.engine.vllm.transfer import gloo
from sortedrl.engine.vllm.worker_report import is_v2, report_worker

gloo.register()
end_with_starter()  # now: weights are loaded, and memory is taken, before the first call of `SortedWorker`
_GREEDY = Draw(0, 0, Sampling(temperature=0.0))  # for rows that are not ours: vLLM's warm-up
_MAX_LOGITS = 1 << 24  # how many logits replay computes at once


@dataclass(slots=True, kw_only=True, frozen=True)
class _Row:
    sampling_args: SamplingArgs
    num_prompt: int  # tokens of vLLM's prompt, which includes the cached answer
    output: list[int]  # vLLM's own list of the request's output tokens: it grows with every step

    @property
    def draw(self) -> Draw:
        position = self.num_prompt + len(self.output) - 1
        return Draw(self.sampling_args.seed, position, self.sampling_args.sampling)


class NoiseRows(LogitsProcessor):
    """Tracks seed and position of every row. It changes no logits, because log-probs must not contain the noise."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            sampling_args = SamplingArgs.from_extra_args(params.extra_args)
            if sampling_args is None:
                rows.pop(index, None)
            else:
                rows[index] = _Row(sampling_args=sampling_args, num_prompt=len(prompt), output=output)
        for source, target, direction in batch_update.moved:
            moved, displaced = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if displaced is not None and direction is MoveDirectionality.SWAP:
                rows[source] = displaced

    def draws(self, count: int) -> list[Draw] | None:
        """Seed, position and sampling of each row in this step; None if no row is ours."""
        if not self._rows:
            return None
        return [row.draw if (row := self._rows.get(index)) is not None else _GREEDY for index in range(count)]


class NoiseSampler(Sampler):
    """vLLM's sampler with our draw; it returns the log-probs of the sampled distribution."""

    def __init__(self, rows: NoiseRows, aborter: StepAborter | None) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self._noise_rows = rows
        self._aborter = aborter
        self._noise: TokenSampler | None = None

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        draws = self._noise_rows.draws(len(logits))
        if self._aborter is not None and self._aborter.is_aborted:
            return torch.zeros(len(logits), dtype=torch.int64), torch.full((len(logits), 1), math.nan)
        if draws is None:
            return super().sample(logits, sampling_metadata, logprobs_mode_override)
        self._noise = self._noise or make_sampler(1, logits.shape[1], logits.device)
        scaled_rv = shape_logits(logits, [draw.sampling for draw in draws])
        drawn = self._noise.verify(scaled_rv, draws, [-1] * len(draws), [0.0] * len(draws)).drawn
        logprobs_r = torch.tensor(drawn.logprobs, device=logits.device)
        return torch.tensor(drawn.tokens, device=logits.device), logprobs_r.unsqueeze(1)

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        """The drawn tokens' log-probs. vLLM also ranks them, with a kernel that takes half a minute to compile."""
        assert num_logprobs == 0, "requests of this engine ask for the log-prob of the drawn token only"
        token_ids = token_ids.unsqueeze(-1)
        if logprobs.shape[1] > 1:  # over the whole vocabulary: no row is ours
            logprobs = logprobs.gather(-1, token_ids)
        ranks_r = torch.zeros(len(token_ids), dtype=torch.int64, device=logprobs.device)
        return LogprobsTensors(token_ids.to(torch.int32), logprobs, ranks_r)


class SortedWorker:
    """Methods added to vLLM's worker. Their names begin with `sorted_` to avoid clashes with its own."""

    model_runner: Any
    weight_transfer_engine: Any

    def sorted_prepare(self, owner: str, flag: str = "") -> dict[str, Any]:
        """Install replay, and in V1 our sampler. End this process when its owner ends (`owner.py`; empty: no owner).

        `flag`: the file of the abort flag, if steps may be aborted. Returns a `WorkerReport` in plain values.
        """
        runner = self.model_runner
        if is_v2(runner):
            from sortedrl.engine.vllm.verify_hook import install_verification

            install_verification(runner)
        else:
            self._replace_sampler(flag)
        if owner:
            end_with_owner(owner)
        return report_worker(runner).to_dict()

    def sorted_report(self) -> dict[str, Any]:
        return report_worker(self.model_runner).to_dict()

    def _replace_sampler(self, flag: str) -> None:
        runner = self.model_runner
        is_alone = runner.parallel_config.world_size == 1 and runner.device.type == "cpu"
        aborter = StepAborter(runner, AbortFlag(Path(flag))) if flag and is_alone else None
        (rows,) = (p for p in runner.input_batch.logitsprocs.all if isinstance(p, NoiseRows))
        runner.sampler = NoiseSampler(rows, aborter)
        if runner.lora_config is not None and runner.device.type == "cpu":
            for kernels in runner.lora_manager._adapter_manager.punica_wrapper_mapping.values():
                kernels.add_lora_linear = _add_adapter
        runner._get_prompt_logprobs_dict = lambda hidden_td, scheduled: (
            {} if aborter is not None and aborter.is_aborted else _verify_prompts(runner, hidden_td, scheduled)
        )

    def sorted_take_weights(self, path: str) -> None:
        runner = self.model_runner
        runner.reload_weights(weights_iterator=_tensors(Path(path)))
        _tie_head(runner.get_model())

    def sorted_leave_transfer(self) -> None:
        """End the present session before another begins.

        vLLM's NCCL engine would overwrite its communicator without freeing the GPU memory.
        """
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.shutdown()

    def sorted_tie_head(self) -> None:
        """After a transfer: give a tied head the new weights."""
        _tie_head(self.model_runner.get_model())


def _add_adapter(
    y_to: torch.Tensor,
    x_ti: torch.Tensor,
    stacked_a: Sequence[torch.Tensor],
    stacked_b: Sequence[torch.Tensor],
    scale: float,
    widths: Sequence[int],
    **_: Any,
) -> None:
    """Add the adapters' product with `x` to a layer's output in place; a packed layer has several side by side.

    vLLM's version for CPUs copies both matrices for every token, because each token may use other adapters. Here all
    tokens use one set. i inputs, o outputs of the layer.
    """
    y_to, x_ti = y_to.view(-1, y_to.shape[-1]), x_ti.view(-1, x_ti.shape[-1]).float()
    start = 0
    for a_ri, b_or, width in zip(stacked_a, stacked_b, widths, strict=True):
        inner_tr = (x_ti @ a_ri[0, 0].float().T).to(y_to.dtype)
        y_to[:, start : start + width].addmm_(inner_tr, b_or[0, 0].T, alpha=scale)
        start += width


def _tensors(path: Path) -> Iterable[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (it is no mapping)
            yield name, file.get_tensor(name)


def _tie_head(model: Any) -> None:
    """Give a tied head the embedding's new weights, because a reload leaves it with the old ones.

    On CPUs a layer computes with a packed copy of its weights. The reload has made one of the embedding's.
    """
    if not getattr(model.config, "tie_word_embeddings", False):
        return
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else model.model.embed_tokens
    head = getattr(model, "lm_head", None)
    if head is None or head is embedding:
        return
    head.weight = embedding.weight
    if hasattr(embedding, "cpu_linear"):
        head.cpu_linear = embedding.cpu_linear


# ---- replay ----------------------------------------------------------------------------------------------------------


def _verify_prompts(
    runner: Any, hidden_td: torch.Tensor, scheduled: dict[str, int]
) -> dict[str, LogprobsTensors | None]:
    """Verify the cached answer tokens of replays. This function replaces vLLM's computation of prompt log-probs.

    vLLM gets the prompt and the cached answer together as one prompt. The result has two columns for each position.
    Column 0 is the cached token. Column 1 is the same token if it is accepted, otherwise the newly drawn token.
    Positions of the real prompt stay zero, and no logits are computed for them.
    """
    complete: dict[str, LogprobsTensors | None] = {}
    for request_id in list(runner.num_prompt_logprobs):
        num_tokens = scheduled.get(request_id)
        if num_tokens is None:  # preempted while it was being prefilled
            continue
        request = runner.requests[request_id]
        tokens = request.prompt_token_ids
        if request.in_progress_prompt_logprobs_cpu is None:
            request.in_progress_prompt_logprobs_cpu = _blank(len(tokens) - 1)
        target = request.in_progress_prompt_logprobs_cpu
        begin = request.num_computed_tokens  # the hidden state at index i predicts token i + 1
        end = min(begin + num_tokens, len(tokens) - 1)
        args = SamplingArgs.from_extra_args(request.sampling_params.extra_args)
        assert args is not None, f"request {request_id} asks for prompt log-probs and does not come from this engine"
        first = max(begin, len(tokens) - args.num_cached - 1)
        offset = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]].item() - begin
        block = max(1, _MAX_LOGITS // runner.model_config.get_vocab_size())
        for start in range(first, end, block):
            rows = slice(start, min(start + block, end))
            logits_rv = runner.model.compute_logits(hidden_td[offset + rows.start : offset + rows.stop]).float()
            _fill(target, rows, logits_rv, tokens, args)
        if begin + num_tokens > len(tokens) - 1:
            complete[request_id] = target
            del runner.num_prompt_logprobs[request_id]
            request.in_progress_prompt_logprobs_cpu = None
    if complete:
        runner._sync_device()
    return complete


def _blank(count: int) -> LogprobsTensors:
    tensors = LogprobsTensors.empty_cpu(count, 2)
    tensors.logprob_token_ids.zero_()
    tensors.logprobs.zero_()
    tensors.selected_token_ranks.zero_()
    return tensors


def _fill(target: LogprobsTensors, rows: slice, logits_rv: torch.Tensor, tokens: list[int], args: SamplingArgs) -> None:
    draws = [Draw(args.seed, index, args.sampling) for index in range(rows.start, rows.stop)]
    cached = tokens[rows.start + 1 : rows.stop + 1]
    scaled_rv = shape_logits(logits_rv, [draw.sampling for draw in draws])
    noise = make_sampler(len(draws), logits_rv.shape[1], logits_rv.device)
    verdict = noise.verify(scaled_rv, draws, cached, [args.tolerance] * len(cached))
    kept = zip(verdict.is_kept, cached, verdict.drawn.tokens, strict=True)
    final = [token if is_kept else drawn for is_kept, token, drawn in kept]
    pairs = zip(verdict.is_kept, verdict.cached_logprobs, verdict.drawn.logprobs, strict=True)
    logprobs = [before if is_kept else drawn for is_kept, before, drawn in pairs]
    target.logprob_token_ids[rows] = torch.tensor([cached, final], dtype=torch.int32).T
    target.logprobs[rows] = torch.tensor([verdict.cached_logprobs, logprobs]).T
