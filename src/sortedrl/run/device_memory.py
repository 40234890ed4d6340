"""The memory of every GPU under a placement: what the learner and the engine hold there, phase by phase.

`estimate.py` calls it for `sortedrl doctor` and `sortedrl plan`. The learner's part comes from a dry run of its real
code with fake tensors (`learner/dry_run.py`), or from formulas where many placements are compared; the engine's part
comes from formulas. Models that are not on this machine have the architecture of a shipped preset.

Guarantees: no weights are read, nothing is downloaded, no GPU is touched; the parts of a phase sum to its total.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sortedrl.config import SortedConfig
from sortedrl.config.placement import Placement
from sortedrl.learner.dry_run import RankMemory, measure_update
from sortedrl.run.memory_formulas import CONTEXT, GIB, EngineMemory, adapters_of, micro_shape, on_device, wire_bytes
from sortedrl.run.model_shapes import architecture
from sortedrl.simulate.costs import ModelShape

DRY_LAYERS = 3  # depth of a quick dry run: from here on, each further layer adds the same


@dataclass(slots=True, kw_only=True, frozen=True)
class DeviceNeed:
    """The phase in which a GPU needs most, and its parts."""

    owners: str  # such as "rank and engine"
    phase: str  # update, publication or rollout
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def device_needs(
    config: SortedConfig, placement: Placement, rank: RankMemory, engine: EngineMemory, shape: ModelShape
) -> list[DeviceNeed]:
    """What GPUs need: one entry for each combination of owners that the placement has."""
    ranks, engines = set(placement.ranks), {device for devices in placement.engines for device in devices}
    kinds = sorted({(device in ranks, device in engines) for device in placement.devices}, reverse=True)
    return [
        _need(config, rank if is_rank else None, engine if is_engine else None, shape) for is_rank, is_engine in kinds
    ]


def _need(config: SortedConfig, rank: RankMemory | None, engine: EngineMemory | None, shape: ModelShape) -> DeviceNeed:
    sleeps, offloads = has_sleep(config), has_offload(config)
    owners = " and ".join(name for name, part in (("rank", rank), ("engine", engine)) if part is not None)
    num_processes = (rank is not None) + (engine is not None and config.has_engine_pool)
    context = {"context": max(num_processes, 1) * CONTEXT}
    awake = {} if engine is None else engine.parts
    asleep = {} if sleeps else awake
    phases: dict[str, dict[str, int]] = {}
    if rank is not None:
        phases["update"] = {**rank.parts, **asleep, **context}
    kept: dict[str, int] = {}
    if rank is not None:
        names = ("weights", "reference", "optimizer")
        kept = {name: rank.parts[name] for name in names}
    in_rollout = {} if offloads else kept
    if engine is not None:
        phases["rollout"] = {**in_rollout, **awake, **context}
    published = {**in_rollout, **awake}
    published.pop("engine_work", None)
    if sleeps:
        published.pop("kv_cache", None)
    phases["publication"] = {
        **published,
        "wire_buffers": wire_bytes(config, shape, is_sender=rank is not None),
        **context,
    }
    phase, parts = max(phases.items(), key=lambda item: sum(item[1].values()))
    return DeviceNeed(owners=owners, phase=phase, parts={name: size for name, size in parts.items() if size})


def has_sleep(config: SortedConfig) -> bool:
    """Whether an engine frees its memory while the learner on the same GPU updates."""
    return config.engine.sleep_during_updates


def has_offload(config: SortedConfig) -> bool:
    """Whether the learner leaves its GPU while an engine on the same GPU decodes."""
    return config.learner.offload


def dry_rank_memory(
    config: SortedConfig, folder: Path, shape: ModelShape, *, device_bytes: int, is_whole: bool = False
) -> RankMemory:
    """The learner's memory on one GPU by a dry run. `is_whole`: at full depth, which takes longer."""
    settings = config.learner.model_copy(update={"context_parallel": config.context_parallel})
    if settings.dtype == "auto":  # on a GPU
        settings = settings.model_copy(update={"dtype": "bfloat16"})
    memory = measure_update(
        architecture(folder, shape),
        settings.model_copy(update={"host_states": False}),  # the fake device is a CPU
        micro_shape(config),
        num_ranks=config.num_ranks if config.has_rank_actors else None,
        lora=adapters_of(config),
        device_bytes=device_bytes,
        layers=None if is_whole else DRY_LAYERS,
    )
    return on_device(config, memory)


def needs_text(needs: Iterable[DeviceNeed]) -> str:
    return "; ".join(
        f"{need.owners} {gib(need.total)} in the {need.phase}: "
        + ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in need.parts.items())
        for need in needs
    )


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
