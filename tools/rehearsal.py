"""`make rehearsal`: on a machine without GPUs, run what a user with GPUs would meet first.

    python -m tools.rehearsal [--only NAME ...] [--limit 900] [--at-once 2] [--json]

Each part runs the project's own code and vLLM's own code, with a stand-in for what is missing: Ray nodes that claim to
have GPUs, a CUDA platform that vLLM believes in, Triton's interpreter, gloo in the place of NCCL. The table says what
each part stands for and what it cannot show. Output goes to rehearsal/. Parts that need vLLM run in .venv-vllm-v2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.command_steps import Fate, Step, StepResult, run_steps

ROOT = Path(__file__).parent.parent
OUT = ROOT / "rehearsal"
V2_PYTHON = ROOT / ".venv-vllm-v2" / "bin" / "python"
V2_FOLDER = ROOT / "tests" / "support" / "vllm_v2"


@dataclass(slots=True, kw_only=True, frozen=True)
class Part:
    name: str
    stands_for: str
    cannot_show: str
    tests: tuple[str, ...] = ()  # files of tests
    command: tuple[str, ...] = ()  # or the arguments of Python
    needs_vllm: bool = False


PARTS = (
    Part(
        name="placement",
        stands_for="engines and ranks of every shipped configuration on Ray nodes with 8 GPUs each",
        cannot_show="whether models fit, and links between GPUs",
        tests=("tests/rehearsal/test_placement.py", "tests/engine/pool/test_ray_placement.py"),
    ),
    Part(
        name="configuration",
        stands_for="vLLM's start on an H100: graphs, asynchronous scheduling, V2, batch invariance",
        cannot_show="capturing graphs, memory profiling",
        tests=("tests/engine/vllm/test_resolved_config.py",),
        needs_vllm=True,
    ),
    Part(
        name="kernel",
        stands_for="the verification kernel: results, bytes moved, compiled for sm_80, sm_90, sm_100",
        cannot_show="rounding of compiled code, speed",
        tests=("tests/engine/vllm/test_verify_kernel.py",),
        needs_vllm=True,
    ),
    Part(
        name="verification",
        stands_for="replay in stock vLLM (V2), in chunks and after preemptions, on 1 and 2 workers",
        cannot_show="CUDA graphs and streams, GPU attention, NCCL",
        tests=("tests/engine/vllm/test_verify_hook.py",),
        needs_vllm=True,
    ),
    Part(
        name="engine",
        stands_for="the vLLM engine on V2, and split over 2 workers: noise, replay, interruption, publication, sleep",
        cannot_show="memory that sleep frees, speed",
        tests=("tests/conformance/test_conformance_v2.py",),
        needs_vllm=True,
    ),
    Part(
        name="publication",
        stands_for="weights from 2 FSDP2 ranks to an engine split in two, and to a pool of two, over gloo; every byte",
        cannot_show="NCCL and CUDA IPC, their speed",
        command=(
            *("-m", "benchmarks.engine.publication", "--model", "knights-tiny", "--rounds", "2"),
            *("--rehearse", "--json"),
        ),
        needs_vllm=True,
    ),
    Part(
        name="slow-engine",
        stands_for="engines that are cut off, slow or dead while a pool publishes",
        cannot_show="how NCCL behaves when a peer is lost",
        tests=("tests/engine/pool/test_pool_route.py",),
    ),
    Part(
        name="probe",
        stands_for="bfloat16 whose prefill rounds otherwise than decoding: an engine that lies",
        cannot_show="how often a GPU differs",
        tests=("tests/engine/test_replay_probe.py",),
    ),
    Part(
        name="sleep",
        stands_for="engine and learner in turns on one GPU, with counted memory",
        cannot_show="real memory, its fragmentation, the time to wake",
        tests=(
            "tests/conformance/test_conformance_sleep.py",
            "tests/engine/pool/test_pool_sleep.py",
            "tests/engine/vllm/test_vllm_promises.py",
        ),
    ),
)


def make_step(part: Part) -> Step:
    python = str(V2_PYTHON) if part.needs_vllm else sys.executable
    arguments = part.command or ("-m", "pytest", "-q", "-p", "no:cacheprovider", *part.tests)
    environment = {"OMP_NUM_THREADS": "1"}
    if part.needs_vllm:
        paths = (str(V2_FOLDER), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return Step(
        name=part.name,
        command=[python, *arguments],
        environment=environment,
        missing="" if not part.needs_vllm or V2_PYTHON.exists() else "run `make vllm-v2` first",
    )


def make_table(results: list[StepResult], parts: dict[str, Part]) -> Table:
    table = Table("part", "stands for", "cannot show", "result", title="rehearsal without GPUs")
    for result in results:
        part = parts[result.step.name]
        told = f"{result.fate} ({result.seconds:.0f} s)" if not result.why else f"{result.fate}: {result.why}"
        table.add_row(part.name, part.stands_for, part.cannot_show, told)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="run these parts only")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for all parts together")
    parser.add_argument("--at-once", type=int, default=min(2, os.cpu_count() or 1), help="parts that run at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    parts = {part.name: part for part in PARTS if not options.only or part.name in options.only}
    steps = [make_step(part) for part in parts.values()]
    results = run_steps(steps, root=ROOT, out=OUT, limit_s=options.limit, at_once=options.at_once)
    if options.json:
        print(json.dumps({r.step.name: {"fate": r.fate, "seconds": round(r.seconds), "why": r.why} for r in results}))
    else:
        Console().print(make_table(results, parts))
    return 0 if all(result.fate is Fate.PASSED for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
