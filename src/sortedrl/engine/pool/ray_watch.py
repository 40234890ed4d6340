"""Notices the end of Ray on this machine, and ends this process with one line before Ray ends it without a word.

When the raylet, Ray's process for a machine, is gone, Ray's own library ends every process that uses it at the next
call, from C++ with `_Exit(1)`: no exception, no message. `ray_cluster.py` starts a `RayWatch` for a connection that it
opened. The watch holds an open connection to the raylet's object store; the kernel closes it when the raylet ends in
whatever way. Of a Ray that this process started, it also watches the GCS, Ray's other central process.

Guarantees: nothing is watched after `stop`. The run directory is left as after `kill -9`: the run can be resumed.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

EXIT_CODE = 2  # that of every error with a one-line message
_CHECK_S = 0.2  # how often the GCS is looked at; the end of the raylet is noticed at once
_SHOW_CURSOR = "\r\x1b[K\x1b[?25h"  # a progress bar hides the cursor of the terminal


class RayWatch(threading.Thread):
    """Calls `end` with the name of the process that ended. `gcs`: the `Popen` of a GCS, or None."""

    def __init__(self, store: socket.socket, gcs: Any, end: Callable[[str], None]) -> None:
        super().__init__(name="sortedrl-ray-watch", daemon=True)
        self._store = store
        self._gcs = gcs
        self._end = end
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(self) -> None:
        while not self._is_stopped:
            ended = None
            if select.select([self._store], [], [], _CHECK_S)[0] and not self._store.recv(1):
                ended = "raylet"
            elif self._gcs is not None and self._gcs.poll() is not None:
                ended = "GCS"
            if ended is not None:
                with self._lock:
                    if not self._is_stopped:
                        self._end(ended)
                break
        self._store.close()

    def stop(self) -> None:
        """Stop watching: from now on Ray may end."""
        with self._lock:
            self._is_stopped = True


def connect_to_store(path: str) -> socket.socket:
    """An open connection to a raylet's object store. It is never used for messages."""
    store = socket.socket(socket.AF_UNIX)
    store.connect(path)
    return store


def end_process(name: str, logs: str, remedy: str) -> None:
    """End this process with one line. Nothing of Ray is called, and nothing waits for a thread that Ray blocks."""
    line = f"error: Ray has ended (its {name} was killed, or crashed; Ray's logs: {logs}): {remedy}\n"
    try:
        os.write(2, ((_SHOW_CURSOR if os.isatty(2) else "") + line).encode())
    finally:
        os._exit(EXIT_CODE)
