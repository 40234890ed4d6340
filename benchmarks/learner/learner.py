"""An update on answers of very different lengths, packed or padded to the longest: speed, memory and gradients.

    python -m benchmarks.learner.learner [--trace LENGTHS] [--threads N] [--rounds 1] [--cases smollm2,tiny] [--json]

Each case is one measurement of `sortedrl bench learner` on the answer lengths of a trace. The default trace is
Qwen2.5-Math on MATH if its file exists, else a similar distribution. For the real model the lengths are scaled down, so
that answers padded to the longest fit in memory and an update takes about a minute. If the machine also does other
work, compare `ratio_cpu` (tokens per CPU second).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.record import ROOT, make_parser, save
from sortedrl.cli.bench import learner_table
from sortedrl.testing.bench.learner import LIKE_QWEN, LearnerBench, measure

DATA = Path(os.environ.get("SORTEDRL_DATA") or ROOT.parent / "shared" / "data")
TRACE = DATA / "traces" / "qwen25_math_100x8.json"
CASES: dict[str, dict[str, Any]] = {
    "smollm2": {"model": "smollm2-135m", "samples": 64, "scale": 0.0625, "prompt_tokens": 8, "passes": 2},
    "tiny": {"model": "knights-tiny", "samples": 64, "scale": 1.0, "prompt_tokens": 64, "passes": 4},
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--trace", default=str(TRACE) if TRACE.is_file() else LIKE_QWEN)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--samples", type=int, help="number of answers; fewer need less memory and time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    options = parser.parse_args()
    results = {}
    for name in options.cases.split(","):
        case = {**CASES[name], **({"samples": options.samples} if options.samples else {})}
        bench = LearnerBench(
            **case, trace=options.trace, rounds=options.rounds, threads=options.threads, seed=options.seed
        )
        results[name] = measure(bench, lambda contender, _, case=name: print(f"{case}: {contender}", file=sys.stderr))
        if not options.json:
            Console(width=120).print(learner_table(results[name]))
    arguments = {key: value for key, value in vars(options).items() if key not in ("trace", "json")}
    record = {"arguments": arguments, "cases": results}
    if options.json:
        print(json.dumps(record))
    print(f"saved {save('learner', record)}", file=sys.stderr)


if __name__ == "__main__":
    main()
