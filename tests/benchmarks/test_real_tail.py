"""The figures of benchmarks/study/real_tail.py, worked out by hand, and the settings of its runs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from benchmarks.study.real_tail import (
    CONFIG,
    demonstrations,
    idle_slot_steps,
    overrides,
    quantiles,
    result,
    start_folder,
)
from sortedrl.config import SortedConfig
from sortedrl.telemetry.summary import Summary

OPTIONS = argparse.Namespace(samples=None, slots=8, full=False, dtype=None, engine="local", threads=None, learn=False)


def run(strategy: str, *, rollout_s: float, update_s: float, wall_s: float, steps: int) -> Summary:
    return Summary(
        strategy=strategy,
        samples=16,
        slots=8,
        trained_tokens=800,
        generated_tokens=816,
        decode_steps=steps,
        idle_slot_steps=1 - 800 / (8 * steps),  # a slot for each of 800 tokens
        rollout_s=rollout_s,
        update_s=update_s,
        publish_s=1.0,
        save_s=2.0,
        wall_s=wall_s,
    )


def test_ratios_idle_steps_and_quantiles() -> None:
    sync = run("sync", rollout_s=20, update_s=9, wall_s=32, steps=200)  # 40 tokens/s in rollout, 800 / 30 as a whole
    large = run("sync-large", rollout_s=16, update_s=9, wall_s=28, steps=160)
    replay = run("sorted-replay", rollout_s=10, update_s=9, wall_s=22, steps=125)
    found = result({"sync": [sync], "sync-large": [large], "sorted-replay": [replay]}, range(1, 102))
    assert found["ratio"] == {
        "sync": {"rollout": 1.0, "whole": 1.0},
        "sync-large": {"rollout": 1.25, "whole": 1.154},
        "sorted-replay": {"rollout": 2.0, "whole": 1.5},
    }
    assert found["ratio_large"]["sorted-replay"] == {"rollout": 1.6, "whole": 1.3}
    assert found["idle_slot_steps"] == {"sync": 0.5, "sync-large": 0.375, "sorted-replay": 0.2}
    assert found["lengths"] == {"p50": 51, "p90": 91, "p99": 100}
    assert [each["strategy"] for each in found["runs"]] == ["sync", "sync-large", "sorted-replay"]


def test_seeds_are_added_up_and_a_missing_baseline_gives_no_ratios() -> None:
    slow = run("sync", rollout_s=30, update_s=9, wall_s=42, steps=300)
    quick = run("sync", rollout_s=20, update_s=9, wall_s=32, steps=200)
    assert idle_slot_steps([slow, quick]) == 0.583  # the mean of 2/3 and 1/2
    found = result({"sync": [slow, quick]}, [1, 2, 3])
    assert found["ratio_large"] == {}
    assert quantiles([1, 2, 3])["p50"] == 2


def test_an_impatient_teacher_ends_lists_too_early_and_writes_nothing_else_wrong() -> None:
    num_short = 0
    for row in demonstrations(200):
        question = re.fullmatch(r"(\d+) to (\d+)(?: by (\d))?:", row["prompt"])
        assert question is not None
        start, stop, step = int(question[1]), int(question[2]), int(question[3] or 1)
        right = list(range(start, stop + 1, step)) if start <= stop else list(range(start, stop - 1, -step))
        given = [int(number) for number in row["completion"].split()]
        assert given == right[: len(given)]
        num_short += given != right
    assert 60 < num_short < 140, "three quarters give up after each number with probability .1"
    assert demonstrations(200) == demonstrations(200)


@pytest.mark.parametrize("strategy", ["sync", "sync-large", "sorted-partial", "sorted-replay"])
def test_runs_differ_in_the_strategy_alone(strategy: str) -> None:
    folder = Path("runs/x/y")
    config = SortedConfig.load(CONFIG, overrides(strategy, 3, Path("start"), folder, OPTIONS))
    assert (config.strategy_name, config.run.seed, config.run_dir) == (strategy, 3, folder)
    assert (config.engine.slots, config.schedule.update_batch, config.engine.dtype) == (8, 8, "float32")
    assert (config.lora.rank > 0, config.lora.last_layers) == (True, 10)
    assert config.engine.max_new_tokens == 512


def test_flags_change_the_runs() -> None:
    given = argparse.Namespace(samples=64, slots=16, full=True, dtype="bfloat16", engine="vllm", threads=1, learn=True)
    config = SortedConfig.load(CONFIG, overrides("sorted-partial", 0, Path("start"), Path("a/b"), given))
    assert (config.engine.slots, config.schedule.update_batch, config.run.samples) == (16, 16, 64)
    assert (config.engine.kind, config.engine.dtype, config.lora.rank) == ("vllm", "bfloat16", 0)
    assert config.run.threads == 1
    assert config.checkpoint.save
    assert config.eval.prompts > 0


def test_the_cold_start_is_made_anew_when_the_task_changes() -> None:
    base = SortedConfig.load(CONFIG)
    other = SortedConfig.load(CONFIG, ["task.options.max_step=3"])
    same = SortedConfig.load(CONFIG, ["task.options.median=20", "learner.lr=1e-5"])  # the cold start has its own median
    runs = Path("runs")
    assert start_folder(runs, base) == start_folder(runs, same) != start_folder(runs, other)
