"""`summary.json`: the results of a run, in one flat schema for training, comparison and simulation.

`summarize` creates it at the end of a run; the report and comparisons read it. A field that does not apply is null.
The tables at the end of this module show the main figures in a terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from rich import box
from rich.markup import escape
from rich.table import Table

from sortedrl.engine.base import EngineStats
from sortedrl.errors import RunDirError
from sortedrl.ledger.atomic_file import atomic_file
from sortedrl.lengths import Calibration
from sortedrl.telemetry.event_file import parse_json
from sortedrl.telemetry.events import Evaluated
from sortedrl.telemetry.metrics import LedgerCounts, RunMetrics, Timing
from sortedrl.telemetry.slot_time import MEANINGS, Cause

SCHEMA_VERSION = 1
UNEVEN_BY = 0.1  # `uneven_updates` tells of larger differences
_UNEVEN = "other update seconds for equal work than the first: they shared processors, or the machine was busy"


class Summary(BaseModel):
    """Reading ignores fields that this version does not know."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="null")

    schema_version: int = SCHEMA_VERSION
    strategy: str
    status: Literal["complete", "stopped"] | None = None
    seed: int | None = None
    slots: int | None = None
    update_batch: int | None = None
    cohort_batches: int | None = None
    lookahead: int | Literal["none"] | None = None  # "none": no bound
    updates: int = 0
    optimizer_steps: int | None = None
    samples: int = 0
    trained_tokens: int = 0
    generated_tokens: int | None = None
    discarded_tokens: int | None = None
    recomputed_tokens: int | None = None
    decode_steps: int | None = None
    rollout_s: float | None = None
    update_s: float | None = None
    publish_s: float | None = None
    save_s: float | None = None  # checkpoints between two updates
    ledger_s: float | None = None  # time spent writing the ledger, since the last resume
    wall_s: float | None = None
    tokens_per_s: float | None = None
    bubble_ratio: float | None = None
    idle_slot_steps: float | None = None  # share of decode steps x slots in which the slot did not run
    goodput: float | None = None
    slot_time: dict[str, float] | None = None  # shares by cause (telemetry/slot_time.py), which add up to 1
    learner_wait_s: float | None = None  # time without an update under way: the learner waited for rollout
    events_gap: str | None = None  # why some figures are incomplete: events that were lost before a resume
    emit_s: float | None = None  # time spent on emitting events, since the last resume
    staleness_mean: float | None = None
    staleness_token_mean: float | None = None
    staleness_max: int | None = None
    divergence_rate: float | None = None
    accepted_prefix: float | None = None
    replay_law: str | None = None  # what a replay keeps: exactly what the new weights draw, or tokens close to it
    mean_length: float | None = None
    mean_longest: float | None = None  # of the trained samples, the longest answer in any attempt
    length_in_order: float | None = None  # share of answer pairs whose predicted lengths are in the right order
    length_log_error: float | None = None  # mean |log(predicted / true)|
    tools: dict[str, float] | None = None  # turns with tools, calls, failed and repeated ones, seconds, tokens fed
    flat_groups: int | None = None  # sibling groups with equal rewards
    filtered_samples: int | None = None  # samples of such groups that were trained with weight 0
    reward_errors: dict[str, int] | None = None  # answers that could not be scored, by function and kind
    unscored_samples: int | None = None  # samples whose reward could not be computed, each counted once
    alarm: str | None = None  # why the run could not learn: `run.on_no_signal` stopped it, or warned
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    greedy_accuracy_before: float | None = None
    greedy_accuracy_after: float | None = None
    heldout_reward_before: float | None = None  # sampled; wrong answers may get partial reward
    heldout_reward_after: float | None = None
    accuracy_by_group_before: dict[str, float] | None = None
    accuracy_by_group_after: dict[str, float] | None = None
    ledger: LedgerCounts | None = None

    def write(self, path: str | Path) -> None:
        path = Path(path)
        try:
            with atomic_file(path) as file:
                file.write(self.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise RunDirError(f"cannot write {path}: {error.strerror}; create its folder or choose another") from error

    @classmethod
    def read(cls, path: str | Path) -> Summary:
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise RunDirError(f"cannot read {path}: {error}; pass the summary.json of a finished run") from error
        try:
            parse_json(text)
            summary = cls.model_validate_json(text)
        except ValueError as error:
            raise RunDirError(
                f"{path} is not the summary of a run: {_reason(error)}; delete it or restore it from a copy"
            ) from error
        if summary.schema_version > SCHEMA_VERSION:
            raise RunDirError(
                f"{path} has schema version {summary.schema_version}, but this package reads up to {SCHEMA_VERSION}: "
                "upgrade it"
            )
        return summary


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the whole file"
    return f"{where}: {first['msg']}"


def summarize(
    metrics: RunMetrics,
    *,
    stats: EngineStats | None,
    timing: Timing | None,
    held: Iterable[int] | None,
    cohort_batches: int | None = None,
    lookahead: int | Literal["none"] | None = None,
    calibration: Calibration | None = None,
    ledger_s: float | None = None,
    reward_errors: Mapping[str, int] | None = None,
    emit_s: float | None = None,
    alarm: str | None = None,
    replay_law: str | None = None,
) -> Summary:
    """Return the summary of a run from `metrics`, which has received all its events.

    `held` are the samples that the buffer still holds; without it the ledger counts are null. Without `stats` and
    `timing` the figures that they measure are null.
    """
    assert metrics.run is not None, "a run that never started has no summary"
    run = metrics.run
    before, after = metrics.first_evaluation, metrics.last_evaluation
    return Summary(
        strategy=run.strategy,
        status="complete" if metrics.end_reason == "complete" else "stopped",
        seed=run.seed,
        slots=run.slots,
        update_batch=run.update_batch,
        cohort_batches=cohort_batches,
        lookahead=lookahead,
        updates=metrics.updates,
        optimizer_steps=metrics.optimizer_steps,
        samples=metrics.samples,
        trained_tokens=metrics.trained_tokens,
        generated_tokens=metrics.generated_tokens,
        discarded_tokens=metrics.discarded_tokens,
        recomputed_tokens=stats.recomputed_tokens if stats else None,
        decode_steps=stats.decode_steps if stats else None,
        rollout_s=timing.rollout_s if timing else None,
        update_s=timing.update_s if timing else None,
        publish_s=timing.publish_s if timing else None,
        save_s=timing.save_s if timing else None,
        ledger_s=ledger_s,
        wall_s=timing.wall_s if timing else None,
        tokens_per_s=metrics.tokens_per_s(timing) if timing else None,
        bubble_ratio=metrics.bubble_ratio(stats, timing) if stats and timing else None,
        idle_slot_steps=metrics.idle_slot_steps(stats) if stats else None,
        goodput=metrics.goodput(timing) if timing else None,
        slot_time=metrics.slot_time(),
        tools=asdict(metrics.tools) if metrics.tools.turns else None,
        learner_wait_s=metrics.learner_wait_s,
        events_gap=metrics.gap or None,
        emit_s=emit_s,
        staleness_mean=metrics.staleness_mean,
        staleness_token_mean=metrics.staleness_token_mean,
        staleness_max=metrics.staleness_max,
        divergence_rate=metrics.divergence_rate,
        accepted_prefix=metrics.accepted_prefix,
        replay_law=replay_law,
        mean_length=metrics.mean_length,
        length_in_order=calibration.in_order if calibration else None,
        length_log_error=calibration.log_error if calibration else None,
        mean_longest=metrics.mean_longest,
        flat_groups=metrics.num_flat_groups,
        filtered_samples=metrics.num_filtered,
        reward_errors=None if reward_errors is None else dict(reward_errors),
        unscored_samples=metrics.num_unscored,
        alarm=alarm,
        accuracy_before=before.sampled_accuracy if before else None,
        accuracy_after=after.sampled_accuracy if after else None,
        greedy_accuracy_before=before.greedy_accuracy if before else None,
        greedy_accuracy_after=after.greedy_accuracy if after else None,
        heldout_reward_before=before.sampled_reward if before else None,
        heldout_reward_after=after.sampled_reward if after else None,
        accuracy_by_group_before=_by_group(before),
        accuracy_by_group_after=_by_group(after),
        ledger=None if held is None else metrics.ledger(held),
    )


def _by_group(evaluated: Evaluated | None) -> dict[str, float] | None:
    """Return the sampled accuracy by group, or None without groups."""
    if evaluated is None or not evaluated.by_group:
        return None
    return {
        group: figures["sampled_accuracy"]
        for group, figures in evaluated.by_group.items()
        if "sampled_accuracy" in figures
    }


# ---- for the terminal -----------------------------------------------------------------------------------------------


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def before_after(before: float | None, after: float | None) -> str:
    if before is None and after is None:
        return "–"
    first, last = ("–" if value is None else f"{value:.3f}" for value in (before, after))
    return f"{first} → {last}"


def _lost_and_duplicated(summary: Summary) -> str:
    return "–" if summary.ledger is None else f"{summary.ledger.lost} / {summary.ledger.duplicated}"


def summary_table(summaries: Sequence[Summary], *, width: int = 100) -> Table:
    """Return a table with a row per run and its main figures (the largest staleness).

    It fits 100 columns, and a single run fits 80.
    """
    is_stopped = any(summary.status == "stopped" for summary in summaries)
    caption = "* stopped before it was complete" if is_stopped else None
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        padding=(0, 1 if width >= 90 else 0),
        caption=caption,
        caption_justify="left",
    )
    table.add_column("strategy", no_wrap=True)
    has_seeds = len({summary.seed for summary in summaries}) > 1
    if has_seeds:
        table.add_column("seed", justify="right")
    for header in ("accuracy", "bubble", "goodput", "tokens/s", "staleness", "wall s", "lost/\ndup"):
        table.add_column(header, justify="right", vertical="bottom", no_wrap=True)
    for summary in summaries:
        seed = [number(summary.seed)] if has_seeds else []
        table.add_row(
            escape(summary.strategy) + ("*" if summary.status == "stopped" else ""),
            *seed,
            before_after(summary.accuracy_before, summary.accuracy_after),
            share(summary.bubble_ratio),
            share(summary.goodput),
            number(summary.tokens_per_s),
            number(summary.staleness_max),
            number(summary.wall_s, 1),
            _lost_and_duplicated(summary),
        )
    return table


