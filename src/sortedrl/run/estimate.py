"""What a run will need, before it runs: memory by part, and time by phase.

`doctor` shows it. Memory is counted from the model's shape and the configuration; time comes from a cost model of
`simulate/`, the roofline of some hardware or one fitted to an earlier run. Both are estimates: activations are those of
a Llama block, and how long answers become is what training decides, so time is given for two lengths.

What it keeps true: no weights are read; every part is bytes or seconds of its own, and totals are their sums.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.errors import ModelError
from sortedrl.learner.logprobs import KEPT_ELEMENTS, PIECE_ELEMENTS, WHOLE_ELEMENTS
from sortedrl.simulate.costs import (
    CostModel,
    Hardware,
    ModelShape,
    RooflineCost,
    load_hardware,
    load_model_shape,
    preset_names,
)
from sortedrl.simulate.fit import fit_runs

FLOAT = 4  # bytes of what the learner holds, and of all of the local engine
HALF = 2  # of an engine on accelerators
TYPICAL_SHARE = 0.25  # of the token budget that a typical answer is taken to use
LOGIT_COPIES = 3  # logits, their log-softmax, and its exponential or the gradient


@dataclass(slots=True, kw_only=True, frozen=True)
class Memory:
    """Bytes by part, at the peak of an update; rollout needs less. Parts of a learner over ranks are those of all."""

    weights: int
    engine_copy: int  # of the weights, where the engine has its own
    reference: int
    gradients: int
    optimizer: int
    kv_cache: int
    activations: int
    logits: int
    gathered: int = 0  # over ranks: the layer at hand, whole, and its gradients
    driver: int = 0  # over ranks: the whole model in the run's own process, and the trained weights on their way there
    ranks: int = 1

    @property
    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ranks"}

    @property
    def of_rank(self) -> int:
        """What one rank holds: its rows of all that is cut, and micro-batches of its own."""
        cut = self.weights + self.reference + self.gradients + self.optimizer
        return (cut + self.activations + self.logits + self.gathered) // self.ranks

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(slots=True, kw_only=True, frozen=True)
class Duration:
    """Seconds of one update by phase, and of the run, if every answer has `length` tokens."""

    length: int
    rollout_s: float
    update_s: float
    publish_s: float
    num_updates: int
    eval_s: float  # of one evaluation
    num_evals: int

    @property
    def cycle_s(self) -> float:
        return self.rollout_s + self.update_s + self.publish_s

    @property
    def total_s(self) -> float:
        return self.cycle_s * self.num_updates + self.eval_s * self.num_evals


def read_shape(path: str, folder: Path) -> ModelShape:
    """The shape of a model from its config.json, or, where the folder is not there, from a preset of its name."""
    if (folder / "config.json").is_file():
        return _shape_of(folder)
    name = Path(path).name.lower()
    for preset in preset_names("models"):
        if name.startswith(preset) or name.replace("meta-", "").startswith(preset):
            return replace(load_model_shape(preset), bytes_per_value=FLOAT)
    known = ", ".join(preset_names("models"))
    raise ModelError(f"the shape of model {path!r} is not known: give a folder with config.json, or one of {known}")


def _shape_of(folder: Path) -> ModelShape:
    """Counted on the meta device, where a model has shapes and no numbers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            module: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{folder}/config.json cannot be read: {why}") from error
    text = config.get_text_config()
    heads = text.num_attention_heads
    return ModelShape(
        params=sum(parameter.numel() for parameter in module.parameters()),
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        bytes_per_value=FLOAT,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        vocab=text.vocab_size,
    )


