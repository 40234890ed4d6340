"""Freshness or curriculum? The runs of the registered study (docs/research/registration.md).

    python -m benchmarks.study.freshness                   # all stages, block by block; goes on where it was cut off
    python -m benchmarks.study.freshness --stages a --runs 1     # one more run of stage a
    python -m benchmarks.study.freshness --list            # what is there, and what is missing

`python -m benchmarks.study.freshness_figures` analyses the results. Every run appends one line to
`benchmarks/results/freshness/STAGE.jsonl`: its settings, its evaluations, counts from its events, and the commit and
processor that made it. A run that is in the file is not made again. Runs come seed by seed, so that finished ones can
be compared in pairs. Seconds are not recorded: other programs use the machine too.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.record import QUICKSTART, RESULTS, make_parser, stamp
from sortedrl.config import SortedConfig
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import BatchTaken, Evaluated, UpdateDone
from sortedrl.telemetry.summary import Summary
from sortedrl.trainer import SortedTrainer

FOLDER = RESULTS / "freshness"
SEEDS = range(10)
SAMPLES, UPDATE_BATCH, EVAL_EVERY, EVAL_PROMPTS = 1024, 16, 128, 256
RATE, SECOND_RATE = 3e-4, 6e-4
COHORT = 16  # update batches

_REPLAY = ("schedule.interrupted=replay", "schedule.max_staleness=0", "schedule.on_bound=replay")
_NO_CLIP = ("learner.clip_low=0.999", "learner.clip_high=1e30")
_GRPO = ("learner.algorithm=grpo", "learner.group_size=4")


def sync() -> tuple[str, ...]:
    return ("schedule.strategy=sync", "schedule.lookahead=0")


def large(cohort: int, order: str = "shuffled") -> tuple[str, ...]:
    """Generates the whole cohort, then trains it in `order` with the staleness that this gives."""
    return (
        "schedule.strategy=sync-large",
        "schedule.lookahead=0",
        f"schedule.cohort_batches={cohort}",
        f"schedule.order={order}",
    )


def replay(cohort: int, order: str) -> tuple[str, ...]:
    """As `large`, but after each update the answers that are left are verified and replayed: staleness 0."""
    return (*large(cohort, order), *_REPLAY)


def preset(strategy: str, cohort: int, lookahead: int, *more: str) -> tuple[str, ...]:
    return (
        f"schedule.strategy={strategy}",
        f"schedule.cohort_batches={cohort}",
        f"schedule.lookahead={lookahead}",
        *more,
    )


FIRST: Mapping[str, tuple[str, ...]] = {
    "sync": sync(),
    "sync-large": large(COHORT),
    "replay, shortest first": replay(COHORT, "shortest-first"),
    "replay, shuffled": replay(COHORT, "shuffled"),
    "sorted-replay": preset("sorted-replay", COHORT, 0),
}
OTHERS: Mapping[str, tuple[str, ...]] = {
    **{f"sync-large, cohort {n}": large(n) for n in (4, 8)},
    **{f"replay, shortest first, cohort {n}": replay(n, "shortest-first") for n in (4, 8)},
    **{f"replay, shuffled, cohort {n}": replay(n, "shuffled") for n in (4, 8)},
    "sync-large, shortest first": large(COHORT, "shortest-first"),
    "sync-large, longest first": large(COHORT, "longest-first"),
    "replay, longest first": replay(COHORT, "longest-first"),
    "sorted-replay, cohort 4": preset("sorted-replay", 4, 0),
    "sorted-partial": preset("sorted-partial", COHORT, 0),
    "sorted-partial, staleness at most 1": preset(
        "sorted-partial", COHORT, 0, "schedule.max_staleness=1", "schedule.on_bound=replay"
    ),
    "async-on-policy": preset("async-on-policy", COHORT, 2),
    "async-on-policy, cohort 4": preset("async-on-policy", 4, 2),
}


@dataclass(slots=True, kw_only=True, frozen=True)
class Cell:
    """One arm at one rate: what a run is besides its seed."""

    stage: str
    arm: str
    rate: float = RATE
    is_clipped: bool = True
    algorithm: str = "reinforce++"

    @property
    def name(self) -> str:
        clip = "" if self.is_clipped else ", without clipping"
        rate = "" if self.rate == RATE else f", rate {self.rate:g}"
        return f"{self.arm}{rate}{clip}"

    def overrides(self) -> list[str]:
        chosen = {**FIRST, **OTHERS}[self.arm]
        algorithm = _GRPO if self.algorithm == "grpo" else ()
        return [f"learner.lr={self.rate}", *chosen, *([] if self.is_clipped else _NO_CLIP), *algorithm]


def cells(stage: str) -> list[Cell]:
    """The registered cells of a stage. `sync` does not depend on the cohort, so later stages use stage a's."""
    match stage:
        case "a":
            return [Cell(stage=stage, arm=arm) for arm in FIRST]
        case "b":
            return [Cell(stage=stage, arm=arm) for arm in OTHERS]
        case "c":
            settings = ((SECOND_RATE, True), (RATE, False), (SECOND_RATE, False))
            return [Cell(stage=stage, arm=arm, rate=rate, is_clipped=clip) for rate, clip in settings for arm in FIRST]
        case "d":
            return [Cell(stage=stage, arm=arm, algorithm="grpo") for arm in FIRST]
        case _:
            raise ValueError(f"no stage {stage!r}: choose among a, b, c, d")


