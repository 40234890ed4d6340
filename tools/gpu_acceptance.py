"""`make gpu-acceptance`: check on a machine with GPUs, in one command, what is expected to work there.

    python -m tools.gpu_acceptance [--quick]

Each step is a separate command whose output goes to gpu-acceptance/. At the end a report in Markdown is printed, and
written to gpu-acceptance/report.md, to paste into an issue: the machine, what passed, and the figures of each step.
Steps that need two GPUs are left out on machines with one. Without a GPU nothing runs, because the result would say
nothing about GPUs. No machine of this project has a GPU: this command has never run on one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.command_steps import Fate, Step, StepResult, run_steps

ROOT = Path(__file__).parent.parent
OUT = ROOT / "gpu-acceptance"
LIMIT_S = 4 * 3600.0
STEP_LIMIT_S = 3600.0  # one that hangs leaves time for the others
FIGURES = ("tokens_per_s", "publish_s", "updates", "wall_s", "accuracy_before", "accuracy_after", "replay_law")


def make_steps(num_gpus: int, *, is_quick: bool) -> list[Step]:
    python, sortedrl = sys.executable, str(Path(sys.executable).with_name("sortedrl"))
    short = ["run.samples=256"] if is_quick else []
    few = ["run.samples=64", "eval.prompts=16", "engine.max_new_tokens=128"]
    recipe = ["run.samples=256", "task.max_prompt_tokens=512", "learner.lr=1e-6", "eval.prompts=32"]
    recipe += ["engine.max_new_tokens=256", "engine.dtype=bfloat16", "model=smollm2-135m"]
    two = "" if num_gpus >= 2 else f"it needs two GPUs, and there is {num_gpus}"

    def check(name: str, missing: str = "") -> Step:
        return Step(name=name, command=[python, "-m", "tools.gpu_checks", name], missing=missing)

    def train(name: str, *changes: str, missing: str = "") -> Step:
        where = [f"run.dir={OUT / 'runs'}", f"run.name={name}", "engine=vllm"]
        return Step(name=name, command=[sortedrl, "train", "quickstart", *where, *changes, "--json"], missing=missing)

    def control(dtype: str) -> Step:
        command = [python, "-m", "benchmarks.engine.vllm_control", "--json", "--dtype", dtype]
        return Step(name=f"control-{dtype}", command=command)

    separate = ["placement.mode=separate", "placement.engines=1", "placement.ranks=1", "placement.gpus_per_node=2"]
    return [
        check("device"),
        check("graphs"),
        check("probe"),
        check("speed"),
        check("nccl", two),
        check("tensor-parallel", two),
        Step(name="conformance", command=[python, "-m", "pytest", "-q", "-m", "vllm", "tests"]),
        control("bfloat16"),
        control("float32"),
        train("quickstart", *short),
        train("recipe", "schedule.strategy=sorted-partial", *recipe),
        train("replay-bfloat16", "schedule.strategy=sorted-replay", *recipe),
        train("lora", "lora.rank=8", "schedule.strategy=sorted-partial", *recipe, *few),
        train("sleep", "schedule.strategy=sorted-partial", "engine.sleep_during_updates=true", *recipe, *few),
        train("separate", "schedule.strategy=sorted-partial", "engine.transfer=nccl", *separate, *few, missing=two),
    ]


def find_machine() -> tuple[int, str]:
    """The number of GPUs, and a line on the machine."""
    import torch

    if not torch.cuda.is_available():
        return 0, "no GPU found"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = ", ".join(f"{name} {_version(name)}" for name in ("vllm", "torch", "triton", "sortedrl"))
    return len(names), f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}, {versions}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def pick_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a check or a benchmark as they are; of a run those that are named above, and seconds a
    publication."""
    runs = figures.get("runs")
    if not runs:
        return figures
    run = runs[0]
    picked = {name: run[name] for name in FIGURES if run.get(name) is not None}
    if run.get("publish_s") is not None and run.get("updates"):
        picked["s_per_publication"] = round(run["publish_s"] / run["updates"], 3)
    return picked


def make_report(machine: str, results: Sequence[StepResult]) -> str:
    """Markdown to paste into an issue."""
    lines = ["## GPU acceptance", "", machine, "", "| step | result | seconds | figures |", "| --- | --- | --- | --- |"]
    for result in results:
        told = f"{result.fate}: {result.why}" if result.why else str(result.fate)
        shown = json.dumps(pick_figures(dict(result.figures)))[:400].replace("|", "/") if result.figures else ""
        lines.append(f"| {result.step.name} | {told} | {result.seconds:.0f} | {shown} |")
    num_failed = sum(result.fate is Fate.FAILED for result in results)
    num_skipped = sum(result.fate is Fate.NOT_RUN for result in results)
    lines += ["", f"{len(results)} steps, {num_failed} failed, {num_skipped} not run."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="train only 256 samples in the quickstart")
    options = parser.parse_args()
    num_gpus, machine = find_machine()
    if not num_gpus:
        print("no GPU found: run this on a machine with one; `make rehearsal` is for machines without", file=sys.stderr)
        return 2
    results = run_steps(
        make_steps(num_gpus, is_quick=options.quick), root=ROOT, out=OUT, limit_s=LIMIT_S, step_limit_s=STEP_LIMIT_S
    )
    report = make_report(machine, results)
    (OUT / "report.md").write_text(report, encoding="utf-8")
    print(report)
    return 1 if any(result.fate is Fate.FAILED for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
