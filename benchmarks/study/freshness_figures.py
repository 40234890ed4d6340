"""The registered analysis of the freshness study: tables and verdicts as Markdown, from raw results in the tree.

    python -m benchmarks.study.freshness_figures             # benchmarks/results/freshness/*.jsonl
    python -m benchmarks.study.freshness_figures --power     # power at ten seeds, from the spread in study.json
    python -m benchmarks.study.freshness_figures --write     # puts tables and picture into docs/research/freshness.md

docs/research/registration.md defines the figures and hypotheses. Differences are paired by seed, intervals are
Student's at 95 %. A hypothesis that lacks seeds is undecided, whatever its interval says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.record import ROOT, load, make_parser
from benchmarks.study import study_figures
from benchmarks.study.claims import coverages, interval, short
from benchmarks.study.curves import Line, Panel, draw
from benchmarks.study.freshness import FOLDER, SEEDS, Cell, read
from benchmarks.study.intervals import (
    Interval,
    chance_of_equal,
    coverage,
    populations,
    power,
    residuals,
    student,
    student_ends,
    t_quantile,
)
from benchmarks.study.study_figures import FEWER_SAMPLES, LEAST_GAIN, reached_or_end

STAGES = ("a", "b", "c", "d")
PAGE, PICTURE = ROOT / "docs" / "research" / "freshness.md", ROOT / "docs" / "images" / "freshness.svg"
BEGIN = "<!-- tables: python -m benchmarks.study.freshness_figures --write -->"
END = "<!-- end of tables -->"
EARLY_SAMPLES = (128, 256)
FINAL_POINTS = 3
MARGIN = 0.05  # differences up to this count as equal
EARLY_UPDATES = 16  # of the first 256 samples
VERDICT_SEEDS = {"a": 10, "b": 5, "c": 5, "d": 5}  # common seeds that a verdict needs, as registered and amended

Record = Mapping[str, Any]
Arms = Mapping[str, Mapping[int, Record]]
"""Runs by the name of their cell and by seed."""
Figure = Callable[[Record], float]


def early(run: Record) -> float:
    return mean(point["accuracy"] for point in run["curve"] if point["samples"] in EARLY_SAMPLES)


def final(run: Record) -> float:
    return mean(point["accuracy"] for point in run["curve"][-FINAL_POINTS:])


def final_greedy(run: Record) -> float:
    return mean(point["greedy"] for point in run["curve"][-FINAL_POINTS:])


def share(run: Record) -> float:
    """The effective sample share over the updates of the first 256 samples that learned something.

    Where no token was learned there is no share. Older lines have 1 there, and the gradient's norm tells: it is 0.
    """
    pairs = zip(run["updates"]["share"][:EARLY_UPDATES], run["updates"]["norm"][:EARLY_UPDATES], strict=True)
    learned = [value for value, norm in pairs if value is not None and norm > 0]
    return mean(learned) if learned else math.nan


def staleness(run: Record) -> float:
    sizes = [length * size for length, size in zip(run["updates"]["length"], run["updates"]["size"], strict=True)]
    return float(np.average(run["updates"]["staleness"], weights=sizes))


def flat_share(run: Record) -> float:
    """The share of updates whose answers all have the same reward: 0 or 1 on average."""
    return mean(reward in (0.0, 1.0) for reward in run["updates"]["reward"])


def collect(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """The runs by cell and seed; cells of GRPO are marked."""
    fields = tuple(Cell.__dataclass_fields__)
    arms: dict[str, dict[int, Record]] = {}
    for record in records:
        cell = Cell(**{field: record[field] for field in fields})
        mark = "" if cell.algorithm == "reinforce++" else f"{cell.algorithm}: "
        arms.setdefault(mark + cell.name, {})[record["seed"]] = record
    return arms


def seeds_of(arms: Arms, *names: str) -> list[int]:
    return sorted(set.intersection(*(set(arms.get(name, {})) for name in names)))


def has_seeds(arms: Arms, *names: str) -> bool:
    """Whether these cells have the common seeds that a verdict needs; a later stage's cell asks for fewer."""
    stages = [run["stage"] for name in names for run in arms.get(name, {}).values()]
    return bool(stages) and len(seeds_of(arms, *names)) >= min(VERDICT_SEEDS[stage] for stage in stages)


