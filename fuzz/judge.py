"""Play a scenario to its end and say what is wrong with it.

Right is: every process ends by itself, with an exit code that fits and at most one line of error; what it leaves behind
is a run directory that resumes or says in one line why not; in the end each sample is trained once, the ledger passes
two audits, the weights are those of an undisturbed run where that is promised, and nothing else is left on the machine.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import sqlite3
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fuzz import child, rows, trl_script
from fuzz.audit import audit
from fuzz.child import Deadline, Ended, Limits
from fuzz.control import Control, left_shared_memory
from fuzz.finding import Finding, FindingKind
from fuzz.programs import Call, Program
from fuzz.scenario import KILLS, SIGNALS, Fault, Kind, Scenario, Stage

_EXIT_CODES = {Fault.TERM: 143, Fault.INTERRUPT: 130, Fault.HANG_UP: 129}
_ABORTED = -6  # the allocator of a library ends the process if memory runs out: Rust's, for one
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
            if result.outcome == "complete" and scenario.has_twin and not result.findings:
                result.has_twin = True
                self._compare_with_twin(program, result)
            if left := left_shared_memory():
                result.find(FindingKind.LEFTOVER, f"shared memory is left: {left[:3]}")
        finally:
            shutil.rmtree(home, ignore_errors=True)
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
        scenario, run_dir, refusal = program.scenario, program.run_dir, ""
        damaged: bytes | None = None  # the ledger, if no process has mended it so far
        program.prepare()
        result.faults += _chaos(scenario)
        for number, stage in enumerate(scenario.stages):
            is_last = number == len(scenario.stages) - 1
            is_resume = program.can_resume
            if stage.damage and is_resume and _damage(run_dir, *stage.damage, seed=stage.at):
                result.faults.append("damaged file")
                damaged = _read(run_dir / "ledger.sqlite") if stage.damage[0].startswith("ledger") else damaged
            ended = self._run(program, program.resume(stage.changes) if is_resume else program.first(), stage)
            result.num_processes += 1
            result.num_changes += bool(stage.changes and is_resume)
            was_hit = ended.was_hit or (stage.fault == Fault.OUT_OF_MEMORY and ended.code != 0)
            result.faults += [stage.fault.value] * was_hit
            result.ends.append(_describe_end(ended, stage, was_hit=was_hit))
            has_damage = any(earlier.damage for earlier in scenario.stages[: number + 1])
            may_raise = scenario.kind == Kind.TRL and (stage.fault == Fault.DISK_FULL or has_damage)
            result.findings += judge_end(ended, stage, may_raise=may_raise)
            if result.findings:
                return
            num_samples = program.num_samples or _num_samples(run_dir)
            # One that was killed or refused the run may have left it as it was, and a script whose steps are all done
            # never opens it.
            is_script = scenario.kind == Kind.TRL and _read(run_dir / "ledger.sqlite") == damaged
            if damaged is not None and ended.code == 0 and not is_script:
                damaged = None
            if damaged is None:
                result.findings += _ledger_findings(run_dir, program.home, num_samples if ended.code == 0 else None)
            if ended.code == 2 and not is_resume and not was_hit:
                result.outcome = "refused"  # a configuration that is not accepted
                if run_dir.exists() and (left := sorted(path.name for path in run_dir.iterdir())):
                    result.find(FindingKind.LEFTOVER, f"a refused configuration left {left[:5]}")
                return
            refusal = ended.err[-300:] if ended.code != 0 and is_last else ""
        if refusal:
            result.outcome = "refused"
            if not any(stage.damage or stage.changes for stage in scenario.stages):
                result.find(FindingKind.WRONG_RESUME, f"a resume is refused: {refusal!r}")
        elif not result.findings:
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
            elif ours != theirs:
                text = f"other weights than the undisturbed twin: {ours} and {theirs}"
                result.find(FindingKind.WRONG_RESUME, text)
        finally:
            shutil.rmtree(twin.home, ignore_errors=True)


def _describe_end(ended: Ended, stage: Stage, *, was_hit: bool) -> str:
    missed = "" if was_hit or stage.fault == Fault.NONE else " (did not happen)"
    return ", ".join([f"fault {stage.fault}{missed}", f"exit code {ended.code}", *ended.error_lines])


def _chaos(scenario: Scenario) -> list[str]:
    """Faults that last as long as the run: functions that misbehave, and files that are not what they seem."""
    text = " ".join(scenario.overrides)
    found = [name for name, word in (("reward chaos", ":chaos_"), ("tool chaos", ":Chaos")) if word in text]
    is_sound = any(f"task.path={name}" in scenario.overrides for name in rows.SOUND)
    return [*found, "bad data file"] if scenario.kind == Kind.DATA and not is_sound else found


def judge_end(ended: Ended, stage: Stage, *, may_raise: bool = False) -> list[Finding]:
    """What is wrong with exit code, output and the processes that are left.

    `may_raise`: a user's script, in which an error of ours is an exception.
    """
    wrong, kinds = [], FindingKind
    allowed = {0, 2}
    if stage.fault in SIGNALS and ended.was_hit:
        allowed |= {_EXIT_CODES[stage.fault], -SIGNALS[stage.fault]}  # the latter before handlers are set
    if stage.fault in KILLS and ended.was_hit:
        allowed.add(-9)
    if stage.fault == Fault.OUT_OF_MEMORY:
        allowed.add(_ABORTED)
    is_raised = may_raise and ended.code in (1, *(allowed - {0, 2}))  # or it was killed while it printed the error
    is_aborting = stage.fault == Fault.OUT_OF_MEMORY and _ABORTING in ended.err
    if ended.code is None and is_aborting:
        pass  # no code of ours runs any more
    elif ended.code is None:
        wrong.append(Finding(kinds.END, f"a process does not end with {stage.fault}: {ended.err[-300:]!r}"))
    elif ended.code not in allowed and not is_raised:
        wrong.append(Finding(kinds.END, f"exit code {ended.code} with {stage.fault}: {ended.err[-600:]!r}"))
    if "Traceback" in ended.out + ended.err and not is_raised:
        wrong.append(Finding(kinds.TRACEBACK, f"with {stage.fault}: {ended.err[-1200:]!r}"))
    if ended.code == 2 and len(ended.error_lines) != 1:
        text = f"{len(ended.error_lines)} error lines with {stage.fault}: {ended.err[-400:]!r}"
        wrong.append(Finding(kinds.END, text))
    if ended.processes:
        wrong.append(Finding(kinds.LEFTOVER, f"processes after {stage.fault}: {ended.processes[:3]}"))
    return wrong


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _num_samples(run_dir: Path) -> int:
    config = tomllib.loads((run_dir / "config.toml").read_text()) if (run_dir / "config.toml").is_file() else {}
    return config.get("run", {}).get("samples", 0)


def _ledger_findings(run_dir: Path, home: Path, num_samples: int | None) -> list[Finding]:
    """`num_samples`: how many a complete run must have trained; None for a run that is not complete."""
    path = run_dir / "ledger.sqlite"
    if not path.is_file():
        return []  # a killed process may not have created it; what was deleted on purpose is the damage itself
    copy = home / "audited"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for file in run_dir.glob("ledger.sqlite*"):
        shutil.copy(file, copy)
    has_tables = _has_tables(copy / "ledger.sqlite")
    is_complete = num_samples is not None
    wrong = audit(copy / "ledger.sqlite", is_complete=is_complete, num_samples=num_samples) if has_tables else []
    shutil.rmtree(copy)
    return wrong


def _has_tables(path: Path) -> bool:
    """Whether the process got as far as to create the tables; a damaged file is for the next resume to find."""
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        with connection:
            found = connection.execute("SELECT value FROM meta WHERE key = 'seq'").fetchone()
            whole = connection.execute("PRAGMA integrity_check(1)").fetchone()[0] == "ok"
        connection.close()
        return bool(found) and whole
    except sqlite3.DatabaseError:
        return False


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


def _damage(run_dir: Path, name: str, how: str, seed: float) -> int:
    """Damage a file of the run directory; returns whether there was one."""
    rng = random.Random(seed)
    if name == "checkpoint":
        newest = sorted((p for p in (run_dir / "checkpoints").glob("[0-9]*")), key=lambda p: int(p.name))[-1:]
        files = sorted(p for folder in newest for p in folder.iterdir() if p.is_file())
        path = rng.choice(files) if files else None
    else:
        path = run_dir / name
    if path is None or not path.is_file():
        return 0
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else rows.damaged(path.read_bytes(), how, rng))
    return 1


def newest_weights(checkpoints: Path) -> str:
    """Version and digest of the newest checkpoint's tensors."""
    folders = sorted(checkpoints.glob("[0-9]*"), key=lambda path: int(path.name))
    if not folders:
        return "no checkpoint"
    digest = hashlib.sha256()
    for path in sorted(folders[-1].glob("*.safetensors")):
        digest.update(path.read_bytes())
    return f"{folders[-1].name}:{digest.hexdigest()[:12]}"
