"""Placements that a configuration could have on some GPUs, with their memory and speed; what to change if none fits.

`sortedrl plan --config` shows the options, and `sortedrl doctor` names the best one if the configured placement does
not fit. Every option is a configuration with another section `placement`. Memory comes from formulas, because a dry run
of every option would take minutes; `doctor` measures the chosen one.

Guarantees: only placements that `plan_placement` accepts are offered; options that fit come first, the fastest of them
first of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from sortedrl.config import SortedConfig
from sortedrl.config.placement import Cluster, Demand, Mode, Placement, plan_placement
from sortedrl.errors import ConfigError
from sortedrl.learner.dry_run import RankMemory
from sortedrl.ledger.atomic_file import atomic_file
from sortedrl.run.builders.parts import model_path_here
from sortedrl.run.device_memory import DeviceNeed, device_needs, gib
from sortedrl.run.memory_formulas import GIB, engine_memory, formula_rank_memory, has_lora
from sortedrl.run.model_shapes import HALF, read_shape
from sortedrl.simulate.costs import Hardware, ModelShape, RooflineCost, load_hardware

MAX_DEVICES = 1024  # no larger cluster is proposed
TYPICAL_SHARE = 0.25  # mean length of answers, as a share of the token budget, for comparing speeds
LEAST_ANSWERS = 4  # of full length that the KV cache of an engine must hold
MAX_CONTEXT = 8  # ranks that are proposed to compute a micro-batch together: those of a machine
NODE_GPUS = 8  # GPUs of a machine, unless the configuration says otherwise


@dataclass(slots=True, kw_only=True, frozen=True)
class PlacementOption:
    config: SortedConfig
    placement: Placement
    worst: DeviceNeed
    room: int  # bytes that a GPU offers
    rollout_s: float  # of one update's samples
    update_s: float

    @property
    def fits(self) -> bool:
        return self.worst.total <= self.room

    @property
    def cycle_s(self) -> float:
        """Seconds from update to update."""
        if self.config.knobs.overlap:
            return max(self.rollout_s, self.update_s)
        return self.rollout_s + self.update_s

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of `placement`."""
        names = ("mode", "engines", "tensor_parallel", "ranks", "context_parallel", "nodes", "gpus_per_node")
        return {name: getattr(self.config.placement, name) for name in names}

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.settings,
            "kv_gb": self.config.engine.kv_gb,
            "fits": self.fits,
            "peak_gib": round(self.worst.total / 2**30, 2),
            "phase": self.worst.phase,
            "owners": self.worst.owners,
            "rollout_s": self.rollout_s,
            "update_s": self.update_s,
            "cycle_s": self.cycle_s,
        }

    def __str__(self) -> str:
        together = self.config.context_parallel
        context = f" with placement.context_parallel = {together}" if together > 1 else ""
        return f"placement.mode = {self.config.placement.mode}, {self.placement}{context}"


def propose_placements(
    config: SortedConfig, shape: ModelShape, hardware: Hardware, num_devices: int, context: int | None = None
) -> list[PlacementOption]:
    """All sensible placements on so many GPUs: those that fit first, by speed; then the others, by what they lack.

    `context` is how many ranks compute a micro-batch together; None: as many as the configuration says.
    """
    context = config.context_parallel if context is None else context
    gpus_per_node = min(config.placement.gpus_per_node if config.placement.mode else NODE_GPUS, num_devices)
    cluster = Cluster.of(num_devices, gpus_per_node)
    options: list[PlacementOption] = []
    for mode, engines, width, ranks in _candidates(config, shape, cluster):
        together = math.gcd(context, ranks, shape.heads)
        keys = {"mode": mode, "engines": engines, "tensor_parallel": width, "ranks": ranks}
        keys["context_parallel"] = together
        machines = {"nodes": len(cluster.gpus), "gpus_per_node": gpus_per_node}
        try:
            placed = with_placement(config, **keys, **machines)
            placement = plan_placement(Demand.of(placed), cluster)
        except ConfigError:
            continue
        options.append(weigh(placed, placement, shape, hardware))
    return sorted(options, key=lambda o: (not o.fits, o.cycle_s if o.fits else o.worst.total))


