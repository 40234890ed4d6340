"""A rank's peak memory in an update, at full depth with the longest micro-batch, by fake tensors; beside `doctor`'s.

    python -m benchmarks.learner.rank_memory --config NAME|all [--hardware h100] [--json]

The real learner is built on a fake process group with fake tensors (`sortedrl/learner/dry_run.py`), with all layers of
the model, and runs forward and backward. `sortedrl doctor` measures a few layers and extends them: `doctor_gib` is its
figure for the rank. `gpu_gib` is the whole GPU under the placement, with an engine if one is there. Needs no weights,
no GPU and no network. For models without a preset, their folder must be here.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.config.placement import Demand, cluster_of, plan_placement
from sortedrl.config.shipped import shipped_names
from sortedrl.run.builders.parts import model_path_here
from sortedrl.run.device_memory import device_needs, dry_rank_memory
from sortedrl.run.memory_formulas import GIB, engine_memory, formula_rank_memory
from sortedrl.run.model_shapes import read_shape
from sortedrl.simulate.costs import load_hardware

LIMIT_GIB = 72.0  # of 80


def measure(name: str, hardware: str) -> dict[str, Any]:
    config = SortedConfig.load(name)
    here = model_path_here(config) or Path(config.model.path)  # not here: the shape comes from the model's name
    shape = replace(read_shape(config.model.path, here), bytes_per_value=2)
    device_bytes = int(load_hardware(hardware).memory)
    start = time.process_time()
    whole = dry_rank_memory(config, here, shape, device_bytes=device_bytes, is_whole=True)
    whole_s = time.process_time() - start
    start = time.process_time()
    quick = dry_rank_memory(config, here, shape, device_bytes=device_bytes)
    record: dict[str, Any] = {
        "config": config.run.name,
        "model": config.model.path,
        "ranks": config.num_ranks,
        "layers": shape.layers,
        "answer_tokens": config.engine.max_new_tokens,
        "peak_gib": whole.peak / GIB,
        "parts": {part: size / GIB for part, size in whole.parts.items()},
        "limit_gib": LIMIT_GIB,
        "doctor_gib": quick.peak / GIB,
        "formula_gib": formula_rank_memory(config, shape, device_bytes).peak / GIB,
        "cpu_s": {"full depth": whole_s, "doctor": time.process_time() - start},
    }
    if config.placement.mode is not None:
        placement = plan_placement(Demand.of(config), cluster_of(config))
        needs = device_needs(config, placement, whole, engine_memory(config, shape), shape)
        worst = max(needs, key=lambda need: need.total)
        record["gpu_gib"] = worst.total / GIB
        parts = {part: size / GIB for part, size in worst.parts.items()}
        record["gpu"] = {"owners": worst.owners, "phase": worst.phase, "parts": parts}
    return record


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"a rank's peak in an update, GiB (at most {LIMIT_GIB:g})")
    for name in ("config", "ranks", "answer", "peak", "doctor", "formula", "whole GPU", "parts"):
        shown.add_column(name)
    for record in records:
        parts = ", ".join(f"{part} {size:.1f}" for part, size in record["parts"].items() if size >= 0.05)
        figures = [f"{record[key]:.2f}" for key in ("peak_gib", "doctor_gib", "formula_gib")]
        gpu = f"{record['gpu_gib']:.1f}" if "gpu_gib" in record else ""
        shown.add_row(record["config"], str(record["ranks"]), str(record["answer_tokens"]), *figures, gpu, parts)
    return shown


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--config", default="all", help="a shipped configuration, a file, or all")
    parser.add_argument("--hardware", default="h100", help="the GPU: pieces of logits follow its memory")
    args = parser.parse_args()
    names = shipped_names() if args.config == "all" else [args.config]
    console = Console(stderr=True)
    records: list[dict[str, Any]] = []
    for name in names:
        with console.status(f"measuring {name}"):
            records.append(measure(name, args.hardware))
    if args.config == "all":
        save("rank_memory", {"hardware": args.hardware, "recipes": records})
    if args.json:
        print(json.dumps({"recipes": records} if args.config == "all" else records[0]))
    else:
        console.print(table(records))


if __name__ == "__main__":
    main()
