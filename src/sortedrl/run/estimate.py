"""Estimate the memory and time that a run needs, before it starts.

`sortedrl doctor` shows it. Memory follows from the model's shape and the configuration. Time comes from a cost model of
`simulate/`: a roofline of some hardware, or one fitted to an earlier run. Both are approximate: activations are counted
for Llama blocks, and neither the length of answers nor the load of the machine is known before training, so time is a
range.

Guarantees: no weights are read; parts do not overlap, and totals are their sums.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.errors import ModelError, first_line
from sortedrl.external.hub import find_cached, shown
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

FLOAT = 4  # bytes per value in the learner and in the local engine
HALF = 2  # bytes per value in an engine on accelerators
SHORT_SHARE = 1 / 16  # mean length of answers at the low end of the time range, as a share of the token budget
# Factors on the roofline's time. It is off by about two for small models; at the high end, other programs run too.
FACTORS = (0.5, 3.0)
START_S = (3.0, 30.0)  # at both ends: imports, loading the model, the report
COMMON_RANK = 16  # assumed for adapters on the hub that are not here yet
LOGIT_COPIES = 3  # logits, their log-softmax, and its exponential or the gradient


@dataclass(slots=True, kw_only=True, frozen=True)
class Memory:
    """Bytes by part at the peak of an update; rollout needs less. The learner's parts are sums over all ranks."""

    weights: int
    engine_copy: int  # the engine's own copy of the weights
    reference: int
    gradients: int
    optimizer: int
    kv_cache: int
    activations: int
    logits: int
    gathered: int = 0  # several ranks: the current layer as a whole, and its gradients
    driver: int = 0  # several ranks: the model in the main process, and the trained weights sent to it
    ranks: int = 1

    @property
    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ranks"}

    @property
    def of_rank(self) -> int:
        """Bytes of one rank: its shard of the parameters and states, and its own micro-batches."""
        sharded = self.weights + self.reference + self.gradients + self.optimizer
        return (sharded + self.activations + self.logits + self.gathered) // self.ranks

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(slots=True, kw_only=True, frozen=True)
class Duration:
    """Seconds of one update by phase and of the whole run, if every answer has `length` tokens."""

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
    """A model's shape from its config.json; without the folder, from a preset with its name."""
    if (folder / "config.json").is_file():
        return _shape_of(folder)
    name = Path(path).name.lower()
    for preset in preset_names("models"):
        if name.startswith(preset) or name.replace("meta-", "").startswith(preset):
            return replace(load_model_shape(preset), bytes_per_value=FLOAT)
    known = ", ".join(preset_names("models"))
    raise ModelError(f"the shape of model {path!r} is unknown: give a folder with a config.json, or one of {known}")


