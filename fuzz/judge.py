"""Play a scenario to its end and say what is wrong with it.

Right is: every process ends by itself, with an exit code that what happened explains, and at most one line of error;
what it leaves behind is a run directory that resumes, unless its files were damaged; in the end each sample is trained
once, the ledger passes the audit and, if it was never damaged, the package's own verification, the weights are those of
an undisturbed run where that is promised, and nothing else is left on the machine.

What counts is what happened, not what was planned: a fault that came too late excuses nothing and is not counted.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import sqlite3
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from fuzz import child, faults, hits, oracle, rows, trl_script
from fuzz.audit import audit
from fuzz.child import Deadline, Ended, Limits
from fuzz.control import Control, left_shared_memory
from fuzz.finding import Finding, FindingKind
from fuzz.programs import Call, Program
from fuzz.scenario import KILLS, SIGNALS, Fault, Kind, Scenario, Stage

_EXIT_CODES = {Fault.TERM: 143, Fault.INTERRUPT: 130, Fault.HANG_UP: 129}
# Faults after which a process may say in one line why it cannot go on. All others are survived, or end it by a signal.
_ENDING = (Fault.DISK_FULL, Fault.OUT_OF_MEMORY, Fault.ENGINE_RAISES)
_ABORTED = -6  # the allocator of a library ends the process if memory runs out: Rust's, for one
_PART_ENDED = re.compile(r"the (?:engine|learner)'s process has ended \(signal 9\)")
_ABORTING = "memory allocation of "  # what Rust's says first; without memory for the rest it may stop there for ever


@dataclass(slots=True, kw_only=True)
class Result:
    scenario: Scenario
    findings: list[Finding] = field(default_factory=list)
    num_processes: int = 0
    num_changes: int = 0  # keys that were changed at a resume
    outcome: str = ""  # complete, refused
    has_twin: bool = False
    faults: list[str] = field(default_factory=list)  # that happened
    ends: list[str] = field(default_factory=list)  # how each process ended, for people

    @property
    def counts(self) -> dict[str, int]:
        return {
            "runs": 1,
            f"runs of {self.scenario.kind}": 1,
            "processes": self.num_processes,
            "faults": len(self.faults),
            "changed keys": self.num_changes,
            "twins": int(self.has_twin),
            "findings": len(self.findings),
            **({self.outcome: 1} if self.outcome else {}),
            **Counter(f"fault {name}" for name in self.faults),
            **Counter(f"found {finding.kind}" for finding in self.findings),
        }

    def find(self, kind: FindingKind, text: str) -> None:
        self.findings.append(Finding(kind, text))


class Player:
    """Plays scenarios one after the other, each in a folder of its own, until its deadline."""

    def __init__(self, page: Control, folder: Path, plant: str = "") -> None:
        self.page, self.folder, self.plant = page, folder, plant
        self.deadline = Deadline()

    def play(self, scenario: Scenario) -> Result:
        result = Result(scenario=scenario)
        home = self.folder / f"s{scenario.seed}"
        shutil.rmtree(home, ignore_errors=True)
        left_shared_memory()
        program = Program(scenario=scenario, home=home)
        if scenario.kind == Kind.TRL:
            trl_script.warm_up()
        try:
            self._stages(program, result)
            result.faults += hits.noted(home)
            if result.outcome == "complete" and scenario.has_twin and not result.findings:
                result.has_twin = bool(result.faults)
                self._compare_with_twin(program, result)
            if left := left_shared_memory():
                result.find(FindingKind.LEFTOVER, f"shared memory is left: {left[:3]}")
        finally:
            shutil.rmtree(home, ignore_errors=True)
            left_shared_memory()  # of a process that was killed when the time was over
        return result

    def _run(self, program: Program, call: Call, stage: Stage) -> Ended:
        limits = Limits(
            fault_s=program.fault_s,
            hang_s=program.limit_s,
            memory_bytes=program.memory_bytes,
            deadline=self.deadline,
        )
        return child.run(self.page, call, program.home, stage, plant=self.plant, limits=limits)

    def _stages(self, program: Program, result: Result) -> None:
        scenario, run_dir = program.scenario, program.run_dir
        program.prepare()
        damage = Damage(run_dir=run_dir)
        has_bad_rows = bool(program.rows_file) and not rows.is_sound(program.home, program.rows_file)
        for number, stage in enumerate(scenario.stages):
            is_resume = program.can_resume
            if stage.damage and is_resume and damage.cause(*stage.damage, seed=stage.at):
                result.faults.append("damaged file")
            config = _config_file(run_dir)
            why = _excuses(program, stage, damage, is_resume=is_resume, has_bad_rows=has_bad_rows)
            ended = self._run(program, program.resume(stage.changes) if is_resume else program.first(), stage)
            why.has_handlers = _config_file(run_dir) != config and not _has_ended(run_dir)
            was_hit = is_hit(ended, stage)
            result.num_processes += 1
            result.num_changes += bool(stage.changes and is_resume and _settings(run_dir) != config.settings)
            result.faults += [stage.fault.value] * was_hit
            if has_bad_rows and (program.rows_file in ended.err or run_dir.exists()):
                result.faults.append("bad data file")
                has_bad_rows = False  # counted once; a run that has begun with it cannot refuse it
            result.ends.append(_describe_end(ended, stage, was_hit=was_hit))
            result.findings += judge_end(ended, stage, why)
            if result.findings:
                return
            damage.look(ended, is_script=scenario.kind == Kind.TRL)
            if damage.ledger is None:
                result.findings += ledger_findings(
                    run_dir,
                    program.home / "audited",
                    is_complete=ended.code == 0,
                    num_samples=program.num_samples or _num_samples(run_dir),
                    has_own_verdict=not damage.was_in_ledger,
                )
            if ended.code == 2 and not is_resume and not was_hit:
                result.outcome = "refused"  # a configuration that is not accepted
                if run_dir.exists() and (left := sorted(path.name for path in run_dir.iterdir())):
                    result.find(FindingKind.LEFTOVER, f"a refused configuration left {left[:5]}")
                return
            if number == len(scenario.stages) - 1 and ended.code != 0:
                result.outcome = "refused"
        if not result.outcome and not result.findings:
            result.outcome = "complete"
            _judge_leftovers(run_dir, program.home, result)

    def _compare_with_twin(self, program: Program, result: Result) -> None:
        twin = Program(scenario=program.scenario, home=program.home.with_name(program.home.name + "-twin"))
        shutil.rmtree(twin.home, ignore_errors=True)
        try:
            twin.prepare()
            ended = self._run(twin, twin.first(), Stage())
            ours, theirs = (newest_weights(one.weights) for one in (program, twin))
            if ended.code != 0:
                result.find(FindingKind.END, f"the undisturbed twin ended with {ended.code}: {ended.err[-300:]!r}")
            elif NO_CHECKPOINT in (ours, theirs):
                result.find(FindingKind.LOST, f"a complete run without a checkpoint: {ours}, and {theirs} of its twin")
            elif ours != theirs:
                text = f"other weights than the undisturbed twin: {ours} and {theirs}"
                result.find(FindingKind.WRONG_RESUME, text)
        finally:
            shutil.rmtree(twin.home, ignore_errors=True)


def _describe_end(ended: Ended, stage: Stage, *, was_hit: bool) -> str:
    missed = "" if was_hit or stage.fault == Fault.NONE else " (did not happen)"
    return ", ".join([f"fault {stage.fault}{missed}", f"exit code {ended.code}", *ended.error_lines])


# ---- how a process may end ------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Excuses:
    """What explains an end of a process besides the fault of its stage."""

    may_refuse: bool = False  # with exit code 2 and one line
    must_refuse: bool = False
    may_raise: bool = False  # an exception, where the program is a user's script
    is_script: bool = False
    has_handlers: bool = False  # it trained when it ended, so a signal ends it with an exit code of its own
    is_resume: bool = False
    needs_helpers: bool = False  # it cannot do without one of the processes that it starts: vLLM's, a rank


def _excuses(program: Program, stage: Stage, damage: Damage, *, is_resume: bool, has_bad_rows: bool) -> Excuses:
    """What is known before the process starts."""
    scenario = program.scenario
    why = Excuses(is_script=scenario.kind == Kind.TRL, is_resume=is_resume)
    why.may_raise = why.is_script and damage.has_happened
    why.needs_helpers = scenario.kind in (Kind.RANKS, Kind.VLLM)
    if not is_resume:
        why.may_refuse, why.must_refuse = has_bad_rows, oracle.must_refuse_start(program)
    elif not why.is_script:
        why.may_refuse = damage.explains_a_refusal()
        why.must_refuse = oracle.must_refuse_changes(program.run_dir, stage.changes)
    return why


def is_hit(ended: Ended, stage: Stage) -> bool:
    """Whether the fault of the stage happened to this process."""
    if stage.fault == Fault.OUT_OF_MEMORY:
        return ended.code == _ABORTED or (ended.code != 0 and faults.tells_of_memory(ended.err))
    return ended.was_hit


def judge_end(ended: Ended, stage: Stage, why: Excuses | None = None) -> list[Finding]:
    """What is wrong with exit code, output and the processes that are left."""
    why = why or Excuses()
    wrong, kinds = [], FindingKind
    was_hit = is_hit(ended, stage)
    allowed, may_refuse = {0}, why.may_refuse or why.must_refuse
    if was_hit and stage.fault in SIGNALS:
        allowed.add(_EXIT_CODES[stage.fault])
        allowed |= set() if why.has_handlers else {-SIGNALS[stage.fault]}
    if was_hit and stage.fault in KILLS:
        allowed = {-9}
    if was_hit and stage.fault == Fault.OUT_OF_MEMORY:
        allowed.add(_ABORTED)
    # Workers for rewards and tools are replaced; without its engine or its learner a run ends, and says so.
    is_without = why.needs_helpers or _PART_ENDED.search(ended.err) is not None
    is_ending = stage.fault in _ENDING or (stage.fault == Fault.HELPER_KILLED and is_without)
    may_refuse = may_refuse or (was_hit and is_ending)
    may_raise = why.may_raise or (why.is_script and was_hit and stage.fault == Fault.DISK_FULL)
    is_raised = may_raise and ended.code in (1, *(allowed - {0}))  # or it was killed while it printed the error
    is_aborting = stage.fault == Fault.OUT_OF_MEMORY and _ABORTING in ended.err
    told = f"{stage.fault}{'' if was_hit or stage.fault == Fault.NONE else ' (which did not happen)'}"
    if ended.code is None and is_aborting:
        pass  # no code of ours runs any more
    elif ended.code is None:
        wrong.append(Finding(kinds.END, f"a process does not end with {told}: {ended.err[-300:]!r}"))
    elif ended.code == 2 and not may_refuse:
        kind = kinds.WRONG_RESUME if why.is_resume else kinds.END
        wrong.append(Finding(kind, f"nothing explains a refusal with {told}: {ended.err[-400:]!r}"))
    elif ended.code == 0 and why.must_refuse:
        wrong.append(Finding(kinds.END, f"what must be refused is accepted: {ended.err[-300:]!r}"))
    elif ended.code not in allowed and ended.code != 2 and not is_raised:
        wrong.append(Finding(kinds.END, f"exit code {ended.code} with {told}: {ended.err[-600:]!r}"))
    if "Traceback" in ended.out + ended.err and not is_raised:
        wrong.append(Finding(kinds.TRACEBACK, f"with {told}: {ended.err[-1200:]!r}"))
    if ended.code == 2 and len(ended.error_lines) != 1:
        text = f"{len(ended.error_lines)} error lines with {told}: {ended.err[-400:]!r}"
        wrong.append(Finding(kinds.END, text))
    if ended.processes:
        wrong.append(Finding(kinds.LEFTOVER, f"processes after {told}: {ended.processes[:3]}"))
    return wrong


# ---- what the run directory says ------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class _ConfigFile:
    """config.toml, which each process writes anew once its parts are built; handlers of signals are set by then."""

    settings: bytes
    number: int  # of the inode; the file is replaced by another one


def _config_file(run_dir: Path) -> _ConfigFile:
    path = run_dir / "config.toml"
    return _ConfigFile(_settings(run_dir), path.stat().st_ino if path.is_file() else 0)


def _settings(run_dir: Path) -> bytes:
    return _read(run_dir / "config.toml")


def _has_ended(run_dir: Path) -> bool:
    """Whether the last process has saved the run and told its end: then signals are the interpreter's again."""
    return (run_dir / "summary.json").is_file() or b'"RunEnded"' in _read(run_dir / "events.jsonl")[-4000:]


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _num_samples(run_dir: Path) -> int:
    config = tomllib.loads((run_dir / "config.toml").read_text()) if (run_dir / "config.toml").is_file() else {}
    return config.get("run", {}).get("samples", 0)


