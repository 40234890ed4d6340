"""Causes faults: inside the process that trains, before it starts, or from outside while it runs.

`child.py` calls `prepare` in the forked process, and `strike` in the fuzzer's own.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fuzz import control, planted
from fuzz.control import Control
from fuzz.scenario import FREEZES, OUTSIDE, SIGNALS, Fault, Stage

MEMORY_MIB = 300  # at most so much more than at its start, if memory runs out
_FAILURE_RATE = 0.1  # of attempts
# How Python, torch, libraries in Rust and C, and this package say that memory ran out; the last two: for a thread.
_OUT_OF_MEMORY = re.compile(r"memory|bad_alloc|MemoryError|start new thread|Resource temporarily", re.IGNORECASE)


def prepare(page: Control, runs: Path, stage: Stage) -> None:
    """Set up a fault that happens inside this process. `runs`: the folder of run directories."""
    pid = os.getpid()
    match stage.fault:
        case Fault.KILL_AT_CALL:
            page.set(control.KILL, pid=pid, at=stage.call)
        case Fault.KILL_AT_WRITE:
            page.set(control.KILL, pid=pid, at=stage.call, folder=runs)
        case Fault.DISK_FULL:
            page.set(control.DISK_FULL, pid=pid, at=stage.call, folder=runs)
        case Fault.CLOCK_JUMP:
            days = random.Random(stage.at).choice((-400, -1, 1, 400))
            page.set(control.CLOCK_JUMP, pid=pid, at=stage.call, jump_s=86_400 * days)
        case Fault.OUT_OF_MEMORY:
            limit_memory(round(stage.at * MEMORY_MIB * 2**20))
        case Fault.ENGINE_RAISES:
            page.set(control.NOTHING, pid=pid)
            _engine_raises(page, max(1, round(300**stage.at)))
        case Fault.SAMPLE_FAILS:
            page.set(control.NOTHING, pid=pid)
            _samples_fail(page, stage.at)
        case _ if stage.fault in OUTSIDE:
            page.set(control.NOTHING, pid=pid, at=1 << 40)
        case _:
            pass


def limit_memory(num_bytes: int) -> None:
    """Let this process and those that it starts have so many bytes more of writable memory."""
    status = Path("/proc/self/status").read_text()
    used = 1024 * int(status.partition("VmData:")[2].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, resource.RLIM_INFINITY))


def tells_of_memory(text: str) -> bool:
    """Whether what a process printed says that memory ran out."""
    return _OUT_OF_MEMORY.search(text) is not None


def _engine_raises(page: Control, call: int) -> None:
    from sortedrl.engine.local.engine import LocalEngine

    inner, calls = LocalEngine.poll, [0]

    def poll(engine: LocalEngine, timeout: float | None = None) -> Any:
        calls[0] += 1
        if calls[0] == call:
            page.mark_hit()
            raise RuntimeError("the fuzzer broke the engine")
        return inner(engine, timeout)

    planted.replace_method(LocalEngine, "poll", poll)


def _samples_fail(page: Control, seed: float) -> None:
    from sortedrl.engine.base import Failed, Finished
    from sortedrl.engine.local.engine import LocalEngine

    inner = LocalEngine.poll

    def fails(event: Finished) -> bool:
        return random.Random(f"{seed} {event.sample} {event.attempt}").random() < _FAILURE_RATE

    def poll(engine: LocalEngine, timeout: float | None = None) -> Any:
        events = []
        for event in inner(engine, timeout):
            if isinstance(event, Finished) and fails(event):
                page.mark_hit()
                events.append(Failed(event.sample, event.attempt, event.clock, "the fuzzer failed it"))
            else:
                events.append(event)
        return events

    planted.replace_method(LocalEngine, "poll", poll)


def strike(pid: int, stage: Stage, helpers: Mapping[int, str], check_time: Callable[[], None]) -> bool:
    """Cause a fault from outside; returns whether something that lives was hit.

    `helpers`: processes that it started. `check_time` is called while a process stands still, and may raise.
    """
    if stage.fault == Fault.HELPER_KILLED:
        return bool(helpers) and _send(random.Random(stage.at).choice(sorted(helpers)), signal.SIGKILL)
    if stage.fault not in FREEZES:
        return _send(pid, SIGNALS.get(stage.fault, signal.SIGKILL))
    if not _send(pid, signal.SIGSTOP):
        return False
    until = time.monotonic() + FREEZES[stage.fault]
    while time.monotonic() < until:
        check_time()
        time.sleep(0.05)
    return _send(pid, signal.SIGCONT)


def _send(pid: int, number: int) -> bool:
    """Send a signal; returns whether the process lived. A dead one takes signals until it is waited for."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        os.kill(pid, number)
    except (ProcessLookupError, FileNotFoundError):
        return False
    return True
