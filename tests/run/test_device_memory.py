"""Memory by GPU: phases by hand, formulas against the dry run, and shipped recipes at full depth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.learner.rank_memory import LIMIT_GIB, measure
from sortedrl.cli import app
from sortedrl.config import SortedConfig
from sortedrl.config.placement import Demand, cluster_of, plan_placement
from sortedrl.errors import ConfigError
from sortedrl.learner.dry_run import RankMemory
from sortedrl.run.device_memory import device_needs, dry_rank_memory
from sortedrl.run.memory_formulas import CONTEXT, GIB, EngineMemory, engine_memory, formula_rank_memory
from sortedrl.run.placements import placements_of, with_placement, write_placement
from sortedrl.simulate.costs import ModelShape

RANK = RankMemory(weights=10, reference=1, gradients=10, optimizer=20, activations=100, gathers=50)
ENGINE = EngineMemory(engine_weights=30, kv_cache=200, engine_work=7)
TOY = ModelShape(
    params=10,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=3,
    bytes_per_value=2,
    hidden=3,
    intermediate=5,
    vocab=7,
)


def config(placement: dict[str, Any], **sections: Any) -> SortedConfig:
    engine = {"kind": "vllm", **sections.pop("engine", {})}
    return SortedConfig(engine=engine, placement=placement, schedule={"strategy": "sorted-partial"}, **sections)


def needs(asked: SortedConfig, rank: RankMemory = RANK, engine: EngineMemory = ENGINE) -> dict[str, tuple[str, int]]:
    placement = plan_placement(Demand.of(asked), cluster_of(asked))
    return {need.owners: (need.phase, need.total) for need in device_needs(asked, placement, rank, engine, TOY)}


def test_phases_of_separate_GPUs_by_hand() -> None:
    separate = config({"mode": "separate", "engines": 4, "ranks": 4})
    # A rank peaks in the update, with everything it has. Two buckets hold all of 10 parameters of 2 bytes.
    found = needs(separate)
    assert found["rank"] == ("update", 191 + CONTEXT)
    assert found["engine"] == ("publication", 30 + 200 + 20 + CONTEXT)
    assert needs(separate, engine=replace(ENGINE, engine_work=21))["engine"] == ("rollout", 251 + CONTEXT)
    # The largest parameter has 7 x 3 values, gathered in 4 bytes and cast to 2.
    large = replace(RANK, gradients=0, activations=0, gathers=0)
    assert needs(separate, rank=large)["rank"] == ("publication", 31 + 20 + 7 * 3 * 6 + CONTEXT)


def test_phases_of_shared_GPUs_by_hand() -> None:
    shared = config({"mode": "colocated", "engines": 8, "ranks": 8})
    assert needs(shared) == {"rank and engine": ("update", 191 + 237 + 2 * CONTEXT)}
    one = config({"mode": "colocated", "gpus_per_node": 1})  # one process
    assert needs(one) == {"rank and engine": ("update", 191 + 237 + CONTEXT)}


def test_turns_on_one_GPU_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    one = config({"mode": "colocated", "gpus_per_node": 1}, learner={"offload": True})
    small = replace(RANK, activations=0, gathers=0)
    # The learner leaves the GPU to the engine, which keeps its memory in an update unless it sleeps.
    assert needs(one, rank=small) == {"rank and engine": ("update", 41 + 237 + CONTEXT)}
    monkeypatch.setattr("sortedrl.run.device_memory.has_sleep", lambda config: True)
    assert needs(one, rank=small) == {"rank and engine": ("rollout", 237 + CONTEXT)}
    assert needs(one, rank=replace(RANK, activations=300)) == {"rank and engine": ("update", 391 + CONTEXT)}


def test_an_engine_by_hand() -> None:
    wide = config(
        {"mode": "separate", "tensor_parallel": 2},
        engine={"slots": 3, "max_new_tokens": 6},
        task={"max_prompt_tokens": 4},
    )
    found = engine_memory(wide, TOY)
    assert found.engine_weights == 10 * 2 // 2
    # 3 slots of 10 tokens; key and value of 2 heads x 3 in 2 layers, 2 bytes each; half of it on each GPU.
    assert found.kv_cache == 3 * 10 * (2 * 2 * 2 * 3 * 2) // 2
    assert (
        engine_memory(config({"mode": "separate", "tensor_parallel": 4}, **_sizes()), TOY).kv_cache == 720
    )  # a head each
    given = config({"mode": "separate"}, engine={"kv_gb": 2})
    assert engine_memory(given, TOY).kv_cache == 2 * GIB


def _sizes() -> dict[str, Any]:
    return {"engine": {"slots": 3, "max_new_tokens": 6}, "task": {"max_prompt_tokens": 4}}


def test_formulas_agree_with_the_dry_run() -> None:
    shape = ModelShape(
        params=2 * 8192 * 256 + 4 * (256 * (2 * 256 + 2 * 128 + 3 * 1024) + 512) + 256,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=64,
        bytes_per_value=2,
        hidden=256,
        intermediate=1024,
        vocab=8192,
    )
    asked = config(
        {"mode": "separate", "ranks": 4},
        task={"max_prompt_tokens": 512},
        engine={"max_new_tokens": 3584},
        learner={"recompute": True, "micro_tokens": 4096},
    )
    dry = dry_rank_memory(asked, Path("nowhere"), shape, device_bytes=2**30, is_whole=True)
    formula = formula_rank_memory(asked, shape, 2**30)
    assert formula.resident == pytest.approx(dry.resident, rel=0.001)
    assert formula.gradients == pytest.approx(dry.gradients, rel=0.001)
    assert formula.peak == pytest.approx(dry.peak, rel=0.15)


def test_placements_are_proposed(tmp_path: Path) -> None:
    recipe = SortedConfig.load("kk-llama3-8b")
    options = placements_of(recipe, "h100", 8)
    assert options[0].fits
    assert [option.fits for option in options] == sorted((option.fits for option in options), reverse=True)
    speeds = [option.cycle_s for option in options if option.fits]
    assert speeds == sorted(speeds)
    assert {option.config.placement.mode for option in options} == {"colocated", "separate"}
    assert all(len(option.placement.devices) <= 8 for option in options)
    assert options[0].config.placement.mode == "colocated"  # without overlap, separate GPUs wait for each other
    assert any(option.config.placement.mode == "separate" and option.fits for option in options)
    assert all(option.worst.total <= option.room for option in options if option.fits)
    write_placement(options, tmp_path / "run.toml")
    written = SortedConfig.load(tmp_path / "run.toml")
    assert (written.num_engines, written.num_ranks) == (options[0].config.num_engines, options[0].config.num_ranks)
    small = placements_of(recipe, "rtx4090", 1)
    assert not any(option.fits for option in small)
    with pytest.raises(ConfigError, match="no placement fits"):
        write_placement(small, tmp_path / "other.toml")
    shown = CliRunner().invoke(app, ["plan", "--config", "kk-llama3-8b", "--devices", "8", "--json"])
    assert [option["fits"] for option in json.loads(shown.stdout)["placements"]] == [o.fits for o in options]
    assert "colocated" in CliRunner().invoke(app, ["plan", "--config", "kk-llama3-8b"]).stdout
    with pytest.raises(ConfigError, match="a placement is about GPUs"):
        placements_of(recipe, "cpu", 1)


def test_a_placement_keeps_the_load() -> None:
    old = config({}, engine={"replicas": 4, "replica_gpus": 1, "slots": 10}, learner={"ranks": 4, "rank_gpus": 1})
    moved = with_placement(old, mode="separate", engines=2, tensor_parallel=2, ranks=4, nodes=1, gpus_per_node=8)
    assert (moved.num_engines, moved.slots, moved.num_ranks, moved.engine_gpus) == (2, 40, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kk-llama3-8b", "math-qwen2.5-32b", "scale-1gpu", "scale-8gpu", "scale-4nodes"])
def test_recipes_fit_at_full_depth_and_doctor_agrees(name: str) -> None:
    found = measure(name, "h100")
    assert found["peak_gib"] <= LIMIT_GIB
    assert found["gpu_gib"] <= LIMIT_GIB
    assert found["doctor_gib"] == pytest.approx(found["peak_gib"], rel=0.15)
    assert found["formula_gib"] == pytest.approx(found["peak_gib"], rel=0.15)
