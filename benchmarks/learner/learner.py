"""An update on answers of very different length, packed and padded to the longest: speed, memory, gradients.

    python -m benchmarks.learner.learner [--trace LENGTHS] [--threads N] [--rounds 1] [--cases smollm2,tiny] [--json]

Each case is what `sortedrl bench learner` measures, on the lengths of a trace: by default those of Qwen2.5-Math on MATH
where the file is there, else drawn from a distribution like theirs. Lengths are scaled down for the real model, since
answers padded to the longest have to fit in memory, and updates of them to end in a minute. All go into
results/learner.json, stamped. On a machine that does other work compare `ratio_cpu`, tokens per CPU second.
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
    parser.add_argument("--samples", type=int, help="fewer answers, for a machine with little memory or time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default=",".join(CASES))
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
