"""The end of Ray is noticed, its helpers end with the driver, and no other Ray is joined: tested without Ray."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sortedrl.engine.pool import ray_cluster, ray_reaper, ray_watch
from sortedrl.engine.pool.ray_watch import RayWatch

WAIT_S = 60.0
_END = "import sys; sys.path.append(sys.argv[1]); import ray_watch; ray_watch.end_process('raylet', 'LOGS', 'resume')"


def test_the_end_of_the_raylet_is_noticed() -> None:
    ours, raylets = socket.socketpair()
    ended: queue.Queue[str] = queue.Queue()
    RayWatch(ours, None, ended.put).start()
    raylets.close()
    assert ended.get(timeout=WAIT_S) == "raylet"


def test_the_end_of_the_gcs_is_noticed() -> None:
    ours, raylets = socket.socketpair()
    ended: queue.Queue[str] = queue.Queue()
    gcs = subprocess.Popen(["sleep", "600"])
    RayWatch(ours, gcs, ended.put).start()
    gcs.kill()
    assert ended.get(timeout=WAIT_S) == "GCS"
    raylets.close()


def test_after_a_stop_ray_may_end() -> None:
    ours, raylets = socket.socketpair()
    ended: list[str] = []
    watch = RayWatch(ours, None, ended.append)
    watch.start()
    watch.stop()
    raylets.close()
    watch.join(WAIT_S)
    assert not watch.is_alive()
    assert not ended


def test_the_process_ends_with_one_line() -> None:
    command = [sys.executable, "-S", "-c", _END, str(Path(ray_watch.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 2
    assert done.stderr == "error: Ray has ended (its raylet was killed, or crashed; Ray's logs: LOGS): resume\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_reaper_kills_only_the_named_processes() -> None:
    named, reused = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    _, start = ray_reaper._processes()[named.pid]
    command = [sys.executable, "-I", "-S", ray_reaper.__file__, f"{named.pid}:{start}", f"{reused.pid}:1"]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        assert named.poll() is None
        reaper.communicate(timeout=WAIT_S)  # closes the pipe, as the end of its owner does
        assert named.wait(WAIT_S) == -9
        assert reused.poll() is None
    finally:
        for process in (named, reused):
            process.kill()
            process.wait()


class FakeRay:
    """In place of the real one, which would be imported for all later tests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []  # of `ray.init`
        ray: Any = ModuleType("ray")
        ray.__spec__ = ModuleSpec("ray", None)
        ray.is_initialized, ray.init = (lambda: False), (lambda **options: self.calls.append(options))
        worker: Any = ModuleType("ray._private.worker")
        worker._global_node = None
        self.constants: Any = ModuleType("ray._private.ray_constants")
        self.constants.env_bool = lambda key, default: os.environ[key] == "1" if key in os.environ else default
        for module in (ray, worker, self.constants):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for name in (ray_cluster.CLUSTERS, ray_cluster.NICENESS):  # `connect` sets them
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("asked", "joined"), [(None, "local"), ("10.0.0.1:6379", "10.0.0.1:6379")])
def test_no_ray_is_joined_that_was_not_asked_for(
    asked: str | None, joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an address, Ray itself would join the one of RAY_ADDRESS, or of /tmp/ray/ray_current_cluster."""
    ray = FakeRay(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    assert ray_cluster.connect(asked)
    assert [call.get("address") for call in ray.calls] == [joined]


@pytest.mark.parametrize(("told", "is_open"), [(None, False), ("0", False), ("1", True)])
def test_a_ray_of_our_own_listens_on_loopback_unless_told_otherwise(
    told: str | None, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay(monkeypatch)
    if told is not None:
        monkeypatch.setenv(ray_cluster.CLUSTERS, told)
    assert ray_cluster.connect()
    assert ray.constants.ENABLE_RAY_CLUSTER is is_open


@pytest.mark.parametrize(("raised", "code"), [(1, 143), (15, 143), (129, 129)])  # 1 and 15 are Ray's own, for SIGTERM
def test_a_signal_while_ray_starts_has_its_exit_code(raised: int, code: int) -> None:
    def start_ray() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray takes it over
        raise SystemExit(raised)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, ray_cluster._own_sigterm():
        start_ray()
    assert ended.value.code == code
    assert signal.getsignal(signal.SIGTERM) == before
