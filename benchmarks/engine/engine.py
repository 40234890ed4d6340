"""Sampling speed of the local engine compared with transformers and vLLM, on a real model and on the tiny one.

    python -m benchmarks.engine.engine [--rounds 3] [--cases smollm2-64,tiny-16] [--threads N] [--name engine]

Each case is one measurement of `sortedrl bench engine`. All results go into results/NAME.json: "engine" is the file of
a processor with AVX2 alone, "engine-avx512" that of one with AVX-512, VNNI and bfloat16. If the machine also
does other work, compare `ratio_cpu` (tokens per CPU second), which does not change when a process waits for a core.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console

from benchmarks.record import make_parser, save
from sortedrl.cli.bench import engine_table
from sortedrl.testing.bench.engine import EngineBench, measure

CASES: dict[str, dict[str, Any]] = {
    "smollm2-64": {"model": "smollm2-135m", "slots": 64, "new_tokens": 128, "against": ("hf", "vllm")},
    "smollm2-16": {"model": "smollm2-135m", "slots": 16, "new_tokens": 128, "against": ("hf", "vllm")},
    "smollm2-8": {"model": "smollm2-135m", "slots": 8, "new_tokens": 128, "against": ("hf", "vllm")},
    "smollm2-256": {"model": "smollm2-135m", "slots": 256, "new_tokens": 64, "against": ("hf", "vllm")},
    "tiny-16": {"model": "knights-tiny", "slots": 16, "new_tokens": 128, "against": ("hf", "hf-continuous", "vllm")},
    "tiny-64": {"model": "knights-tiny", "slots": 64, "new_tokens": 128, "against": ("hf", "hf-continuous", "vllm")},
}


def main() -> None:
    parser = make_parser(__doc__, has_json=False)
    parser.add_argument("--vllm-python", help="python of an environment with vLLM")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--name", default="engine", help="of the result file; one file per kind of processor")
    options = parser.parse_args()
    results = {}
    for name in options.cases.split(","):
        bench = EngineBench(
            **CASES[name],
            rounds=options.rounds,
            threads=1
            if name.startswith("tiny")
            else options.threads,  # a second thread does not speed up small matrices
            seed=options.seed,
            vllm_python=options.vllm_python,
        )
        results[name] = measure(bench, lambda contender, _, case=name: print(f"{case}: {contender}", file=sys.stderr))
        Console(width=120).print(engine_table(results[name]))
    arguments = {key: value for key, value in vars(options).items() if key != "vllm_python"}
    print(f"saved {save(options.name, {'arguments': arguments, 'cases': results})}", file=sys.stderr)


if __name__ == "__main__":
    main()
