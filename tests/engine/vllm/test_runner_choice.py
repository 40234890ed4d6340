"""How vLLM decodes on machines that the tests do not have: graphs, scheduling, the model runner, batch invariance."""

from __future__ import annotations

from typing import Any

import pytest

from sortedrl.engine.vllm.runner_choice import (
    CPU_PLAN,
    PlatformFacts,
    RunnerWishes,
    find_backend_fault,
    plan_runner,
)
from sortedrl.errors import EngineError

CPU = PlatformFacts(device="cpu", has_triton=False)
H100 = PlatformFacts(device="cuda", has_triton=True, capability=(9, 0))
T4 = PlatformFacts(device="cuda", has_triton=True, capability=(7, 5))
INTERPRETED = PlatformFacts(device="cpu", has_triton=True, asked_v2=True)


def test_a_gpu_decodes_with_stock_vllm() -> None:
    plan = plan_runner(H100, RunnerWishes())
    assert plan.arguments == {"enforce_eager": False, "async_scheduling": True}  # no logits processor of ours
    assert plan.flags == ["--async-scheduling"]
    assert plan.environment == {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_BATCH_INVARIANT": "0"}


def test_a_cpu_decodes_with_our_sampler() -> None:
    plan = plan_runner(CPU, RunnerWishes())
    assert plan == CPU_PLAN
    assert plan.arguments["enforce_eager"]
    assert not plan.arguments["async_scheduling"]
    assert plan.arguments["logits_processors"] == ["sortedrl.engine.vllm.worker:NoiseRows"]
    assert plan.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_the_user_can_ask_for_less_on_a_gpu() -> None:
    plan = plan_runner(H100, RunnerWishes(eager=True, async_scheduling=False))
    assert plan.arguments == {"enforce_eager": True, "async_scheduling": False}
    assert plan.is_v2
    assert plan.flags == ["--no-async-scheduling", "--enforce-eager"]


def test_the_user_can_ask_for_the_older_runner_on_a_gpu() -> None:
    plan = plan_runner(PlatformFacts(device="cuda", has_triton=True, capability=(9, 0), asked_v2=False), RunnerWishes())
    assert not plan.is_v2
    assert plan.is_eager
    assert "--logits-processors" in plan.flags


def test_the_interpreter_runs_v2_eagerly() -> None:
    plan = plan_runner(INTERPRETED, RunnerWishes())
    assert (plan.is_v2, plan.is_eager, plan.is_async) == (True, True, False)


@pytest.mark.parametrize(
    ("facts", "wishes", "message"),
    [
        (CPU, {"eager": False}, "remove engine.eager"),
        (CPU, {"async_scheduling": True}, "remove engine.async_scheduling"),
        (INTERPRETED, {"async_scheduling": True}, "remove engine.async_scheduling"),
        (CPU, {"batch_invariant": "on"}, "attention on CPUs is not batch-invariant"),
        (T4, {"batch_invariant": "on"}, "compute capability 8.0 or later, and this one has 7.5"),
        (PlatformFacts(device="cuda", has_triton=False, asked_v2=True), {}, "needs Triton"),
    ],
)
def test_what_a_platform_cannot_do_is_refused(facts: PlatformFacts, wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        plan_runner(facts, RunnerWishes(**wishes))


@pytest.mark.parametrize(
    ("facts", "wishes", "is_invariant"),
    [
        (H100, {"needs_exact_replay": True}, True),
        (H100, {}, False),  # it costs speed, and nobody replays
        (H100, {"batch_invariant": "on"}, True),
        (H100, {"batch_invariant": "off", "needs_exact_replay": True}, False),
        (T4, {"needs_exact_replay": True}, False),
        (CPU, {"needs_exact_replay": True}, False),
        (PlatformFacts(device="rocm", has_triton=True), {"needs_exact_replay": True}, True),  # the probe decides
        (PlatformFacts(device="cuda", has_triton=True, capability=(8, 0), asked_invariant=True), {}, True),
    ],
)
def test_batch_invariance(facts: PlatformFacts, wishes: dict[str, Any], is_invariant: bool) -> None:
    plan = plan_runner(facts, RunnerWishes(**wishes))
    assert plan.is_batch_invariant == is_invariant
    assert plan.environment["VLLM_BATCH_INVARIANT"] == str(int(is_invariant))


def test_an_attention_backend_that_depends_on_the_batch_is_named() -> None:
    assert find_backend_fault(["FLASH_ATTN", "TRITON_ATTN"]) is None
    assert "FLASHINFER" in (find_backend_fault(["FLASHINFER", "FLASH_ATTN"]) or "")
