"""The paper's claims from the study's raw results, on both baselines, as Markdown. It makes no runs.

    python -m benchmarks.study.claims            # benchmarks/results/study.json
    python -m benchmarks.study.claims --json

The paper compares with a cohort of 512 samples trained in four updates on math (`sync-large` here), and with one update
per rollout on logic (`sync` here). Intervals are Student's, over seeds and paired by seed. Their coverage is simulated
at the number of seeds that there is. An arm that never reaches an accuracy counts with all its samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import RESULTS, make_parser
from benchmarks.study.intervals import (
    Interval,
    coverage,
    percentile_ends,
    populations,
    residuals,
    student,
    student_ends,
)
from benchmarks.study.study_figures import (
    BASES,
    Record,
    by_arm,
    early,
    final,
    is_sorted,
    judge,
    tabulate,
)


def paired_differences(records: Sequence[Record]) -> list[list[float]]:
    """To `sync` in early and final accuracy, of each arm under each algorithm."""
    found: list[list[float]] = []
    for algorithm in dict.fromkeys(record["algorithm"] for record in records):
        arms = by_arm(records, algorithm)
        base = arms[BASES[0]]
        for name, runs in arms.items():
            if name != BASES[0]:
                for figure in (early, final):
                    seeds = sorted(runs.keys() & base.keys())
                    found.append([figure(runs[seed]) - figure(base[seed]) for seed in seeds])
    return found


def coverages(records: Sequence[Record], seeds: Sequence[int] = (5, 10)) -> list[dict[str, Any]]:
    """How often intervals of 95 % contain the mean, for each number of seeds and each population."""
    return [
        {
            "seeds": num,
            "population": name,
            "student": coverage(student_ends, values, num),
            "bootstrap": coverage(percentile_ends, values, num),
        }
        for num in seeds
        for name, values in populations(residuals(paired_differences(records))).items()
    ]


def pooled(records: Sequence[Record], algorithm: str, base: str) -> dict[str, Any]:
    """All sorted arms together: on each seed their mean, less the base's. One comparison in place of many."""
    arms = by_arm(records, algorithm)
    sorted_arms = [runs for name, runs in arms.items() if is_sorted(name)]
    found = {}
    for label, figure in (("early", early), ("final", final)):
        values = [mean(figure(runs[seed]) for runs in sorted_arms) - figure(run) for seed, run in arms[base].items()]
        found[label] = student(values)
    return {"arms": len(sorted_arms), **found}


def count_answers(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for verdict in verdicts:
        claim = counts.setdefault(verdict["claim"], {"yes": 0, "no": 0, "not decidable": 0})
        claim[verdict["answer"]] += 1
    return counts


def analyse(records: Sequence[Record]) -> dict[str, Any]:
    algorithms = list(dict.fromkeys(record["algorithm"] for record in records))
    pairs = [(algorithm, base) for algorithm in algorithms for base in BASES]
    return {
        "coverage": coverages(records),
        "tables": {f"{algorithm}, {base}": tabulate(records, algorithm, base) for algorithm, base in pairs},
        "pooled": {f"{algorithm}, {base}": pooled(records, algorithm, base) for algorithm, base in pairs},
        "claims": {f"{algorithm}, {base}": judge(records, algorithm, base) for algorithm, base in pairs},
    }


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(found: Mapping[str, Any]) -> str:
    lines = ["| seeds | seeds drawn from | Student | percentile bootstrap |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['seeds']} | {row['population']} | {row['student']:.0%} | {row['bootstrap']:.0%} |"
        for row in found["coverage"]
    ]
    for algorithm in dict.fromkeys(name.split(", ")[0] for name in found["tables"]):
        lines += ["", *_arm_lines(found, algorithm)]
    lines += ["", "| claim | base | yes | no | undecided |", "| --- | --- | --- | --- | --- |"]
    for name, verdicts in found["claims"].items():
        for claim, counts in count_answers(verdicts).items():
            lines.append(f"| {claim} | {name} | {' | '.join(str(count) for count in counts.values())} |")
    return "\n".join(lines)


def _arm_lines(found: Mapping[str, Any], algorithm: str) -> list[str]:
    """A table with a row for each arm, and differences to both bases."""
    heads = [algorithm, "final accuracy"]
    heads += [
        f"{what}, to `{base}`" for what in ("after 128 samples", "final", "samples saved to .7") for base in BASES
    ]
    lines = [f"| {' | '.join([*heads, 'bubble', 'staleness (max)'])} |", f"|{' --- |' * 10}"]
    tables = [{row["arm"]: row for row in found["tables"][f"{algorithm}, {base}"]} for base in BASES]
    for arm, row in tables[0].items():
        cells = [arm, short(row["accuracy"], ".3f")]
        for key, form in (("early_difference", "+.3f"), ("accuracy_difference", "+.3f"), ("fewer_to_0.7", "+.0%")):
            cells += ["" if arm == base else interval(t[arm][key], form) for base, t in zip(BASES, tables, strict=True)]
        cells += [short(row["bubble"], ".2f"), f"{short(row['staleness'], '.2f')} ({row['staleness_max']})"]
        lines.append(f"| {' | '.join(cells)} |")
    together = [found["pooled"][f"{algorithm}, {base}"] for base in BASES]
    cells = [interval(at[key], "+.3f") for key in ("early", "final") for at in together]
    return [*lines, f"| all {together[0]['arms']} sorted arms together | | {' | '.join(cells)} | | | | |"]


def short(value: float, form: str) -> str:
    """A number without the zero before its point."""
    return format(value, form).replace("0.", ".", 1) if abs(value) < 1 else format(value, form)


def interval(found: Interval | None, form: str) -> str:
    if found is None:
        return "–"
    return f"{short(found[0], form)} [{short(found[1], form)}, {short(found[2], form)}]"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS / "study.json")
    given = parser.parse_args()
    found = analyse(json.loads(given.results.read_text(encoding="utf-8"))["runs"])
    print(json.dumps(found) if given.json else markdown(found))


if __name__ == "__main__":
    main()