def estimate_memory(config: SortedConfig, model: ModelShape) -> Memory:
    """The learner trains in float32; an engine has its own weights, the local one for its fused kernels.

    `model.bytes_per_value` is that of the engine's weights and KV cache.
    """
    weights = int(model.params) * FLOAT
    trained = int(model.params) if config.lora.rank == 0 else _adapter_params(config, model)
    window, ranks = config.task.max_prompt_tokens + config.engine.max_new_tokens, config.learner.ranks
    # An update has no more tokens than its samples, and a micro-batch no more than its budget, one sample excepted.
    share = -(-config.schedule.update_batch // ranks)
    micro = max(min(config.learner.micro_tokens, share * window), window)
    has_reference = config.learner.kl_coef > 0 and config.lora.rank == 0  # without adapters the model is its reference
    return Memory(
        weights=weights,
        engine_copy=int(model.weight_bytes) * config.engine.replicas,
        reference=weights if has_reference else 0,
        gradients=trained * FLOAT,
        optimizer=2 * trained * FLOAT,
        kv_cache=int(config.slots * window * model.kv_bytes),
        activations=ranks * _kept_bytes(model, micro, is_recomputed=config.learner.recompute),
        logits=ranks * _logit_bytes(micro * model.vocab),
        gathered=ranks * 2 * weights // model.layers if ranks > 1 else 0,
        driver=2 * weights if ranks > 1 and not config.learner.rank_gpus else 0,  # with GPUs it is in other memory
        ranks=ranks,
    )


def _logit_bytes(size: int) -> int:
    """What a micro-batch with so many logits holds of them at once: a piece's, and what is kept of the others."""
    kept = min(size, KEPT_ELEMENTS) if size > WHOLE_ELEMENTS else 0
    return (LOGIT_COPIES * min(size, PIECE_ELEMENTS) + kept) * FLOAT


def activation_bytes(model: ModelShape) -> int:
    """What a Llama block keeps of one token for the backward pass, over all layers.

    Of the hidden size: both norms' inputs, what they normalise and their outputs; of the query heads: before and
    after the rotation, and attention's output; of the key-value heads likewise, and the values; of the feed-forward
    size: gate, its activation, up, and their product.
    """
    of_block = (
        6 * model.hidden
        + 3 * model.heads * model.head_dim
        + 3 * model.kv_heads * model.head_dim
        + 4 * model.intermediate
    )
    return model.layers * of_block * FLOAT


def _kept_bytes(model: ModelShape, num_tokens: int, *, is_recomputed: bool) -> int:
    """Activations of a micro-batch: all of them, or every layer's input and all of one layer."""
    if not is_recomputed:
        return num_tokens * activation_bytes(model)
    return num_tokens * (model.layers * model.hidden * FLOAT + activation_bytes(model) // model.layers)


def _adapter_params(config: SortedConfig, model: ModelShape) -> int:
    """Two thin matrices beside each of the seven linear maps of a block; all of them unless modules are named."""
    q, kv, h, f = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.hidden, model.intermediate
    sides = {
        "q_proj": h + q,
        "k_proj": h + kv,
        "v_proj": h + kv,
        "o_proj": q + h,
        "gate_proj": h + f,
        "up_proj": h + f,
        "down_proj": f + h,
    }
    chosen = config.lora.target_modules or tuple(sides)
    return model.layers * config.lora.rank * sum(sides.get(name, h + f) for name in chosen)


def estimate_time(config: SortedConfig, cost: CostModel, length: int) -> Duration:
    """A schedule that keeps every slot busy: the least that this hardware needs for answers of this length."""
    prompt, batch = config.task.max_prompt_tokens // 2, config.schedule.update_batch
    num_updates = -(-config.run.samples // batch)
    num_evals = 0
    if config.eval.prompts:
        every = config.eval.every_samples
        num_evals = 2 + (max(0, (config.run.samples - 1) // every) if every else 0)
    return Duration(
        length=length,
        rollout_s=_rollout_s(config, cost, batch, prompt, length),
        # Siblings share their prompt, in the update as in the prefill.
        update_s=cost.update_s(batch * length + batch // config.learner.group_size * prompt)
        * config.learner.inner_epochs,
        publish_s=cost.publish_s(),
        num_updates=num_updates,
        eval_s=_rollout_s(config, cost, config.eval.prompts * (config.eval.samples + 1), prompt, length),
        num_evals=num_evals,
    )


def _rollout_s(config: SortedConfig, cost: CostModel, num_samples: int, prompt: int, length: int) -> float:
    if not num_samples:
        return 0.0
    slots = min(config.engine.slots, num_samples)
    rounds, num_prompts = num_samples / slots, max(1, slots // config.learner.group_size)
    return rounds * (cost.decode_s(slots, slots * prompt, length) + cost.prefill_s([prompt] * num_prompts))


def measured_hardware(cpu: Hardware) -> Hardware:
    """This machine's processor: what a product of matrices and a copy reach now, the rest as in the preset."""
    import time

    import torch

    def seconds(work: Any) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - start)
        return best

    side, size = 768, 2**24
    a, b = torch.rand(side, side), torch.rand(side, side)
    flops = 2 * side**3 / seconds(lambda: a @ b)
    source, target = torch.rand(size // FLOAT), torch.empty(size // FLOAT)
    bandwidth = 2 * size / seconds(lambda: target.copy_(source))
    # Shares of what was measured, which is what kernels reach: small batches and many small products reach less.
    return replace(cpu, flops=flops, bandwidth=bandwidth, bandwidth_share=0.8, train_flops_share=0.5)


@dataclass(slots=True, kw_only=True, frozen=True)
class Forecast:
    """What `doctor` says about memory and time."""

    memory: Memory
    room: int  # bytes there are
    room_of_rank: int  # of them, what one rank can have
    where: str
    typical: Duration
    longest: Duration
    source: str  # of the times

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room and self.memory.of_rank <= self.room_of_rank

    @property
    def memory_text(self) -> str:
        parts = ", ".join(
            f"{name.replace('_', ' ')} {_bytes(size)}" for name, size in self.memory.parts.items() if size
        )
        total = f"about {_bytes(self.memory.total)} of {_bytes(self.room)} on {self.where}: {parts}"
        if self.memory.ranks > 1:
            total += f"; each of {self.memory.ranks} ranks {_bytes(self.memory.of_rank)} of {_bytes(self.room_of_rank)}"
        remedy = "lower learner.micro_tokens or engine.slots, set lora.rank, or use more devices"
        return total if self.fits else f"{total}; that does not fit: {remedy}"

    @property
    def time_text(self) -> str:
        told = [
            f"{_seconds(d.total_s)} if answers take {d.length:,} tokens ({d.num_updates:,} updates of "
            f"{_seconds(d.cycle_s)}: rollout {_seconds(d.rollout_s)}, update {_seconds(d.update_s)}; "
            f"{d.num_evals} evaluations of {_seconds(d.eval_s)})"
            for d in (self.typical, self.longest)
        ]
        return f"at least {told[0]}; {told[1]}; by {self.source}"


def forecast_run(
    config: SortedConfig, folder: Path, *, hardware: str | None, devices: int, from_run: Path | None
) -> Forecast:
    """For `devices` of some hardware, or for this machine; times by an earlier run where one is given."""
    shape = read_shape(config.model.path, folder)
    on_accelerators = hardware is not None and hardware != "cpu"
    shape = replace(shape, bytes_per_value=HALF if on_accelerators else FLOAT)
    room_of_rank: int | None = None
    if hardware is None:
        room, where = _machine_memory(), "this machine"
        kind = measured_hardware(load_hardware("cpu"))
        source = "a roofline of this machine as busy as it is"
    else:
        kind = load_hardware(hardware)
        room, where = int(kind.memory * kind.memory_share * devices), f"{devices} x {hardware}"
        if on_accelerators and config.learner.ranks > 1:
            room_of_rank = int(room / devices * max(config.learner.rank_gpus, 1))
        source = f"the roofline of {where}"
    cost: CostModel = RooflineCost(hardware=kind, model=shape, tensor_parallel=devices)
    if from_run is not None:
        cost, source = fit_runs([from_run]).cost, f"what {from_run} took"
    budget = config.engine.max_new_tokens
    return Forecast(
        memory=estimate_memory(config, shape),
        room=room,
        room_of_rank=room if room_of_rank is None else room_of_rank,
        where=where,
        typical=estimate_time(config, cost, max(1, int(budget * TYPICAL_SHARE))),
        longest=estimate_time(config, cost, budget),
        source=source,
    )


def _machine_memory() -> int:
    """Of the first accelerator, since one that is there holds the model; else all that this machine has."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _bytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.1f} MiB"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