def difference(arms: Arms, name: str, base: str, figure: Figure) -> Interval | None:
    """The paired difference of two cells; None with fewer than two seeds."""
    values = [figure(arms[name][seed]) - figure(arms[base][seed]) for seed in seeds_of(arms, name, base)]
    return student(values) if len(values) > 1 else None


def ratio(arms: Arms, name: str, base: str, compare: Callable[[Record, Record], float]) -> Interval | None:
    values = [compare(arms[name][seed], arms[base][seed]) for seed in seeds_of(arms, name, base)]
    return student(values) if len(values) > 1 else None


# ---- hypotheses ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, frozen=True)
class Verdict:
    """The answer to one registered hypothesis."""

    name: str
    says: str
    answer: str  # yes, no or undecided
    found: Interval | None
    seeds: int

    @property
    def line(self) -> str:
        form = "+.3f"
        return f"| {self.name} | {self.says} | {interval(self.found, form)} | {self.seeds} | {self.answer} |"


def above(found: Interval | None, wanted: float, *, complete: bool) -> str:
    """Whether a figure is above `wanted`: yes or no if the whole interval is on one side."""
    if found is None or not complete:
        return "undecided"
    return "yes" if found[1] > wanted else "no" if found[2] < wanted else "undecided"


def equal(found: Interval | None, margin: float, *, complete: bool) -> str:
    """Whether a difference is nothing: yes if its interval is within the margin, no if it leaves out 0."""
    if found is None or not complete:
        return "undecided"
    if -margin <= found[1] and found[2] <= margin:
        return "yes"
    return "no" if found[1] > 0 or found[2] < 0 else "undecided"


def slope_over_share(arms: Arms) -> Verdict:
    """Early accuracy per unit of effective sample share: a straight line over unsorted arms, one slope per seed."""
    names = ["sync", "sync-large", "replay, shuffled"]
    names += [f"{arm}, cohort {n}" for n in (4, 8) for arm in ("sync-large", "replay, shuffled")]
    seeds = seeds_of(arms, *names)
    slopes = []
    for seed in seeds:
        of_seed = [arms[name][seed] for name in names]
        slopes.append(float(np.polyfit([share(run) for run in of_seed], [early(run) for run in of_seed], 1)[0]))
    found = student(slopes) if len(slopes) > 1 else None
    says = "early accuracy rises with the effective sample share (slope)"
    answer = above(found, 0.0, complete=has_seeds(arms, *names))
    return Verdict(name="H1b", says=says, answer=answer, found=found, seeds=len(seeds))


def hypotheses(arms: Arms) -> list[Verdict]:
    found: list[Verdict] = []

    def add_above(name: str, says: str, arm: str, base: str, figure: Figure, wanted: float = 0.0) -> None:
        seen, seeds = difference(arms, arm, base, figure), len(seeds_of(arms, arm, base))
        answer = above(seen, wanted, complete=has_seeds(arms, arm, base))
        found.append(Verdict(name=name, says=says, answer=answer, found=seen, seeds=seeds))

    def add_equal(name: str, arm: str, base: str) -> None:
        for when, figure in (("early", early), ("final", final)):
            seen, seeds = difference(arms, arm, base, figure), len(seeds_of(arms, arm, base))
            answer = equal(seen, MARGIN, complete=has_seeds(arms, arm, base))
            says = f"{arm} = {base}, {when}"
            found.append(Verdict(name=name, says=says, answer=answer, found=seen, seeds=seeds))

    add_above("H1a", "sync > sync-large, early", "sync", "sync-large", early)
    found.append(slope_over_share(arms))
    add_equal("H2a", "replay, shortest first", "replay, shuffled")
    for n in (4, 8):
        add_equal("H2b", f"replay, shortest first, cohort {n}", f"replay, shuffled, cohort {n}")
    add_equal("H2b", "replay, longest first", "replay, shuffled")
    add_equal("H2c", "sync-large, shortest first", "sync-large")
    add_equal("H2c", "sync-large, longest first", "sync-large")
    add_equal("H3a", "replay, shuffled", "sync")
    add_equal("H3b", "sorted-replay", "sync")
    for name in ("replay, shuffled, cohort 4", "replay, shuffled, cohort 8"):
        add_equal("H3c", name, "sync")
    for name in ("sorted-replay, cohort 4", "async-on-policy", "async-on-policy, cohort 4"):
        add_equal("H3c", name, "sync")
    add_above("H4a", "sorted-replay > sync-large, final", "sorted-replay", "sync-large", final)
    second = ", rate 0.0006"
    add_above("H4b", "the same at twice the rate", f"sorted-replay{second}", f"sync-large{second}", final)
    return found