def ledger_findings(
    run_dir: Path, scratch: Path, *, is_complete: bool, num_samples: int, has_own_verdict: bool = True
) -> list[Finding]:
    """What is wrong with the ledger of a run that was not damaged. `num_samples`: how many the run trains in all.

    `has_own_verdict`: also ask the package to verify the file. `scratch` is where a copy is made.
    """
    if is_complete and num_samples == 0:
        return [Finding(FindingKind.LOST, "a complete run does not say how many samples it trains")]
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for file in run_dir.glob("ledger.sqlite*"):
        shutil.copy(file, scratch)
    path = scratch / "ledger.sqlite"
    if _has_tables(path):
        wrong = audit(path, is_complete=is_complete, num_samples=num_samples or None)
        wrong = wrong or (list(_own_verdict(path)) if has_own_verdict else [])
    else:
        wrong = [Finding(FindingKind.LOST, "a complete run without a ledger")] if is_complete else []
    shutil.rmtree(scratch)
    return wrong


def _has_tables(path: Path) -> bool:
    """Whether a process got as far as to create the tables. A file that cannot be read has some: the audit says so.

    Opened for writing, so that SQLite takes back what a killed process had not committed.
    """
    if not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as connection:
            return connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] > 0
    except sqlite3.DatabaseError:
        return True


