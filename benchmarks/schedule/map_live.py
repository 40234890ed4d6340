"""The map "which strategy when" against live runs: how far its speeds are off, and what its advice loses.

    python -m benchmarks.schedule.map_live                      # measures the points that are missing, then the table
    python -m benchmarks.schedule.map_live --point torch-wide   # one point
    python -m benchmarks.schedule.map_live --start FOLDER       # also SmolLM2, from the cold start of `real_tail`
    python -m benchmarks.schedule.map_live --point smollm2 --finished "sync=DIR" --finished "sync-large=DIR"
    python -m benchmarks.schedule.map_live --read               # only the table, from results/map_live.json

A point is a live setting: an engine, a task, slots and an update batch. Every choice of the map that stops rollout
during updates trains there with the same prompts and noise. The run of `sync` also tells where the point lies on the
map: tail of the lengths, cost of a step (fitted), share of the learner. `--finished` takes runs that are there, such
as those of `real_tail`, if their slots and their schedule are the point's. Speeds are trained tokens per second of
rollout, updates and publications, as multiples of `sync`'s. "Simulated" is what `plan --from-run` does besides looking
at the map: the schedule of each run, with all its knobs, simulated with the lengths and fitted costs of the `sync` run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.record import QUICKSTART, RESULTS, load, make_parser, save, stamp
from benchmarks.study.real_tail import speeds, whole_s
from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError, SortedRLError
from sortedrl.simulate.explanation import StepCost
from sortedrl.simulate.fit import Fit, fit_runs
from sortedrl.simulate.run import simulate
from sortedrl.simulate.strategy_map import CHOICES, Condition, MapPoint, nearest, shipped_map, tail_of
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.summary import Summary
from sortedrl.trainer import SortedTrainer

NAME = "map_live"
SAMPLES = 256
QUESTIONS: Mapping[str, Mapping[str, Any]] = {"staleness 0": {"max_staleness": 0}, "any staleness": {}}
_TORCH = ("engine.kind=sortedrl.engine.local.engine:LocalEngine", "engine.options={path='lean'}")
_ON_POINT = (
    "sync",
    "sync-large",
    "sorted-replay",
    "sorted-replay, lookahead 2",
    "sorted-replay, lookahead 4",
    "sorted-partial, lookahead 2",
)


@dataclass(slots=True, kw_only=True, frozen=True)
class LivePoint:
    """One live setting: what is changed in a recipe, and which choices run there."""

    what: str
    slots: int
    update_batch: int
    overrides: Sequence[str] = ()
    config: str = QUICKSTART
    samples: int = SAMPLES
    choices: Sequence[str] = _ON_POINT


def _people(num: int) -> tuple[str, ...]:
    return ("task.name=benchmarks.study.puzzles:FreshPuzzles", f"task.options={{people={num}}}")


# The compiled engine pays for each sequence; the PyTorch path pays most of a step however many sequences run.
POINTS: Mapping[str, LivePoint] = {
    "compiled": LivePoint(what="compiled engine", slots=16, update_batch=16),
    "compiled-wide": LivePoint(what="compiled engine", slots=32, update_batch=8),
    "compiled-large-batch": LivePoint(what="compiled engine", slots=8, update_batch=32),
    "compiled-five": LivePoint(what="compiled engine, five people", slots=16, update_batch=16, overrides=_people(5)),
    "compiled-two": LivePoint(what="compiled engine, two people", slots=16, update_batch=16, overrides=_people(2)),
    "torch": LivePoint(what="PyTorch engine", slots=16, update_batch=16, overrides=_TORCH),
    "torch-wide": LivePoint(what="PyTorch engine", slots=32, update_batch=8, overrides=_TORCH),
    "torch-large-batch": LivePoint(what="PyTorch engine", slots=8, update_batch=32, overrides=_TORCH),
    "torch-five": LivePoint(
        what="PyTorch engine, five people", slots=16, update_batch=16, overrides=(*_TORCH, *_people(5))
    ),
    "torch-fast-rate": LivePoint(
        what="PyTorch engine, rate 1e-3", slots=16, update_batch=16, overrides=(*_TORCH, "learner.lr=1e-3")
    ),
    "smollm2": LivePoint(
        what="SmolLM2-135M",
        slots=8,
        update_batch=8,
        config="tail-smollm2",
        samples=48,
        choices=("sync", "sync-large", "sorted-replay, lookahead 2"),
    ),
    "smollm2-wide": LivePoint(
        what="SmolLM2-135M",
        slots=16,
        update_batch=8,
        config="tail-smollm2",
        samples=48,
        choices=("sync", "sorted-replay, lookahead 2"),
    ),
}


# ---- runs ------------------------------------------------------------------------------------------------------------


def config_of(point: LivePoint, choice: str, folder: Path, start: Path | None = None) -> SortedConfig:
    strategy, knobs = CHOICES[choice]
    given = [
        f"run.dir={folder}",
        f"run.name={choice.replace(', ', '-').replace(' ', '-')}",
        f"run.samples={point.samples}",
        "run.report=false",
        "run.on_no_signal=warn",
        "checkpoint.save=false",
        "eval.prompts=0",
        f"engine.slots={point.slots}",
        f"schedule.update_batch={point.update_batch}",
        f"schedule.strategy={strategy}",
        "schedule.cohort_batches=4" if strategy != "sync" else "schedule.lookahead=0",
        *(f"schedule.{name}={value}" for name, value in {"lookahead": 0, **knobs}.items()),
        *([] if start is None else [f"model.path={start}"]),
        *point.overrides,
    ]
    return SortedConfig.load(point.config, given)


def measure(point: LivePoint, start: Path | None = None) -> dict[str, Any]:
    """Run every choice of a point in this process; one short run before them warms everything up."""
    made_by = stamp()
    with TemporaryDirectory() as name:
        folder = Path(name)
        warm = config_of(point, "sync", folder / "warm", start)
        _train(warm.model_copy(update={"run": warm.run.model_copy(update={"samples": 2 * point.update_batch})}))
        runs = {choice: _train(config_of(point, choice, folder, start)) for choice in point.choices}
        return {"stamp": made_by, **figures(point, runs)}


def from_finished(point: LivePoint, runs: Mapping[str, Path]) -> dict[str, Any]:
    """A point from runs that are there; the stamp is of this reading, and may not be of the code that ran."""
    for choice, folder in runs.items():
        check_finished(point, choice, folder)
    samples = {choice: Summary.read(folder / "summary.json").samples for choice, folder in runs.items()}
    return {"stamp": stamp(), "finished_runs": samples, **figures(point, runs)}


def check_finished(point: LivePoint, choice: str, folder: Path) -> None:
    """Refuse a run whose task, slots or schedule are not those of the choice at this point."""
    found, wanted = (_facts(config) for config in (live_config(folder), config_of(point, choice, folder, folder)))
    for name, value in wanted.items():
        if found[name] != value:
            raise ConfigError(f"{folder} is no run of {choice!r} here: {name} is {found[name]}, the point has {value}")


def _facts(config: SortedConfig) -> dict[str, Any]:
    facts = {"task": config.task.name, "slots": config.slots, "strategy": config.strategy_name, **asdict(config.knobs)}
    return {name: "none" if value is None else str(value) for name, value in facts.items()}


def live_config(run_dir: Path) -> SortedConfig:
    """The configuration that a run has saved."""
    path = run_dir / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not the folder of a run: it has no {path.name}")
    return SortedConfig.load(path)


def _train(config: SortedConfig) -> Path:
    trainer = SortedTrainer(args=config, quiet=True)
    trainer.train()
    if trainer.stop_requested:
        raise SystemExit(130)
    return trainer.run_dir


# ---- figures ---------------------------------------------------------------------------------------------------------


def figures(point: LivePoint, runs: Mapping[str, Path]) -> dict[str, Any]:
    """Where the point lies on the map, and the speed of every choice: live, on the map and simulated."""
    summaries = {choice: Summary.read(folder / "summary.json") for choice, folder in runs.items()}
    fitted = fit_runs([runs["sync"]])
    rates = [summary.divergence_rate for summary in summaries.values() if summary.divergence_rate is not None]
    divergence = mean(rates) if rates else 0.0
    condition = condition_of(point, runs["sync"], summaries["sync"], fitted, divergence)
    whole = {choice: speeds([summary])["whole"] for choice, summary in summaries.items()}
    known = nearest(shipped_map(), condition)
    return {
        "condition": asdict(condition),
        "nearest": asdict(known.condition),
        "fit_r2": fitted.r2,
        "live": {choice: speed / whole["sync"] for choice, speed in whole.items()},
        "map": {choice: known.speedups[choice] for choice in runs},
        "simulated": simulated(runs, fitted, divergence),
        "seconds": {choice: whole_s(summary) for choice, summary in summaries.items()},
        "tokens": {choice: summary.trained_tokens for choice, summary in summaries.items()},
    }


def condition_of(point: LivePoint, sync_run: Path, sync: Summary, fitted: Fit, divergence: float) -> Condition:
    lengths = load_trace(sync_run).lengths
    context = fitted.cost.prompt_tokens + round(mean(lengths))
    return Condition(
        tail=tail_of(lengths),
        batch_per_slot=point.update_batch / point.slots,
        fixed_share=StepCost.of(fitted.cost, slots=point.slots, context=context).fixed_share,
        learner_share=(sync.update_s or 0.0) / whole_s(sync),
        diverged=divergence * mean(lengths),
    )


def simulated(runs: Mapping[str, Path], fitted: Fit, divergence: float) -> dict[str, float]:
    """The schedules that ran, with all their knobs, simulated with the lengths and fitted costs of the `sync` run."""
    trace, found = load_trace(runs["sync"]), {}
    for choice, run_dir in runs.items():
        config = live_config(run_dir)
        summary = simulate(
            trace,
            strategy=config.strategy_name,
            slots=config.slots,
            update_batch=config.knobs.update_batch,
            cost=fitted.cost,
            divergence=divergence,
            prompt_tokens=fitted.cost.prompt_tokens,
            exact=config.knobs,  # a recipe sets more than the choice does: `max_unverified`
        )
        found[choice] = summary.tokens_per_s or 0.0
    return {choice: speed / found["sync"] for choice, speed in found.items()}


# ---- the table -------------------------------------------------------------------------------------------------------


def advice_of(record: Mapping[str, Any], source: str, question: str) -> str:
    """The choice that a set of speeds advises, by the map's own rule, among the choices that ran."""
    point = MapPoint(condition=Condition(**record["condition"]), speedups=record[source])
    return point.advice(**QUESTIONS[question])