def paper_claims(arms: Arms) -> list[Verdict]:
    """The paper's claims for its scheduling at staleness 0 (`sorted-replay`), on both baselines."""
    found = []
    for base in ("sync", "sync-large"):
        seeds = len(seeds_of(arms, "sorted-replay", base))
        target = 0.9 * mean(map(final, arms[base].values())) if base in arms else math.nan

        def saved(arm: Record, other: Record, target: float = target) -> float:
            return 1 - reached_or_end(arm["curve"], target) / reached_or_end(other["curve"], target)

        claims: list[tuple[str, float, Callable[[Record, Record], float]]] = [
            ("scores better by 3.9 % at equal data", LEAST_GAIN, lambda a, b: final(a) / final(b) - 1),
            (f"40.74 % fewer samples to {short(target, '.2f')}", FEWER_SAMPLES, saved),
            ("idle slot-steps cut by half", 0.5, lambda a, b: 1 - a["idle_slot_steps"] / b["idle_slot_steps"]),
        ]
        for says, wanted, compare in claims:
            seen = ratio(arms, "sorted-replay", base, compare)
            answer = above(seen, wanted, complete=has_seeds(arms, "sorted-replay", base))
            found.append(Verdict(name=f"against `{base}`", says=says, answer=answer, found=seen, seeds=seeds))
    return found


# ---- Markdown --------------------------------------------------------------------------------------------------------


