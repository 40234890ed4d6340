"""Does sorted scheduling learn better, or only faster? All strategies on the quickstart task, with equal data.

    python -m benchmarks.study.study RUNS_DIR            # all: a rate tuned for each arm, five seeds, two algorithms
    python -m benchmarks.study.study RUNS_DIR --quick    # four arms, three seeds, 512 samples: `make study-quick`
    python -m benchmarks.study.study RUNS_DIR --read     # makes no runs: tables and result file from existing runs
    python -m benchmarks.study.claims                    # makes no runs: the tables from the result file in the tree

Arms differ only in their schedule. All use the configuration quickstart with as many slots as samples per update. They
train half as long, since most is learned by then, and are evaluated eight times. With the same seed all arms get the
same prompts and the same noise, so differences are taken seed by seed. Every arm chooses among the same learning rates
with the same number of tuning runs, on a separate seed. Seconds are CPU seconds of a run's process, which has one
thread, so other work on the machine does not count; evaluations do not count either.

Existing runs are not made again: a study that was stopped continues where it was.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.record import QUICKSTART, make_parser, save
from benchmarks.study.study_figures import BASES, judge, outcome, show_claims, show_table, tabulate
from sortedrl.config import SortedConfig
from sortedrl.telemetry.events import Evaluated, Event
from sortedrl.trainer import SortedTrainer

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "reinforce++": ("learner.algorithm=reinforce++", "learner.group_size=1"),
    "grpo": ("learner.algorithm=grpo", "learner.group_size=4"),
}


def _sorted(strategy: str, lookahead: int, *more: str) -> tuple[str, ...]:
    return (f"schedule.strategy={strategy}", f"schedule.lookahead={lookahead}", *more)


ARMS: Mapping[str, tuple[str, ...]] = {
    "sync": ("schedule.strategy=sync", "schedule.lookahead=0"),
    "sync-large": _sorted("sync-large", 0),
    "sync-large, sorted": _sorted("sync-large", 0, "schedule.order=shortest-first"),
    "sync-large, longest first": _sorted("sync-large", 0, "schedule.order=longest-first"),
    "sorted-on-policy, lookahead 0": _sorted("sorted-on-policy", 0),
    "sorted-on-policy, lookahead 2": _sorted("sorted-on-policy", 2),
    "sorted-partial, lookahead 0": _sorted("sorted-partial", 0),
    "sorted-partial, lookahead 2": _sorted("sorted-partial", 2),
    "sorted-replay, lookahead 0": _sorted("sorted-replay", 0),
    "sorted-replay, lookahead 2": _sorted("sorted-replay", 2),
    "april": ("schedule.strategy=april", "schedule.lookahead=none"),
    "sorted-replay, cohort scope": _sorted("sorted-replay", 0, "learner.advantage_scope=cohort"),
    "sorted-replay, shuffled": _sorted("sorted-replay", 2, "schedule.order=shuffled"),
}
# A question from the first results: did staleness make `sorted-partial` fail on one seed? These arms change only the
# bound, at the rate that was tuned for the arm without a bound.
FOLLOWED = "sorted-partial, lookahead 2"
FOLLOW_UPS: Mapping[str, tuple[str, ...]] = {
    f"sorted-partial, staleness at most {bound}": (
        *ARMS[FOLLOWED],
        f"schedule.max_staleness={bound}",
        "schedule.on_bound=replay",
    )
    for bound in (1, 3)
}
ONLY_WHITENED = ("sorted-replay, cohort scope",)  # GRPO compares siblings, so the scope changes nothing
QUICK_ARMS = ("sync", "sync-large", "sorted-partial, lookahead 2", "sorted-replay, lookahead 2")
RATES = (7.5e-5, 1.5e-4, 3e-4)
TUNING_SEED = 100
SEEDS = range(5)


@dataclass(slots=True, kw_only=True, frozen=True)
class Run:
    """One training run of the study."""

    algorithm: str
    arm: str
    rate: float
    seed: int
    samples: int
    eval_every: int
    eval_prompts: int

    @property
    def name(self) -> str:
        words = f"{self.algorithm} {self.arm} {self.rate:g} {self.samples} {self.seed}"
        return words.replace(",", "").replace(" ", "_")

    def config(self, folder: Path) -> SortedConfig:
        return SortedConfig.load(
            QUICKSTART,
            [
                f"run.dir={folder}",
                f"run.name={self.name}",
                f"run.seed={self.seed}",
                f"run.samples={self.samples}",
                "run.report=false",
                "checkpoint.save=false",
                f"eval.prompts={self.eval_prompts}",
                f"eval.every_samples={self.eval_every}",
                f"learner.lr={self.rate}",
                *ALGORITHMS[self.algorithm],
                *{**ARMS, **FOLLOW_UPS}[self.arm],
            ],
        )


class Curve:
    """An event sink that records each evaluation with the CPU seconds of training so far."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []
        self._start = self._last = time.process_time()
        self._evaluation_s = 0.0

    def emit(self, event: Event) -> None:
        now = time.process_time()
        if isinstance(event, Evaluated):
            self._evaluation_s += now - self._last
            self.points.append(
                {
                    "samples": event.samples_trained,
                    "seconds": now - self._start - self._evaluation_s,
                    "accuracy": event.sampled_accuracy,
                    "length": event.mean_length,
                }
            )
        elif not self.points:
            self._start = now  # no training happens before the first evaluation
        self._last = now

    def close(self) -> None:
        pass


