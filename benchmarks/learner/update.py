"""Time of an update with compiled layers and with the layers of transformers: of the quickstart, and of a real model.

    python -m benchmarks.learner.update [--samples 1280] [--rounds 5] [--profile] [--json]
    python -m benchmarks.learner.update --real [--full] [--threads 2] [--rounds 5] [--profile] [--json]

The script trains like the quickstart on one thread and keeps the batches. Then a new learner repeats the batches of the
second half in both ways, in turns, at a learning rate that changes nothing. Times are CPU milliseconds, which other
work on the machine hardly changes. `rollout_ms` is the CPU time of engine and controller for the samples of one update.
The learner `overlap` is the one of `async`, which takes a snapshot of the weights.

`--real` updates SmolLM2-135M on 8 answers whose lengths are like those of tail-smollm2, with LoRA or, with `--full`,
all weights, in float32 and in bfloat16, in turns. Times are seconds; gradients are compared with those of transformers'
layers in float32. It also measures a publication: merging the adapters and laying the weights out for the engine.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import QUICKSTART, make_parser, save
from sortedrl.buffer import Buffer
from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.learner import pack
from sortedrl.learner.lora import adapt, peft_config_of
from sortedrl.learner.model import load_model
from sortedrl.learner.smollm2 import smollm2_path
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch
from sortedrl.run.builders.learner import build_learner
from sortedrl.run.builders.loop import build_loop
from sortedrl.run.builders.parts import build_engine, build_parts
from sortedrl.telemetry.events import ignore
from sortedrl.testing.bench.learner import LearnerBench, spread_lengths
from sortedrl.testing.bench.learner_round import read_samples, write_answers

CAN_USE_COMPILED_LAYERS = pack.can_use_compiled_layers
WAYS = {"modules": lambda model, layout: False, "compiled": CAN_USE_COMPILED_LAYERS}
NO_CHANGE = "learner.lr=1e-12"
REAL = "tail-smollm2"
UNCHANGED = (NO_CHANGE, "learner.grad_clip=1e9")  # neither weights nor gradients change
LENGTHS = LearnerBench(trace="lognormal(48, 0.71, 512)", samples=8, scale=1.0)
PROMPT_TOKENS = 40
DTYPES = ("float32", "bfloat16")


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


# ---- a real model ----------------------------------------------------------------------------------------------------


def real_parts(is_full: bool) -> tuple[Any, Batch, dict[str, Any]]:
    """The model, a batch of answers that it wrote itself, and the seconds of a publication."""
    model, _ = load_model(smollm2_path())
    with tempfile.TemporaryDirectory() as scratch:
        job = {
            "lengths": spread_lengths(LENGTHS),
            "prompt_tokens": PROMPT_TOKENS,
            "seed": 0,
            "answers": str(Path(scratch) / "answers.safetensors"),
        }
        write_answers(model, job)
        batch = Batch(update=0, version=0, samples=tuple(read_samples(job)))
    config = SortedConfig.load(REAL)
    if not is_full:
        model = adapt(model, peft_config_of(config.lora))
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # at the start it is 0, and so would be the gradients of the other half
                torch.nn.init.normal_(parameter, std=1e-3)
    return model, batch, publication(config, model)


def publication(config: SortedConfig, model: Any) -> dict[str, float]:
    """Seconds to merge the adapters and to publish the merged weights to an engine."""
    learner = build_learner(config, model)
    engine = build_engine(config, learner.source.module, config.knobs)
    merge_s, publish_s = [], []
    for version in range(1, 4):
        began = time.perf_counter()
        _ = learner.source.module
        merged = time.perf_counter()
        engine.publish(version, learner.source)
        publish_s.append(time.perf_counter() - merged)
        merge_s.append(merged - began)
    engine.close()
    learner.close()
    return {"merge_s": min(merge_s), "publish_s": min(publish_s)}  # `publish_s` merges again


def measure_real(options: argparse.Namespace) -> dict[str, Any]:
    model, batch, published = real_parts(options.full)
    ways = [(layers, dtype) for layers in WAYS for dtype in DTYPES]
    settings = {dtype: SortedConfig.load(REAL, [*UNCHANGED, f"learner.dtype={dtype}"]).learner for dtype in DTYPES}
    learners = {dtype: TorchLearner(model, settings[dtype], temperature=1.0) for dtype in DTYPES}
    gradients: list[torch.Tensor] = []

    def catch(*_: object) -> None:
        gradients.append(torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]))

    times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    metrics: dict[tuple[str, str], dict[str, float]] = {}
    for number in track(range(options.rounds + 1), REAL, console=Console(stderr=True)):
        for layers, dtype in ways:
            pack.can_use_compiled_layers = WAYS[layers]
            handle = register_optimizer_step_pre_hook(catch) if number == 0 else None  # the first round is a warm-up
            began = time.perf_counter()
            metrics[layers, dtype] = learners[dtype].start(batch).result().metrics
            if handle is None:
                times[layers, dtype].append(time.perf_counter() - began)
            else:
                handle.remove()
    if options.profile:
        print(profile_real(learners, batch))
    first = statistics.median(times[ways[0]])
    rows = [
        {
            "layers": layers,
            "dtype": dtype,
            "update_s": statistics.median(times[layers, dtype]),
            "least_s": min(times[layers, dtype]),
            "ratio": statistics.median(times[layers, dtype]) / first,
            "loss": metrics[layers, dtype]["loss"],
            "ratio_p05": metrics[layers, dtype]["ratio_p05"],
            "ratio_p95": metrics[layers, dtype]["ratio_p95"],
            "gradient_cosine": float(torch.cosine_similarity(gradient, gradients[0], 0)),
            "gradient_norm": float(gradient.norm() / gradients[0].norm()),  # as a multiple of the first row's
        }
        for (layers, dtype), gradient in zip(ways, gradients, strict=True)
    ]
    tokens = sum(sample.num_tokens for sample in batch.samples)
    return {
        "full": options.full,
        "threads": options.threads,
        "rounds": options.rounds,
        "tokens": tokens,
        "prompt_tokens": PROMPT_TOKENS * len(batch.samples),
        **published,
        "rows": rows,
    }


def profile_real(learners: dict[str, TorchLearner], batch: Batch) -> str:
    texts: list[str] = []
    for layers, dtype in (("modules", "float32"), ("compiled", "bfloat16")):
        pack.can_use_compiled_layers = WAYS[layers]
        with profile(activities=[ProfilerActivity.CPU]) as found:
            learners[dtype].start(batch).result()
        table = found.key_averages().table("self_cpu_time_total", row_limit=24, max_name_column_width=56)
        texts.append(f"{layers}, {dtype}\n{table}")
    return "\n".join(texts)


def real_table(record: dict[str, Any]) -> Table:
    kind = "all weights" if record["full"] else "LoRA"
    caption = (
        f"{kind}, {record['threads']} threads, {record['tokens']} answer and {record['prompt_tokens']} prompt tokens; "
        f"merging {record['merge_s']:.2f} s, publication {record['publish_s']:.2f} s"
    )
    table = Table("layers", "precision", "s per update", "least", "ratio", "loss", box=None, caption=caption)
    for header in ("policy ratio 5 to 95 %", "gradient cosine", "norm"):
        table.add_column(header)
    for row in record["rows"]:
        table.add_row(
            *(row["layers"], row["dtype"], f"{row['update_s']:.2f}", f"{row['least_s']:.2f}", f"{row['ratio']:.2f}"),
            *(f"{row['loss']:.5f}", f"{row['ratio_p05']:.3f} to {row['ratio_p95']:.3f}"),
            *(f"{row['gradient_cosine']:.5f}", f"{row['gradient_norm']:.4f}"),
        )
    return table


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=1280)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--profile", action="store_true", help="print tables of the torch profiler; without --real, save nothing"
    )
    parser.add_argument("--real", action="store_true", help="a real model in place of the quickstart's")
    parser.add_argument("--full", action="store_true", help="with --real: train all weights instead of adapters")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="with --real")
    options = parser.parse_args()
    if options.real:
        torch.set_num_threads(options.threads)
        record = measure_real(options)
        save(f"update_real{'_full' if options.full else ''}{'_one_thread' if options.threads == 1 else ''}", record)
        print(json.dumps(record)) if options.json else Console(width=140).print(real_table(record))
        return
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
