"""The conformance suite on real vLLM, and what only vLLM can get wrong. `make test-vllm` runs it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from cases import MAX_LENGTH, SLOTS, letters, model_case

from sortedrl.engine.vllm_core import vllm_version
from sortedrl.testing import CHECKS, Check, EngineCase
from tiny_models import tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.timeout(900),
]
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}  # what its kernels like


def is_gone(pids: list[int]) -> bool:
    alive = [process for process in psutil.process_iter(["pid", "status"]) if process.info["pid"] in pids]
    return all(process.info["status"] == psutil.STATUS_ZOMBIE for process in alive)


@pytest.fixture(scope="module")
def case() -> Iterator[EngineCase]:
    from sortedrl.engine.vllm import VllmEngine

    model = tiny_model(**HEADS)
    engine = VllmEngine(model, slots=SLOTS, max_length=MAX_LENGTH, decode=letters)

    def kill() -> None:
        os.kill(engine.pids[0], signal.SIGKILL)

    yield model_case(engine, model, kill=kill)
    pids = engine.pids
    engine.close()
    assert is_gone(pids)


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_vllm(check: Check, case: EngineCase) -> None:
    if not check.needs(case):
        pytest.skip(f"not promised by this engine: {check.promise}")
    try:
        check.run(case)
    finally:
        case.engine.interrupt()
    assert case.engine.stats().running == 0
