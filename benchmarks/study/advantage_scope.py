"""How `advantage_scope` and `overlong` affect learning from sorted batches, on the quickstart task with REINFORCE++.

    python -m benchmarks.study.advantage_scope RUNS_DIR [--only scopes|tail] [--samples 256]    # makes missing runs
    python -m benchmarks.study.draw_scopes docs/images/advantage_scope.svg                      # draws the result

There are two studies, paired by seed (same prompts, same noise):
- scopes: the configuration quickstart with three scopes and seeds 0 to 4. It records accuracy and length over trained
  samples, and on held-out puzzles before and after.
- tail: strict cohorts (lookahead 0) and a budget of 128 tokens, which truncates many answers, with three scopes x three
  settings of `overlong` and seeds 0 to 2. It records what the last batch of a cohort contains, and its advantages.
A difference is the mean over seeds of arm minus base on the same seed, with Student's 95 % interval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.record import QUICKSTART, make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.learner.advantage import AdvantageEstimator, is_truncated
from sortedrl.learner.algorithms import ALGORITHMS, objective_of
from sortedrl.learner.loss_inputs import shaped_rewards
from sortedrl.records import FinishReason, Prompt, Sample, Segment
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import BatchTaken, CohortLoaded, Evaluated, UpdateDone
from sortedrl.telemetry.summary import Summary
from sortedrl.trainer import SortedTrainer

SCOPES = ("batch", "cohort", "running")
OVERLONG = ("keep", "mask", "shape")
WINDOW = 32  # trained samples per point of a curve
STUDENT_95 = {2: 4.303, 3: 3.182, 4: 2.776}  # two-sided 5 % quantile of Student's t, by degrees of freedom
TAIL = (
    "schedule.lookahead=0",
    "engine.max_new_tokens=128",
    "eval.every_samples=0",
    "eval.prompts=128",
)
QUIET = ("run.report=false", "checkpoint.save=false")


@dataclass(slots=True, kw_only=True, frozen=True)
class Arm:
    study: str
    scope: str
    overlong: str
    seed: int
    samples: int

    @property
    def name(self) -> str:
        return f"{self.study}-{self.scope}-{self.overlong}-{self.samples}-{self.seed}"

    def config(self, folder: Path) -> SortedConfig:
        own = TAIL if self.study == "tail" else ("eval.every_samples=0", "eval.prompts=128")
        keys = (
            f"run.dir={folder}",
            f"run.name={self.name}",
            f"run.seed={self.seed}",
            f"run.samples={self.samples}",
            f"learner.advantage_scope={self.scope}",
            f"learner.overlong={self.overlong}",
        )
        return SortedConfig.load(QUICKSTART, ["schedule.strategy=sorted-replay", *keys, *own, *QUIET])


def arms(study: str, samples: int) -> list[Arm]:
    """All arms, seed by seed, so that finished runs can always be compared in pairs."""
    if study == "scopes":
        return [
            Arm(study=study, scope=scope, overlong="keep", seed=seed, samples=samples)
            for seed in range(5)
            for scope in SCOPES
        ]
    return [
        Arm(study=study, scope=scope, overlong=overlong, seed=seed, samples=samples)
        for seed in range(3)
        for scope in SCOPES
        for overlong in OVERLONG
    ]


def is_made(arm: Arm, folder: Path) -> bool:
    path = folder / arm.name / "summary.json"
    return path.exists() and Summary.read(path).status == "complete"


def make(arm: Arm, folder: Path) -> None:
    if not is_made(arm, folder):
        trainer = SortedTrainer(args=arm.config(folder), quiet=True)
        trainer.train()
        if trainer.stop_requested:
            raise SystemExit(130)


def read(arm: Arm, folder: Path) -> dict[str, Any]:
    """The curves of a run, and means over updates: those that end a cohort, and all others."""
    config = arm.config(folder)
    estimator = AdvantageEstimator(ALGORITHMS[config.learner.algorithm].advantage, arm.scope)
    cohort_of: dict[int, int] = {}
    left: dict[int, int] = {}
    evaluations, lengths, rewards = [], [], []
    last: list[dict[str, float]] = []
    others: list[dict[str, float]] = []
    batch: BatchTaken | None = None
    for event in read_events(folder / arm.name / "events.jsonl"):
        match event:
            case CohortLoaded():
                cohort_of |= dict.fromkeys(event.samples, event.cohort)
                left[event.cohort] = len(event.samples)
            case BatchTaken():
                batch = event
                lengths += event.lengths
                rewards += event.rewards
            case UpdateDone():
                assert batch is not None, "an update follows a batch"
                for sample in batch.samples:
                    left[cohort_of[sample]] -= 1
                ends = any(left[cohort_of[sample]] == 0 for sample in batch.samples)
                samples = trained(batch, cohort_of, config.engine.max_new_tokens)
                advantages, _ = estimator.estimate(samples, shaped_rewards(samples, objective_of(config.learner)))
                (last if ends else others).append(figures(batch, event, samples, advantages))
            case Evaluated():
                evaluations.append([event.samples_trained, event.sampled_accuracy, event.mean_length])
            case _:
                pass
    return {
        "study": arm.study,
        "scope": arm.scope,
        "overlong": arm.overlong,
        "seed": arm.seed,
        "evaluations": evaluations,
        "lengths": windows(lengths),
        "rewards": windows(rewards),
        "last_batches": averages(last),
        "other_batches": averages(others),
    }


def trained(batch: BatchTaken, cohort_of: dict[int, int], budget: int) -> list[Sample]:
    """The samples of a batch, with all fields that advantages depend on."""
    return [
        Sample(
            id=number,
            prompt=Prompt(id=str(number), tokens=(), content=""),
            index=0,
            epoch=0,
            cohort=cohort_of[number],
            seed=0,
            budget=budget,
            segments=[Segment(version=0, tokens=[0] * length, logprobs=[0.0] * length)],
            finish_reason=FinishReason.LENGTH if length == budget else FinishReason.STOP,
            reward=reward,
        )
        for number, length, reward in zip(batch.samples, batch.lengths, batch.rewards, strict=True)
    ]


def figures(
    batch: BatchTaken, done: UpdateDone, samples: Sequence[Sample], advantages: Sequence[float]
) -> dict[str, float]:
    """Figures of one update; advantages are recomputed, since the events contain only their mean."""
    assert math.isclose(mean(advantages), done.metrics["advantage_mean"], abs_tol=1e-6), (
        "advantages differ from the run"
    )
    by_end: dict[bool, list[float]] = {True: [], False: []}
    for sample, advantage in zip(samples, advantages, strict=True):
        by_end[is_truncated(sample)].append(advantage)
    return {
        "samples": float(len(samples)),
        "length": mean(batch.lengths),
        "reward": mean(batch.rewards),
        "truncated": len(by_end[True]) / len(samples),
        "flat": float(len(set(batch.rewards)) == 1),
        "advantage": mean(advantages),
        "advantage, truncated": mean(by_end[True]) if by_end[True] else math.nan,
        "advantage, finished": mean(by_end[False]) if by_end[False] else math.nan,
        "stepped": float(done.optimizer_steps > 0),
        "gradient": done.metrics["grad_norm"],
    }


def averages(rows: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Means by name over the rows that have a number."""
    found: dict[str, float | None] = {"count": float(len(rows))}
    for name in rows[0] if rows else ():
        known = [row[name] for row in rows if not math.isnan(row[name])]
        found[name] = mean(known) if known else None
    return found


