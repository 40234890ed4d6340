"""The connection to Ray: an existing cluster, or a Ray on this machine that listens on loopback.

`run/builders` calls `connect`. Guarantees: without an address, no part of Ray can be reached from another machine,
whether or not Ray was imported before, unless the environment sets Ray's own switch for clusters (`CLUSTERS`) to 1;
without an address, no other Ray is joined, whatever the environment or files of Ray say; if Ray ends, the process ends
with a message (`ray_watch.py`).
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from sortedrl.engine.pool.ray_reaper import start_reaper
from sortedrl.engine.pool.ray_watch import RayWatch, connect_to_store, end_process
from sortedrl.errors import EngineError
from sortedrl.external.extras import extra_message

# A switch of Ray: without clusters it binds to 127.0.0.1, on any system.
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# By default Ray gives its workers a lower priority than all other processes, the learner included.
NICENESS = "RAY_worker_niceness"
_REAPER_S = 5.0  # a copy of the pipe in a forked process would keep the reaper waiting

_watches: list[RayWatch] = []  # one, while a connection is open that `connect` opened
_reapers: list[subprocess.Popen[bytes]] = []  # one, while a Ray lives that `connect` started


def is_connected() -> bool:
    """Whether this process is already connected to a Ray."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def connect(address: str | None = None, *, run_dir: Path | None = None) -> bool:
    """Join the cluster at `address` (`auto`: this machine's), or start Ray here. False if already connected.

    `run_dir`: the run to resume, for the message if Ray ends.
    """
    if importlib.util.find_spec("ray") is None:
        raise EngineError(extra_message("a pool of engines, or a learner of several ranks,", "ray"))
    if is_connected():
        return False
    if address is None:
        _listen_on_loopback()
        os.environ.setdefault(NICENESS, "0")
    import ray

    _silence()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with _own_sigterm():
            if address is not None:
                ray.init(address=address, **quiet)
            else:
                # Without "local", Ray would join the cluster of RAY_ADDRESS or of a file in /tmp that anyone may write.
                ray.init(address="local", include_dashboard=False, num_cpus=os.cpu_count(), **quiet)
        _watch(run_dir)
    except Exception as error:  # a start that times out raises no narrower type
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "on this machine" if address is None else f"at {address!r}"
        raise EngineError(
            f"Ray did not start {where} ({why}): start it with `ray start --head`, or set engine.cluster to its address"
        ) from error
    return True


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Give SIGTERM back to the program that starts Ray.

    Ray takes it over: while it starts, SIGTERM ends its processes and then this one, with another exit code. Exits that
    other signals cause have the codes of this program, which stay.
    """
    if threading.current_thread() is not threading.main_thread():  # there Ray leaves signals alone
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as leave:
        if isinstance(leave.code, int) and leave.code > 128:
            raise
        raise SystemExit(128 + signal.SIGTERM) from leave
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _listen_on_loopback() -> None:
    """Have a Ray that is started here, and its workers, bind to 127.0.0.1, unless `CLUSTERS` is set to 1."""
    os.environ.setdefault(CLUSTERS, "0")
    constants: Any = importlib.import_module("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(CLUSTERS, default=False)  # Ray read it when it was imported


def _watch(run_dir: Path | None) -> None:
    """Watch the Ray of this machine. A client of a remote cluster (`ray://`) has none."""
    worker: Any = importlib.import_module("ray._private.worker")
    node = worker._global_node
    if node is None or not node.plasma_store_socket_name:
        return
    gcs = node.all_processes.get("gcs_server")  # None on a cluster that others started
    command = "" if run_dir is None else f" with: sortedrl train --resume {shlex.quote(str(run_dir))}"
    end = partial(end_process, logs=str(node.get_logs_dir_path()), remedy=f"resume the run{command}")
    watch = RayWatch(connect_to_store(node.plasma_store_socket_name), gcs[0].process if gcs else None, end)
    _watches.append(watch)
    atexit.register(_stop_watches)  # runs before the handlers with which Ray ends its processes
    watch.start()
    raylet = node.all_processes.get("raylet")
    reaper = start_reaper(raylet[0].process.pid) if raylet else None
    if reaper is not None:
        _reapers.append(reaper)


def _stop_watches() -> None:
    while _watches:
        _watches.pop().stop()


def _silence() -> None:
    """Keep Ray from writing to stdout, where `--json` promises one JSON object and nothing else.

    Ray reports dead workers there even with `log_to_driver=False`. The pool logs them itself.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    worker._worker_logs_enabled = False  # Ray's own debugger uses this switch


def disconnect() -> None:
    import ray

    _stop_watches()
    ray.shutdown()
    while _reapers:
        reaper = _reapers.pop()
        with suppress(subprocess.TimeoutExpired):
            reaper.communicate(timeout=_REAPER_S)  # closes its pipe
        reaper.kill()
        reaper.wait()
