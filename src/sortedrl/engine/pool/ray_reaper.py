"""Ends the helpers of Ray's raylet when the process that started Ray ends: `ray_reaper.py PID:START_TIME...` on Linux.

Ray's main processes end with their driver, but two agents of the raylet then try for a minute to report its end to a
GCS that is gone, and one keeps a port open. `ray_cluster.py` starts this program with their process ids and holds the
other end of the pipe that is its stdin; the kernel closes it when the driver ends in whatever way.

Guarantees: a process is killed only if it still is the one that was named, by its start time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def start_reaper(raylet: int) -> subprocess.Popen[bytes] | None:
    """Start the program for the children that a raylet has now. None on systems without /proc."""
    if sys.platform != "linux":
        return None
    children = [f"{pid}:{start}" for pid, (parent, start) in _processes().items() if parent == raylet]
    command = [sys.executable, "-I", "-S", __file__, *children]
    # A session of its own: Ctrl-C in a terminal must not end it before the driver.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=2, start_new_session=True)


def _processes() -> dict[int, tuple[int, str]]:
    """Parent and start time of all processes."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                found[int(entry.name)] = int(fields[1]), fields[19]
    return found


def main() -> None:
    while os.read(0, 1):
        pass
    processes = _processes()
    for word in sys.argv[1:]:
        pid, _, start = word.partition(":")
        if int(pid) in processes and processes[int(pid)][1] == start:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
