"""The run directory: its lock, with real processes that are killed, and the renaming of an earlier run."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sortedrl.errors import RunDirError
from sortedrl.ledger import atomic_file, run_lock
from sortedrl.ledger.run_lock import LOCK_FILE, RunLock, is_being_written
from sortedrl.ledger.store import Store
from sortedrl.run.atomic_folder import written_whole
from sortedrl.run.rundir import check_writable, prepare_run_dir

HOLD = "RunLock(sys.argv[1]).acquire(); print(os.getpid(), flush=True); sys.stdin.read()"
HOLD_AND_FORK = """
lock = RunLock(sys.argv[1])
lock.acquire()
if os.fork() == 0:
    lock.release()  # the parent's: not the child's to give back
    print(os.getpid(), flush=True)
sys.stdin.read()
"""
needs_flock = pytest.mark.skipif(run_lock.fcntl is None, reason="the system has no flock")


@contextmanager
def start_process(code: str, run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-c",
        f"import os, sys\nfrom sortedrl.ledger.run_lock import RunLock\n{code}",
        str(run_dir),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def read_pid(child: subprocess.Popen[str]) -> int:
    assert child.stdout is not None
    return int(child.stdout.readline())


@contextmanager
def process(code: str, run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a process that runs until its standard input ends; yields it and the process id that it printed."""
    with start_process(code, run_dir) as child:
        yield child, read_pid(child)


def is_free(run_dir: Path) -> bool:
    try:
        with RunLock(run_dir):
            return True
    except RunDirError:
        return False


@needs_flock
def test_a_second_process_is_told_who_holds_the_run(tmp_path: Path) -> None:
    with process(HOLD, tmp_path) as (child, pid):
        since = r"\(since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\)"
        name = re.escape(str(tmp_path))
        with pytest.raises(
            RunDirError, match=rf"run {name} is in use by process {pid} {since}: wait for it or stop it"
        ):
            RunLock(tmp_path).acquire()
        assert child.poll() is None


@needs_flock
def test_a_killed_holder_does_not_block_though_its_file_is_left(tmp_path: Path) -> None:
    with process(HOLD, tmp_path) as (child, pid):
        assert not is_free(tmp_path)
        os.kill(pid, signal.SIGKILL)
        child.wait()
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"{pid} ")
        assert is_free(tmp_path)


@needs_flock
def test_a_child_that_outlives_a_killed_holder_does_not_hold_the_run(tmp_path: Path) -> None:
    with process(HOLD_AND_FORK, tmp_path) as (parent, child_pid):
        assert not is_free(tmp_path)
        parent.kill()
        parent.wait()
        os.kill(child_pid, 0)  # it lives
        assert is_free(tmp_path)
        os.kill(child_pid, signal.SIGKILL)


@needs_flock
def test_one_of_many_processes_gets_it(tmp_path: Path) -> None:
    code = """
try:
    RunLock(sys.argv[1]).acquire()
    print(os.getpid(), flush=True)
    sys.stdin.read()
except OSError:
    print(0, flush=True)
"""
    with ExitStack() as stack:
        children = [stack.enter_context(start_process(code, tmp_path)) for _ in range(6)]
        pids = sorted(read_pid(child) for child in children)
    assert pids[:5] == [0] * 5
    assert pids[5] > 0


def test_it_is_given_back_with_nothing_left(tmp_path: Path) -> None:
    def fail_while_held() -> None:
        with RunLock(tmp_path) as lock:
            assert lock.path.read_text().startswith(f"{os.getpid()} ")
            assert not is_free(tmp_path)
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail_while_held()
        assert list(tmp_path.iterdir()) == []


@needs_flock
def test_a_file_deleted_by_its_holder_between_open_and_flock_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = RunLock(tmp_path), RunLock(tmp_path), RunLock(tmp_path)
    flock = run_lock.fcntl.flock
    first.acquire()

    def flock_too_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(run_lock.fcntl, "flock", flock)
        first.release()
        second.acquire()
        flock(descriptor, operation)

    monkeypatch.setattr(run_lock.fcntl, "flock", flock_too_late)
    with pytest.raises(RunDirError, match="in use"):
        third.acquire()
    second.release()
    assert is_free(tmp_path)


