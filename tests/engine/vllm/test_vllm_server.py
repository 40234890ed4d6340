"""vLLM as a server, without one: what is read of it, what it is refused for, and what is said when none is there."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sortedrl.config import SortedConfig
from sortedrl.engine.vllm import server as vllm_server
from sortedrl.engine.vllm.http import Written
from sortedrl.engine.vllm.process import CoreLost, CoreSettings, Life, StepCounts
from sortedrl.engine.vllm.server import Server, find_server_fault, read_metrics
from sortedrl.engine.vllm.weights import map_tensors
from sortedrl.errors import ConfigError, EngineError
from sortedrl.run.build.parts import build_engine
from tests.support.tiny_models import tiny_model


def settings(folder: Path, **changes: Any) -> CoreSettings:
    values = {"slots": 4, "max_length": 256, "dtype": "float32", "kv_bytes": 1 << 24, "block_size": 32}
    return CoreSettings(folder=folder, **(values | changes))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# What a server says


def test_a_chunk_is_read_token_by_token() -> None:
    entries = [{"token_id": 7, "logprob": -0.5, "rank": None}, {"token_id": 3, "logprob": -9999.0, "rank": None}]
    versions = [{"version": "2", "start": 0, "end": 2}]
    choice = {"token_ids": [7, 3], "logprobs": {"content": entries}, "finish_reason": "abort", "index": 0}
    written = Written.read(choice | {"weight_versions": versions})
    assert (written.token_ids, written.finish_reason) == ([7, 3], "abort")
    assert written.logprobs[0][7].logprob == -0.5
    assert written.logprobs[1][3].logprob != written.logprobs[1][3].logprob  # what JSON cannot say is not a number
    assert [span.version for span in written.weight_versions] == ["2"]
    assert Written.read({"finish_reason": "abort", "token_ids": []}).logprobs == []


def test_metrics_are_read() -> None:
    text = """# HELP vllm:num_preemptions_total Preemptions.
vllm:num_preemptions_total{engine="0",model_name="a b"} 3.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
process_open_fds 12.0
"""
    found = read_metrics(text)
    assert found == {"vllm:num_preemptions_total": 3.0, "vllm:kv_cache_usage_perc": 0.25, "process_open_fds": 12.0}


@pytest.mark.parametrize(
    ("changes", "has_noise", "fault"),
    [
        ({}, True, None),
        ({"max_model_len": 100}, True, "max-model-len is 100"),
        ({"max_num_seqs": 2}, True, "max-num-seqs is 2"),
        ({"dtype": "torch.bfloat16"}, True, "set engine.dtype = bfloat16"),
        ({"async_scheduling": True}, True, "--no-async-scheduling"),
        ({"async_scheduling": True, "logprobs_mode": "raw_logprobs"}, False, "--logprobs-mode processed_logprobs"),
        ({"async_scheduling": True}, False, "a head tied to its embedding would keep old weights"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_what_to_change(
    changes: dict[str, Any], has_noise: bool, fault: str | None, tmp_path: Path
) -> None:
    tiny_model().config.save_pretrained(tmp_path)  # tied
    values = {"max_model_len": 256, "max_num_seqs": 4, "dtype": "torch.float32", "async_scheduling": False}
    values |= {"logprobs_mode": "processed_logprobs"} | changes
    found = find_server_fault(
        {"model_config": values, "scheduler_config": values}, settings(tmp_path), has_noise=has_noise
    )
    assert found is None if fault is None else fault in (found or "")


def test_an_untied_model_needs_no_extension(tmp_path: Path) -> None:
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    values = {"max_model_len": 256, "max_num_seqs": 4, "dtype": "float32", "logprobs_mode": "processed_logprobs"}
    config = {"model_config": values, "scheduler_config": values}
    assert find_server_fault(config, settings(tmp_path), has_noise=False) is None


# No server, or another one


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=rf"port {port} is in use: name a free one in engine\.port"):
            Server(settings(tmp_path), StepCounts(), limit_s=5.0, port=port)


def test_a_server_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "_CONNECT_S", 0.3)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=rf"no vLLM server answers at http://{address}: start it"):
        Server(settings(tmp_path), StepCounts(), limit_s=5.0, address=address)


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


def test_a_server_without_its_development_mode_is_refused(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1 python -m vllm"):
        Server(settings(tmp_path), StepCounts(), limit_s=5.0, address=f"http://127.0.0.1:{server.server_port}/")
    server.shutdown()
    server.server_close()


def test_a_server_whose_core_is_gone_is_not_waited_for() -> None:
    """It cannot answer what it was asked, and does not end before that is answered."""
    server = Server.__new__(Server)
    Life.__init__(server, limit_s=300.0)
    front, core = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    server._process, server._pids = front, [core.pid]
    try:
        assert not server.is_dead
        core.kill()
        with pytest.raises(CoreLost, match="died"):
            server.call(asyncio.Event().wait())
        assert front.poll() is None
    finally:
        for process in (front, core):
            process.kill()
            process.wait()
        server._end_loop()


def test_an_address_and_a_port_are_one_too_many() -> None:
    config = SortedConfig(engine={"kind": "vllm", "address": "http://127.0.0.1:8000", "port": 8001})
    with pytest.raises(ConfigError, match="set one of them"):
        build_engine(config, tiny_model(), config.knobs)


def test_mapped_tensors_are_the_file(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    mapped, before = map_tensors(path), load_file(path)
    assert mapped.keys() == before.keys()
    assert all((mapped[name] == before[name]).all() for name in before)
    mapped["model.norm.weight"].fill_(0.5)
    assert (load_file(path)["model.norm.weight"] == 0.5).all()
