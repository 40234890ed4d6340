"""How the samples of each cohort differ: length, reward, staleness, accepted prefix, and waiting time.

`sample_lives.py` collects a `CohortTally` for every cohort that is not trained completely yet. `sortedrl trace` shows
the figures of all cohorts; the report shows the waiting times.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich import box
from rich.table import Table

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
    """`longest` is over all samples that have run, trained or not: the longest answer of each in any attempt.

    If restarts replace long answers with shorter ones, `length` is below `longest`.
    """

    cohort: int
    loaded_update: int  # updates done when the cohort was loaded
    loaded: int
    trained: int
    length: Spread | None  # of trained answers, like reward and staleness
    longest: Spread | None
    reward: Spread | None
    staleness: Spread | None
    accepted: Spread | None  # share of its cached tokens that a replay kept


@dataclass(slots=True, kw_only=True)
class CohortWait:
    """How long the samples of one cohort, or of several neighbours, waited from load to training, in seconds."""

    cohort: int  # the first one
    num_samples: int
    num_interrupted: int  # samples that were interrupted at least once
    shortest: float
    median: float
    longest: float


def join_waits(first: CohortWait, second: CohortWait) -> CohortWait:
    count = first.num_samples + second.num_samples
    return CohortWait(
        cohort=first.cohort,
        num_samples=count,
        num_interrupted=first.num_interrupted + second.num_interrupted,
        shortest=min(first.shortest, second.shortest),
        median=(first.median * first.num_samples + second.median * second.num_samples) / count,
        longest=max(first.longest, second.longest),
    )


@dataclass(slots=True, kw_only=True)
class CohortTally:
    """What is known of a cohort so far. All lists but `accepted` have one entry per trained sample."""

    cohort: int
    loaded_update: int
    num_samples: int
    num_interrupted: int = 0
    waits: array[float] = field(default_factory=lambda: array("d"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    longest: array[int] = field(default_factory=lambda: array("q"))  # without samples whose attempts were not reported
    rewards: array[float] = field(default_factory=lambda: array("d"))
    staleness: array[int] = field(default_factory=lambda: array("q"))
    accepted: array[float] = field(default_factory=lambda: array("d"))

    @property
    def is_trained(self) -> bool:
        return len(self.waits) == self.num_samples

    def wait(self) -> CohortWait:
        shortest, median, longest = (float(value) for value in np.quantile(self.waits, [0.0, 0.5, 1.0]))
        return CohortWait(
            cohort=self.cohort,
            num_samples=self.num_samples,
            num_interrupted=self.num_interrupted,
            shortest=shortest,
            median=median,
            longest=longest,
        )

    def figures(self, untrained_longest: Iterable[int] = ()) -> CohortFigures:
        """Return the distributions; `untrained_longest` are the longest answers of the samples not trained yet."""
        return CohortFigures(
            cohort=self.cohort,
            loaded_update=self.loaded_update,
            loaded=self.num_samples,
            trained=len(self.lengths),
            length=Spread.of(self.lengths),
            longest=Spread.of([*self.longest, *untrained_longest]),
            reward=Spread.of(self.rewards),
            staleness=Spread.of(self.staleness),
            accepted=Spread.of(self.accepted),
        )


def cohort_table(figures: Sequence[CohortFigures]) -> Table:
    """Return a table with a row per cohort; if there are many, with rows spread evenly over the run."""
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
