"""What the vLLM engine promises and in which order it calls vLLM, with doubles in vLLM's place: no vLLM is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from sortedrl.engine.base import Sampling
from sortedrl.engine.replay_probe import ReplayEvidence
from sortedrl.engine.vllm import engine as vllm_engine
from sortedrl.engine.vllm.runner_choice import PlatformFacts, RunnerWishes
from sortedrl.engine.vllm.worker_report import WorkerReport
from sortedrl.errors import EngineError
from tests.support.double_vllm import CPU, H100, ON_CPU, ON_GPU, DoubleProcess
from tests.support.tiny_models import make_requests, source, tiny_model


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes an engine on a platform, with workers that report what is given."""
    made: list[Any] = []

    def engine(facts: PlatformFacts, report: WorkerReport, **settings: Any) -> Any:
        monkeypatch.setattr(vllm_engine, "check_installed", lambda: "0.32.0")
        monkeypatch.setattr(vllm_engine, "read_platform", lambda: facts)
        monkeypatch.setattr(vllm_engine, "CoreProcess", type("P", (DoubleProcess,), {"report": report}))
        made.append(vllm_engine.VllmEngine(tiny_model(), slots=2, max_length=64, transfer="file", **settings))
        return made[-1]

    yield engine
    for one in made:
        one.close()


BF16 = {"dtype": torch.bfloat16, "wishes": RunnerWishes(needs_exact_replay=True)}
EXACT, DIFFERENT = (ReplayEvidence(num_tokens=256, num_differences=count) for count in (0, 3))


@pytest.mark.parametrize(
    ("report", "dtype", "evidence", "needs_probe", "is_exact"),
    [
        (ON_GPU, torch.bfloat16, None, True, False),  # nothing is promised before the probe
        (ON_GPU, torch.bfloat16, EXACT, False, True),
        (ON_GPU, torch.bfloat16, DIFFERENT, False, False),
        (ON_GPU, torch.float32, None, True, False),  # float32 on a GPU is probed too
        (replace(ON_GPU, is_batch_invariant=False), torch.float32, EXACT, False, True),
        (replace(ON_GPU, is_batch_invariant=False), torch.bfloat16, EXACT, False, False),  # 256 tokens are too few
        (replace(ON_GPU, attention_backends=("FLASHINFER",)), torch.bfloat16, EXACT, False, False),
        (ON_CPU, torch.float32, None, False, True),
        (ON_CPU, torch.float32, DIFFERENT, False, False),
        (ON_CPU, torch.bfloat16, None, False, False),
    ],
)
def test_exact_replay_is_promised_by_mode_and_evidence(
    make: Any,
    report: WorkerReport,
    dtype: torch.dtype,
    evidence: ReplayEvidence | None,
    needs_probe: bool,
    is_exact: bool,
) -> None:
    engine = make(CPU if report is ON_CPU else H100, report, dtype=dtype)
    if evidence is not None:
        engine.take_evidence(evidence)
    assert engine.needs_probe == needs_probe
    assert engine.capabilities.exact_replay == is_exact
    assert engine.capabilities.replay_probe == ("" if evidence is None else str(evidence))


def test_a_gpu_gets_the_plan_of_its_platform(make: Any) -> None:
    engine = make(H100, ON_GPU, **BF16, sleeps=True)
    plan = engine._process.settings.plan
    assert (plan.is_v2, plan.is_eager, plan.is_async, plan.is_batch_invariant) == (True, False, True, True)
    assert engine._request_loop.is_stock
    assert engine.workers == [ON_GPU]


def test_an_update_has_the_device_to_itself(make: Any) -> None:
    engine = make(H100, ON_GPU, **BF16, sleeps=True)
    frontend = engine._process.frontend
    assert engine.capabilities.sleeps
    frontend.calls.clear()
    engine.sleep()
    assert frontend.held == set()
    with pytest.raises(EngineError, match="asleep and serves no requests"):
        engine.submit(make_requests(1))
    with pytest.raises(EngineError, match="publish weights"):
        engine.wake()
    engine.publish(1, source(tiny_model(seed=1))).wait()
    assert frontend.held == {"weights"}  # the KV cache comes when the weights are there
    engine.wake()
    assert frontend.held == {"weights", "kv_cache"}
    assert frontend.calls[:3] == ["sleep", "wake weights", "sorted_take_weights"]
    assert frontend.calls[-2:] == ["version 1", "wake kv_cache"]


def test_filters_whose_order_differs_fail_alone(make: Any) -> None:
    engine = make(H100, ON_GPU)
    (request,) = make_requests(1, sampling=Sampling(top_p=0.5, min_p=0.1))
    engine.submit([request])
    (event,) = engine.poll(0)
    assert "min-p before top-p" in event.error


def test_an_engine_that_was_not_asked_to_sleep_says_so(make: Any) -> None:
    assert not make(H100, ON_GPU).capabilities.sleeps


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"is_speculative": True}, "speculates"),
        ({"uses_float64_noise": True}, "use_fp64_gumbel"),
        ({"is_v2": False}, "--no-async-scheduling"),
    ],
)
def test_other_noise_is_refused(changes: dict[str, Any], fault: str | None) -> None:
    found = replace(ON_GPU, **changes).noise_fault
    assert found is None if fault is None else fault in (found or "")


def test_a_report_survives_json() -> None:
    import json

    assert WorkerReport.from_dict(json.loads(json.dumps(ON_GPU.to_dict()))) == ON_GPU
