"""Answers of 16,384 tokens over 1, 2 and 4 ranks that share them: is the update the same, and does memory fall?

    python -m benchmarks.learner.long_answers [--answer 16384] [--sizes 1,2,4] [--json]

A small Llama learns from one answer of full length and a short one. The ranks of a context group
(`learner.context_parallel`) communicate over gloo, each in a process with one thread, without Ray. Peak memory is what
the process had at most during the update (VmHWM) above what it had before; beside it stands what the dry run with fake
tensors says of activations and gathers. Losses and weights after the updates are compared with those of one rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.learner.ranks import apart, whole
from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.learner.dry_run import MicroShape, measure_update
from sortedrl.learner.sharded.rank import RankLearner
from sortedrl.records import Batch, FinishReason, Prompt, Sample, Segment

VOCABULARY, PROMPT, SHORT, UPDATES = 512, 16, 64, 1
MIB = 2**20


def model_config(answer: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=answer + PROMPT,
    )


def settings_of(size: int, answer: int) -> Any:
    values = {"ranks": size, "context_parallel": size, "micro_tokens": answer + PROMPT + SHORT, "dtype": "float32"}
    return SortedConfig(learner={**values, "algorithm": "reinforce++", "group_size": 1, "lr": 1e-3}).learner


def make_batch(update: int, answer: int) -> Batch:
    noise = torch.Generator().manual_seed(update)
    samples = [
        Sample(
            id=index,
            prompt=Prompt(id="0", tokens=tuple(range(PROMPT)), content=""),
            index=index,
            epoch=0,
            cohort=0,
            seed=index,
            budget=answer,
            segments=[
                Segment(
                    version=update,
                    tokens=torch.randint(VOCABULARY, (length,), generator=noise).tolist(),
                    logprobs=[-6.2] * length,
                )
            ],
            finish_reason=FinishReason.STOP,
            reward=float(index),
        )
        for index, length in enumerate((answer, SHORT))
    ]
    return Batch(update=update, version=update, samples=tuple(samples), progress=0.0)


def run_rank(rank: int, size: int, answer: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=900))
    torch.manual_seed(0)
    model = LlamaForCausalLM(model_config(answer)).eval()
    mesh = init_device_mesh("cpu", (size,))
    learner = RankLearner(model, settings_of(size, answer), temperature=1.0, mesh=mesh)
    learner.start(make_batch(0, 64)).result()  # makes the optimizer's state
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM starts again from what is there now
    began = time.process_time()
    losses = [learner.start(make_batch(update, answer)).result().metrics["loss"] for update in range(1, UPDATES + 1)]
    found = {"losses": losses, "peak": memory("VmHWM") - before, "cpu_s": (time.process_time() - began) / UPDATES}
    weights = whole(learner)
    if rank == 0:
        save_file(weights, folder / "weights.safetensors")
    (folder / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def memory(name: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(size: int, answer: int, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    spawn(run_rank, args=(size, answer, folder), nprocs=size)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    micro = MicroShape(prompt_tokens=PROMPT, answer_tokens=answer, num_tokens=PROMPT + answer)
    dry = measure_update(model_config(answer), settings_of(size, answer), micro, num_ranks=size, device_bytes=2**30)
    return {
        "context_parallel": size,
        "losses": ranks[0]["losses"],
        "peak_mib": max(rank["peak"] for rank in ranks) / MIB,
        "dry_mib": (dry.activations + dry.gathers) / MIB,
        "cpu_s": max(rank["cpu_s"] for rank in ranks),
    }


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for size in map(int, args.sizes.split(",")):
            record = measure(size, args.answer, Path(name) / str(size))
            weights = load_file(Path(name) / str(size) / "weights.safetensors")
            first = records[0] if records else record
            base = load_file(Path(name) / str(first["context_parallel"]) / "weights.safetensors")
            pairs = zip(record["losses"], first["losses"], strict=True)
            record["loss_apart"] = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
            record["weights_apart"] = apart(weights, base)
            records.append(record)
    return records


def table(records: list[dict[str, Any]], answer: int) -> Table:
    shown = Table(title=f"an answer of {answer:,} tokens over ranks that share it")
    names = ("context_parallel", "peak_mib", "dry_mib", "cpu_s", "loss_apart", "weights_apart")
    for name in names:
        shown.add_column(name)
    for record in records:
        shown.add_row(*(f"{record[name]:.4g}" for name in names))
    return shown


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--answer", type=int, default=16384)
    parser.add_argument("--sizes", default="1,2,4", help="ranks that share an answer, separated by commas")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    with console.status("training"):
        records = compare(args)
    save("long_answers", {"answer": args.answer, "sizes": records})
    if args.json:
        print(json.dumps({"answer": args.answer, "sizes": records}))
    else:
        console.print(table(records, args.answer))


if __name__ == "__main__":
    main()
