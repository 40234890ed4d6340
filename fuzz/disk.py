"""A disk that forgets: replay the writes of a run as a power loss would leave them, and resume from what is left.

`record` runs a training whose calls that change files are logged by `syscalls.c`. `crash_states` yields what the run
directory may hold after a power loss: before every flush and at the end, once without anything that was not flushed
(contents and names), once with all names but without unflushed contents; and at random moments with part of the
unflushed writes, the last one torn.
From each state the run must end with the weights of the undisturbed run, and with a ledger that passes the audit. If a
checkpoint was saved before the power loss, it must go on from the newest one, or from a later one; without a checkpoint
it may say in one line why it cannot.

A name (of a new, renamed or removed file) is safe once its folder is flushed, a content once its file is.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from fuzz import child
from fuzz.control import Control
from fuzz.finding import Finding, FindingKind
from fuzz.judge import NO_CHECKPOINT, Excuses, judge_end, ledger_findings, newest_weights
from fuzz.programs import BASE, command
from fuzz.scenario import Stage

_HEAD = struct.Struct("=5q")
_CHECKPOINT = re.compile(r"/checkpoints/([0-9]+)$")
NUM_SAMPLES = 48
ARGUMENTS = (
    f"run.samples={NUM_SAMPLES}",
    "checkpoint.every_updates=2",
    "checkpoint.keep=2",
    "schedule.strategy=sorted-replay",
)


@dataclass(slots=True, kw_only=True, frozen=True)
class Call:
    kind: str  # w write, t truncate, f content, s flush, r rename, u remove, m make folder, c create, o create or empty
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass(slots=True, kw_only=True, frozen=True)
class CrashState:
    """What is on the disk: folders, and files with their contents."""

    name: str
    folders: tuple[str, ...]
    files: dict[str, bytes]
    saved: int = 0  # the newest checkpoint that had its name, with the folder of checkpoints flushed


Contents = tuple[tuple[str, ...], dict[str, bytes]]  # folders, and files with their contents


def read_log(path: Path) -> list[Call]:
    calls, data, at = [], path.read_bytes(), 0
    while at < len(data):
        kind, offset, *sizes = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        parts = []
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        calls.append(
            Call(kind=chr(kind), path=parts[0].decode(), other=parts[1].decode(), offset=offset, data=parts[2])
        )
    return calls


def record(page: Control, home: Path, plant: str = "") -> list[Call]:
    """Train once below `home`, undisturbed, and return its calls that changed the run directory."""
    (home / "runs").mkdir(parents=True)  # calls below it are recorded; that it is there is taken for safe
    log = home.with_suffix(".log")
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    start = command("train", "quickstart", *BASE, *ARGUMENTS)
    ended = child.run(page, start, home, Stage(), plant=plant, record_to=log_fd)
    os.close(log_fd)
    assert ended.code == 0, f"the recorded run failed: {ended.err[-500:]}"
    return read_log(log)


# ---- the model of a disk --------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _File:
    current: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""
    pending: list[Call] = field(default_factory=list)  # since the last flush


@dataclass(slots=True, eq=False)
class _Folder:
    current: dict[str, _File | _Folder] = field(default_factory=dict)
    flushed: dict[str, _File | _Folder] = field(default_factory=dict)


class Disk:
    """Folders and files, as the processes see them and as a power loss would leave them."""

    def __init__(self) -> None:
        self.root = _Folder()

    def apply(self, call: Call) -> None:
        folder, name = self._place(call.path)
        entry = folder.current.get(name)
        match call.kind:
            case "m":
                folder.current[name] = _Folder()
            case "c" | "o":
                if not isinstance(entry, _File):
                    folder.current[name] = _File()
                elif call.kind == "o":
                    _change(entry, Call(kind="t", path=call.path))
            case "w" | "t":
                if isinstance(entry, _File):  # a file that was removed while it was open is gone anyway
                    _change(entry, call)
            case "f":
                if not isinstance(entry, _File):  # it was made and written by calls that are not seen
                    entry = folder.current[name] = _File()
                if entry.current != call.data:
                    _change(entry, Call(kind="t", path=call.path))
                    _change(entry, Call(kind="w", path=call.path, data=call.data))
            case "r":
                target, new_name = self._place(call.other)
                target.current[new_name] = folder.current.pop(name)
            case "u":
                folder.current.pop(name, None)
            case "s":
                if isinstance(entry, _File):
                    entry.flushed, entry.pending = bytes(entry.current), []
                elif entry is not None:
                    entry.flushed = dict(entry.current)
            case _:
                raise AssertionError(f"unknown call {call.kind}")

    def _place(self, path: str) -> tuple[_Folder, str]:
        """The folder of a path, and the name in it. Folders that no call has made were there before, and are safe."""
        *parents, name = path.strip("/").split("/")
        folder = self.root
        for parent in parents:
            entry = folder.current.get(parent)
            if entry is None:
                entry = folder.current[parent] = folder.flushed[parent] = _Folder()
            assert isinstance(entry, _Folder), f"{path} is below a file"
            folder = entry
        return folder, name

    def after_power_loss(self) -> Contents:
        """Without any name or content that was not flushed."""
        return _walk(self.root, is_flushed=True, content=lambda file: file.flushed)

    def with_names_only(self) -> Contents:
        """With all names, and without contents that were not flushed."""
        return _walk(self.root, is_flushed=False, content=lambda file: file.flushed)

    def torn(self, rng: random.Random) -> Contents:
        """With all names, and in each file some of the writes that were not flushed, the last one torn."""
        return _walk(self.root, is_flushed=False, content=lambda file: _torn(file, rng))


def _torn(file: _File, rng: random.Random) -> bytes:
    data = bytearray(file.flushed)
    kept = file.pending[: rng.randint(0, len(file.pending))]
    for number, call in enumerate(kept, start=1):
        length = rng.randint(0, len(call.data)) if number == len(kept) else len(call.data)
        _write(data, Call(kind=call.kind, path="", offset=call.offset, data=call.data[:length]))
    return bytes(data)


def _walk(root: _Folder, *, is_flushed: bool, content: Callable[[_File], bytes]) -> Contents:
    folders, files = [], {}
    waiting: list[tuple[str, _Folder]] = [("", root)]
    while waiting:
        path, folder = waiting.pop()
        for name, entry in sorted((folder.flushed if is_flushed else folder.current).items()):
            if isinstance(entry, _Folder):
                folders.append(f"{path}/{name}")
                waiting.append((f"{path}/{name}", entry))
            else:
                files[f"{path}/{name}"] = content(entry)
    return tuple(sorted(folders)), files


def _change(file: _File, call: Call) -> None:
    _write(file.current, call)
    file.pending.append(call)


def _write(data: bytearray, call: Call) -> None:
    if call.kind == "t":
        del data[call.offset :]
        data.extend(bytes(max(0, call.offset - len(data))))
        return
    end = call.offset + len(call.data)
    if len(data) < call.offset:
        data.extend(bytes(call.offset - len(data)))
    data[call.offset : end] = call.data


def crash_states(calls: list[Call], num_torn: int, seed: int) -> Iterator[CrashState]:
    """States after a power loss, without those that equal an earlier one."""
    rng, disk, seen = random.Random(seed), Disk(), set[int]()
    torn_at = {rng.randrange(len(calls)) for _ in range(num_torn)}
    named = saved = 0
    for number, call in enumerate(calls):
        states = []
        if call.kind == "s":
            states += _both(disk, f"call {number}", saved)
        disk.apply(call)
        if call.kind == "r" and (found := _CHECKPOINT.search(call.other)):
            named = int(found[1])
        if call.kind == "s" and call.path.endswith("/checkpoints"):
            saved = named
        if number in torn_at:
            states += [(f"call {number}, torn", disk.torn(rng), saved)]
        if number == len(calls) - 1:  # after the last flush
            states += _both(disk, "the end", saved)
        for name, (folders, files), safe in states:
            digest = hash((safe, folders, tuple(sorted((p, hash(data)) for p, data in files.items()))))
            if digest not in seen:
                seen.add(digest)
                yield CrashState(name=name, folders=folders, files=files, saved=safe)


def _both(disk: Disk, name: str, saved: int) -> list[tuple[str, Contents, int]]:
    return [
        (f"{name}, unflushed gone", disk.after_power_loss(), saved),
        (f"{name}, names kept", disk.with_names_only(), saved),
    ]


def check(
    page: Control, folder: Path, *, num_torn: int, seed: int, plant: str = ""
) -> Iterator[tuple[str, list[Finding]]]:
    """Resume from every state; yields its name and what is wrong with what came out."""
    home = folder / "home"
    calls = record(page, home, plant)
    wanted = newest_weights(home / "runs" / "r" / "checkpoints")
    assert wanted != NO_CHECKPOINT, "the recorded run saves one"
    for state in crash_states(calls, num_torn, seed):
        shutil.rmtree(home)
        for path in (str(home), *state.folders):
            Path(path).mkdir(parents=True, exist_ok=True)
        for path, data in state.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data)
        run_dir = home / "runs" / "r"
        if (run_dir / "config.toml").is_file() and (run_dir / "config.toml").stat().st_size:
            call = command("train", "--resume", str(run_dir))
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            call = command("train", "quickstart", *BASE, *ARGUMENTS)
        ended = child.run(page, call, home, Stage(), plant=plant)
        wrong = judge_end(ended, Stage(), Excuses(may_refuse=True))
        if ended.code and state.saved and not wrong:
            text = f"checkpoint {state.saved} was saved before the power loss, but is refused: {ended.err[-300:]!r}"
            wrong.append(Finding(FindingKind.WRONG_RESUME, text))
        if ended.code == 0 and (found := newest_weights(run_dir / "checkpoints")) != wanted:
            text = f"other weights: {found}, and {wanted} without the power loss"
            wrong.append(Finding(FindingKind.WRONG_RESUME, text))
        elif ended.code == 0 and " is complete: " not in ended.err and (at := _resumed_at(run_dir)) < state.saved:
            text = f"checkpoint {state.saved} was saved before the power loss, and the run went back to {at}"
            wrong.append(Finding(FindingKind.WRONG_RESUME, text))
        if ended.code == 0:  # a refused run is as the power loss left it
            wrong += ledger_findings(run_dir, home / "audited", is_complete=True, num_samples=NUM_SAMPLES)
        yield state.name, wrong


def _resumed_at(run_dir: Path) -> int:
    """The version from which the last process went on."""
    with closing(sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)) as connection:
        return connection.execute("SELECT version FROM lineages ORDER BY lineage DESC LIMIT 1").fetchone()[0]