def digest(points: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of speeds over all points, and what advice from the map and from the simulation loses."""
    found: dict[str, Any] = {"points": len(points)}
    for source in ("map", "simulated"):
        errors = [r[source][c] / r["live"][c] - 1 for r in points.values() for c in r["live"] if c != "sync"]
        sizes = sorted(map(abs, errors))
        found[source] = {"median": median(sizes), "p90": sizes[int(0.9 * len(sizes))], "bias": mean(errors)}
        for question in QUESTIONS:
            lost = []
            for record in points.values():
                best = record["live"][advice_of(record, "live", question)]
                lost.append(max(0.0, 1 - record["live"][advice_of(record, source, question)] / best))
            right = sum(value <= 0.05 for value in lost)
            found[source][question] = {"within_5_percent": right, "mean_lost": mean(lost), "most_lost": max(lost)}
    return found


def markdown(points: Mapping[str, Mapping[str, Any]]) -> str:
    heads = "| point | slots, batch | tail | fixed share | learner | advised at staleness 0: live, map, simulated |"
    lines = [f"{heads} fastest at staleness 0 | fastest of all |", "|" + " --- |" * 8]
    for name, record in points.items():
        point, condition = POINTS[name], record["condition"]
        advised = advice_of(record, "map", "staleness 0")
        speeds = ", ".join(f"{record[source][advised]:.2f}" for source in ("live", "map", "simulated"))
        cells = [point.what, f"{point.slots}, {point.update_batch}", f"{condition['tail']:.2f}"]
        cells += [f"{condition['fixed_share']:.0%}", f"{condition['learner_share']:.0%}", f"{advised}: {speeds}"]
        for question in QUESTIONS:
            best = advice_of(record, "live", question)
            cells.append(f"{best} ({record['live'][best]:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    found = digest(points)
    for source in ("map", "simulated"):
        told = found[source]
        lines += ["", f"{source}: speeds off by {told['median']:.0%} (median), {told['p90']:.0%} (90th percentile), "]
        lines[-1] += f"{told['bias']:+.0%} on average"
        for question in QUESTIONS:
            at = told[question]
            lines.append(
                f"- {question}: advice within 5 % of the fastest at {at['within_5_percent']} of {len(points)} points, "
                f"{at['mean_lost']:.1%} lost on average, {at['most_lost']:.0%} at most"
            )
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--point", action="append", choices=list(POINTS), help="only this point, again if it is there")
    parser.add_argument(
        "--start", type=Path, help="the cold start of tail-smollm2; without it those points are left out"
    )
    parser.add_argument("--finished", action="append", metavar="CHOICE=DIR", help="a finished run of the one --point")
    parser.add_argument("--read", action="store_true", help="measure nothing")
    given = parser.parse_args()
    if not all("=" in text for text in given.finished or ()):
        parser.error("--finished needs CHOICE=DIR")
    finished = {choice: Path(folder) for choice, _, folder in (text.partition("=") for text in given.finished or ())}
    if finished and (len(given.point or ()) != 1 or "sync" not in finished or not finished.keys() <= CHOICES.keys()):
        parser.error(f"--finished needs one --point, a run of sync, and choices among: {'; '.join(CHOICES)}")
    points = dict(load(NAME)["points"]) if (RESULTS / f"{NAME}.json").exists() else {}
    for name, point in POINTS.items():
        is_wanted = name in given.point if given.point else name not in points
        if given.read or not is_wanted or (point.config != QUICKSTART and not (given.start or finished)):
            continue
        start = given.start if point.config != QUICKSTART else None
        try:
            points[name] = from_finished(point, finished) if finished else measure(point, start)
        except SortedRLError as error:
            parser.error(str(error))
        save(NAME, {"points": {key: points[key] for key in POINTS if key in points}})
    points = {key: points[key] for key in POINTS if key in points}
    if not points:
        parser.error(
            f"there are no results in {RESULTS / NAME}.json: leave out --read, and give SmolLM2's points --start"
        )
    print(json.dumps({"points": points, **digest(points)}) if given.json else markdown(points))


if __name__ == "__main__":
    main()
