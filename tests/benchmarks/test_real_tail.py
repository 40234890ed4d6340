"""The figures of benchmarks/study/real_tail.py, worked out by hand, and the settings of its runs."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study.real_tail import (
    CONFIG,
    answer_of,
    demonstrations,
    idle_slot_steps,
    overrides,
    paired,
    quantiles,
    result,
    run_folder,
    share_right_second_half,
    start_folder,
)
from sortedrl.config import SortedConfig
from sortedrl.telemetry.events import BatchTaken
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


def batch(update: int, samples: Sequence[int], rewards: Sequence[float]) -> BatchTaken:
    return BatchTaken(
        t=0.0,
        update=update,
        version=update,
        samples=[*samples],
        lengths=[5] * len(samples),
        rewards=[*rewards],
        staleness=[0] * len(samples),
        staleness_token_sum=[0] * len(samples),
        truncated=0,
        num_interrupted=0,
        slot_s=1.0,
    )


def test_right_answers_of_the_second_half_are_counted_in_training_order() -> None:
    # Eight samples: the last four trained have rewards 1, .5, 0 and 1, and half a reward is not right.
    batches = [batch(0, [7, 1, 2], [1.0, 1.0, 1.0]), batch(1, [0, 5, 6], [0.0, 1.0, 0.5]), batch(2, [3, 4], [0.0, 1.0])]
    assert share_right_second_half(batches) == 0.5
    with pytest.raises(AssertionError, match="every sample was trained once"):
        share_right_second_half([*batches, batch(3, [4], [1.0])])


def figures(accuracy: float, second_half: float) -> dict[str, Any]:
    return {"accuracy_after": accuracy, "share_right_second_half": second_half}


def test_strategies_are_compared_seed_by_seed_and_decided_with_five() -> None:
    runs = {
        "sync": {seed: figures(0.4 + 0.1 * seed, 0.5) for seed in range(3)},
        "sorted-replay": {seed: figures(0.5 + 0.1 * seed, 0.5 + 0.1 * seed) for seed in range(2)},
    }
    accuracy, second = paired(runs)  # none against sync-large, which has no run
    assert (accuracy["strategy"], accuracy["base"], accuracy["seeds"]) == ("sorted-replay", "sync", 2)
    assert accuracy["difference"] == pytest.approx((0.1, 0.1, 0.1))
    assert accuracy["answer"] == "undecided", "two seeds decide nothing"
    # Differences 0 and .1: mean .05, error .05, and t is 12.706 for one degree of freedom.
    assert second["difference"] == pytest.approx((0.05, 0.05 - 0.6353, 0.05 + 0.6353), abs=1e-4)
    assert [answer_of(ends, 5) for ends in ((0.1, 0.05, 0.2), (-0.1, -0.2, -0.05), (0.0, -0.1, 0.1))] == [
        "ahead",
        "behind",
        "undecided",
    ]


def test_facts_stand_beside_the_summary_of_their_run() -> None:
    runs = [run("sync", rollout_s=20, update_s=9, wall_s=32, steps=200).model_copy(update={"seed": 0})]
    found = result({"sync": runs}, [1, 2], {"sync": [{"commits": ["abc"], "share_right_second_half": 0.25}]})
    assert (found["runs"][0]["commits"], found["runs"][0]["strategy"]) == (["abc"], "sync")
    assert (found["share_right_second_half"], found["paired"]) == ({"sync": 0.25}, [])


def save_start(folder: Path, weights: str) -> Path:
    folder.mkdir()
    files = {"model.safetensors": {"sha256": weights}, "learner_state.json": {"sha256": folder.name}}
    (folder / "manifest.json").write_text(json.dumps({"files": files}), encoding="utf-8")
    return folder


def test_a_run_with_other_settings_or_another_start_has_another_folder(tmp_path: Path) -> None:
    first, copy, other = (save_start(tmp_path / name, name[0]) for name in ("a1", "a2", "b"))
    given = argparse.Namespace(**{**vars(OPTIONS), "runs": tmp_path, "learn": True})
    folder = run_folder("sync", 0, first, given)
    assert folder.name.startswith("sync-0-")
    assert run_folder("sync", 0, copy, given) == folder, "the same weights in another place"
    changed = [argparse.Namespace(**{**vars(given), name: 64}) for name in ("samples", "threads")]
    others = [run_folder("sync", 0, other, given), *(run_folder("sync", 0, first, each) for each in changed)]
    assert len({folder, *others}) == 4
