"""Play a scenario to its end and say what is wrong with it.

Right is: every process ends by itself, with an exit code that fits and at most one line of error; what it leaves behind
is a run directory that resumes or says in one line why not; in the end each sample is trained once, the ledger passes
two audits, the weights are those of an undisturbed run where that is promised, and nothing else is left on the machine.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fuzz import child
from fuzz.audit import audit
from fuzz.child import Ended
from fuzz.control import Control
from fuzz.scenario import SIGNALS, Fault, Scenario, Stage

BASE = (
    *("run.report=false", "eval.prompts=4", "engine.max_new_tokens=32", "engine.slots=8", "schedule.update_batch=8"),
    *("run.on_no_signal=warn", "reward.grace_s=60", "run.name=r", "run.dir=runs"),
)
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_MADE_BY_RUNS = ("psm_", "torch_")  # how Python and torch name it
_EXIT_CODES = {Fault.TERM: 143, Fault.INTERRUPT: 130, Fault.HANG_UP: 129}


@dataclass(slots=True, kw_only=True)
class Result:
    scenario: Scenario
    findings: list[str] = field(default_factory=list)
    num_processes: int = 0
    outcome: str = ""  # complete, refused
    has_twin: bool = False
    kinds: list[str] = field(default_factory=list)  # of the faults that happened

    @property
    def counts(self) -> dict[str, int]:
        by_kind = Counter(f"fault {kind}" for kind in self.kinds)
        return {
            "runs": 1,
            "processes": self.num_processes,
            "faults": self.num_faults,
            "twins": int(self.has_twin),
            "findings": len(self.findings),
            **({self.outcome: 1} if self.outcome else {}),
            **by_kind,
        }

    @property
    def num_faults(self) -> int:
        return len(self.kinds)


class Player:
    """Plays scenarios one after the other, each in a folder of its own."""

    def __init__(self, page: Control, folder: Path, plant: str = "") -> None:
        self.page, self.folder, self.plant = page, folder, plant

    def play(self, scenario: Scenario) -> Result:
        result = Result(scenario=scenario)
        home, shared = self.folder / f"s{scenario.seed}", set(os.listdir(SHARED_MEMORY))
        shutil.rmtree(home, ignore_errors=True)
        try:
            self._stages(scenario, home, result)
            if result.outcome == "complete" and scenario.has_twin and not result.findings:
                result.has_twin = True
                self._compare_with_twin(scenario, home, result)
            if left := _unused(set(os.listdir(SHARED_MEMORY)) - shared):
                result.findings.append(f"shared memory is left: {left[:3]}")
        finally:
            shutil.rmtree(home, ignore_errors=True)
        return result

    def _stages(self, scenario: Scenario, home: Path, result: Result) -> None:
        run_dir, refusal = home / "runs" / "r", ""
        for number, stage in enumerate(scenario.stages):
            is_last = number == len(scenario.stages) - 1
            is_resume = (run_dir / "config.toml").is_file()
            if stage.damage and is_resume and _damage(run_dir, *stage.damage, seed=stage.at):
                result.kinds.append("damaged file")
            if is_resume:
                arguments = ["train", "--resume", str(run_dir), *stage.changes]
            else:
                arguments = ["train", "quickstart", *BASE, *scenario.overrides]
            ended = child.run(self.page, arguments, home, stage, self.plant)
            result.num_processes += 1
            result.kinds += [stage.fault.value] * ended.was_hit + ["changed key"] * bool(stage.changes and is_resume)
            result.findings += judge_end(ended, stage)
            if result.findings:
                return
            result.findings += _ledger_findings(run_dir, is_complete=ended.code == 0, home=home)
            if ended.code == 2 and not is_resume and not ended.was_hit:
                result.outcome = "refused"  # a configuration that is not accepted
                if run_dir.exists() and any(run_dir.iterdir()):
                    result.findings.append(
                        f"a refused configuration left {sorted(p.name for p in run_dir.iterdir())[:5]}"
                    )
                return
            refusal = "; ".join(ended.error_lines) if ended.code == 2 and is_last else ""
        if refusal:
            result.outcome = "refused"
            is_excused = any(stage.damage or stage.changes for stage in scenario.stages)
            if not is_excused:
                result.findings.append(f"a resume is refused: {refusal}")
        elif not result.findings:
            result.outcome = "complete"
            _judge_leftovers(run_dir, home, result)

    def _compare_with_twin(self, scenario: Scenario, home: Path, result: Result) -> None:
        twin = home.with_name(home.name + "-twin")
        shutil.rmtree(twin, ignore_errors=True)
        try:
            ended = child.run(self.page, ["train", "quickstart", *BASE, *scenario.overrides], twin, Stage(), self.plant)
            ours, theirs = (newest_weights(folder / "runs" / "r") for folder in (home, twin))
            if ended.code != 0:
                result.findings.append(f"the undisturbed twin ended with {ended.code}")
            elif ours != theirs:
                result.findings.append(f"other weights than the undisturbed twin: {ours} and {theirs}")
        finally:
            shutil.rmtree(twin, ignore_errors=True)


def judge_end(ended: Ended, stage: Stage) -> list[str]:
    """What is wrong with exit code, output and the processes that are left."""
    wrong = []
    allowed = {0, 2}
    if stage.fault in SIGNALS and ended.was_hit:
        allowed |= {_EXIT_CODES[stage.fault], -SIGNALS[stage.fault]}  # the latter before handlers are set
    if stage.fault in (Fault.KILL_AT_CALL, Fault.KILL_AT_WRITE, Fault.KILL) and ended.was_hit:
        allowed.add(-9)
    if ended.code is None:
        wrong.append("a process does not end")
    elif ended.code not in allowed:
        wrong.append(f"exit code {ended.code} with {stage.fault}: {ended.err[-300:]!r}")
    if "Traceback" in ended.out + ended.err:
        wrong.append(f"a traceback with {stage.fault}: {ended.err[-600:]!r}")
    if ended.code == 2 and len(ended.error_lines) != 1:
        wrong.append(f"{len(ended.error_lines)} error lines with {stage.fault}: {ended.err[-400:]!r}")
    if ended.processes:
        wrong.append(f"processes are left after {stage.fault}: {ended.processes[:3]}")
    return wrong


def _ledger_findings(run_dir: Path, *, is_complete: bool, home: Path) -> list[str]:
    path = run_dir / "ledger.sqlite"
    if not path.is_file():
        return []  # a killed process may not have created it; what was deleted on purpose is the damage itself
    copy = home / "audited"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for file in run_dir.glob("ledger.sqlite*"):
        shutil.copy(file, copy)
    config = tomllib.loads((run_dir / "config.toml").read_text()) if (run_dir / "config.toml").is_file() else {}
    samples = config.get("run", {}).get("samples") if is_complete else None
    has_tables = _has_tables(copy / "ledger.sqlite")
    wrong = audit(copy / "ledger.sqlite", is_complete=is_complete, num_samples=samples) if has_tables else []
    shutil.rmtree(copy)
    return [f"the ledger: {text}" for text in wrong]


def _has_tables(path: Path) -> bool:
    """Whether the process got as far as to create the tables; a damaged file is for the next resume to find."""
    import sqlite3

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
    if parts:
        result.findings.append(f"temporary files are left in the run directory: {[p.name for p in parts[:3]]}")
    was_killed = any(s.fault in (Fault.KILL, Fault.KILL_AT_CALL, Fault.KILL_AT_WRITE) for s in result.scenario.stages)
    if not was_killed and (left := [p.name for p in (home / "tmp").iterdir()]):
        result.findings.append(f"temporary files are left: {left[:3]}")


def _unused(names: set[str]) -> list[str]:
    """The files of shared memory that no process has open: other programs may have made new ones meanwhile."""
    if not names:
        return []
    used = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            used |= {
                line.split(None, 5)[5].strip()
                for line in (entry / "maps").read_text().splitlines()
                if str(SHARED_MEMORY) in line
            }
            used |= {os.readlink(link) for link in (entry / "fd").iterdir()}
        except (OSError, IndexError):
            continue
    return sorted(name for name in names if name.startswith(_MADE_BY_RUNS) and str(SHARED_MEMORY / name) not in used)


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
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
        return 1
    if how == "empty":
        data = bytearray()
    elif how == "cut":
        del data[rng.randrange(len(data) + 1) :]
    elif data:
        for _ in range(3):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))
    return 1


def newest_weights(run_dir: Path) -> str:
    """Version and digest of the newest checkpoint's tensors."""
    folders = sorted((run_dir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    if not folders:
        return "no checkpoint"
    digest = hashlib.sha256()
    for path in sorted(folders[-1].glob("*.safetensors")):
        digest.update(path.read_bytes())
    return f"{folders[-1].name}:{digest.hexdigest()[:12]}"