def table(arms: Arms, names: Sequence[str], bases: Sequence[str]) -> list[str]:
    """A row for each cell: means over seeds, and differences to each base."""
    heads = ["arm", "seeds", "effective share", "staleness", "one-reward updates", "early", "final", "greedy"]
    heads += [f"{when}, to `{base}`" for base in bases for when in ("early", "final")]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name in names:
        runs = list(arms.get(name, {}).values())
        if not runs:
            continue
        cells = [name, str(len(runs))]
        for figure, form in ((share, ".2f"), (staleness, ".1f"), (flat_share, ".0%")):
            cells.append(short(mean(map(figure, runs)), form))
        cells += [short(mean(map(figure, runs)), ".3f") for figure in (early, final, final_greedy)]
        for base in bases:
            for figure in (early, final):
                cells.append("" if name == base else interval(difference(arms, name, base, figure), "+.3f"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict_table(verdicts: Sequence[Verdict], first: str) -> list[str]:
    return [
        f"| {first} | says | found | seeds | answer |",
        "| --- | --- | --- | --- | --- |",
        *(v.line for v in verdicts),
    ]


def paired_differences(arms: Arms) -> list[list[float]]:
    """To `sync` in early and final accuracy, of each arm that has all seeds."""
    found: list[list[float]] = []
    for name in arms:
        seeds = seeds_of(arms, name, "sync")
        if len(seeds) == len(SEEDS):
            for figure in (early, final):
                found.append([figure(arms[name][seed]) - figure(arms["sync"][seed]) for seed in seeds])
    return found


def coverage_table(arms: Arms) -> list[str]:
    """How often intervals of 95 % contain the true mean, by simulation."""
    lines = ["| seeds | drawn from | 95 % interval covers |", "| --- | --- | --- |"]
    for seeds in sorted(set(VERDICT_SEEDS.values())):
        for name, values in populations(residuals(paired_differences(arms))).items():
            if len(values):
                lines.append(f"| {seeds} | {name} | {coverage(student_ends, values, seeds):.0%} |")
    return lines


def markdown(arms: Arms) -> str:
    """The tables of arms, one for each algorithm, rate and clipping, then the verdicts."""
    parts = []
    grouped: dict[str, list[str]] = {}
    for name in arms:
        mark = name.partition(": ")[0] if ": " in name else "reinforce++"
        clip = ", without clipping" if "without clipping" in name else ""
        rate = ", rate 0.0006" if ", rate 0.0006" in name else ""
        grouped.setdefault(f"{'' if mark == 'reinforce++' else mark + ': '}|{rate}{clip}", []).append(name)
    for key, names in grouped.items():
        mark, _, tail = key.partition("|")
        parts.append(table(arms, names, [f"{mark}{base}{tail}" for base in ("sync", "sync-large")]))
    parts += [verdict_table(hypotheses(arms), "hypothesis"), verdict_table(paper_claims(arms), "paper's claim")]
    parts.append(coverage_table(arms))
    return "\n\n".join("\n".join(part) for part in parts if part)


def power_lines() -> list[str]:
    """Power at ten seeds, from the spread of paired differences in the first study."""
    records = load("study")["runs"]
    arms = study_figures.by_arm(records, "reinforce++")
    lines = ["| figure | spread of paired differences | half width | power for .05 | for .10 | 0 is found equal |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for label, figure in (("early", study_figures.early), ("final", study_figures.final)):
        variances = []
        for base in ("sync", "sync-large"):
            for name, runs in arms.items():
                if name != base:
                    variances.append(np.var([figure(runs[s]) - figure(arms[base][s]) for s in runs], ddof=1))
        spread = float(np.sqrt(np.mean(variances)))
        half = t_quantile(len(SEEDS) - 1) * spread / math.sqrt(len(SEEDS))
        powers = [short(power(wanted, spread, len(SEEDS)), ".2f") for wanted in (0.05, 0.10)]
        powers.append(short(chance_of_equal(MARGIN, spread, len(SEEDS)), ".2f"))
        lines.append(f"| {label} | {short(spread, '.3f')} | {short(half, '.3f')} | {' | '.join(powers)} |")
    rows = [row for row in coverages(records) if row["seeds"] == len(SEEDS)]
    lines += ["", "| seeds drawn from | Student's 95 % interval covers |", "| --- | --- |"]
    return [*lines, *(f"| {row['population']} | {row['student']:.0%} |" for row in rows)]


def picture(arms: Arms) -> str:
    """Accuracy over samples of stage a's arms; lines are means over seeds, bands their intervals."""
    lines = []
    for name in ("sync", "sync-large", "replay, shuffled", "sorted-replay", "replay, shortest first"):
        curves = [run["curve"] for run in arms.get(name, {}).values()]
        if len(curves) > 1:
            found = [student([point["accuracy"] for point in at]) for at in zip(*curves, strict=True)]
            points = [(point["samples"], at[0]) for point, at in zip(curves[0], found, strict=True)]
            band = [(at[1], at[2]) for at in found] if name in ("sync", "sync-large") else ()
            lines.append(Line(name=name, points=points, band=band))
    panel = Panel(
        title="five people: held-out accuracy",
        x_title="samples trained",
        x_marks=[256 * at for at in range(5)],
        y_marks=[0.2, 0.4, 0.6, 0.8],
        lines=lines,
    )
    return draw([panel])


def with_tables(page: str, tables: str) -> str:
    """The page with these tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    assert rest, f"the page lacks the mark {BEGIN}"
    _, end, after = rest.partition(END)
    assert end, f"the page lacks the mark {END} after the tables"
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--results", type=Path, default=FOLDER)
    parser.add_argument("--power", action="store_true", help="only the power, from study.json")
    parser.add_argument("--write", action="store_true", help="put tables and picture into the page")
    given = parser.parse_args()
    if given.power:
        print("\n".join(power_lines()))
        return
    arms = collect([record for stage in STAGES for record in read(stage, given.results)])
    if given.write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), markdown(arms)), encoding="utf-8")
        PICTURE.write_text(picture(arms), encoding="utf-8")
    if given.json:
        verdicts = [*hypotheses(arms), *paper_claims(arms)]
        print(json.dumps([{"name": v.name, "says": v.says, "answer": v.answer, "found": v.found} for v in verdicts]))
        return
    print(markdown(arms))


if __name__ == "__main__":
    main()