def _own_verdict(path: Path) -> Iterator[Finding]:
    """What the package's own verification finds."""
    from sortedrl.errors import LedgerError
    from sortedrl.ledger.reader import Ledger
    from sortedrl.ledger.verify import verify

    try:
        with Ledger(path) as ledger:
            violations = verify(ledger).violations
    except LedgerError as error:
        yield Finding(FindingKind.LEDGER, f"it cannot be verified: {error}")
        return
    if violations:
        yield Finding(FindingKind.LEDGER, f"its verification says: {'; '.join(map(str, violations[:3]))}")


def _judge_leftovers(run_dir: Path, home: Path, result: Result) -> None:
    """What a complete run must not leave behind. A killed process cannot clean up; the next one must."""
    parts = [
        p for p in run_dir.rglob(".*") if p.name.endswith(".part") or ".partial-" in p.name or ".removed-" in p.name
    ]
    # A script that is started again when all its steps are done runs nothing of ours that could remove the file.
    is_ended_script = result.scenario.kind == Kind.TRL and not (run_dir / "summary.json").exists()
    if parts and not is_ended_script:
        result.find(FindingKind.LEFTOVER, f"temporary files in the run directory: {[p.name for p in parts[:3]]}")
    faults = {stage.fault for stage in result.scenario.stages}
    can_clean_up = faults.isdisjoint((*KILLS, Fault.OUT_OF_MEMORY, Fault.HELPER_KILLED))
    # Ray keeps the folder of each session, and vLLM's sockets stay if its processes are ended while they start.
    can_clean_up = can_clean_up and result.scenario.kind not in (Kind.RANKS, Kind.VLLM)
    if can_clean_up and (left := [p.name for p in (home / "tmp").iterdir()]):
        result.find(FindingKind.LEFTOVER, f"temporary files: {left[:3]}")


