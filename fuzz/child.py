"""Run the command `sortedrl` in a forked process and cause a fault in it.

A process group of its own, an empty folder for temporary files, and output in files: afterwards everything that the
process left behind can be found.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import control, planted
from fuzz.control import Control
from fuzz.scenario import COUNTED, SIGNALS, Fault, Stage

TIME_LIMIT_S = 180.0  # of a process, on a busy machine
SETTLE_S = 15.0  # how long helpers of a dead process may live on


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


def run(
    page: Control,
    arguments: Sequence[str],
    folder: Path,
    stage: Stage,
    plant: str = "",
    *,
    record_to: int | None = None,
) -> Ended:
    """Run `sortedrl` with these arguments below `folder` and cause the stage's fault.

    `record_to`: a file descriptor for the log of all calls that change the run directory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        _be_child(page, arguments, folder, stage, plant, record_to)
    code, was_hit = _wait(pid, stage, page)
    page.clear()
    left = _processes_of(pid)
    for number in left:
        _kill(number)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
    return Ended(code=code, out=texts[0], err=texts[1], was_hit=was_hit, processes=tuple(left.values()))


def warm_up() -> None:
    """Import what a run needs, so that forked processes start quickly."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import sortedrl.cli
    import sortedrl.run.builders.parts
    import sortedrl.trainer  # noqa: F401

    torch.set_num_threads(1)


def _be_child(
    page: Control, arguments: Sequence[str], folder: Path, stage: Stage, plant: str, record_to: int | None
) -> None:
    code = 1
    try:
        os.setsid()
        (folder / "tmp").mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(folder / "tmp")
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in enumerate(("stdout.txt", "stderr.txt"), start=1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        import tempfile

        tempfile.tempdir = None
        _prepare(page, folder, stage)
        if record_to is not None:
            page.set(control.RECORD, pid=os.getpid(), at=1 << 40, log_fd=record_to, folder=folder / "runs")
        planted.plant(plant)
        from sortedrl import cli

        sys.argv = ["sortedrl", *arguments]
        cli.main()
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(page: Control, folder: Path, stage: Stage) -> None:
    """Set up a fault that happens inside the process."""
    runs = folder / "runs"
    match stage.fault:
        case Fault.KILL_AT_CALL:
            page.set(control.KILL, pid=os.getpid(), at=stage.call)
        case Fault.KILL_AT_WRITE:
            page.set(control.KILL, pid=os.getpid(), at=stage.call, folder=runs)
        case Fault.DISK_FULL:
            page.set(control.DISK_FULL, pid=os.getpid(), at=stage.call, folder=runs)
        case Fault.CLOCK_JUMP:
            days = random.Random(stage.at).choice((-400, -1, 1, 400))
            page.set(control.CLOCK_JUMP, pid=os.getpid(), at=stage.call, jump_s=86_400 * days)
        case Fault.ENGINE_RAISES:
            _engine_raises(max(1, round(300**stage.at)))
        case Fault.SAMPLE_FAILS:
            _samples_fail(stage.at)
        case _:
            pass


def _engine_raises(call: int) -> None:
    from sortedrl.engine.local.engine import LocalEngine

    inner, calls = LocalEngine.poll, [0]

    def poll(engine: LocalEngine, timeout: float | None = None) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError("the fuzzer broke the engine")
        return inner(engine, timeout)

    planted.replace_method(LocalEngine, "poll", poll)


def _samples_fail(seed: float) -> None:
    """One attempt in ten fails."""
    from sortedrl.engine.base import Failed, Finished
    from sortedrl.engine.local.engine import LocalEngine

    inner = LocalEngine.poll

    def poll(engine: LocalEngine, timeout: float | None = None) -> Any:
        return [
            Failed(event.sample, event.attempt, event.clock, "the fuzzer failed it")
            if isinstance(event, Finished) and random.Random(f"{seed} {event.sample} {event.attempt}").random() < 0.1
            else event
            for event in inner(engine, timeout)
        ]

    planted.replace_method(LocalEngine, "poll", poll)


def _wait(pid: int, stage: Stage, page: Control) -> tuple[int | None, bool]:
    """Wait for a process to end and send it the stage's signal; returns its code, and whether the fault happened."""
    began, was_hit = time.monotonic(), stage.fault in (Fault.ENGINE_RAISES, Fault.SAMPLE_FAILS)
    is_due = stage.fault in (*SIGNALS, Fault.KILL, Fault.FREEZE, Fault.WORKER_KILLED)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), was_hit or (stage.fault in COUNTED and page.is_hit)
        passed = time.monotonic() - began
        if is_due and passed > stage.seconds:
            is_due, was_hit = False, True
            _strike(pid, stage)
        if passed > TIME_LIMIT_S:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, was_hit
        time.sleep(0.01)


def _strike(pid: int, stage: Stage) -> None:
    if stage.fault in SIGNALS:
        os.kill(pid, SIGNALS[stage.fault])
    elif stage.fault == Fault.KILL:
        os.kill(pid, signal.SIGKILL)
    elif stage.fault == Fault.FREEZE:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
    else:
        for number, name in _members(pid).items():
            if number != pid and "worker" in name:
                _kill(number)
                return


def _processes_of(session: int) -> dict[int, str]:
    """The processes of a session that still live after some time."""
    deadline = time.monotonic() + SETTLE_S
    while (left := _members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _members(session: int) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
        except (OSError, IndexError):
            continue
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
