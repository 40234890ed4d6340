"""An independent recomputation of the tables of both studies: own code, raw results only.

    python -m benchmarks.study.recompute         # exits with 1 if a cell of a page differs

It shares no code with the analysis (`freshness_figures.py`, `claims.py`, `study_figures.py`, `intervals.py`). It reads
the raw lines of `benchmarks/results/freshness/*.jsonl` and the runs of `benchmarks/results/study.json`, follows the
definitions of docs/research/registration.md, and compares what it finds with every cell of the tables of arms, of
hypotheses and of claims in docs/research/freshness.md and docs/research/results.md.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TREE = Path(__file__).parents[2]
RAW = TREE / "benchmarks" / "results"
PAGES = TREE / "docs" / "research"

# Two-sided 95 % quantiles of Student's t with 1, 2, ... degrees of freedom, as printed tables give them.
T95 = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
MARGIN, BETTER, FEWER, HALF = 0.05, 0.039, 0.4074, 0.5  # of equality; the paper's claims
SEEDS_OF_STAGE = {"a": 10, "b": 5, "c": 5, "d": 5}  # that a verdict needs: registration and amendment

Run = dict[str, Any]
Cells = dict[str, dict[int, Run]]
"""Runs by the name that a table gives them, and by seed."""
Ends = tuple[float, float, float]
"""Mean and both ends of an interval."""
Compare = Callable[[Run, Run], float]
"""A figure of two runs of one seed."""


@dataclass(slots=True)
class Tally:
    """How many cells were compared, and those that differ."""

    compared: int = 0
    wrong: list[str] = field(default_factory=list)

    def compare(self, where: str, shown: str, expected: str) -> None:
        self.compared += 1
        if shown.strip() != expected:
            self.wrong.append(f"{where}: the page shows {shown.strip()!r}, recomputed {expected!r}")

    def require(self, what: str, wanted: Iterable[str], seen: Iterable[str]) -> None:
        """What must be on the page, once: rows or heads."""
        counts = Counter(seen)
        for name in wanted:
            self.compared += 1
            if counts[name] != 1:
                self.wrong.append(f"{what} {name!r} is on the page {counts[name]} times, expected once")


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def ends_of(values: Sequence[float]) -> Ends | None:
    data = np.array(values, dtype=float)
    if len(data) < 2:
        return None
    error = T95[len(data) - 2] * np.sqrt(np.sum((data - data.mean()) ** 2) / (len(data) - 1) / len(data))
    return float(data.mean()), float(data.mean() - error), float(data.mean() + error)


def accuracy(run: Run, *, at: Sequence[int] = (), last: int = 0) -> float:
    """The mean accuracy over the last evaluations, or over the first after each of these numbers of samples.

    Batches without `exact_batch` may be larger, so an evaluation "after 128 samples" may come after 130.
    """
    points = run["curve"][-last:] if last else [next(p for p in run["curve"] if p["samples"] >= num) for num in at]
    return float(np.mean([point["accuracy"] for point in points]))


def samples_until(run: Run, target: float) -> float:
    """Samples at which straight lines between evaluations cross the target for the first time, else all samples."""
    xs = np.array([point["samples"] for point in run["curve"]], dtype=float)
    ys = np.array([point["accuracy"] for point in run["curve"]])
    crossings = np.flatnonzero((ys[:-1] < target) & (ys[1:] >= target))
    if not len(crossings):
        return float(xs[-1])
    at = crossings[0]
    return float(np.interp(target, ys[at : at + 2], xs[at : at + 2]))


def shown(value: float, digits: int, *, sign: bool = False) -> str:
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return re.sub(r"^([+-]?)0\.", r"\1.", text)


def shown_interval(found: Ends | None, *, percent: bool = False) -> str:
    if found is None:
        return "–"
    mean, low, high = (f"{100 * value:+.0f}%" if percent else shown(value, 3, sign=True) for value in found)
    return f"{mean} [{low}, {high}]"


def is_above(found: Ends | None, wanted: float, *, complete: bool) -> str:
    if found is None or not complete or found[1] <= wanted <= found[2]:
        return "undecided"
    return "yes" if found[0] > wanted else "no"


def is_equal(found: Ends | None, *, complete: bool) -> str:
    if found is None or not complete:
        return "undecided"
    if max(abs(found[1]), abs(found[2])) <= MARGIN:
        return "yes"
    return "undecided" if found[1] <= 0 <= found[2] else "no"


# ---- the freshness study ---------------------------------------------------------------------------------------------


def raw_runs() -> Cells:
    """All lines of the raw files, under the names of the page's tables."""
    cells: Cells = {}
    for path in sorted((RAW / "freshness").glob("?.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                run = json.loads(line)
            except json.JSONDecodeError:
                continue  # the process died while it wrote this line
            name = run["arm"]
            name += ", rate 0.0006" if run["rate"] > 3e-4 else ""
            name += "" if run["is_clipped"] else ", without clipping"
            cells.setdefault(("grpo: " if run["algorithm"] == "grpo" else "") + name, {})[run["seed"]] = run
    return cells


def early(run: Run) -> float:
    return accuracy(run, at=(128, 256))


def final(run: Run) -> float:
    return accuracy(run, last=3)


def effective_share(run: Run) -> float:
    """Over the first 16 updates, without those that had no gradient: there was nothing to weigh."""
    shares = np.array(run["updates"]["share"][:16], dtype=float)  # null becomes NaN
    has_learned = np.array(run["updates"]["norm"][:16]) != 0
    return float(shares[has_learned & ~np.isnan(shares)].mean())


FIGURES: dict[str, Callable[[Run], float]] = {"early": early, "final": final}


def differences(cells: Cells, arm: str, base: str, compare: Compare) -> list[float]:
    """One value for each seed that both have."""
    mine, others = cells.get(arm, {}), cells.get(base, {})
    return [compare(mine[seed], others[seed]) for seed in range(10) if seed in mine and seed in others]


def is_complete(cells: Cells, *names: str) -> bool:
    """Whether all seeds that a verdict needs are there: as many as the smallest stage of these cells asks for."""
    if not all(cells.get(name) for name in names):
        return False
    stages = [next(iter(cells[name].values()))["stage"] for name in names]
    common = set.intersection(*(set(cells[name]) for name in names))
    return len(common) >= min(SEEDS_OF_STAGE[stage] for stage in stages)


def arm_row(cells: Cells, name: str, heads: Sequence[str]) -> list[str]:
    """The cells of an arm's row, for the table's own heads."""
    runs = list(cells[name].values())
    stale = [np.array([run["updates"][key] for key in ("staleness", "length", "size")]) for run in runs]
    mean_staleness = np.mean([(s * length * size).sum() / (length * size).sum() for s, length, size in stale])
    flat = np.mean([np.isin(run["updates"]["reward"], (0.0, 1.0)).mean() for run in runs])
    row = {
        "arm": name,
        "seeds": str(len(runs)),
        "effective share": shown(float(np.mean([effective_share(run) for run in runs])), 2),
        "staleness": shown(float(mean_staleness), 1),
        "one-reward updates": f"{100 * flat:.0f}%",
        "early": shown(float(np.mean([early(run) for run in runs])), 3),
        "final": shown(float(np.mean([final(run) for run in runs])), 3),
        "greedy": shown(float(np.mean([[p["greedy"] for p in run["curve"][-3:]] for run in runs])), 3),
    }
    for head in heads:
        when, _, base = head.partition(", to ")
        if base:
            base, figure = base.strip("`"), FIGURES[when]
            values = differences(cells, name, base, lambda a, b, figure=figure: figure(a) - figure(b))
            row[head] = "" if base == name else shown_interval(ends_of(values))
    return [row[head] for head in heads]


def hypothesis_row(cells: Cells, name: str, says: str) -> list[str]:
    """The cells of a hypothesis, from its words: "A = B, early", "A > B, final", or one of two that name no arms."""
    if "slope" in says:
        return [name, says, *_slope(cells)]
    if says == "the same at twice the rate":
        arm, relation, base, when = "sorted-replay, rate 0.0006", ">", "sync-large, rate 0.0006", "final"
    else:
        words = re.fullmatch(r"(.+) ([=>]) (.+), (early|final)", says)
        assert words, f"a hypothesis in other words: {says}"
        arm, relation, base, when = words[1], words[2], words[3], words[4]
    figure = FIGURES[when]
    values = differences(cells, arm, base, lambda a, b: figure(a) - figure(b))
    found, complete = ends_of(values), is_complete(cells, arm, base)
    answer = is_equal(found, complete=complete) if relation == "=" else is_above(found, 0.0, complete=complete)
    return [name, says, shown_interval(found), str(len(values)), answer]


def _slope(cells: Cells) -> list[str]:
    """Least squares by hand: covariance over variance, one slope per seed."""
    names = [f"{arm}{size}" for size in ("", ", cohort 4", ", cohort 8") for arm in ("sync-large", "replay, shuffled")]
    names.append("sync")
    seeds = [seed for seed in range(10) if all(seed in cells.get(name, {}) for name in names)]
    slopes = []
    for seed in seeds:
        x = np.array([effective_share(cells[name][seed]) for name in names])
        y = np.array([early(cells[name][seed]) for name in names])
        slopes.append(float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()))
    found = ends_of(slopes)
    answer = is_above(found, 0.0, complete=bool(seeds) and is_complete(cells, *names))
    return [shown_interval(found), str(len(seeds)), answer]


def claim_row(cells: Cells, base: str, says: str) -> list[str]:
    """The cells of one of the paper's claims about `sorted-replay`."""
    target = 0.9 * float(np.mean([final(run) for run in cells[base].values()]))
    if says.startswith("scores"):
        wanted, values = BETTER, differences(cells, "sorted-replay", base, lambda a, b: final(a) / final(b) - 1)
    elif "fewer samples" in says:
        says = f"40.74 % fewer samples to {shown(target, 2)}"
        wanted = FEWER
        values = differences(
            cells, "sorted-replay", base, lambda a, b: 1 - samples_until(a, target) / samples_until(b, target)
        )
    else:
        key, wanted = "idle_slot_steps", HALF
        values = differences(cells, "sorted-replay", base, lambda a, b: 1 - a[key] / b[key])
    found = ends_of(values)
    answer = is_above(found, wanted, complete=is_complete(cells, "sorted-replay", base))
    return [f"against `{base}`", says, shown_interval(found), str(len(values)), answer]


def check_freshness(page: str, cells: Cells, tally: Tally) -> None:
    seen: dict[str, list[str]] = {"arm": [], "hypothesis": [], "claim": []}
    for heads, rows in tables_of(page.partition("<!-- tables")[2].partition("<!-- end of tables")[0]):
        if heads[0] == "arm":
            tally.require(f"in the table of {rows[0][0]}, the head", arm_heads(rows[0][0]), heads)
        for row in rows:
            if heads[0] == "arm":
                expected = arm_row(cells, row[0], heads)
                seen["arm"].append(row[0])
            elif heads[0] == "hypothesis":
                expected = hypothesis_row(cells, row[0], row[1])
                seen["hypothesis"].append(f"{row[0]}: {row[1]}")
            elif heads[0] == "seeds":
                continue  # coverage by simulation
            else:
                expected = claim_row(cells, row[0].removeprefix("against ").strip("`"), row[1])
                seen["claim"].append(f"{row[0]}: {re.sub(' to [0-9.]+$', '', row[1])}")
            for head, on_page, right in zip(heads, row, expected, strict=True):
                tally.compare(f"{heads[0]} {row[0]}, {head}", on_page, right)
    tally.require("the row of the arm", cells, seen["arm"])
    tally.require("the row of the hypothesis", registered_hypotheses(), seen["hypothesis"])
    claims = ("scores better by 3.9 % at equal data", "40.74 % fewer samples", "idle slot-steps cut by half")
    bases = ("sync", "sync-large")
    tally.require("the row of the claim", (f"against `{base}`: {c}" for base in bases for c in claims), seen["claim"])


def arm_heads(first: str) -> list[str]:
    """The heads of a table of arms that has `first`, the base `sync` of its algorithm, rate and clipping, on top."""
    bases = [first, first.replace("sync", "sync-large")]
    heads = ["arm", "seeds", "effective share", "staleness", "one-reward updates", "early", "final", "greedy"]
    return [*heads, *(f"{when}, to `{base}`" for base in bases for when in ("early", "final"))]


def registered_hypotheses() -> list[str]:
    """The rows that the registration asks for, in the words of the page."""
    pairs = [("H2a", "replay, shortest first", "replay, shuffled")]
    pairs += [("H2b", f"replay, shortest first, cohort {n}", f"replay, shuffled, cohort {n}") for n in (4, 8)]
    pairs += [("H2b", "replay, longest first", "replay, shuffled")]
    pairs += [("H2c", f"sync-large, {order} first", "sync-large") for order in ("shortest", "longest")]
    pairs += [("H3a", "replay, shuffled", "sync"), ("H3b", "sorted-replay", "sync")]
    arms = [f"replay, shuffled, cohort {n}" for n in (4, 8)]
    arms += ["sorted-replay, cohort 4", "async-on-policy", "async-on-policy, cohort 4"]
    pairs += [("H3c", arm, "sync") for arm in arms]
    equal = [f"{name}: {arm} = {base}, {when}" for name, arm, base in pairs for when in ("early", "final")]
    slope = "H1b: early accuracy rises with the effective sample share (slope)"
    above = ["H1a: sync > sync-large, early", "H4a: sorted-replay > sync-large, final"]
    return [*above, "H4b: the same at twice the rate", slope, *equal]


# ---- the first study -------------------------------------------------------------------------------------------------


def first_study(algorithm: str) -> Cells:
    cells: Cells = {}
    for run in json.loads((RAW / "study.json").read_text(encoding="utf-8"))["runs"]:
        if run["algorithm"] == algorithm:
            cells.setdefault(run["arm"], {})[run["seed"]] = run
    return cells


def at_128(run: Run) -> float:
    return accuracy(run, at=(128,))


def first_row(cells: Cells, name: str) -> list[str]:
    """The cells of an arm's row in the first study's tables."""
    if name.startswith("all "):
        return _pooled_row(cells)
    runs = list(cells[name].values())
    compare: list[tuple[Compare, bool]] = [
        (lambda a, b: at_128(a) - at_128(b), False),
        (lambda a, b: final(a) - final(b), False),
        (lambda a, b: 1 - samples_until(a, 0.7) / samples_until(b, 0.7), True),
    ]
    row = [name, shown(float(np.mean([final(run) for run in runs])), 3)]
    for figure, percent in compare:
        for base in ("sync", "sync-large"):
            found = ends_of(differences(cells, name, base, figure))
            row.append("" if name == base else shown_interval(found, percent=percent))
    row.append(shown(float(np.mean([run["bubble"] for run in runs])), 2))
    worst = max(run["staleness_max"] for run in runs)
    return [*row, f"{shown(float(np.mean([run['staleness'] for run in runs])), 2)} ({worst})"]


def _sorted_arms(cells: Cells) -> list[str]:
    return [name for name in cells if name.startswith(("sorted", "april"))]


def _pooled_row(cells: Cells) -> list[str]:
    names = _sorted_arms(cells)
    row = [f"all {len(names)} sorted arms together", ""]
    for figure in (at_128, final):
        for base in ("sync", "sync-large"):
            values = [
                float(np.mean([figure(cells[name][seed]) for name in names])) - figure(run)
                for seed, run in cells[base].items()
            ]
            row.append(shown_interval(ends_of(values)))
    return [*row, "", "", "", ""]


def count_row(cells: Cells, claim: str, label: str, base: str) -> list[str]:
    """How many sorted arms a claim holds for: yes, no, undecided."""
    target = 0.9 * float(np.mean([final(run) for run in cells[base].values()]))
    wanted = BETTER if claim.startswith("scores") else FEWER if "fewer samples" in claim else HALF
    if wanted == FEWER:
        claim = f"40.7% fewer samples to the same score ({shown(target, 2)})"

    def compare(a: Run, b: Run) -> float:
        if wanted == BETTER:
            return final(a) / final(b) - 1
        return 1 - (
            samples_until(a, target) / samples_until(b, target) if wanted == FEWER else a["bubble"] / b["bubble"]
        )

    answers = [
        is_above(ends_of(differences(cells, name, base, compare)), wanted, complete=True)
        for name in _sorted_arms(cells)
    ]
    return [claim, label, *(str(answers.count(answer)) for answer in ("yes", "no", "undecided"))]


def check_first_study(page: str, tally: Tally) -> None:
    algorithms = {"REINFORCE++": first_study("reinforce++"), "GRPO": first_study("grpo")}
    section, seen = page.partition("## Does it hold?")[2].partition("\n## ")[0], list[str]()
    for heads, rows in tables_of(section):
        for row in rows:
            if heads[0] in algorithms:
                expected = first_row(algorithms[heads[0]], row[0])
            elif heads[0] == "claim":
                algorithm, _, base = row[1].partition(", ")
                expected = count_row(algorithms[algorithm], row[0], row[1], base.strip("`"))
            else:
                continue  # coverage by simulation
            of = row[1] if heads[0] == "claim" else heads[0]
            seen.append(f"{of}: {re.sub(r' [(][.0-9]+[)]$', '', row[0])}")  # the target of a claim is compared below
            for head, on_page, right in zip(heads, row, expected, strict=True):
                tally.compare(f"{heads[0]}: {row[0]}, {head}", on_page, right)
    for name, cells in algorithms.items():
        arms = [*cells, f"all {len(_sorted_arms(cells))} sorted arms together"]
        tally.require("the row", (f"{name}: {arm}" for arm in arms), seen)
    claims = ("scores better by 3.9% or more at equal data", "40.7% fewer samples to the same score")
    for claim in (*claims, "bubbles cut by more than half"):
        bases = [f"{name}, `{base}`" for name in algorithms for base in ("sync", "sync-large")]
        tally.require("the row", (f"{base}: {claim}" for base in bases), seen)


# ---- the command -----------------------------------------------------------------------------------------------------


def tables_of(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The heads and rows of each Markdown table."""
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.strip().splitlines()]
        yield rows[0], rows[2:]


def recompute(pages: Path = PAGES) -> Tally:
    tally = Tally()
    check_freshness((pages / "freshness.md").read_text(encoding="utf-8"), raw_runs(), tally)
    check_first_study((pages / "results.md").read_text(encoding="utf-8"), tally)
    return tally


def main() -> None:
    tally = recompute()
    print(f"{tally.compared} cells compared with the raw results, {len(tally.wrong)} differ")
    print("\n".join(tally.wrong))
    sys.exit(1 if tally.wrong else 0)


if __name__ == "__main__":
    main()
