"""Intervals of a mean over few seeds, and how often they contain the true mean.

`study_figures.py`, `claims.py`, `freshness_figures.py`, `selection_bias.py` and `real_tail.py` call `student`.
`claims.py` prints the coverage. Nothing here reads files; every function is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from statistics import mean, stdev

import numpy as np

LEVEL = 0.95
Interval = tuple[float, float, float]
"""Mean, and the ends of its 95 % interval."""
Ends = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]
"""Both ends of the interval of each row of a matrix."""


def student(values: Sequence[float]) -> Interval:
    """The mean, and the ends of its 95 % interval by Student's t; infinite for a single value."""
    if len(values) < 2:
        return (mean(values), -math.inf, math.inf)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return (mean(values), mean(values) - half, mean(values) + half)


@cache
def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The value that |t| exceeds with probability 1 - level, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _inside(t: float, freedom: int) -> float:
    """The probability that |t| is below `t`: the closed form for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    term = total = 0.0
    if freedom % 2 == 0:
        term = total = 1.0
        for k in range(1, freedom // 2):
            term *= math.cos(angle) ** 2 * (2 * k - 1) / (2 * k)
            total += term
        return math.sin(angle) * total
    for k in range(freedom // 2):
        term = math.cos(angle) if k == 0 else term * math.cos(angle) ** 2 * 2 * k / (2 * k + 1)
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total)


# ---- coverage --------------------------------------------------------------------------------------------------------


def student_ends(values: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    num = values.shape[1]
    half = t_quantile(num - 1) * values.std(axis=1, ddof=1) / math.sqrt(num)
    return values.mean(axis=1) - half, values.mean(axis=1) + half


def percentile_ends(values: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The percentile bootstrap with 1,000 draws."""
    num = values.shape[1]
    draws = rng.integers(num, size=(1000, num))
    low, high = np.quantile(values[:, draws].mean(axis=2), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
    return low, high


def coverage(ends: Ends, population: np.ndarray, seeds: int, *, rounds: int = 4000) -> float:
    """The share of intervals, each of `seeds` values drawn from the population, that contain its mean."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(rounds // 200):
        low, high = ends(population[rng.integers(len(population), size=(200, seeds))], rng)
        hits += int(((low <= population.mean()) & (population.mean() <= high)).sum())
    return hits / (rounds // 200 * 200)


def residuals(samples: Iterable[Sequence[float]]) -> list[float]:
    """All values, each sample's centred and scaled by its standard deviation; a sample without spread has none."""
    found: list[float] = []
    for values in samples:
        spread = stdev(values) if len(values) > 1 else 0.0
        if spread > 0:
            found += [(value - mean(values)) / spread for value in values]
    return found


def populations(residuals: Sequence[float]) -> dict[str, np.ndarray]:
    """What seeds may be drawn from: the measured residuals, a normal distribution, and a skewed one."""
    rng = np.random.default_rng(1)
    return {
        "measured residuals": np.asarray(residuals),
        "normal": rng.normal(size=100_000),
        "skewed (exponential)": rng.exponential(size=100_000),
    }


def power(difference: float, spread: float, seeds: int, *, rounds: int = 20_000) -> float:
    """How often the 95 % interval of a paired difference with this mean and spread leaves out 0."""
    rng = np.random.default_rng(2)
    low, high = student_ends(rng.normal(difference, spread, size=(rounds, seeds)), rng)
    return float(((low > 0) | (high < 0)).mean())


def chance_of_equal(margin: float, spread: float, seeds: int, *, rounds: int = 20_000) -> float:
    """How often the 95 % interval of a paired difference whose mean is 0 lies within the margin."""
    rng = np.random.default_rng(3)
    low, high = student_ends(rng.normal(0.0, spread, size=(rounds, seeds)), rng)
    return float(((-margin <= low) & (high <= margin)).mean())