def windows(values: Sequence[float]) -> list[float]:
    return [round(mean(values[at : at + WINDOW]), 4) for at in range(0, len(values) - WINDOW // 2, WINDOW)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its 95 % interval."""
    return mean(values), STUDENT_95[len(values) - 1] * stdev(values) / math.sqrt(len(values))


def outcome(run: dict[str, Any]) -> dict[str, float]:
    """Accuracy at the end and over all evaluations, and the answer length at the end."""
    after = run["evaluations"][1:]
    return {
        "accuracy, end": after[-1][1],
        "accuracy, all evaluations": mean(point[1] for point in after),
        "held-out length, end": after[-1][2],
    }


def differences(runs: Sequence[dict[str, Any]], base: dict[str, str]) -> list[dict[str, Any]]:
    """A row per arm, with differences from the base on the same seeds."""
    by_arm: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for run in runs:
        by_arm.setdefault((run["scope"], run["overlong"]), {})[run["seed"]] = outcome(run)
    reference = by_arm[base["scope"], base["overlong"]]
    rows = []
    for (scope, overlong), found in by_arm.items():
        seeds = sorted(found.keys() & reference.keys())
        row: dict[str, Any] = {"scope": scope, "overlong": overlong, "seeds": len(seeds)}
        for name in outcome(runs[0]):
            row[name] = mean(found[seed][name] for seed in seeds)
            if found is not reference and len(seeds) > 2:
                row[f"{name}, difference"] = interval([found[seed][name] - reference[seed][name] for seed in seeds])
        rows.append(row)
    return rows


def tail_rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, separately for the last and the other batches of a cohort."""
    rows = []
    for scope in SCOPES:
        for overlong in OVERLONG:
            mine = [run for run in runs if (run["scope"], run["overlong"]) == (scope, overlong)]
            for kind in ("last_batches", "other_batches"):
                if mine:
                    found = averages([{k: math.nan if v is None else v for k, v in run[kind].items()} for run in mine])
                    rows.append({"scope": scope, "overlong": overlong, "batches": kind, **found})
    return rows


def show(rows: Iterable[dict[str, Any]]) -> None:
    """Print the rows as a Markdown table."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    for row in rows:
        print("| " + " | ".join(cell(row.get(name, "")) for name in names) + " |")


def cell(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:+.3f} ± {value[1]:.3f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--only", choices=("scopes", "tail"))
    parser.add_argument("--samples", type=int, default=256, help="trained samples per run")
    parser.add_argument("--read", action="store_true", help="make no runs; tabulate and save the existing ones")
    options = parser.parse_args()
    studies = [options.only] if options.only else ["tail", "scopes"]
    chosen = [arm for study in studies for arm in arms(study, options.samples)]
    if options.read:
        chosen = [arm for arm in chosen if is_made(arm, options.runs)]
    else:
        for arm in track(chosen, "runs", console=Console(stderr=True)):
            make(arm, options.runs)
    runs = [read(arm, options.runs) for arm in chosen]
    base = {"scope": "batch", "overlong": "keep"}
    scopes, tail = ([run for run in runs if run["study"] == study] for study in ("scopes", "tail"))
    record = {
        "samples": options.samples,
        "scopes": differences(scopes, base) if scopes else [],
        "tail": differences(tail, base) if tail else [],
        "tail_batches": tail_rows(tail),
        "runs": runs,
    }
    save("advantage_scope", record)
    if options.json:
        print(json.dumps(record))
        return
    for name in ("scopes", "tail", "tail_batches"):
        print(f"\n{name}\n")
        show(record[name])


if __name__ == "__main__":
    main()
