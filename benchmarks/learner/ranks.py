"""Sharded ranks against one process: are losses and weights equal after the same updates, and what does a rank cost?

    python -m benchmarks.learner.ranks [--ranks 2] [--context 1] [--updates 5] [--hidden 256] [--dtype float32] [--json]

The ranks of the sharded learner communicate over gloo, each in a process with one thread, without Ray. The optimizer is
plain SGD: Adam divides by small numbers and would enlarge differences between gradients. At the end one process loads
the state of the ranks, and new ranks load it too; weights and moments must be equal. Times are CPU seconds per update
without the first. With gloo a rank also uses CPU time while it waits for another rank. In bfloat16, ranks and one
process round at other places: both are compared with one process in float32, weights relative to how far they moved.
"""

from __future__ import annotations

import argparse
import json
import math
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
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.config.sections import LearnerSection
from sortedrl.learner.sharded.rank import RankLearner
from sortedrl.learner.sharded.shards import skeleton_of, weights_of
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch, FinishReason, Prompt, Sample, Segment
from sortedrl.weights import tensor_of

VOCABULARY, LAYERS, SAMPLES, GROUP = 1024, 4, 32, 4
GOAL = 1e-5  # largest relative difference of losses and weights


def settings_of(dtype: str, ranks: int = 1, context: int = 1) -> LearnerSection:
    values = {"micro_tokens": 2048, "lr": 0.05, "group_size": GROUP, "grad_clip": 1.0, "dtype": dtype}
    return SortedConfig(learner={**values, "ranks": ranks, "context_parallel": context}).learner