def placements_of(config: SortedConfig, hardware: str, num_devices: int) -> list[PlacementOption]:
    """The placements of a configuration on GPUs by the name of their preset."""
    if hardware == "cpu":
        raise ConfigError("a placement is about GPUs: give --hardware h100, a100 or rtx4090")
    folder = model_path_here(config) or Path(config.model.path)
    shape = replace(read_shape(config.model.path, folder), bytes_per_value=HALF)
    return propose_placements(config, shape, load_hardware(hardware), num_devices)


def write_placement(options: list[PlacementOption], path: Path) -> None:
    """Write the configuration with the first placement to a file."""
    if not options or not options[0].fits:
        raise ConfigError("no placement fits, so there is no configuration to write: leave out --out, or add devices")
    try:
        with atomic_file(path) as file:
            file.write(options[0].config.to_toml())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another file with --out") from None


def _candidates(config: SortedConfig, shape: ModelShape, cluster: Cluster) -> Iterator[tuple[Mode, int, int, int]]:
    """Mode, engines, GPUs per engine and ranks."""
    total, widest = cluster.num_gpus, max(cluster.gpus)
    widths = [width for width in (1, 2, 4, 8) if width <= widest and shape.heads % width == 0]
    for width in widths:
        if total % width == 0:
            yield "colocated", total // width, width, total
        for eighths in range(1, 8):
            ranks = total * eighths // 8
            engines = (total - ranks) // width
            if ranks and engines:
                yield "separate", engines, width, ranks