Run = tuple[Cell, int]
"""A cell and a seed."""


def runs(stage: str) -> list[Run]:
    return [(cell, seed) for seed in SEEDS for cell in cells(stage)]


FIRST_SEEDS, LAST_SEEDS = SEEDS[:5], SEEDS[5:]
# The registration's amendments: blocks in the order in which they decide hypotheses, with the seeds of each.
BLOCKS: Sequence[tuple[str, Sequence[int], Sequence[str]]] = (
    ("a", SEEDS, tuple(FIRST)),
    (
        "b",
        FIRST_SEEDS,
        (
            "sync-large, cohort 4",
            "replay, shortest first, cohort 4",
            "replay, shuffled, cohort 4",
            "sorted-replay, cohort 4",
            "async-on-policy, cohort 4",
        ),
    ),
    ("b", FIRST_SEEDS, ("sync-large, shortest first", "replay, longest first")),
    ("c", FIRST_SEEDS, tuple(f"{arm}, rate 0.0006" for arm in FIRST if arm != "replay, shortest first")),
    ("b", FIRST_SEEDS, ("sync-large, cohort 8", "replay, shuffled, cohort 8", "replay, shortest first, cohort 8")),
    ("d", FIRST_SEEDS, tuple(FIRST)),
    (
        "b",
        FIRST_SEEDS,
        ("sync-large, longest first", "async-on-policy", "sorted-partial", "sorted-partial, staleness at most 1"),
    ),
    ("c", LAST_SEEDS, ("sync-large, rate 0.0006", "sorted-replay, rate 0.0006")),
    (
        "c",
        FIRST_SEEDS,
        ("replay, shortest first, rate 0.0006", *(cell.name for cell in cells("c") if not cell.is_clipped)),
    ),
)


def in_order() -> list[Run]:
    """All registered runs: block by block and seed by seed, then the seeds that the amendments cut."""
    chosen: list[Run] = []
    for stage, seeds, names in BLOCKS:
        by_name = {cell.name: cell for cell in cells(stage)}
        chosen += [(by_name[name], seed) for seed in seeds for name in names]
    planned = set(chosen)
    later = [run for stage in ("b", "c", "d") for run in runs(stage) if run not in planned]
    return [*chosen, *later]


def config_of(run: Run, folder: Path, samples: int = SAMPLES) -> SortedConfig:
    cell, seed = run
    fixed = [
        f"run.dir={folder}",
        f"run.seed={seed}",
        f"run.samples={samples}",
        "run.report=false",
        "run.on_no_signal=warn",  # fully sorted cohorts begin with batches of one reward
        "checkpoint.save=false",
        "task.name=benchmarks.study.puzzles:FreshPuzzles",
        f"schedule.update_batch={UPDATE_BATCH}",
        "schedule.exact_batch=true",
        f"eval.prompts={EVAL_PROMPTS}",
        f"eval.every_samples={EVAL_EVERY}",
        "eval.noise=fresh",
        "reward.timeout_s=1e6",  # a paused process must not lose a reward,
        "reward.grace_s=600",  # and batches must not depend on the load of the machine
    ]
    return SortedConfig.load(QUICKSTART, [*fixed, *cell.overrides()])


def train(run: Run, samples: int = SAMPLES) -> dict[str, Any]:
    """Train one run in this process and return its record."""
    (cell, seed), made_by = run, stamp()  # a commit may come in while the run trains
    with tempfile.TemporaryDirectory() as folder:
        trainer = SortedTrainer(args=config_of(run, Path(folder), samples), quiet=True)
        trainer.train()
        if trainer.stop_requested:
            raise SystemExit(130)
        return {**asdict(cell), "seed": seed, **outcome(trainer.run_dir), "stamp": made_by}


