# pyright: reportMissingImports=false
"""What a vLLM worker really runs: its model runner, attention, graphs, scheduling and memory, as plain values.

`worker.py` makes a report in vLLM's worker. The engine keeps the reports of all its workers: it decides by them whether
replay can be exact, and `tools/gpu_acceptance.py` checks by them that a GPU is used. Only `report_worker` needs vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True, kw_only=True, frozen=True)
class WorkerReport:
    is_v2: bool
    device: str
    dtype: str
    attention_backends: tuple[str, ...]
    graph_mode: str  # vLLM's name: NONE, PIECEWISE, FULL_AND_PIECEWISE, ...
    is_async: bool
    is_batch_invariant: bool
    tensor_parallel: int
    is_speculative: bool
    uses_float64_noise: bool
    allocated_bytes: int  # on the device, by torch; 0 on a CPU

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WorkerReport:
        return cls(**{**values, "attention_backends": tuple(values["attention_backends"])})

    @property
    def noise_fault(self) -> str | None:
        """Why tokens are not drawn with the shared noise; None if they are."""
        if not self.is_v2 and self.is_async:
            return "our sampler for vLLM's V1 runner does not work with async scheduling: add --no-async-scheduling"
        if self.is_speculative:
            return "vLLM speculates, and its acceptance test draws with other noise: remove its speculative_config"
        if self.is_v2 and self.uses_float64_noise:
            return "vLLM draws with noise in float64: remove its use_fp64_gumbel"
        return None


def is_v2(runner: Any) -> bool:
    """Whether a model runner is vLLM's V2."""
    return hasattr(runner, "prompt_logprobs_worker")


def report_worker(runner: Any) -> WorkerReport:
    """The report of the worker that this model runner belongs to."""
    import torch
    from vllm import envs

    config = runner.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    is_cuda = runner.device.type == "cuda"
    return WorkerReport(
        is_v2=is_v2(runner),
        device=str(runner.device),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        attention_backends=tuple(sorted(backends)),
        graph_mode=config.compilation_config.cudagraph_mode.name,
        is_async=bool(config.scheduler_config.async_scheduling),
        is_batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        tensor_parallel=config.parallel_config.tensor_parallel_size,
        is_speculative=config.speculative_config is not None,
        uses_float64_noise=bool(getattr(getattr(runner, "sampler", None), "use_fp64_gumbel", False)),
        allocated_bytes=torch.cuda.memory_allocated(runner.device) if is_cuda else 0,
    )