def train(run: Run, folder: Path) -> None:
    """Train one run in this process; its curve is written last and marks the run as complete."""
    curve = Curve()
    trainer = SortedTrainer(args=run.config(folder), sinks=[curve], quiet=True)
    trainer.train()
    if trainer.stop_requested:
        raise SystemExit(130)
    path = folder / run.name / "curve.json"
    path.with_suffix(".part").write_text(json.dumps(curve.points), encoding="utf-8")
    path.with_suffix(".part").replace(path)


def is_made(run: Run, folder: Path) -> bool:
    return (folder / run.name / "curve.json").exists()


def make(runs: Sequence[Run], folder: Path, *, jobs: int, title: str) -> None:
    """Make the missing runs, in `jobs` processes at a time."""
    missing = [run for run in runs if not is_made(run, folder)]
    processes = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    with Progress(console=Console(stderr=True)) as progress, processes as pool:
        bar = progress.add_task(title, total=len(runs), completed=len(runs) - len(missing))
        for done in as_completed([pool.submit(train, run, folder) for run in missing]):
            if (error := done.exception()) is not None:
                pool.shutdown(cancel_futures=True)
                raise error
            progress.advance(bar)


def tuning_runs(algorithms: Sequence[str]) -> list[Run]:
    return [
        Run(algorithm=algorithm, arm=arm, rate=rate, seed=TUNING_SEED, samples=1024, eval_every=256, eval_prompts=96)
        for algorithm in algorithms
        for arm in arms_of(algorithm)
        for rate in RATES
    ]


def arms_of(algorithm: str) -> list[str]:
    return [arm for arm in ARMS if algorithm == "reinforce++" or arm not in ONLY_WHITENED]


def chosen_rates(runs: Sequence[Run], folder: Path) -> dict[tuple[str, str], float]:
    """For each arm the rate with the best mean accuracy over the evaluations of its tuning run."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run in runs:
        if is_made(run, folder):
            score = mean(point["accuracy"] for point in read_curve(run, folder)[1:])
            found.setdefault((run.algorithm, run.arm), []).append((score, run.rate))
    rates = {key: max(tried)[1] for key, tried in found.items()}
    if ("reinforce++", FOLLOWED) in rates:
        rates |= {("reinforce++", arm): rates["reinforce++", FOLLOWED] for arm in FOLLOW_UPS}
    return rates


def study_runs(rates: Mapping[tuple[str, str], float], samples: int) -> list[Run]:
    """All runs, seed by seed, so that finished runs can always be compared in pairs."""
    return [
        Run(algorithm=algorithm, arm=arm, rate=rate, seed=seed, samples=samples, eval_every=128, eval_prompts=96)
        for seed in SEEDS
        for (algorithm, arm), rate in rates.items()
    ]


def quick_runs() -> list[Run]:
    base = Run(algorithm="reinforce++", arm="sync", rate=1.5e-4, seed=0, samples=512, eval_every=128, eval_prompts=96)
    return [replace(base, arm=arm, seed=seed) for seed in range(3) for arm in QUICK_ARMS]


def read_curve(run: Run, folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / run.name / "curve.json").read_text(encoding="utf-8"))


def records(runs: Sequence[Run], folder: Path) -> Iterator[dict[str, Any]]:
    for run in runs:
        if is_made(run, folder):
            yield {**asdict(run), "curve": read_curve(run, folder), **outcome(folder / run.name)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--quick", action="store_true", help="four arms, three seeds, 512 samples")
    parser.add_argument("--read", action="store_true", help="make no runs; use the existing ones")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--samples", type=int, default=1024, help="trained samples per run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    given = parser.parse_args()
    algorithms = given.algorithms.split(",")
    if given.quick:
        chosen, rates = quick_runs(), {}
    else:
        tuning = tuning_runs(algorithms)
        if not given.read:
            make(tuning, given.runs, jobs=given.jobs, title="tuning")
        rates = chosen_rates(tuning, given.runs)
        chosen = study_runs(rates, given.samples)
    if not given.read:
        make(chosen, given.runs, jobs=given.jobs, title="runs")
    found = list(records(chosen, given.runs))
    record = {
        "rates": {f"{algorithm}, {arm}": rate for (algorithm, arm), rate in rates.items()},
        "runs": found,
    }
    save("study_quick" if given.quick else "study", record)
    if given.json:
        print(json.dumps(record))
        return
    for algorithm in dict.fromkeys(run["algorithm"] for run in found):
        for base in BASES:
            show_table(algorithm, tabulate(found, algorithm, base), base)
            show_claims(judge(found, algorithm, base))


if __name__ == "__main__":
    main()
