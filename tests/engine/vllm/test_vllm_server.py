"""The client side of a vLLM server, tested without one: parsing, refusals and error messages."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from sortedrl.config import SortedConfig
from sortedrl.engine.vllm import server as vllm_server
from sortedrl.engine.vllm.core import is_alive
from sortedrl.engine.vllm.http import StreamedTokens
from sortedrl.engine.vllm.process import StepCounts, VllmLost, VllmProcess, VllmSettings
from sortedrl.engine.vllm.server import ServerProcess, find_server_fault, read_metrics
from sortedrl.engine.vllm.weights import map_tensors
from sortedrl.errors import ConfigError, EngineError
from sortedrl.run.builders.parts import build_engine
from tests.conformance.process_cases import free_port
from tests.support.double_vllm import ON_GPU
from tests.support.tiny_models import tiny_model


def settings(folder: Path, **changes: Any) -> VllmSettings:
    values = {"slots": 4, "max_length": 256, "dtype": "float32", "kv_bytes": 1 << 24, "block_size": 32}
    return VllmSettings(folder=folder, **(values | changes))


# Parsing of answers


def test_a_chunk_is_read_token_by_token() -> None:
    entries = [{"token_id": 7, "logprob": -0.5, "rank": None}, {"token_id": 3, "logprob": -9999.0, "rank": None}]
    versions = [{"version": "2", "start": 0, "end": 2}]
    choice = {"token_ids": [7, 3], "logprobs": {"content": entries}, "finish_reason": "abort", "index": 0}
    streamed = StreamedTokens.read(choice | {"weight_versions": versions})
    assert (streamed.token_ids, streamed.finish_reason) == ([7, 3], "abort")
    assert streamed.logprobs[0][7].logprob == -0.5
    assert streamed.logprobs[1][3].logprob != streamed.logprobs[1][3].logprob  # NaN
    assert [span.version for span in streamed.weight_versions] == ["2"]
    assert StreamedTokens.read({"finish_reason": "abort", "token_ids": []}).logprobs == []


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
        ({"async_scheduling": True, "logprobs_mode": "raw_logprobs"}, False, "--logprobs-mode processed_logprobs"),
        ({"async_scheduling": True}, False, "head is tied to its embedding and would keep old weights"),
    ],
)
def test_the_message_on_an_unusable_server_says_what_to_change(
    changes: dict[str, Any], has_noise: bool, fault: str | None, tmp_path: Path
) -> None:
    tiny_model().config.save_pretrained(tmp_path)  # tied
    values = {"max_model_len": 256, "max_num_seqs": 4, "dtype": "torch.float32", "async_scheduling": False}
    values |= {"logprobs_mode": "processed_logprobs"} | changes
    found = find_server_fault(
        {"model_config": values, "scheduler_config": values}, settings(tmp_path), has_noise=has_noise
    )
    assert found is None if fault is None else fault in (found or "")


@pytest.mark.parametrize("is_v2", [False, True])
def test_stock_vllm_must_report_the_log_probs_that_it_draws_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_v2: bool
) -> None:
    """With our extension, V1 draws by our sampler, whose log-probs are right whatever the server was told."""
    values = {"max_model_len": 256, "max_num_seqs": 4, "dtype": "float32", "logprobs_mode": "raw_logprobs"}
    parallel = {"worker_extension_cls": "sortedrl.engine.vllm.worker.SortedWorker"}
    config = {"model_config": values, "scheduler_config": values, "parallel_config": parallel}
    calls: list[str] = []

    class Frontend:
        client = SimpleNamespace(get=lambda *_, **__: done(SimpleNamespace(status_code=200, json=lambda: told)))
        has_noise = is_stock = False

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return lambda *_: done([replace(ON_GPU, is_v2=is_v2, is_async=is_v2).to_dict()])

    async def done(value: Any = None) -> Any:
        return value

    told = {"vllm_config": config}
    server: Any = ServerProcess.__new__(ServerProcess)
    server.frontend, server._popen, server._address = Frontend(), None, "http://there"
    monkeypatch.setattr(server, "refresh_counts", done)
    if is_v2:
        with pytest.raises(EngineError, match="start it with --logprobs-mode processed_logprobs"):
            asyncio.run(server._connect(settings(tmp_path)))
    else:
        asyncio.run(server._connect(settings(tmp_path)))
    assert ("take_weights" in calls) == (not is_v2)


def test_an_untied_model_needs_no_extension(tmp_path: Path) -> None:
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    values = {"max_model_len": 256, "max_num_seqs": 4, "dtype": "float32", "logprobs_mode": "processed_logprobs"}
    config = {"model_config": values, "scheduler_config": values}
    assert find_server_fault(config, settings(tmp_path), has_noise=False) is None


# No server, or an unusable one


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=rf"port {port} is in use: set engine\.port to a free one"):
            ServerProcess(settings(tmp_path), StepCounts(), limit_s=5.0, port=port)


def test_a_missing_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "_CONNECT_S", 0.3)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=rf"no vLLM server answers at http://{address}: start it"):
        ServerProcess(settings(tmp_path), StepCounts(), limit_s=5.0, address=address)


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
        ServerProcess(settings(tmp_path), StepCounts(), limit_s=5.0, address=f"http://127.0.0.1:{server.server_port}/")
    server.shutdown()
    server.server_close()


def test_a_server_whose_core_is_gone_is_not_waited_for() -> None:
    """Such a server cannot answer its calls, and does not end before it has."""
    server = ServerProcess.__new__(ServerProcess)
    VllmProcess.__init__(server, limit_s=300.0)
    api_server, core = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    server._popen, server._pids = api_server, [core.pid]
    try:
        assert not server.is_dead
        core.kill()
        with pytest.raises(VllmLost, match="died"):
            server.call(asyncio.Event().wait())
        assert api_server.poll() is None
    finally:
        for process in (api_server, core):
            process.kill()
            process.wait()
        server._stop_loop()


_LOSES_ITS_CORE = """
import subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