def with_placement(config: SortedConfig, **placement: Any) -> SortedConfig:
    """The configuration with another placement, which replaces the older keys for the same; the load stays.

    The number of sequences that run at once stays about the same: `engine.slots` is divided over the engines.
    """
    tree = config.tree()
    for section, key in (
        ("engine", "replicas"),
        ("engine", "tensor_parallel"),
        ("engine", "replica_gpus"),
        ("learner", "ranks"),
        ("learner", "rank_gpus"),
        ("learner", "context_parallel"),
    ):
        tree[section].pop(key, None)
    tree["engine"]["kind"] = "vllm"
    tree["engine"]["slots"] = max(-(-config.slots // placement["engines"]), 1)
    tree["placement"] = placement
    return SortedConfig(**tree)


def weigh(config: SortedConfig, placement: Placement, shape: ModelShape, hardware: Hardware) -> PlacementOption:
    """Memory by formulas, with the KV cache that the rest leaves; and seconds by the roofline."""
    room = int(hardware.memory * hardware.memory_share)
    rank = formula_rank_memory(config, shape, int(hardware.memory))
    config = _with_cache(config, placement, rank, shape, room)
    engine = engine_memory(config, shape)
    needs = device_needs(config, placement, rank, engine, shape)
    length = max(int(config.engine.max_new_tokens * TYPICAL_SHARE), 1)
    per_answer = (config.task.max_prompt_tokens // 2 + length) * shape.kv_bytes / config.tensor_parallel
    slots = min(config.engine.slots, max(int(engine.kv_cache / per_answer), 1)) * config.num_engines
    cost, batch = placed_cost(config, shape, hardware), config.schedule.update_batch
    return PlacementOption(
        config=config,
        placement=placement,
        worst=max(needs, key=lambda need: need.total),
        room=room,
        rollout_s=rollout_s(config, cost, batch, length, slots),
        update_s=learner_cost(config, shape, hardware).update_s(update_tokens(config, length)),
    )


def _with_cache(
    config: SortedConfig, placement: Placement, rank: RankMemory, shape: ModelShape, room: int
) -> SortedConfig:
    """The configuration with a KV cache for all slots at full length, or with what fits; never for too few answers."""
    tree = config.tree()
    tree["engine"].pop("kv_gb", None)
    whole = engine_memory(SortedConfig(**tree), shape)
    needs = device_needs(config, placement, rank, replace(whole, kv_cache=0), shape)
    left = room - max(need.total for need in needs if "engine" in need.owners)
    least = whole.kv_cache * LEAST_ANSWERS // config.engine.slots
    cache = max(min(left, whole.kv_cache), least)
    return config.replaced(engine={"kv_gb": max(int(cache / GIB * 10) / 10, 0.1)})


def placed_cost(config: SortedConfig, shape: ModelShape, hardware: Hardware) -> RooflineCost:
    """The roofline of all engines."""
    return RooflineCost(
        hardware=hardware, model=shape, tensor_parallel=config.tensor_parallel, replicas=config.num_engines
    )


def learner_cost(config: SortedConfig, shape: ModelShape, hardware: Hardware) -> RooflineCost:
    """The roofline of all ranks."""
    return RooflineCost(hardware=hardware, model=shape, replicas=config.num_ranks)


def update_tokens(config: SortedConfig, length: int) -> int:
    """Tokens of an update whose answers have `length` tokens; siblings share their prompt."""
    prompt, batch = config.task.max_prompt_tokens // 2, config.schedule.update_batch
    return batch * length + batch // config.learner.group_size * prompt


def rollout_s(config: SortedConfig, cost: Any, num_samples: int, length: int, slots: int | None = None) -> float:
    """Seconds in which all slots together, or so many of them, make answers of `length` tokens."""
    if not num_samples:
        return 0.0
    prompt, slots = config.task.max_prompt_tokens // 2, min(slots or config.slots, num_samples)
    rounds, num_prompts = num_samples / slots, max(1, slots // config.learner.group_size)
    return rounds * (cost.decode_s(slots, slots * prompt, length) + cost.prefill_s([prompt] * num_prompts))


# ---- what would fit --------------------------------------------------------------------------------------------------


def what_would_fit(config: SortedConfig, shape: ModelShape, hardware: Hardware, name: str, num_devices: int) -> str:
    """One line: another placement, more GPUs, shorter answers or adapters; the first ones that are found."""
    found: list[str] = []
    here = propose_placements(config, shape, hardware, num_devices)
    if here and here[0].fits:
        found.append(str(here[0]))
    count = num_devices * 2
    while not found and count <= MAX_DEVICES:
        more = propose_placements(config, shape, hardware, count)
        if more and more[0].fits:
            found.append(f"{count} x {name} with {more[0]}")
        count *= 2
    for changed, context, text in _smaller(config, shape):
        options = propose_placements(changed, shape, hardware, num_devices, context)
        if options and options[0].fits:
            found.append(f"{text} with {options[0]}")
            break
    return "; or ".join(found) if found else "a smaller model"


def _smaller(config: SortedConfig, shape: ModelShape) -> Iterator[tuple[SortedConfig, int, str]]:
    """Changes that need less memory, the smallest change first, each on top of those before.

    With each comes the number of ranks that compute a micro-batch together.
    """
    context = config.context_parallel
    if not config.learner.recompute:
        config = config.replaced(learner={"recompute": True})
        yield config, context, "learner.recompute = true"
    while context < MAX_CONTEXT and shape.heads % (context * 2) == 0:
        context *= 2
        yield config, context, "long answers divided over ranks"
    answer = config.engine.max_new_tokens
    while not has_lora(config) and answer >= 2048:
        answer //= 2
        micro = config.task.max_prompt_tokens + answer
        yield (
            config.replaced(engine={"max_new_tokens": answer}, learner={"micro_tokens": micro}),
            context,
            f"engine.max_new_tokens = {answer} and learner.micro_tokens = {micro}",
        )
    if not has_lora(config):
        yield config.replaced(lora={"rank": 32}, learner={"kl_coef": 0.0}), context, "lora.rank = 32"


def placements_table(options: list[PlacementOption], title: str) -> Table:
    table = Table(
        title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption="* fits, and is fastest"
    )
    for header in (
        "",
        "mode",
        "engines",
        "GPUs per engine",
        "ranks",
        "together",
        "peak per GPU",
        "of",
        "when",
        "update every",
    ):
        table.add_column(header, justify="left" if header in ("", "mode", "when") else "right")
    for number, option in enumerate(options):
        keys = option.settings
        table.add_row(
            "*" if option.fits and number == 0 else "" if option.fits else "no",
            *(str(keys[name]) for name in ("mode", "engines", "tensor_parallel", "ranks", "context_parallel")),
            gib(option.worst.total),
            gib(option.room),
            f"{option.worst.phase} ({option.worst.owners})",
            f"{option.cycle_s:,.0f} s",
        )
    return table