def group_line(summary: Summary) -> str | None:
    """Return the sampled accuracy before and after for each group of held-out prompts, or None without groups."""
    before, after = summary.accuracy_by_group_before or {}, summary.accuracy_by_group_after or {}
    parts = [f"{group}: {before_after(before.get(group), after.get(group))}" for group in sorted({*before, *after})]
    return "accuracy by group  " + ",  ".join(parts) if parts else None


def comparison_table(summaries: Sequence[Summary]) -> Table:
    """Return a table with a row per strategy: means over its runs, range of accuracy, speed against the first row."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption="means over seeds")
    table.add_column("strategy", no_wrap=True)
    headers = ("accuracy after", "bubble", "idle", "goodput", "tokens/s", "speed", "staleness", "rollout s", "update s")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    uneven = uneven_updates(summaries)
    if uneven:
        table.caption = f"means over seeds; ! {_UNEVEN}"
    arms: dict[str, list[Summary]] = {}
    for summary in summaries:
        arms.setdefault(summary.strategy, []).append(summary)
    base = _mean([run.tokens_per_s for run in next(iter(arms.values()))])
    for strategy, runs in arms.items():
        after = [run.accuracy_after for run in runs if run.accuracy_after is not None]
        spread = f" ({min(after):.3f}-{max(after):.3f})" if after else ""
        speed = _mean([run.tokens_per_s for run in runs])
        table.add_row(
            escape(strategy),
            number(_mean([*after]), 3) + spread,
            share(_mean([run.bubble_ratio for run in runs])),
            share(_mean([run.idle_slot_steps for run in runs])),
            share(_mean([run.goodput for run in runs])),
            number(speed),
            "–" if speed is None or not base else f"{speed / base:.2f}x",
            number(_mean([run.staleness_token_mean for run in runs]), 2),
            number(_mean([run.rollout_s for run in runs]), 1),
            number(_mean([run.update_s for run in runs]), 1) + ("!" if strategy in uneven else ""),
        )
    return table


def uneven_updates(summaries: Sequence[Summary]) -> dict[str, float]:
    """Return strategies whose updates took other seconds than the first one's for equal work, as multiples.

    Work is equal if samples and updates are; seconds are taken per trained token. A tenth and less is not told.
    """
    arms: dict[str, list[Summary]] = {}
    for summary in summaries:
        arms.setdefault(summary.strategy, []).append(summary)
    (first, base), *others = arms.items()
    base_s = _update_s_per_token(base)
    found: dict[str, float] = {}
    for strategy, runs in others:
        own_s = _update_s_per_token(runs)
        is_equal = _work(runs) == _work(base) and strategy != first
        if is_equal and base_s and own_s and abs(own_s / base_s - 1) > UNEVEN_BY:
            found[strategy] = round(own_s / base_s, 3)
    return found


def _update_s_per_token(runs: Sequence[Summary]) -> float | None:
    tokens = sum(run.trained_tokens for run in runs)
    return sum(run.update_s or 0.0 for run in runs) / tokens if tokens else None


def _work(runs: Sequence[Summary]) -> Counter[tuple[int | None, int, int]]:
    """Return seed, samples and updates of each run."""
    return Counter((run.seed, run.samples, run.updates) for run in runs)


def slot_time_table(columns: Sequence[tuple[str, Mapping[str, float] | None]]) -> Table | None:
    """Return a table of slot time by cause, without causes that took no time; None if nothing is known."""
    known = [(name, shares) for name, shares in columns if shares]
    if not known:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("slot time", no_wrap=True)
    for name, _ in known:
        table.add_column(escape(name), justify="right")
    for cause in Cause:
        parts = [shares.get(cause.value, 0.0) for _, shares in known]
        if max(parts) >= 0.0005:
            table.add_row(MEANINGS[cause], *(share(part) for part in parts))
    return table


def mean_slot_time(summaries: Sequence[Summary]) -> list[tuple[str, dict[str, float]]]:
    """Return slot time by strategy, as means over its runs."""
    arms: dict[str, list[dict[str, float]]] = {}
    for summary in summaries:
        if summary.slot_time:
            arms.setdefault(summary.strategy, []).append(summary.slot_time)
    return [
        (name, {cause: sum(run.get(cause, 0.0) for run in runs) / len(runs) for cause in Cause})
        for name, runs in arms.items()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
