# pyright: reportMissingImports=false
"""Decides how vLLM decodes on a platform: which model runner, CUDA graphs, asynchronous scheduling, batch invariance.

`engine.py` calls `read_platform` and `plan_runner` once, and starts every vLLM by the plan. `plan_runner` is a pure
function of facts about the platform, so tests call it with the facts of machines that they do not have.

Two ways to decode:
- V2, where Triton is and the device is no CPU: vLLM's own sampler, unchanged, because its noise is the shared noise;
  CUDA graphs and asynchronous scheduling are on.
- V1, for CPUs: our sampler in place of vLLM's, without graphs; a step must be over before the next one is scheduled,
  because otherwise a row's position is not known when its token is drawn.

Guarantees: settings that a platform cannot have are refused with an `EngineError` before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sortedrl.errors import EngineError

BatchInvariance = Literal["auto", "on", "off"]

# Attention backends whose kernels can be batch-invariant in vLLM 0.32 (`supports_batch_invariance`).
INVARIANT_BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASH_ATTN_MLA", "TRITON_MLA"})
EXTENSION = "sortedrl.engine.vllm.worker"
_LEAST_CAPABILITY = (8, 0)  # of NVIDIA devices, for batch invariance: Ampere
_V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_INVARIANT_VARIABLE = "VLLM_BATCH_INVARIANT"


@dataclass(slots=True, kw_only=True, frozen=True)
class PlatformFacts:
    """What vLLM finds on a machine."""

    device: str  # vLLM's name: cpu, cuda, rocm, xpu
    has_triton: bool
    capability: tuple[int, int] | None = None  # of an NVIDIA device
    asked_v2: bool | None = None  # by the user, through VLLM_USE_V2_MODEL_RUNNER
    asked_invariant: bool = False  # by the user, through VLLM_BATCH_INVARIANT


@dataclass(slots=True, kw_only=True, frozen=True)
class RunnerWishes:
    """What the configuration asks for. None: what is best on the platform."""

    eager: bool | None = None
    async_scheduling: bool | None = None
    batch_invariant: BatchInvariance = "auto"
    needs_exact_replay: bool = False


@dataclass(slots=True, kw_only=True, frozen=True)
class RunnerPlan:
    is_v2: bool
    is_eager: bool
    is_async: bool
    is_batch_invariant: bool
    device: str

    @property
    def environment(self) -> dict[str, str]:
        """Variables that vLLM and its processes read."""
        return {_V2_VARIABLE: str(int(self.is_v2)), _INVARIANT_VARIABLE: str(int(self.is_batch_invariant))}

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's engine. V2 gets no logits processor: nothing of ours takes part in decoding."""
        chosen: dict[str, Any] = {"enforce_eager": self.is_eager, "async_scheduling": self.is_async}
        return chosen if self.is_v2 else chosen | {"logits_processors": [f"{EXTENSION}:NoiseRows"]}

    @property
    def flags(self) -> list[str]:
        """The same as words of a server's command."""
        words = ["--async-scheduling" if self.is_async else "--no-async-scheduling"]
        words += ["--enforce-eager"] if self.is_eager else []
        return words if self.is_v2 else [*words, "--logits-processors", f"{EXTENSION}:NoiseRows"]


CPU_PLAN = RunnerPlan(is_v2=False, is_eager=True, is_async=False, is_batch_invariant=False, device="cpu")


def plan_runner(facts: PlatformFacts, wishes: RunnerWishes) -> RunnerPlan:
    """How vLLM shall run. Raises `EngineError` for wishes that the platform cannot fulfil."""
    is_cpu = facts.device == "cpu"
    is_v2 = facts.asked_v2 if facts.asked_v2 is not None else facts.has_triton and not is_cpu
    if is_v2 and not facts.has_triton:
        raise EngineError(f"{_V2_VARIABLE}=1 needs Triton, which vLLM does not find: install it, or unset the variable")
    if is_cpu or not is_v2:
        where = "on a CPU" if is_cpu else f"with {_V2_VARIABLE}=0"
        if wishes.eager is False:
            raise EngineError(f"vLLM has no CUDA graphs {where}: remove engine.eager = false")
        if wishes.async_scheduling:
            raise EngineError(f"vLLM schedules one step at a time {where}: remove engine.async_scheduling = true")
    has_graphs = is_v2 and not is_cpu
    return RunnerPlan(
        is_v2=is_v2,
        is_eager=not has_graphs if wishes.eager is None else wishes.eager,
        is_async=has_graphs if wishes.async_scheduling is None else wishes.async_scheduling,
        is_batch_invariant=_wants_invariance(facts, wishes),
        device=facts.device,
    )


def _wants_invariance(facts: PlatformFacts, wishes: RunnerWishes) -> bool:
    fault = find_invariance_fault(facts)
    if wishes.batch_invariant == "on" and fault is not None:
        raise EngineError(f"engine.batch_invariant = on does not work here: {fault}; set it to auto or off")
    # It costs speed, so `auto` takes it only for those who need decode and prefill to agree.
    is_useful = wishes.needs_exact_replay or facts.asked_invariant
    is_wanted = wishes.batch_invariant == "on" or (wishes.batch_invariant == "auto" and is_useful)
    return is_wanted and fault is None


def find_invariance_fault(facts: PlatformFacts) -> str | None:
    """Why vLLM cannot compute independently of the batch on a platform; None if it can, or might."""
    if facts.device == "cpu":
        return "vLLM's attention on CPUs is not batch-invariant"
    if facts.device == "cuda" and (facts.capability is None or facts.capability < _LEAST_CAPABILITY):
        found = "unknown" if facts.capability is None else ".".join(map(str, facts.capability))
        return f"it needs an NVIDIA device of compute capability 8.0 or later, and this one has {found}"
    return None


def find_backend_fault(backends: Iterable[str]) -> str | None:
    """Why a model with these attention backends is not batch-invariant; None if it is."""
    variant = sorted(set(backends) - INVARIANT_BACKENDS)
    return f"the attention backend {variant[0]} is not batch-invariant" if variant else None


def asks_v1(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user wants the V1 model runner, in which our sampler draws."""
    return environment.get(_V2_VARIABLE) == "0"


def read_platform(environment: Mapping[str, str] = os.environ) -> PlatformFacts:
    """The facts of this machine, from vLLM itself; no device is initialised."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    asked = environment.get(_V2_VARIABLE)
    return PlatformFacts(
        device="rocm" if current_platform.is_rocm() else current_platform.device_type,
        has_triton=HAS_TRITON,
        capability=None if found is None else (found.major, found.minor),
        asked_v2=None if asked is None else asked == "1",
        asked_invariant=environment.get(_INVARIANT_VARIABLE) == "1",
    )
