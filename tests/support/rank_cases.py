"""Updates that one process and several ranks both compute, for test_ranks.py, and the function that each rank runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from sortedrl.learner.algorithms import ALGORITHMS
from sortedrl.learner.pack import MicroBatch
from sortedrl.learner.sharded.rank import RankLearner
from sortedrl.learner.sharded.shards import shard_like, skeleton_of, weights_of
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch
from sortedrl.weights import tensor_of
from tests.support.learners import Settings, make_batch, make_model

NUM_RANKS = 2
NUM_UPDATES = 5
SAVED_AFTER = 2
SHORT_OF_MEMORY = ("short-ppo", "context-2-short")  # cases in which one rank runs out of memory


@dataclass(slots=True, kw_only=True, frozen=True)
class RankCase:
    settings: Settings
    is_sgd: bool = False
    is_skeleton: bool = False  # build the ranks from a model without weights
    is_adapted: bool = False
    kv_heads: int | None = None  # with this, the model has four heads
    num_updates: int = NUM_UPDATES


CASES = {
    # Micro-batches of 24 tokens: some ranks have fewer of them, and make a pass without effect.
    "sgd": RankCase(settings=Settings(micro_tokens=24, lr=0.1), is_sgd=True),
    "clipped": RankCase(
        settings=Settings(micro_tokens=24, lr=0.1, grad_clip=0.05, loss_mean="sequence"), is_sgd=True, num_updates=2
    ),
    # Each mini-batch is one sample, so one rank has nothing to compute.
    "one-by-one": RankCase(settings=Settings(inner_steps=8, lr=0.05), is_sgd=True, num_updates=1),
    "adam": RankCase(settings=Settings(micro_tokens=40, weight_decay=0.1), is_skeleton=True),
    "ppo": RankCase(
        settings=Settings(
            algorithm="ppo", micro_tokens=40, kl_coef=0.1, importance="token", inner_steps=2, entropy_coef=0.01
        ),
        is_skeleton=True,
        num_updates=3,
    ),
    "short-ppo": RankCase(
        settings=Settings(micro_tokens=100, lr=0.1, algorithm="ppo", kl_coef=0.1), is_sgd=True, num_updates=1
    ),
    "adapters": RankCase(
        settings=Settings(micro_tokens=24, lr=1.0), is_sgd=True, is_skeleton=True, is_adapted=True, num_updates=2
    ),
}
_LONG = Settings(micro_tokens=40, lr=0.1, context_parallel=2)
CONTEXT_CASES = {
    "context-2": RankCase(settings=_LONG, is_sgd=True),
    # One head of keys and values, which both ranks of a group need.
    "context-2-ppo": RankCase(
        settings=replace(
            _LONG, algorithm="ppo", kl_coef=0.1, importance="token", entropy_coef=0.01, inner_steps=2, recompute=True
        ),
        is_sgd=True,
        is_skeleton=True,
        kv_heads=1,
        num_updates=2,
    ),
    # Each mini-batch is one sample: one of the ranks has nothing but the prompt of a short answer.
    "context-2-one-by-one": RankCase(
        settings=replace(_LONG, inner_steps=8, entropy_coef=0.05), is_sgd=True, num_updates=1
    ),
    "context-2-short": RankCase(
        settings=replace(_LONG, micro_tokens=100, algorithm="ppo", kl_coef=0.1), is_sgd=True, num_updates=1
    ),
    "context-2-adapters": RankCase(
        settings=replace(_LONG, lr=1.0, algorithm="gspo", importance_mask="sequence", recompute=True),
        is_sgd=True,
        is_skeleton=True,
        is_adapted=True,
        num_updates=2,
    ),
}
WIDE_CONTEXT_CASES = {
    "context-4": RankCase(settings=replace(_LONG, context_parallel=4), is_sgd=True, kv_heads=2),
    "context-2-of-4": RankCase(settings=replace(_LONG, micro_tokens=24), is_sgd=True, kv_heads=4),
    "context-2-copies": RankCase(settings=replace(_LONG, rank_replicas=2), is_sgd=True, kv_heads=4, num_updates=2),
}
_LOW = Settings(micro_tokens=40, lr=0.1, dtype="bfloat16")
LOW_CASES = {
    "bf16": RankCase(settings=replace(_LOW, recompute=True), is_sgd=True, is_skeleton=True, num_updates=2),
    "bf16-ppo-kl": RankCase(
        settings=replace(_LOW, algorithm="ppo", kl_coef=0.1, importance="token", fp32_head=True),
        is_sgd=True,
        num_updates=1,
    ),
    "bf16-adapters": RankCase(
        settings=replace(_LOW, algorithm="grpo", kl_coef=0.1, lr=1.0),
        is_sgd=True,
        is_skeleton=True,
        is_adapted=True,
        num_updates=1,
    ),
}
FIVE_LOW_UPDATES = {"bf16-five": replace(LOW_CASES["bf16"], num_updates=NUM_UPDATES)}
# Every algorithm, in full and with adapters; with a KL penalty, recomputed activations and the head in float32 in turn.
ALL_LOW_CASES = {
    f"bf16-{name}-{kind}": RankCase(
        settings=replace(
            _LOW,
            algorithm=name,
            clip_low=None,
            clip_high=None,
            lr=1.0 if kind == "adapters" else 0.1,
            kl_coef=0.1 if number % 2 else 0.0,
            recompute=number % 3 == 0,
            fp32_head=number % 4 == 1,
            importance=("none", "token", "sequence")[number % 3],
        ),
        is_sgd=True,
        is_skeleton=True,
        is_adapted=kind == "adapters",
        num_updates=2,
    )
    for kind in ("full", "adapters")
    for number, name in enumerate(ALGORITHMS)
}
EVERY_CASE = CASES | LOW_CASES | FIVE_LOW_UPDATES | ALL_LOW_CASES | CONTEXT_CASES | WIDE_CONTEXT_CASES


def model_of(name: str) -> Any:
    kv_heads = EVERY_CASE[name].kv_heads
    model = make_model() if kv_heads is None else make_model(heads=4, kv_heads=kv_heads)
    if EVERY_CASE[name].is_adapted:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def use_sgd(learner: TorchLearner) -> None:
    """Replace Adam by SGD: Adam divides by small numbers, which enlarges rounding differences."""
    groups = [{**group, "params": list(group["params"])} for group in learner.optimizer.param_groups]
    learner.optimizer = torch.optim.SGD(  # pyright: ignore[reportAttributeAccessIssue]
        [{key: group[key] for key in ("params", "rate", "weight_decay")} for group in groups], lr=0.1
    )


def batch_of(update: int) -> Batch:
    made = make_batch(make_model(), off_policy=0.1, progress=update / 10)
    return replace(made, update=update, version=2)


def run_updates(learner: TorchLearner, first: int, last: int) -> list[dict[str, float]]:
    return [learner.start(batch_of(update)).result().metrics for update in range(first, last)]


def rank_learner(name: str) -> RankLearner:
    case, model = EVERY_CASE[name], model_of(name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = weights_of(model) if case.is_skeleton else None
    learner = RankLearner(
        skeleton_of(model) if case.is_skeleton else model, case.settings, temperature=1.0, mesh=mesh, weights=weights
    )
    if case.is_sgd:
        use_sgd(learner)
    return learner


def whole_weights(learner: RankLearner) -> dict[str, Tensor]:
    return {name: tensor_of(array, is_floating=True) for name, array in learner.trained_weights().items()}


def save_state(folder: Path, learner: RankLearner, metrics: list[dict[str, float]]) -> None:
    """Every rank must call this, because collecting the weights is collective; rank 0 writes the files."""
    weights, state = whole_weights(learner), learner.state_dict()
    if dist.get_rank() == 0:
        folder.mkdir()
        save_file(weights, folder / "weights.safetensors")
        save_file(state.pop("optimizer"), folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps({"metrics": metrics, "learner": state}))


def read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], list[dict[str, float]]]:
    """The saved weights, learner state and metrics."""
    saved = json.loads((folder / "state.json").read_text())
    state = {**saved["learner"], "optimizer": load_file(folder / "optimizer.safetensors")}
    return load_file(folder / "weights.safetensors"), state, saved["metrics"]


def run_rank(rank: int, folder: Path, size: int, names: tuple[str, ...]) -> None:
    """Run cases as one of `size` ranks; writes each final state and each half-way state into `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    for name in names:
        case, learner = EVERY_CASE[name], rank_learner(name)
        if name in SHORT_OF_MEMORY and rank == 1:
            run_out_of_memory(learner)
        metrics = run_updates(learner, 0, min(SAVED_AFTER, case.num_updates))
        save_state(folder / f"{name}-half", learner, metrics)
        metrics += run_updates(learner, len(metrics), case.num_updates)
        save_state(folder / name, learner, metrics)
        if (folder / f"{name}-one").exists():  # saved by a single process; continue from it
            weights, state, _ = read_state(folder / f"{name}-one")
            learner = rank_learner(name)
            load_whole(learner, weights)
            learner.load_state_dict(state)
            save_state(folder / f"{name}-taken", learner, [])
            save_state(folder / f"{name}-gone-on", learner, run_updates(learner, SAVED_AFTER, case.num_updates))
    dist.destroy_process_group()


def run_out_of_memory(learner: RankLearner) -> None:
    """Let the second layer run out of memory for micro-batches of several samples, once forward and once backward."""
    layer, forward = learner.model.get_submodule("model.layers.1.mlp"), learner._forward
    failures, num_samples = ["forward", "backward"], 0

    def spy(module: Any, micro: MicroBatch, **options: Any) -> Any:
        nonlocal num_samples
        num_samples = micro.num_samples
        return forward(module, micro, **options)

    def fail(when: str) -> None:
        if num_samples > 1 and failures[:1] == [when]:
            raise torch.OutOfMemoryError(f"CUDA out of memory ({failures.pop(0)})")

    learner._forward = spy
    layer.register_forward_pre_hook(lambda *_: fail("forward"))
    layer.register_full_backward_pre_hook(lambda *_: fail("backward"))


@torch.no_grad()
def load_whole(learner: RankLearner, weights: dict[str, Tensor]) -> None:
    for name, parameter in learner.model.named_parameters():
        parameter.copy_(shard_like(weights[name], parameter))
