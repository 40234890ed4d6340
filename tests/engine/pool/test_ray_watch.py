"""The end of Ray is noticed, its helpers end with the driver, and no other Ray is joined: tested without Ray."""

from __future__ import annotations

import queue
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


@pytest.mark.parametrize(("asked", "joined"), [(None, "local"), ("10.0.0.1:6379", "10.0.0.1:6379")])
def test_no_ray_is_joined_that_was_not_asked_for(
    asked: str | None, joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an address, Ray itself would join the one of RAY_ADDRESS, or of /tmp/ray/ray_current_cluster."""
    calls: list[dict[str, Any]] = []
    ray: Any = ModuleType("ray")
    ray.__spec__ = ModuleSpec("ray", None)
    ray.is_initialized, ray.init = (lambda: False), (lambda **options: calls.append(options))
    worker: Any = ModuleType("ray._private.worker")
    worker._global_node = None
    monkeypatch.setitem(sys.modules, "ray", ray)  # the real one would be imported for all later tests
    monkeypatch.setitem(sys.modules, "ray._private.worker", worker)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    assert ray_cluster.connect(asked)
    assert [call.get("address") for call in calls] == [joined]
