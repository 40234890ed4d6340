"""How length, reward, staleness and accepted prefix are distributed in each cohort, and lengths trained against loaded.

`sortedrl trace` folds the events of a run into `Cohorts`. What it keeps true: a cohort that is trained whole is reduced
to its quantiles, so that memory follows what is under way, not the length of the run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from sortedrl.telemetry.events import AttemptEnded, AttemptVerified, BatchTaken, CohortLoaded, Event

_MAX_ROWS = 16


@dataclass(slots=True, kw_only=True, frozen=True)
class Spread:
    """A distribution; `p10` to `p90` are percentiles."""

    count: int
    mean: float
    least: float
    p10: float
    p50: float
    p90: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not len(values):
            return None
        least, p10, p50, p90, most = np.quantile(np.asarray(values), [0.0, 0.1, 0.5, 0.9, 1.0]).tolist()
        mean = float(np.mean(np.asarray(values)))
        return cls(count=len(values), mean=mean, least=least, p10=p10, p50=p50, p90=p90, most=most)


@dataclass(slots=True, kw_only=True, frozen=True)
class CohortFigures:
    """`longest` is over all samples that have run, trained or not: the longest answer seen of each, in any attempt.

    Where long answers are started again and come out shorter, `length` falls behind it.
    """

    cohort: int
    loaded_update: int  # updates done when it was loaded
    loaded: int
    trained: int
    length: Spread | None  # of trained answers, as are reward and staleness
    longest: Spread | None
    reward: Spread | None
    staleness: Spread | None
    accepted: Spread | None  # share of its cached tokens that a replay kept


@dataclass(slots=True, kw_only=True)
class _Tally:
    loaded_update: int
    samples: list[int]
    lengths: array[int] = field(default_factory=lambda: array("q"))
    rewards: array[float] = field(default_factory=lambda: array("d"))
    staleness: array[int] = field(default_factory=lambda: array("q"))
    accepted: array[float] = field(default_factory=lambda: array("d"))


class Cohorts:
    """Fold events in one by one, then ask for `figures`."""

    def __init__(self) -> None:
        self._open: dict[int, _Tally] = {}
        self._whole: dict[int, CohortFigures] = {}
        self._cohort_of: dict[int, int] = {}
        self._longest: dict[int, int] = {}

    def emit(self, event: Event) -> None:
        match event:
            case AttemptEnded():
                if event.num_tokens > self._longest.get(event.sample, -1):
                    self._longest[event.sample] = event.num_tokens
            case AttemptVerified():
                tally = self._open.get(self._cohort_of.get(event.sample, -1))
                if tally is not None and event.cached:
                    tally.accepted.append(event.accepted / event.cached)
            case BatchTaken():
                self._train(event)
            case CohortLoaded():
                self._open[event.cohort] = _Tally(loaded_update=event.update, samples=event.samples)
                self._cohort_of.update(dict.fromkeys(event.samples, event.cohort))
            case _:
                pass

    def figures(self) -> list[CohortFigures]:
        """Those of every cohort, whole or not."""
        found = {**self._whole, **{cohort: self._reduce(cohort, tally) for cohort, tally in self._open.items()}}
        return [found[cohort] for cohort in sorted(found)]

    def _train(self, event: BatchTaken) -> None:
        for position, sample in enumerate(event.samples):
            cohort = self._cohort_of.get(sample, -1)
            tally = self._open.get(cohort)
            if tally is None:
                continue
            tally.lengths.append(event.lengths[position])
            tally.rewards.append(event.rewards[position])
            tally.staleness.append(event.staleness[position])
            if len(tally.lengths) == len(tally.samples):
                self._whole[cohort] = self._reduce(cohort, tally)
                del self._open[cohort]
                for other in tally.samples:
                    del self._cohort_of[other]
                    self._longest.pop(other, None)

    def _reduce(self, cohort: int, tally: _Tally) -> CohortFigures:
        return CohortFigures(
            cohort=cohort,
            loaded_update=tally.loaded_update,
            loaded=len(tally.samples),
            trained=len(tally.lengths),
            length=Spread.of(tally.lengths),
            longest=Spread.of([self._longest[sample] for sample in tally.samples if sample in self._longest]),
            reward=Spread.of(tally.rewards),
            staleness=Spread.of(tally.staleness),
            accepted=Spread.of(tally.accepted),
        )


def as_records(figures: Sequence[CohortFigures]) -> list[dict[str, Any]]:
    return [asdict(cohort) for cohort in figures]


def cohort_table(figures: Sequence[CohortFigures]) -> Table:
    """A row per cohort; of many, some evenly over the run."""
    step = max(len(figures) / _MAX_ROWS, 1.0)
    shown = [figures[int(row * step)] for row in range(min(len(figures), _MAX_ROWS))]
    caption = "length, longest seen and staleness: 10th percentile, median, 90th; reward and accepted prefix: means"
    if len(shown) < len(figures):
        caption = f"{len(shown)} of {len(figures)} cohorts; {caption}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption, caption_justify="left")
    for header in ("cohort", "loaded", "trained", "length", "longest seen", "staleness", "reward", "accepted"):
        table.add_column(header, justify="right", no_wrap=True)
    for cohort in shown:
        table.add_row(
            f"{cohort.cohort}",
            f"{cohort.loaded:,}",
            f"{cohort.trained:,}",
            *(_range(spread) for spread in (cohort.length, cohort.longest, cohort.staleness)),
            "–" if cohort.reward is None else f"{cohort.reward.mean:.3f}",
            "–" if cohort.accepted is None else f"{cohort.accepted.mean:.1%}",
        )
    return table


def _range(spread: Spread | None) -> str:
    return "–" if spread is None else f"{spread.p10:,.0f} · {spread.p50:,.0f} · {spread.p90:,.0f}"
