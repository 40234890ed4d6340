"""The conformance suite on real vLLM, and what only vLLM can get wrong. `make test-vllm` runs it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest
from cases import MAX_LENGTH, SLOTS, keep_promise, letters, model_case

from sortedrl.engine.vllm_core import vllm_version
from sortedrl.testing import CHECKS, Check, EngineCase
from tiny_models import tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.timeout(900),
]
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}  # what its kernels like


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_gone(pids: list[int]) -> bool:
    alive = [process for process in psutil.process_iter(["pid", "status"]) if process.info["pid"] in pids]
    return all(process.info["status"] == psutil.STATUS_ZOMBIE for process in alive)


@pytest.fixture(scope="module", params=["core", "server"])
def case(request: pytest.FixtureRequest) -> Iterator[EngineCase]:
    """vLLM in this process, and as a server behind HTTP."""
    from sortedrl.engine.vllm import VllmEngine

    model = tiny_model(**HEADS)
    port = free_port() if request.param == "server" else 0
    engine = VllmEngine(model, slots=SLOTS, max_length=MAX_LENGTH, decode=letters, port=port)

    def kill() -> None:
        os.kill(engine.pids[0], signal.SIGKILL)

    yield model_case(engine, model, kill=kill)
    pids = engine.pids
    engine.close()
    assert is_gone(pids)


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_vllm(check: Check, case: EngineCase) -> None:
    keep_promise(check, case)
