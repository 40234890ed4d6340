"""CPU time of an update of the quickstart: with compiled layers, and with the layers of transformers.

    python -m benchmarks.learner.update [--samples 1280] [--rounds 5] [--profile] [--json]

The script trains like the quickstart on one thread and keeps the batches. Then a new learner repeats the batches of the
second half in both ways, in turns, at a learning rate that changes nothing. Times are CPU milliseconds, which other
work on the machine hardly changes. `rollout_ms` is the CPU time of engine and controller for the samples of one update.
The learner `overlap` is the one of `async`, which takes a snapshot of the weights.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import QUICKSTART, make_parser, save
from sortedrl.buffer import Buffer
from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.learner import pack
from sortedrl.records import Batch
from sortedrl.run.builders.learner import build_learner
from sortedrl.run.builders.loop import build_loop
from sortedrl.run.builders.parts import build_parts
from sortedrl.telemetry.events import ignore

CAN_USE_COMPILED_LAYERS = pack.can_use_compiled_layers
WAYS = {"modules": lambda model, layout: False, "compiled": CAN_USE_COMPILED_LAYERS}
NO_CHANGE = "learner.lr=1e-12"


def collect(samples: int) -> tuple[Any, list[Batch], float]:
    """Train; returns the model, the batches of the second half, and the CPU seconds per batch outside the learner."""
    changes = ["schedule.strategy=sorted-replay", f"run.samples={samples}", "run.threads=1", "eval.prompts=0"]
    config = SortedConfig.load(QUICKSTART, changes)
    parts = build_parts(config)
    controller = build_loop(config, parts, Buffer(grouped=config.is_grouped), emit=ignore, clock=WallClock())
    batches: list[Batch] = []
    spent = 0.0
    start = parts.learner.start

    def keep(batch: Batch) -> Any:
        nonlocal spent
        batches.append(copy.deepcopy(batch))
        began = time.process_time()
        try:
            return start(batch)
        finally:
            spent += time.process_time() - began

    controller.learner.start = keep  # type: ignore[method-assign]
    began = time.process_time()
    try:
        controller.run()
    finally:
        parts.close()
    rollout_s = (time.process_time() - began - spent) / len(batches)
    later = [batch for batch in batches[len(batches) // 2 :] if len({s.reward for s in batch.samples}) > 1]
    return parts.model, later, rollout_s


def cpu_ms(learner: Any, batches: Sequence[Batch]) -> float:
    began = time.process_time()
    for batch in batches:
        learner.start(batch).result()
    return (time.process_time() - began) / len(batches) * 1e3


def measure(model: Any, batches: Sequence[Batch], rounds: int, strategy: str) -> list[dict[str, Any]]:
    config = SortedConfig.load(QUICKSTART, [NO_CHANGE, f"schedule.strategy={strategy}"])
    learner = build_learner(config, model)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    metrics: dict[str, dict[str, float]] = {}
    for number in track(range(rounds + 1), strategy, console=Console(stderr=True)):
        for name, way in WAYS.items():
            pack.can_use_compiled_layers = way
            found = cpu_ms(learner, batches)
            metrics[name] = learner.start(batches[0]).result().metrics
            if number:  # the first round is a warm-up
                times[name].append(found)
    learner.close()
    return [
        {
            "learner": "overlap" if config.knobs.overlap else "plain",
            "layers": name,
            "update_ms": statistics.median(found),
            "least_ms": min(found),
            "ratio": statistics.median(found) / statistics.median(times["modules"]),
            "loss": metrics[name]["loss"],
            "grad_norm": metrics[name]["grad_norm"],
        }
        for name, found in times.items()
    ]


def profile_updates(model: Any, batches: Sequence[Batch]) -> str:
    learner = build_learner(SortedConfig.load(QUICKSTART, [NO_CHANGE, "schedule.strategy=sorted-replay"]), model)
    texts: list[str] = []
    for name, way in WAYS.items():
        pack.can_use_compiled_layers = way
        cpu_ms(learner, batches)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            cpu_ms(learner, batches)
        table = found.key_averages().table("self_cpu_time_total", row_limit=20, max_name_column_width=56)
        texts.append(f"{name}, {len(batches)} updates\n{table}")
    return "\n".join(texts)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=1280)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print tables of the torch profiler and save nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, batches, rollout_s = collect(options.samples)
    if options.profile:
        print(profile_updates(model, batches))
        return
    rows = [row for strategy in ("sorted-replay", "async") for row in measure(model, batches, options.rounds, strategy)]
    answers = [sum(sample.num_tokens for sample in batch.samples) for batch in batches]
    record = {
        "samples": options.samples,
        "rounds": options.rounds,
        "batches": len(batches),
        "tokens": statistics.mean(answers),
        "rollout_ms": rollout_s * 1e3,
        "rows": rows,
    }
    save("update", record)
    if options.json:
        print(json.dumps(record))
        return
    table = Table("learner", "layers", "CPU ms per update", "minimum", "ratio", "loss", "gradient norm", box=None)
    for row in rows:
        table.add_row(
            *(row["learner"], row["layers"], f"{row['update_ms']:.1f}", f"{row['least_ms']:.1f}"),
            *(f"{row['ratio']:.2f}", f"{row['loss']:.7f}", f"{row['grad_norm']:.7f}"),
        )
    Console().print(table)
    tokens, rollout_ms = record["tokens"], record["rollout_ms"]
    Console().print(f"{len(batches)} batches of {tokens:,.0f} answer tokens; rollout of one: {rollout_ms:.0f} CPU ms")


if __name__ == "__main__":
    main()
