"""Run a program in a forked process, cause a fault in it, and find everything that it leaves behind.

The process gets a session of its own, an empty folder for temporary files, and output in files. Processes that outlive
it become children of this one, so none of them can be missed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fuzz import control, faults, hits, planted
from fuzz.control import Control
from fuzz.scenario import OUTSIDE, Fault, Stage

SETTLE_S = 30.0  # how long helpers of a dead process may live on, on a busy machine
_NOT_PLANTED = "not-planted.txt"  # what a process writes that could not plant its defect
_PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h


@dataclass(slots=True, kw_only=True, frozen=True)
class Ended:
    """How a process ended. `code` is None if it took too long, and minus the number of the signal that killed it."""

    code: int | None
    out: str
    err: str
    was_hit: bool  # the fault happened
    processes: tuple[str, ...]  # that outlived it

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class OutOfTimeError(Exception):
    """The fuzzer's own time is over."""


@dataclass(slots=True)
class Deadline:
    """When the fuzzer itself has to stop. A process that still runs then is killed, and what it did does not count."""

    at: float = math.inf  # on the monotonic clock
    is_asked: bool = False  # to stop before that

    @property
    def has_passed(self) -> bool:
        return self.is_asked or time.monotonic() > self.at

    def check(self) -> None:
        if self.has_passed:
            raise OutOfTimeError


@dataclass(slots=True, kw_only=True, frozen=True)
class Limits:
    fault_s: float | None = None  # a fault from outside comes within this time; None: at the stage's call
    hang_s: float = 180.0  # on a busy machine; then a process is killed
    memory_bytes: int | None = None  # more than at its start
    deadline: Deadline = field(default_factory=Deadline)


def warm_up() -> None:
    """Import what a run needs, so that forked processes start quickly."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import sortedrl.cli
    import sortedrl.run.builders.loop
    import sortedrl.run.builders.parts
    import sortedrl.run.machine_load
    import sortedrl.run.model_card
    import sortedrl.run.save_and_resume
    import sortedrl.trainer  # noqa: F401

    with contextlib.suppress(ImportError):  # a table of a thousand patterns that each process would compile
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy every page of memory
    adopt_orphans()


def adopt_orphans() -> None:
    """Make every process that a child of this one leaves behind a child of this one."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def run(
    page: Control,
    call: Callable[[], None],
    folder: Path,
    stage: Stage,
    *,
    plant: str = "",
    limits: Limits | None = None,
    record_to: int | None = None,
) -> Ended:
    """Call `call` in a process whose working folder is `folder`, and cause the stage's fault.

    `record_to`: a file descriptor for the log of all calls that change the run directory. Raises OutOfTimeError at the
    deadline, and NotPlantedError if the defect `plant` cannot be planted.
    """
    limits = limits or Limits()
    folder.mkdir(parents=True, exist_ok=True)
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    for path in (out, err):  # the process may be killed before it opens them
        path.write_bytes(b"")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    page.clear()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _forget_temporary_folders()
            code = _be_child(page, call, folder, stage, plant, limits, record_to)
            if stage.ends_normally:  # wait for threads, call `atexit`, take down modules, flush and leave
                ctypes.pythonapi.Py_Exit(code)
        except KeyboardInterrupt:  # after the call has returned
            code = 128 + signal.SIGINT
        finally:
            os._exit(code)  # the code below, which removes folders, is the fuzzer's own
    try:
        code, was_struck = _wait(page, pid, stage, limits)
    except BaseException:
        page.clear()
        _end(pid)
        raise
    # A signal to a process that was ending at that moment killed nothing.
    was_hit = code == -signal.SIGKILL if stage.fault == Fault.KILL else was_struck or page.is_hit
    page.clear()
    left = _left_processes()
    for number in left:
        _kill(number)
    if (folder / _NOT_PLANTED).exists():
        raise planted.NotPlantedError((folder / _NOT_PLANTED).read_text())
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
    return Ended(code=code, out=texts[0], err=texts[1], was_hit=was_hit, processes=tuple(left.values()))


def _be_child(
    page: Control,
    call: Callable[[], None],
    folder: Path,
    stage: Stage,
    plant: str,
    limits: Limits,
    record_to: int | None,
) -> int:
    """In the forked process: call `call` and return the exit code."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        (folder / "tmp").mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(folder / "tmp")
        (folder / hits.FOLDER).mkdir(exist_ok=True)
        os.environ[hits.VARIABLE] = str(folder / hits.FOLDER)
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in enumerate(("stdout.txt", "stderr.txt"), start=1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
        tempfile.tempdir = None
        if limits.memory_bytes is not None:
            faults.limit_memory(limits.memory_bytes)
        _plant(plant)
        faults.prepare(page, folder / "runs", stage)
        if record_to is not None:
            page.set(control.RECORD, pid=os.getpid(), at=1 << 40, log_fd=record_to, folder=folder / "runs")
        call()
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    else:
        return 0
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()


def _plant(name: str) -> None:
    """Plant a defect. What fails here is no failure of the program, so the fuzzer learns of it in another way."""
    try:
        planted.plant(name)
    except BaseException as error:
        Path(_NOT_PLANTED).write_text(f"{name}: {type(error).__name__}: {error}")
        os._exit(1)


def _forget_temporary_folders() -> None:
    """Keep the interpreter's end in this process from removing temporary folders, which all are the fuzzer's so far."""
    for finalize in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalize.peek()
        if alive is not None and isinstance(alive[0], tempfile.TemporaryDirectory):
            finalize.detach()


def _wait(page: Control, pid: int, stage: Stage, limits: Limits) -> tuple[int | None, bool]:
    """Wait for a process to end and cause the stage's fault; returns its code, and whether something was struck."""
    began, is_due, was_struck = time.monotonic(), stage.fault in OUTSIDE, False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), was_struck
        passed = time.monotonic() - began
        is_time = page.count >= stage.call if limits.fault_s is None else passed > stage.at * limits.fault_s
        if is_due and is_time:
            was_struck = faults.strike(pid, stage, _descendants(pid), limits.deadline.check)
            is_due = not was_struck  # as long as there is no helper to kill
            began += faults.FREEZES.get(stage.fault, 0.0)
        if passed > limits.hang_s:
            _end(pid)
            return None, was_struck
        limits.deadline.check()
        time.sleep(0.005)


def _end(pid: int) -> None:
    """Kill a process and all that it started, and wait until they are gone."""
    for number in (*_descendants(pid), pid):
        _kill(number)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    while left := _descendants(os.getpid()):  # they started others meanwhile
        for number in left:
            _kill(number)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _left_processes() -> dict[int, str]:
    """The processes that a dead one started and that still live after some time."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = _descendants(os.getpid())
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _descendants(pid: int) -> dict[int, str]:
    """The living processes that a process started, and those that they started, with their command lines."""
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for number in _children(waiting.pop()):
            command = _command(number)
            if command is not None:
                found[number] = command
            waiting.append(number)
    return found


def _children(pid: int) -> list[int]:
    """The kernel lists them for each thread that started them."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (thread / "children").read_text().split())
    return children


def _command(pid: int) -> str | None:
    """None for a process that is dead and not waited for yet."""
    with contextlib.suppress(OSError, IndexError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
