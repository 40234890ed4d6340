"""How well the simulator predicts other strategies from the `sync` runs of a comparison.

    python -m benchmarks.schedule.forecast RUN_DIR...      (the run directories of one `sortedrl compare`)

One cost model is fitted to the `sync` runs of all seeds. With it every run is simulated from its settings and answer
lengths, without its own times. For each strategy the script says whether the means over seeds of rollout time and
bubble ratio are within 15 % of the measured ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, save
from sortedrl.simulate.fit import fit_runs
from sortedrl.simulate.forecast import Forecast, forecast
from sortedrl.telemetry.summary import Summary

LIMIT = 0.15


def main() -> None:
    parser = make_parser(__doc__, has_json=False)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    finished = [path for path in parser.parse_args().runs if (path / "summary.json").is_file()]
    summaries = {path: Summary.read(path / "summary.json") for path in finished}
    base = [path for path, summary in summaries.items() if summary.strategy == "sync"]
    if not base:
        sys.exit("none of these is a finished `sync` run: give the run directories of a `sortedrl compare` with sync")
    fitted = fit_runs(base)
    forecasts = [forecast(path, fitted.cost) for path in summaries]
    arms: dict[str, list[Forecast]] = {}
    for one in forecasts:
        arms.setdefault(one.strategy, []).append(one)
    table = Table("strategy", "runs", "rollout s", "forecast", "error", "bubble", "forecast", "error", "within 15 %")
    records = []
    for strategy, runs in arms.items():
        rollout_s, expected_s = (
            mean(s) for s in zip(*((r.measured_rollout_s, r.rollout_s) for r in runs), strict=True)
        )
        bubble, expected = (
            mean(s) for s in zip(*((r.measured_bubble_ratio, r.bubble_ratio) for r in runs), strict=True)
        )
        errors = {"rollout_s": expected_s / rollout_s - 1, "bubble_ratio": expected / bubble - 1}
        within = [name for name, error in errors.items() if abs(error) <= LIMIT]
        table.add_row(
            strategy,
            str(len(runs)),
            f"{rollout_s:.1f}",
            f"{expected_s:.1f}",
            f"{errors['rollout_s']:+.1%}",
            f"{bubble:.3f}",
            f"{expected:.3f}",
            f"{errors['bubble_ratio']:+.1%}",
            "both" if len(within) == len(errors) else ", ".join(within) or "neither",
        )
        records.append({"strategy": strategy, "errors": errors, "within": within, "runs": [r.as_dict() for r in runs]})
    Console(width=110).print(table)
    print(f"fit: R2 {fitted.r2:.3f} over {fitted.num_stretches} spans, {fitted.update_r2:.3f} over updates")
    print(f"assumed, since sync runs do not show them: {', '.join(fitted.assumed) or 'nothing'}")
    print(f"saved {save('forecast', {'fit': fitted.as_dict(), 'strategies': records})}")


if __name__ == "__main__":
    main()