def make_model(hidden: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def make_batch(update: int) -> Batch:
    """A batch of random answers of 20 to 400 tokens with random log-probs; the comparison needs no real answers."""
    noise = torch.Generator().manual_seed(update)
    samples: list[Sample] = []
    for index in range(SAMPLES):
        length = int(torch.randint(20, 400, (), generator=noise))
        segment = Segment(
            version=update,
            tokens=torch.randint(VOCABULARY, (length,), generator=noise).tolist(),
            logprobs=(-6.9 + 0.1 * torch.randn(length, generator=noise)).tolist(),
        )
        samples.append(
            Sample(
                id=index,
                prompt=Prompt(id=str(index // GROUP), tokens=(1, 2, 3 + index // GROUP), content=""),
                index=index % GROUP,
                epoch=0,
                cohort=0,
                seed=index,
                budget=512,
                segments=[segment],
                finish_reason=FinishReason.STOP,
                reward=float(torch.rand((), generator=noise)),
            )
        )
    return Batch(update=update, version=update, samples=tuple(samples), progress=0.0)


def train(learner: TorchLearner, updates: int) -> dict[str, Any]:
    """Train; returns the losses and the CPU seconds per update."""
    groups = [
        {key: group[key] for key in ("params", "rate", "weight_decay")} for group in learner.optimizer.param_groups
    ]
    learner.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)  # pyright: ignore[reportAttributeAccessIssue]
    losses, seconds = [], []
    for update in range(updates):
        batch, began = make_batch(update), time.process_time()
        losses.append(learner.start(batch).result().metrics["loss"])
        seconds.append(time.process_time() - began)
    return {"losses": losses, "cpu_s": sum(seconds[1:]) / max(len(seconds) - 1, 1)}


def held_bytes(learner: TorchLearner) -> int:
    """Bytes of weights, gradients and AdamW moments in this process: four numbers per parameter."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in learner.model.parameters()]
    return sum(4 * parameter.nbytes for parameter in local)


def run_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.ranks, timeout=timedelta(seconds=600))
    mesh, model = init_device_mesh("cpu", (args.ranks,)), make_model(args.hidden)
    skeleton, arrays = skeleton_of(model), weights_of(model)
    settings = settings_of(args.dtype, args.ranks, args.context)
    learner = RankLearner(skeleton, settings, temperature=1.0, mesh=mesh, weights=arrays)
    found = {**train(learner, args.updates), "held_bytes": held_bytes(learner)}
    write(folder / "ranks", rank, whole(learner), learner.state_dict(), found)
    dist.barrier()
    # Here new ranks load the state; `measure` loads the same state in one process.
    state = read_state(folder / "ranks")
    again = RankLearner(
        skeleton_of(model),
        settings,
        temperature=1.0,
        mesh=mesh,
        weights=weights_of(filled(model, load_file(folder / "ranks" / "weights.safetensors"))),
    )
    again.load_state_dict(state)
    write(folder / "back", rank, whole(again), again.state_dict(), {})
    dist.destroy_process_group()


def whole(learner: RankLearner) -> dict[str, Tensor]:
    return {name: tensor_of(array, is_floating=True) for name, array in learner.trained_weights().items()}


def filled(model: Any, weights: dict[str, Tensor]) -> Any:
    model.load_state_dict(weights, strict=False)  # the tied output head has another name
    return model


def write(folder: Path, rank: int, weights: dict[str, Tensor], state: dict[str, Any], found: dict[str, Any]) -> None:
    if rank == 0:
        folder.mkdir()
        save_file(weights, folder / "weights.safetensors")
        save_file(state.pop("optimizer"), folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps({"learner": state, **found}), encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return {**saved["learner"], "optimizer": load_file(folder / "optimizer.safetensors")}


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys(), "different tensors"
    return max(
        float((value - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-30)) for name, value in ours.items()
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    settings = settings_of(args.dtype)
    one = TorchLearner(make_model(args.hidden), settings, temperature=1.0)
    alone = train(one, args.updates)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spawn(run_rank, args=(args, folder), nprocs=args.ranks)
        found = json.loads((folder / "ranks" / "state.json").read_text(encoding="utf-8"))
        weights, state = load_file(folder / "ranks" / "weights.safetensors"), read_state(folder / "ranks")
        taken = TorchLearner(filled(make_model(args.hidden), weights), settings, temperature=1.0)
        taken.load_state_dict(state)
        back = load_file(folder / "back" / "weights.safetensors"), read_state(folder / "back")["optimizer"]
        moments = state["optimizer"]
        through_one = apart(taken.state_dict()["optimizer"], moments)
        through_ranks = max(apart(back[0], weights), apart(back[1], moments))
    pairs = zip(found["losses"], alone["losses"], strict=True)
    return {
        "ranks": args.ranks,
        "context_parallel": args.context,
        "updates": args.updates,
        "dtype": args.dtype,
        **(rounding(args, weights, found["losses"], one, alone["losses"]) if args.dtype == "bfloat16" else {}),
        "parameters": sum(parameter.numel() for parameter in one.model.parameters()),
        "loss_apart": max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs),
        "weights_apart": apart(weights, {name: p.detach() for name, p in one.model.named_parameters()}),
        "state_apart_in_one": through_one,
        "state_apart_in_ranks": through_ranks,
        "held_share": found["held_bytes"] / held_bytes(one),
        "cpu_s": {"one": alone["cpu_s"], "rank 0": found["cpu_s"]},
        "cpu_ratio": found["cpu_s"] / alone["cpu_s"],
        "goal": GOAL,
    }


def rounding(
    args: argparse.Namespace, weights: dict[str, Tensor], losses: list[float], one: TorchLearner, of_one: list[float]
) -> dict[str, float]:
    """How far ranks and one process, both in bfloat16, are from one process in float32."""
    exact = TorchLearner(make_model(args.hidden), settings_of("float32"), temperature=1.0)
    start = {name: value.detach().clone() for name, value in exact.model.named_parameters()}
    exact_losses = train(exact, args.updates)["losses"]
    end = {name: value.detach() for name, value in exact.model.named_parameters()}
    moved = distance(end, start)
    return {
        "loss_rounding_ranks": max(abs(a - b) for a, b in zip(losses, exact_losses, strict=True)),
        "loss_rounding_one": max(abs(a - b) for a, b in zip(of_one, exact_losses, strict=True)),
        "weights_rounding_ranks": distance(weights, end) / moved,
        "weights_rounding_one": distance({k: p.detach() for k, p in one.model.named_parameters()}, end) / moved,
    }


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((value - theirs[name]).square().sum()) for name, value in ours.items()))


def table(record: dict[str, Any]) -> Table:
    shown = Table(title=f"{record['ranks']} ranks against one process, {record['updates']} updates")
    for name in ("figure", "value"):
        shown.add_column(name)
    for name in (
        "loss_apart",
        "weights_apart",
        "state_apart_in_one",
        "state_apart_in_ranks",
        "held_share",
        "cpu_ratio",
        *(name for name in record if "_rounding_" in name),
    ):
        shown.add_row(name, f"{record[name]:.3g}")
    return shown


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--context", type=int, default=1, help="ranks that share a micro-batch")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    with console.status("training in one process, then in ranks"):
        record = measure(args)
    name = "ranks" if args.context == 1 else f"ranks-context-{args.context}"
    save(name if args.dtype == "float32" else f"{name}-{args.dtype}", record)
    if args.json:
        print(json.dumps(record))
    else:
        console.print(table(record))


if __name__ == "__main__":
    main()