@pytest.mark.parametrize("text", ["", "no text of ours", "12", "x y z", "1 2026-13-01 h", "\x1b[31m \x00 \xff"])
def test_a_file_that_says_something_else_does_not_block_and_is_not_repeated(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    with RunLock(tmp_path) as lock:
        lock.path.write_text(text)
        with pytest.raises(RunDirError, match=f"run {re.escape(str(tmp_path))} is in use by another process: wait"):
            RunLock(tmp_path).acquire()


def test_a_holder_on_another_machine_is_named_with_it(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        lock.path.write_text("77 2026-01-02T03:04:05+00:00 far.away\n")
        with pytest.raises(RunDirError, match=r"process 77 on 'far.away' \(since 2026-01-02 03:04:05 UTC\)"):
            RunLock(tmp_path).acquire()


@needs_flock
def test_what_a_link_points_to_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    (tmp_path / LOCK_FILE).symlink_to("precious")
    with pytest.raises(RunDirError, match=r"run\.dir=PATH"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / "precious").read_text() == "keep"


def test_a_run_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="absent: No such file"):
        RunLock(tmp_path / "absent").acquire()


def test_without_flock_the_file_is_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "fcntl", None)
    with RunLock(tmp_path) as lock:
        expected = rf"in use by process {os.getpid()} \(since .*if it has ended, delete {re.escape(str(lock.path))}"
        with pytest.raises(RunDirError, match=expected):
            RunLock(tmp_path).acquire()
        assert lock.path.exists()
    assert list(tmp_path.iterdir()) == []


@needs_flock
def test_a_file_system_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(run_lock.errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), RunLock(tmp_path):
        assert "cannot be locked (Operation not supported)" in caplog.text
    monkeypatch.setattr(run_lock, "_NO_FLOCK", set())
    with pytest.raises(RunDirError, match="Operation not supported"):
        RunLock(tmp_path).acquire()


def test_an_earlier_run_is_moved_aside(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for turn in range(3):
        prepare_run_dir(run_dir)
        assert list(run_dir.iterdir()) == []
        (run_dir / "events.jsonl").write_text(str(turn))
    assert [(tmp_path / name / "events.jsonl").read_text() for name in ("run.1", "run.2", "run")] == ["0", "1", "2"]
    assert [entry.name for entry in (tmp_path / "run.1").iterdir()] == ["events.jsonl"]


@needs_flock
def test_a_run_in_use_is_not_moved(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prepare_run_dir(run_dir)
    with process(HOLD, run_dir) as (_, pid):
        prepare_run_dir(run_dir)  # nothing but a lock is in it: nothing to save
        (run_dir / "events.jsonl").write_text("")
        with pytest.raises(RunDirError, match=f"in use by process {pid}"):
            prepare_run_dir(run_dir)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_place_that_cannot_hold_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "deep" / "er")
    assert not (tmp_path / "deep").exists()
    for refuse in (check_writable, prepare_run_dir):
        with pytest.raises(RunDirError, match=r"choose another with run\.dir=PATH"):
            refuse(tmp_path / "file" / "run")
    with pytest.raises(RunDirError, match="file is not a folder"):
        check_writable(tmp_path / "file")


def test_whether_a_run_is_being_written_is_told_without_its_lock(tmp_path: Path):
    assert not is_being_written(tmp_path)
    with RunLock(tmp_path):
        assert is_being_written(tmp_path)
    assert not is_being_written(tmp_path)
    command = [sys.executable, "-c", "import os; print(os.getpid())"]
    gone = subprocess.run(command, capture_output=True, text=True, check=True)
    (tmp_path / "lock").write_text(f"{int(gone.stdout)} 2026-01-01T00:00:00+00:00 {socket.gethostname()}\n")
    assert not is_being_written(tmp_path), "its process has ended"
    (tmp_path / "lock").write_text("1 2026-01-01T00:00:00+00:00 elsewhere\n")
    assert is_being_written(tmp_path), "a process of another machine cannot be looked up"
    (tmp_path / "lock").write_text("nonsense")
    assert not is_being_written(tmp_path)


def test_the_names_of_new_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(atomic_file, "sync", synced.append)
    prepare_run_dir(tmp_path / "runs" / "new")
    assert set(synced) == {tmp_path, tmp_path / "runs"}
    synced.clear()
    prepare_run_dir(tmp_path / "runs" / "new")
    assert synced == []


def test_a_folder_that_may_be_written_but_not_read_can_hold_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shared folder of mode 1733: its names cannot be synced. Root may read it, so the refusal is played."""
    open_file = os.open

    def refuse(path: Any, *options: Any, **named: Any) -> int:
        if Path(path) == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *options, **named)

    monkeypatch.setattr(os, "open", refuse)
    prepare_run_dir(tmp_path / "new")
    Store.create(tmp_path / "ledger.sqlite", grouped=False, knobs={"update_batch": 1}).close()
    with written_whole(tmp_path / "folder") as temporary:
        (temporary / "file").write_text("text")
    assert (tmp_path / "folder" / "file").read_text() == "text"