# ---- damage ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Damage:
    """What was damaged in a run directory, and what of it no process has mended so far."""

    run_dir: Path
    has_happened: bool = False
    was_in_ledger: bool = False
    ledger: tuple[bytes, bytes] | None = None  # the damaged ledger and its log, until a process has mended it
    files: dict[Path, bytes | None] = field(default_factory=dict)  # of checkpoints, as they were left; None: gone

    def cause(self, name: str, how: str, seed: float) -> bool:
        """Damage a file of the run directory; returns whether that changed anything."""
        path, rng = self._path(name, random.Random(seed))
        if path is None or not path.is_file():
            return False
        before = path.read_bytes()
        if how == "delete":
            path.unlink()
        else:
            path.write_bytes(b"" if how == "empty" else rows.damaged(before, how, rng))
        after = path.read_bytes() if path.is_file() else None
        if after == before:
            return False
        self.has_happened = True
        if name == "checkpoint":
            self.files[path] = after
        elif name.startswith("ledger"):
            self.ledger, self.was_in_ledger = self._ledger_files(), True
        return True

    def _path(self, name: str, rng: random.Random) -> tuple[Path | None, random.Random]:
        if name != "checkpoint":
            return self.run_dir / name, rng
        files = sorted(path for folder in self._checkpoints()[-1:] for path in folder.iterdir() if path.is_file())
        return (rng.choice(files) if files else None), rng

    def _checkpoints(self) -> list[Path]:
        folders = (self.run_dir / "checkpoints").glob("[0-9]*")
        return sorted(folders, key=lambda path: int(path.name))

    def _ledger_files(self) -> tuple[bytes, bytes]:
        return _read(self.run_dir / "ledger.sqlite"), _read(self.run_dir / "ledger.sqlite-wal")

    def explains_a_refusal(self) -> bool:
        """Whether a resume may be refused: there is no sound checkpoint, and files of the run were damaged.

        Damage of other files, or of one checkpoint among several, must be survived.
        """
        damaged = {
            path.parent
            for path, left in self.files.items()
            if (path.read_bytes() if path.is_file() else None) == left and path.parent.is_dir()
        }
        return self.has_happened and damaged.issuperset(self._checkpoints())

    def look(self, ended: Ended, *, is_script: bool) -> None:
        """Note whether a process has mended the ledger: one that ended well has, if it had to read it.

        One that was killed or refused the run may have left the ledger as it was. A script whose steps are all done
        never opens it, and a run that is complete looks at it, but writes nothing.
        """
        has_done_nothing = is_script or " is complete: " in ended.err
        if ended.code == 0 and not (has_done_nothing and self._ledger_files() == self.ledger):
            self.ledger = None


NO_CHECKPOINT = "no checkpoint"


def newest_weights(checkpoints: Path) -> str:
    """Version and digest of the newest checkpoint's tensors."""
    folders = sorted(checkpoints.glob("[0-9]*"), key=lambda path: int(path.name))
    if not folders:
        return NO_CHECKPOINT
    digest = hashlib.sha256()
    for path in sorted(folders[-1].glob("*.safetensors")):
        digest.update(path.read_bytes())
    return f"{folders[-1].name}:{digest.hexdigest()[:12]}"
