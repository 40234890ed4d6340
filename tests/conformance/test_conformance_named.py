"""A real vLLM server that is somebody else's, without our worker extension: what it keeps, and what its loss does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sortedrl.config import SortedConfig
from sortedrl.engine.base import Partial
from sortedrl.engine.vllm import server as vllm_server
from sortedrl.engine.vllm.core import vllm_version
from sortedrl.engine.vllm.process import VllmSettings
from sortedrl.engine.vllm.server import serve_command
from sortedrl.errors import ConfigError, EngineError
from sortedrl.run.builders.parts import build_engine
from sortedrl.testing import Caller, run_checks
from tests.conformance.cases import MAX_LENGTH, SLOTS, model_case
from tests.conformance.process_cases import HEADS, free_port
from tests.support.tiny_models import make_requests, tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.timeout(1200),
]


@pytest.fixture
def plain_server(tmp_path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Without our worker extension, as its owner would start it: its address, and what ends it at once."""
    tiny_model("qwen3", **HEADS).save_pretrained(tmp_path / "model")
    port = free_port()
    settings = VllmSettings(
        folder=tmp_path / "model",
        slots=SLOTS,
        max_length=MAX_LENGTH,
        dtype="float32",
        kv_bytes=1 << 24,
        block_size=32,
    )
    command = serve_command(settings, port)
    for option in ("--worker-extension-cls", "--logits-processors"):
        place = command.index(option)
        del command[place : place + 2]
    command[0] = sys.executable
    process = subprocess.Popen(command, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"})

    def kill() -> None:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    yield f"http://127.0.0.1:{port}", kill
    kill()


def test_a_named_server_keeps_what_it_promises_and_its_loss_is_told(
    plain_server: tuple[str, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sortedrl.engine.vllm.engine import VllmEngine

    address, kill = plain_server
    monkeypatch.setattr(vllm_server, "_CONNECT_S", 600.0)
    model = tiny_model("qwen3", **HEADS)
    config = SortedConfig(
        engine={"kind": "vllm", "address": address, "slots": SLOTS, "max_new_tokens": 64},
        task={"max_prompt_tokens": 128},
        schedule={"strategy": "sorted-replay"},
    )
    with pytest.raises(ConfigError, match=r"worker extension.*to resume, restart or wait"):
        build_engine(config, model, config.knobs)
    engine = VllmEngine(model, slots=SLOTS, max_length=MAX_LENGTH, address=address)
    assert not engine.capabilities.exact_replay
    found = run_checks(model_case(engine, model, decode=None))
    assert {name: result for name, result in found.items() if result.startswith("failed")} == {}
    assert sum(result == "passed" for result in found.values()) > 10
    assert engine.stats().decode_steps > 0
    caller, requests = Caller(engine), make_requests(3, budget=200)
    engine.submit(requests)
    before = engine.stats().decoded_tokens
    while engine.stats().decoded_tokens < before + 6:
        caller.take(engine.poll(0.01))
    kill()
    events = []
    while engine.stats().running:
        events += engine.poll(1.0)
    assert {event.sample for event in events if isinstance(event, Partial)} == {0, 1, 2}
    monkeypatch.setattr(vllm_server, "_CONNECT_S", 0.5)
    with pytest.raises(EngineError, match="no vLLM server answers at"):
        engine.submit(make_requests(1))
    engine.close()
