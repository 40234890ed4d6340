"""Kill a training process again and again with SIGKILL and resume it: no sample may be lost or trained twice.

    python -m benchmarks.ledger.crash_storm [--kills 200] [--strategy sorted-replay] [--json]

The tiny model trains with a checkpoint after every update in a forked child process, which notes its current phase in
shared memory. The parent waits for the phase that was hit least so far, waits a random time, and kills the child. After
every kill, and at the end of every run, the ledger is verified from its file alone. Every run must end with each of its
samples trained once. Runs with some of the same seeds that are never killed give the accuracy to compare with.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.ledger.forked import fork
from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.learner.torch import TorchLearner
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify
from sortedrl.reward.scorer import SampleScorer
from sortedrl.run.builders.parts import build_parts
from sortedrl.run.evaluate import Evaluator
from sortedrl.run.save_and_resume import RunSaver
from sortedrl.telemetry.summary import Summary
from sortedrl.trainer import SortedTrainer

PHASES = ("start", "between", "rollout", "scoring", "update", "publish", "checkpoint", "evaluate")
# The phase of a child while one of these methods runs; else the phase is "between", or "start" at first.
WATCHED: tuple[tuple[type, str, str], ...] = (
    (LocalEngine, "poll", "rollout"),
    (SampleScorer, "poll", "scoring"),
    (TorchLearner, "start", "update"),
    (LocalEngine, "publish", "publish"),
    (RunSaver, "run", "checkpoint"),
    (Evaluator, "run", "evaluate"),
)
# The longest delay between the start of a phase and the kill; short phases leave no time for a delay.
LONGEST_S = {"start": 0.8, "rollout": 0.02, "update": 0.05, "checkpoint": 0.05, "evaluate": 0.3}
LONGEST_S |= dict.fromkeys(("between", "scoring", "publish"), 0.0)
MIN_HITS = 20  # kills in each phase, when there are 200 in all
PATIENCE_S = 120.0  # a child that does not reach the phase within this time hangs


class PhaseNote:
    """The phase of the child, in one byte of memory that parent and child share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    @property
    def phase(self) -> str:
        return PHASES[self._memory[0]]

    @phase.setter
    def phase(self, name: str) -> None:
        self._memory[0] = PHASES.index(name)

    def watch(self, owner: type, method: str, phase: str) -> None:
        """Wrap a method so that it notes its phase while it runs."""
        inner: Callable[..., Any] = getattr(owner, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            is_instant = phase == "scoring" and args[1] == 0  # a poll that does not wait
            if self.phase == "evaluate" or is_instant:  # an evaluation also samples and scores
                return inner(*args, **kwargs)
            self.phase = phase
            try:
                return inner(*args, **kwargs)
            finally:
                self.phase = "between"

        setattr(owner, method, noted)


def make_config(folder: Path, seed: int, strategy: str, updates: int) -> SortedConfig:
    return SortedConfig(
        run={"name": f"storm-{seed}", "dir": str(folder), "seed": seed, "samples": 16 * updates, "report": False},
        engine={"slots": 16, "max_new_tokens": 96},
        schedule={"strategy": strategy, "update_batch": 16},
        learner={"algorithm": "reinforce++", "group_size": 1, "lr": 5e-4},
        eval={"prompts": 16, "every_samples": 16 * max(updates // 4, 2)},
        checkpoint={"every_updates": 1},
    )


def warm_up(config: SortedConfig) -> None:
    """Import everything that a run needs, so that forked children start quickly."""
    build_parts(config).close()


def start_child(config: SortedConfig, note: PhaseNote, *, resume: bool) -> int:
    """Train in a forked process; returns its process id."""

    def work() -> None:
        for owner, method, phase in WATCHED:
            note.watch(owner, method, phase)
        SortedTrainer(args=config, quiet=True).train(resume=resume)

    note.phase = "start"
    return fork(work)


def has_ended(child: int) -> bool:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended and os.waitstatus_to_exitcode(status):
        raise SystemExit(f"a training process failed with exit code {os.waitstatus_to_exitcode(status)}")
    return bool(ended)


def kill_in(child: int, note: PhaseNote, wanted: str, rng: random.Random) -> str | None:
    """Kill the child in or near the wanted phase; returns the phase that was hit, or None if the child ended first."""
    skipped = rng.randint(0, 2)  # if every kill hit the first phase of its kind, the run would never progress
    delay = rng.uniform(0, LONGEST_S[wanted])
    deadline, was_there = time.monotonic() + PATIENCE_S, False
    while True:
        is_there = note.phase == wanted
        if is_there and not was_there:
            if skipped == 0 or wanted == "start":
                break
            skipped -= 1
        was_there = is_there
        if LONGEST_S[wanted]:
            time.sleep(1e-3)  # leave the CPU to the child; not for short phases, which would be missed
        if not is_there and has_ended(child):
            return None
        if time.monotonic() > deadline:
            raise SystemExit(f"the training process did not reach the phase {wanted} within {PATIENCE_S:g} s")
    if delay:
        time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return note.phase if os.WIFSIGNALED(status) else None


def check_ledger(config: SortedConfig) -> bool:
    """Whether the ledger file passes verification; a process that was killed early may not have created it."""
    path = config.run_dir / "ledger.sqlite"
    if not path.is_file():
        return True
    verdict = verify(Ledger(path))
    for violation in verdict.violations:
        print(violation, file=sys.stderr)
    return not verdict.violations


def storm(folder: Path, kills: int, strategy: str, updates: int, seed: int, quiet: bool) -> dict[str, Any]:
    rng, note, hits = random.Random(seed), PhaseNote(), Counter[str]()
    totals, accuracies, unclean, run_seed, resume = Counter[str](), {}, 0, seed, False
    config = make_config(folder, run_seed, strategy, updates)
    warm_up(config)
    for _ in track(range(kills), "kills", console=Console(stderr=True), disable=quiet):
        while True:  # until a kill hits
            wanted = min((phase for phase in PHASES), key=lambda phase: (hits[phase], rng.random()))
            child = start_child(config, note, resume=resume and (config.run_dir / "config.toml").is_file())
            resume = True
            hit = kill_in(child, note, wanted, rng)
            if hit is not None:
                break
            totals.update(ledger_of(config, accuracies))
            unclean += not check_ledger(config)
            run_seed, resume = run_seed + 1, False
            config = make_config(folder, run_seed, strategy, updates)
        hits[hit] += 1
        unclean += not check_ledger(config)
    if resume:
        child = start_child(config, note, resume=(config.run_dir / "config.toml").is_file())
        while not has_ended(child):
            time.sleep(0.01)
        totals.update(ledger_of(config, accuracies))
        unclean += not check_ledger(config)
    return {
        "kills": kills,
        "strategy": strategy,
        "by_phase": {phase: hits[phase] for phase in PHASES},
        "ledger": {**totals, "unclean": unclean},
        "runs": len(accuracies),
        "accuracy": accuracies,
    }


def ledger_of(config: SortedConfig, accuracies: dict[int, float]) -> dict[str, int]:
    """Sample counts of a run that has ended; adds its accuracy to `accuracies`."""
    summary = Summary.read(config.run_dir / "summary.json")
    assert summary.status == "complete", f"{config.run_dir} ended as {summary.status}"
    assert summary.ledger is not None, f"{config.run_dir} has no ledger"
    assert summary.accuracy_after is not None, f"{config.run_dir} was not evaluated"
    accuracies[config.run.seed] = summary.accuracy_after
    return summary.ledger.model_dump()


def undisturbed(folder: Path, seeds: list[int], strategy: str, updates: int) -> dict[int, float]:
    """Accuracies of the same runs without kills."""
    accuracies: dict[int, float] = {}
    for seed in seeds:
        config = make_config(folder, seed, strategy, updates)
        child = start_child(config, PhaseNote(), resume=False)
        while not has_ended(child):
            time.sleep(0.01)
        ledger_of(config, accuracies)
    return accuracies


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--strategy", default="sorted-replay")
    parser.add_argument("--updates", type=int, default=24, help="updates per run")
    parser.add_argument("--calm", type=int, default=4, help="number of runs without kills, for comparison")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-save", action="store_true", help="do not write the result file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        killed, calm = Path(folder, "killed"), Path(folder, "calm")
        record = storm(killed, options.kills, options.strategy, options.updates, options.seed, options.json)
        seeds = list(record["accuracy"])[: options.calm]
        record["accuracy_undisturbed"] = undisturbed(calm, seeds, options.strategy, options.updates)
    ledger = record["ledger"]
    is_whole = ledger["trained"] == ledger["loaded"] and not any(
        ledger[bad] for bad in ("lost", "duplicated", "unclean")
    )
    record["within_goal"] = is_whole and min(record["by_phase"].values()) >= MIN_HITS * options.kills // 200
    if not options.no_save:
        save("crash_storm", record)
    if options.json:
        print(json.dumps(record))
    else:
        show(record)
    sys.exit(not record["within_goal"])


def show(record: dict[str, Any]) -> None:
    table = Table("phase", "kills", box=None)
    for phase, hits in record["by_phase"].items():
        table.add_row(phase, str(hits))
    console = Console()
    console.print(table)
    console.print(record["ledger"])
    console.print("accuracy", record["accuracy"], "undisturbed", record["accuracy_undisturbed"])


if __name__ == "__main__":
    main()
