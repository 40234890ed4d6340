"""Ends a process when the process that owns it has ended, in whatever way.

`core.py` and `server.py` send the mark of their process to vLLM's workers, which call `end_with_owner`. `core.py` also
puts it into the environment of vLLM's processes, because starting one takes minutes. A process id
means something on one machine and in one container only, so the mark names these too. A worker on another machine
cannot watch its owner: it ends with vLLM's executor, which Ray ends with the owner. Before a worker ends so, it removes
what vLLM would leave in shared memory.

Guarantees: a worker never ends because another machine lacks a process with its owner's number, or because that number
was given to another process.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from sortedrl.engine.vllm.segments import mapped_segments, remove_segments

VARIABLE = "SORTEDRL_VLLM_OWNER"  # holds the mark while vLLM starts
_CHECK_S = 1.0
_watched: set[str] = set()


def own_mark() -> str:
    """The mark of this process: machine and container, process id, start time. Empty on systems without /proc."""
    started = _start_time(os.getpid())
    return "" if started is None else f"{_place()} {os.getpid()} {started}"


def end_with_owner(mark: str) -> None:
    """End this process when the process with this mark has ended; do nothing if it is on another machine."""
    place, pid, started = mark.rsplit(" ", 2)
    if place == _place() and int(pid) != os.getpid() and mark not in _watched:
        _watched.add(mark)
        threading.Thread(target=_watch, args=(int(pid), started), name="sortedrl-owner", daemon=True).start()


def end_with_starter() -> None:
    """End this process when the process that has started vLLM has ended, if the environment names it."""
    if mark := os.environ.get(VARIABLE):
        end_with_owner(mark)


def is_running(pid: int, started: str) -> bool:
    """Whether the process with this id and start time still runs. A zombie does not."""
    return _start_time(pid) == started


def _watch(pid: int, started: str) -> None:
    while is_running(pid, started):
        time.sleep(_CHECK_S)
    remove_segments(mapped_segments([os.getpid()]))
    os._exit(1)  # vLLM's other processes end with their worker


def _place() -> str:
    """This machine since its last start, and the set of processes that can see each other on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown"


def _start_time(pid: int) -> str | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