core = subprocess.Popen(["sleep", "600"])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health":
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            core.kill()
            core.wait()
            time.sleep(600)

    def log_message(self, *words):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_started_server_that_loses_its_core_while_connecting_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays up, but never answers."""
    started: list[subprocess.Popen[bytes]] = []

    def launch(settings: VllmSettings, port: int) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", _LOSES_ITS_CORE, str(port)]))
        return started[0]

    monkeypatch.setattr(vllm_server, "_launch", launch)
    with pytest.raises(EngineError, match=r"failed while connecting.*core has died.*see its messages"):
        ServerProcess(settings(tmp_path, start_s=300.0), StepCounts(), limit_s=300.0, port=free_port())
    assert started[0].poll() is not None


class _Silent(_Healthy):
    """Answers that it is healthy, and nothing else until `may_end`."""

    may_end = threading.Event()

    def do_GET(self) -> None:
        if self.path != "/health":
            self.may_end.wait()
        super().do_GET()


def test_a_server_that_falls_silent_while_connecting_is_given_up(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(EngineError, match=rf"{address} failed while connecting.*did not answer for 0\.5 s"):
            ServerProcess(settings(tmp_path, start_s=0.5), StepCounts(), limit_s=300.0, address=address)
    finally:
        _Silent.may_end.set()
        server.shutdown()
        server.server_close()


def test_an_address_excludes_a_port() -> None:
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


# A server ends with its owner


_OWNER = """
import os, signal, sys, time
from pathlib import Path

sys.path.append(sys.argv[1])
import owned_launch

folder, has_started = Path(sys.argv[2]), sys.argv[3] == "started"
fake = (
    "import os, subprocess, sys, time; child = subprocess.Popen(['sleep', '600']);"
    f"open('{folder}/new', 'w').write(str(child.pid)); os.rename('{folder}/new', '{folder}/child'); time.sleep(600)"
)
process = owned_launch.start_owned([sys.executable, "-S", "-c", fake], os.environ)
(folder / "server").write_text(str(process.pid))
while has_started and not (folder / "child").exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["starting", "started"])
def test_a_server_ends_when_its_owner_is_killed(moment: str, tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", _OWNER, str(Path(vllm_server.__file__).parent), str(tmp_path), moment]
    subprocess.run(command, check=False, timeout=120)
    pids = [int(file.read_text()) for name in ("server", "child") if (file := tmp_path / name).exists()]
    assert len(pids) >= (2 if moment == "started" else 1)
    try:
        deadline = time.monotonic() + 60
        while left := [pid for pid in pids if is_alive(pid)]:
            assert time.monotonic() < deadline, "the server outlives its owner"
            time.sleep(0.02)
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)


def test_a_closed_server_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = ["python", "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(vllm_server, "serve_command", lambda settings, port: endless)
    process = vllm_server._launch(settings(tmp_path), free_port())
    watchers = wait_for_watchers(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in watchers):
        assert time.monotonic() < deadline, "the watcher outlives its server"
        time.sleep(0.02)


def wait_for_watchers(server: int) -> list[int]:
    deadline = time.monotonic() + 60
    while not (found := [child.pid for child in psutil.Process(server).children()]):
        assert time.monotonic() < deadline, "the server has no watcher"
        time.sleep(0.02)
    return found