def _shape_of(folder: Path) -> ModelShape:
    """Build the model on the meta device, where tensors have shapes but no data, and read its shape."""
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
    """Count the memory of learner and engine. The learner trains in float32; each engine has a copy of the weights.

    `model.bytes_per_value` applies to the engine's weights and KV cache.
    """
    weights = int(model.params) * FLOAT
    has_adapters = bool(config.lora.rank or config.lora.path)
    trained = _adapter_params(config, model) if has_adapters else int(model.params)
    window, ranks = config.task.max_prompt_tokens + config.engine.max_new_tokens, config.learner.ranks
    # A micro-batch has at most `micro_tokens` tokens, unless a single sample is longer, and at most the rank's samples.
    share = -(-config.schedule.update_batch // ranks)
    micro = max(min(config.learner.micro_tokens, share * window), window)
    # With LoRA, the model without its adapters is the reference.
    has_reference = config.learner.kl_coef > 0 and not has_adapters
    return Memory(
        weights=weights,
        engine_copy=int(model.weight_bytes) * config.engine.replicas,
        reference=weights if has_reference else 0,
        gradients=trained * FLOAT,
        optimizer=2 * trained * FLOAT,
        kv_cache=int(config.slots * window * model.kv_bytes),
        activations=ranks * _activation_bytes(model, micro, is_recomputed=config.learner.recompute),
        logits=ranks * _logit_bytes(micro * model.vocab),
        gathered=ranks * 2 * weights // model.layers if ranks > 1 else 0,
        driver=2 * weights if ranks > 1 and not config.learner.rank_gpus else 0,  # with GPUs, host memory
        ranks=ranks,
    )


def _logit_bytes(size: int) -> int:
    """Bytes that the logits of a micro-batch take at once: the current piece, and what is kept of the others."""
    kept = min(size, KEPT_ELEMENTS) if size > WHOLE_ELEMENTS else 0
    return (LOGIT_COPIES * min(size, PIECE_ELEMENTS) + kept) * FLOAT


def activation_bytes(model: ModelShape) -> int:
    """Bytes that all Llama blocks keep for the backward pass of one token.

    Hidden size: input, normalised input and output of both norms. Query heads: before and after the rotation, and the
    attention output. Key-value heads: keys before and after the rotation, and values. Feed-forward size: gate, its
    activation, up, and the product.
    """
    per_block = (
        6 * model.hidden
        + 3 * model.heads * model.head_dim
        + 3 * model.kv_heads * model.head_dim
        + 4 * model.intermediate
    )
    return model.layers * per_block * FLOAT


def _activation_bytes(model: ModelShape, num_tokens: int, *, is_recomputed: bool) -> int:
    """Bytes of a micro-batch's activations; with recomputation, only each layer's input and one whole layer."""
    if not is_recomputed:
        return num_tokens * activation_bytes(model)
    return num_tokens * (model.layers * model.hidden * FLOAT + activation_bytes(model) // model.layers)


def _adapter_params(config: SortedConfig, model: ModelShape) -> int:
    """Parameters of LoRA: two low-rank matrices for each chosen linear layer; by default all seven of a block."""
    q, kv, h, f = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.hidden, model.intermediate
    num_sides = {
        "q_proj": h + q,
        "k_proj": h + kv,
        "v_proj": h + kv,
        "o_proj": q + h,
        "gate_proj": h + f,
        "up_proj": h + f,
        "down_proj": f + h,
    }
    rank, modules = _adapter_shape(config)
    return model.layers * rank * sum(num_sides.get(name, h + f) for name in modules or tuple(num_sides))


def _adapter_shape(config: SortedConfig) -> tuple[int, tuple[str, ...]]:
    """Rank and target modules: the configured ones, or those of the adapters in `lora.path` if they are here."""
    folder = find_cached(config.lora.path, config.lora.revision) if config.lora.path else None
    if folder is None:
        return config.lora.rank or COMMON_RANK, config.lora.target_modules
    try:
        saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        modules = saved["target_modules"]
        return int(saved["r"]), tuple(modules) if isinstance(modules, list) else ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the adapters in {shown(folder)} cannot be read: {first_line(error)}") from error


def estimate_time(config: SortedConfig, cost: CostModel, length: int) -> Duration:
    """The time with every slot busy, which is a lower bound for answers of this length on this hardware."""
    prompt, batch = config.task.max_prompt_tokens // 2, config.schedule.update_batch
    num_updates = -(-config.run.samples // batch)
    num_evals = 0
    if config.eval.prompts:
        every = config.eval.every_samples
        num_evals = 2 + (max(0, (config.run.samples - 1) // every) if every else 0)
    return Duration(
        length=length,
        rollout_s=_rollout_s(config, cost, batch, prompt, length),
        # Siblings share their prompt, both in the update and in the prefill.
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


def _measure_hardware(cpu: Hardware, threads: int) -> Hardware:
    """The CPU preset with this machine's measured speed of matrix products and copies on so many threads.

    One thread is measured, in CPU time, so that other programs that run now do not count.
    """
    import time

    import torch

    def seconds(work: Any) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.thread_time()
            work()
            best = min(best, time.thread_time() - start)
        return best

    side, size = 768, 2**24
    a, b = torch.rand(side, side), torch.rand(side, side)
    source, target = torch.rand(size // FLOAT), torch.empty(size // FLOAT)
    num_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = threads * 2 * side**3 / seconds(lambda: a @ b)
        bandwidth = threads * 2 * size / seconds(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(num_before)
    # Small batches and small matrices reach only a share of the measured peak.
    return replace(cpu, flops=flops, bandwidth=bandwidth, bandwidth_share=0.8, train_flops_share=0.5)


@dataclass(slots=True, kw_only=True, frozen=True)
class RunEstimate:
    """Memory and time of a run, with the texts that `sortedrl doctor` shows."""

    memory: Memory
    room: int  # bytes available
    room_of_rank: int  # bytes available to one rank
    where: str
    shortest: Duration
    longest: Duration
    source: str  # what the times are based on

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
        return total if self.fits else f"{total}; this does not fit: {remedy}"

    @property
    def seconds(self) -> tuple[float, float]:
        """The range in which the whole command ends."""
        ends = zip(FACTORS, (self.shortest, self.longest), START_S, strict=True)
        low, high = (factor * duration.total_s + start_s for factor, duration, start_s in ends)
        return low, high

    @property
    def time_text(self) -> str:
        low, high = self.seconds
        short, long = self.shortest, self.longest
        parts = f"{short.num_updates:,} updates and {short.num_evals} evaluations"
        return (
            f"{_seconds(low)} to {_seconds(high)} for {parts}, by {self.source}: the first if answers take "
            f"{short.length:,} tokens at twice the expected speed, the second if all take {long.length:,} at a third "
            f"of it; expected at {long.length:,}: rollout {_seconds(long.rollout_s)} and learner "
            f"{_seconds(long.update_s)} per update"
        )


def estimate_run(
    config: SortedConfig, folder: Path, *, hardware: str | None, devices: int, from_run: Path | None
) -> RunEstimate:
    """Estimate for `devices` of some hardware, or for this machine; `from_run` gives the times of an earlier run."""
    shape = read_shape(config.model.path, folder)
    on_accelerators = hardware is not None and hardware != "cpu"
    shape = replace(shape, bytes_per_value=HALF if on_accelerators else FLOAT)
    room_of_rank: int | None = None
    if hardware is None:
        room, where = _machine_memory(), "this machine"
        kind = _measure_hardware(load_hardware("cpu"), config.run.threads)
        source = "a roofline of this machine"
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
    return RunEstimate(
        memory=estimate_memory(config, shape),
        room=room,
        room_of_rank=room if room_of_rank is None else room_of_rank,
        where=where,
        shortest=estimate_time(config, cost, max(1, int(budget * SHORT_SHARE))),
        longest=estimate_time(config, cost, budget),
        source=source,
    )


def _machine_memory() -> int:
    """Bytes of the first accelerator, if there is one; else of this machine's memory."""
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
