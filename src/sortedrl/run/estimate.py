"""Estimate the memory and time that a run needs, before it starts.

`sortedrl doctor` shows it. Memory follows from the model's shape and the configuration. Time comes from a cost model of
`simulate/`: a roofline of some hardware, or one fitted to an earlier run. Both are approximate: activations are counted
for Llama blocks, and neither the length of answers nor the load of the machine is known before training, so time is a
range.

Guarantees: no weights are read; parts do not overlap, and totals are their sums.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.config.placement import Cluster, Demand, plan_placement
from sortedrl.errors import ConfigError
from sortedrl.external.extras import has_extra
from sortedrl.run.device_memory import device_needs, dry_rank_memory, gib, needs_text
from sortedrl.run.memory_formulas import Memory, engine_memory, estimate_memory, formula_rank_memory, has_lora
from sortedrl.run.model_shapes import FLOAT, HALF, read_shape
from sortedrl.run.placements import (
    NODE_GPUS,
    learner_cost,
    placed_cost,
    propose_placements,
    rollout_s,
    update_tokens,
    what_would_fit,
)
from sortedrl.simulate.costs import (
    CostModel,
    Hardware,
    ModelShape,
    RooflineCost,
    load_hardware,
    preset_names,
)
from sortedrl.simulate.fit import fit_runs

SHORT_SHARE = 1 / 16  # mean length of answers at the low end of the time range, as a share of the token budget
# Factors on the roofline's time. It is off by about two for small models; at the high end, other programs run too.
FACTORS = (0.5, 3.0)
START_S = (3.0, 30.0)  # at both ends: imports, loading the model, the report


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


def estimate_time(config: SortedConfig, cost: CostModel, length: int, learner: CostModel | None = None) -> Duration:
    """The time with every slot busy, which is a lower bound for answers of this length on this hardware.

    `learner` gives the cost of updates if they run elsewhere.
    """
    batch = config.schedule.update_batch
    num_updates = -(-config.run.samples // batch)
    num_evals = 0
    if config.eval.prompts:
        every = config.eval.every_samples
        num_evals = 2 + (max(0, (config.run.samples - 1) // every) if every else 0)
    return Duration(
        length=length,
        rollout_s=rollout_s(config, cost, batch, length),
        update_s=(learner or cost).update_s(update_tokens(config, length)) * config.learner.inner_epochs,
        publish_s=cost.publish_s(),
        num_updates=num_updates,
        eval_s=rollout_s(config, cost, config.eval.prompts * (config.eval.samples + 1), length),
        num_evals=num_evals,
    )


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

    fits: bool
    memory_text: str
    placement_text: str  # on GPUs: who gets which, or why nobody can
    is_placed: bool
    shortest: Duration
    longest: Duration
    source: str  # what the times are based on

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


@dataclass(slots=True, kw_only=True, frozen=True)
class Accelerators:
    """The GPUs that a run is planned for."""

    name: str
    hardware: Hardware
    count: int

    @property
    def room(self) -> int:
        """Bytes that one of them offers; the rest is lost to fragmentation and other programs."""
        return int(self.hardware.memory * self.hardware.memory_share)

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"


def estimate_run(
    config: SortedConfig, folder: Path, *, hardware: str | None, devices: int, from_run: Path | None
) -> RunEstimate:
    """Estimate for `devices` of some hardware, or for this machine; `from_run` gives the times of an earlier run."""
    shape = read_shape(config.model.path, folder)
    there = _accelerators(hardware, devices)
    if there is not None:
        return _estimate_on_gpus(config, folder, replace(shape, bytes_per_value=HALF), there, from_run)
    shape = replace(shape, bytes_per_value=FLOAT)
    if hardware is None:
        room, where = _machine_memory(), "this machine"
        kind = _measure_hardware(load_hardware("cpu"), config.run.threads)
        source = "a roofline of this machine"
    else:
        kind = load_hardware(hardware)
        room, where = int(kind.memory * kind.memory_share * devices), f"{devices} x {hardware}"
        source = f"the roofline of {where}"
    cost: CostModel = RooflineCost(hardware=kind, model=shape, tensor_parallel=devices)
    if from_run is not None:
        cost, source = fit_runs([from_run]).cost, f"what {from_run} took"
    memory = estimate_memory(config, shape)
    short, long = _lengths(config)
    return RunEstimate(
        fits=memory.total <= room and memory.of_rank <= room,
        memory_text=_memory_text(memory, room, where),
        placement_text="",
        is_placed=True,
        shortest=estimate_time(config, cost, short),
        longest=estimate_time(config, cost, long),
        source=source,
    )


def _lengths(config: SortedConfig) -> tuple[int, int]:
    """The mean lengths of answers at both ends of the time range."""
    budget = config.engine.max_new_tokens
    return max(1, int(budget * SHORT_SHARE)), budget


def _memory_text(memory: Memory, room: int, where: str) -> str:
    parts = ", ".join(f"{name.replace('_', ' ')} {_bytes(size)}" for name, size in memory.parts.items() if size)
    total = f"about {_bytes(memory.total)} of {_bytes(room)} on {where}: {parts}"
    if memory.ranks > 1:
        total += f"; each of {memory.ranks} ranks {_bytes(memory.of_rank)} of {_bytes(room)}"
    remedy = "lower learner.micro_tokens or engine.slots, set lora.rank, or use more devices"
    is_fine = memory.total <= room and memory.of_rank <= room
    return total if is_fine else f"{total}; this does not fit: {remedy}"


def _accelerators(hardware: str | None, devices: int) -> Accelerators | None:
    """The GPUs that are asked for, or those of this machine; None if there are none."""
    if hardware is not None:
        return (
            None if hardware == "cpu" else Accelerators(name=hardware, hardware=load_hardware(hardware), count=devices)
        )
    import torch

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    known = (preset for preset in preset_names("hardware") if preset in name.lower().replace(" ", ""))
    kind = replace(load_hardware(next(known, "a100")), memory=float(torch.cuda.mem_get_info()[1]))
    return Accelerators(name=name, hardware=kind, count=torch.cuda.device_count())


def _estimate_on_gpus(
    config: SortedConfig, folder: Path, shape: ModelShape, there: Accelerators, from_run: Path | None
) -> RunEstimate:
    """Memory device by device under the placement; time by the rooflines of engines and ranks."""
    fits, is_placed, memory_text, placement_text = judge_memory(config, folder, shape, there)
    engines, ranks = placed_cost(config, shape, there.hardware), learner_cost(config, shape, there.hardware)
    source = f"the roofline of {there}"
    cost: CostModel = engines
    learner: CostModel = ranks
    if from_run is not None:
        cost = learner = fit_runs([from_run]).cost
        source = f"what {from_run} took"
    short, long = _lengths(config)
    return RunEstimate(
        fits=fits,
        memory_text=memory_text,
        placement_text=placement_text,
        is_placed=is_placed,
        shortest=estimate_time(config, cost, short, learner),
        longest=estimate_time(config, cost, long, learner),
        source=source,
    )


def judge_memory(
    config: SortedConfig, folder: Path, shape: ModelShape, there: Accelerators
) -> tuple[bool, bool, str, str]:
    """Whether every GPU has room for what it would hold, and whether it can be placed; the memory and the placement."""
    gpus_per_node = config.placement.gpus_per_node if config.placement.mode else NODE_GPUS
    try:
        placement = plan_placement(Demand.of(config), Cluster.of(there.count, min(gpus_per_node, there.count)))
    except ConfigError as error:
        return False, False, _closest(config, shape, there), str(error)
    device_bytes = int(there.hardware.memory)
    if has_lora(config) and not has_extra("lora"):  # a dry run makes the adapters
        rank = formula_rank_memory(config, shape, device_bytes)
    else:
        rank = dry_rank_memory(config, folder, shape, device_bytes=device_bytes)
    needs = device_needs(config, placement, rank, engine_memory(config, shape), shape)
    fits = all(need.total <= there.room for need in needs)
    text = f"of {gib(there.room)} on each of {there}: {needs_text(needs) or 'nothing'}"
    if not fits:
        fitting = what_would_fit(config, shape, there.hardware, there.name, there.count)
        text = f"{text}; this does not fit. What would: {fitting}"
    return fits, True, text, str(placement)


def _closest(config: SortedConfig, shape: ModelShape, there: Accelerators) -> str:
    """What to say where the placement itself is impossible: whether another one would fit these GPUs."""
    fitting = what_would_fit(config, shape, there.hardware, there.name, there.count)
    options = propose_placements(config, shape, there.hardware, there.count)
    if options and not options[0].fits:
        need = needs_text([options[0].worst])
        return (
            f"of {gib(there.room)} on each of {there}, even {options[0]} needs {need}; this does not fit. "
            f"What would: {fitting}"
        )
    return f"{there} do not have the configured placement. What would fit: {fitting}"


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