def outcome(run_dir: Path) -> dict[str, Any]:
    """Evaluations and counts of a finished run."""
    summary = Summary.read(run_dir / "summary.json")
    curve: list[dict[str, float]] = []
    batches: list[dict[str, float | None]] = []
    for event in read_events(run_dir / "events.jsonl"):
        match event:
            case Evaluated():
                point = {"samples": event.samples_trained, "accuracy": event.sampled_accuracy}
                curve.append({**point, "greedy": event.greedy_accuracy, "length": round(event.mean_length, 2)})
            case BatchTaken():
                tokens = sum(event.lengths)
                batches.append({"size": len(event.lengths), "length": tokens / len(event.lengths)})
                batches[-1] |= {"staleness": sum(event.staleness_token_sum) / max(tokens, 1)}
                batches[-1] |= {"reward": mean(event.rewards)}
            case UpdateDone():
                metrics = event.metrics
                batches[-1]["share"] = metrics.get("effective_sample_share")  # None: no token was learned
                batches[-1] |= {"clipped": metrics["clip_fraction"], "norm": metrics["grad_norm"]}
            case _:
                pass
    ledger = summary.ledger
    return {
        "curve": curve,
        "updates": {name: [rounded(batch[name]) for batch in batches] for name in batches[0]},
        "tokens": summary.trained_tokens,
        "decode_steps": summary.decode_steps,
        "idle_slot_steps": summary.idle_slot_steps,
        "discarded_tokens": summary.discarded_tokens,
        "recomputed_tokens": summary.recomputed_tokens,
        "divergence_rate": summary.divergence_rate,
        "staleness_max": summary.staleness_max,
        "lost": None if ledger is None else ledger.lost,
        "duplicated": None if ledger is None else ledger.duplicated,
    }


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# ---- the result files ------------------------------------------------------------------------------------------------


def path_of(stage: str, folder: Path = FOLDER) -> Path:
    return folder / f"{stage}.jsonl"


def read(stage: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """All runs of a stage that are in its file. A line that was cut off does not count."""
    path = path_of(stage, folder)
    return list(_whole_lines(path)) if path.exists() else []


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def missing(stage: str, folder: Path = FOLDER) -> list[Run]:
    fields = tuple(Cell.__dataclass_fields__)
    found = {(*(record[field] for field in fields), record["seed"]) for record in read(stage, folder)}
    return [run for run in runs(stage) if (*asdict(run[0]).values(), run[1]) not in found]


def append(record: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Add a run's line; a line that was cut off is ended first."""
    path = path_of(record["stage"], folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if not text or text.endswith("\n") else "\n") + json.dumps(record) + "\n")


def make(todo: Sequence[Run], *, jobs: int) -> None:
    """Make runs, each in a new process, `jobs` at a time. If one fails, those under way are still kept."""
    context = multiprocessing.get_context("spawn")
    processes = ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1)
    with Progress(console=Console(stderr=True)) as progress, processes as pool:
        bar = progress.add_task("runs", total=len(todo))
        left = {pool.submit(train, run) for run in todo}
        for done in as_completed(tuple(left)):
            if done.exception() is not None:
                break
            left.remove(done)
            append(done.result())
            progress.advance(bar)
        pool.shutdown(cancel_futures=True)  # waits for runs that are under way
        ended = [run for run in left if not run.cancelled()]
        for run in ended:
            if run.exception() is None:
                append(run.result())
        for error in filter(None, (run.exception() for run in ended)):
            raise error


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--stages", default="a,b,c,d")
    parser.add_argument("--arm", action="append", help="only this arm; may be given several times")
    parser.add_argument("--seed", type=int, action="append", help="only this seed; may be given several times")
    parser.add_argument("--runs", type=int, help="at most this many runs; all that are missing without it")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core")
    parser.add_argument("--list", action="store_true", help="make no runs: count those that are there")
    given = parser.parse_args()
    stages = given.stages.split(",")
    absent = {run for stage in stages for run in missing(stage)}
    todo = [run for run in in_order() if run in absent and (given.arm is None or run[0].arm in given.arm)]
    todo = [run for run in todo if given.seed is None or run[1] in given.seed]
    if not given.list:
        make(todo[: given.runs], jobs=given.jobs)
    counts = {stage: {"made": len(read(stage)), "registered": len(runs(stage))} for stage in stages}
    if given.json:
        print(json.dumps(counts))
        return
    for stage, count in counts.items():
        print(f"stage {stage}: {count['made']} of {count['registered']} runs")


if __name__ == "__main__":
    main()
