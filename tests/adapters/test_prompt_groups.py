"""Samplers of prompt groups: the core on random arrivals and kills, and NeMo-RL's on a double of its buffer."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sortedrl.adapters.nemo_rl import SortedSampler
from sortedrl.adapters.prompt_groups import CompleteGroup, PromptGroups
from sortedrl.errors import ConfigError, RunDirError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify


def group(name: str, num_tokens: int = 3) -> CompleteGroup:
    return CompleteGroup(id=name, num_tokens=num_tokens)


def assert_proven(run_dir: Path) -> None:
    with Ledger(run_dir) as ledger:
        assert verify(ledger).violations == []


def test_the_shortest_groups_come_first_until_one_has_waited_too_long() -> None:
    groups = PromptGroups(1, max_wait=2)
    groups.begin(0)
    groups.offer([group("long", 90), group("a", 3), group("b", 2), group("c", 5)])
    assert groups.take(["long", "a", "b", "c"]) == ["b"]
    assert groups.take(["long", "a", "c"]) == ["a"]
    groups.offer([group("d", 1)])
    assert groups.take(["long", "c", "d"]) == [
        "c"
    ]  # "long" and "c" have waited two updates; the shorter one comes first
    assert groups.take(["long", "d"]) == ["long"]
    assert groups.take([]) is None
    assert groups.take(["d"]) == ["d"]


def test_only_groups_that_are_there_are_taken() -> None:
    groups = PromptGroups(2, order="longest-first")
    groups.begin(0)
    groups.offer([group("a", 1), group("b", 2), group("c", 3)])
    assert groups.take(["a"]) is None
    assert groups.take(["a", "b"]) == ["b", "a"]
    assert groups.is_trained("a")
    assert not groups.is_trained("c")
    assert groups.take(["a", "b", "c"]) is None  # trained groups do not come back


@pytest.mark.parametrize("seed", range(3))
def test_every_group_is_taken_once_in_spite_of_kills(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    names = [f"g{number}" for number in range(64)]
    waiting, checkpoint, trained = list(names), (0, list(names)), []
    groups = PromptGroups(4, run_dir=tmp_path)
    groups.begin(0)
    while waiting:
        there = waiting[: rng.randint(4, 12)]
        groups.offer([group(name, rng.randint(1, 50)) for name in there])
        taken = groups.take(there)
        assert taken is not None
        waiting = [name for name in waiting if name not in taken]
        trained.append(taken)
        if rng.random() < 0.3:
            checkpoint = (len(trained), list(waiting))
        if rng.random() < 0.2:  # the process dies; the framework goes back to its checkpoint
            groups.close()
            num_updates, waiting = checkpoint[0], list(checkpoint[1])
            trained = trained[:num_updates]
            groups = PromptGroups(4, run_dir=tmp_path)
            groups.begin(num_updates)
    groups.close()
    assert sorted(name for taken in trained for name in taken) == sorted(names)
    assert [len(taken) for taken in trained] == [4] * 16
    assert_proven(tmp_path)


def test_a_ledger_that_does_not_reach_the_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"there is no .*ledger\.sqlite"):
        PromptGroups(1, run_dir=tmp_path / "none").begin(2)
    groups = PromptGroups(1, run_dir=tmp_path / "run")
    groups.begin(0)
    groups.close()
    with pytest.raises(RunDirError, match="older than the checkpoint"):
        PromptGroups(1, run_dir=tmp_path / "run").begin(2)


def test_the_first_resume_with_another_size_is_refused(tmp_path: Path) -> None:
    groups = PromptGroups(2, run_dir=tmp_path)
    groups.begin(0)
    groups.offer([group(name) for name in "abcdef"])
    assert groups.take("abcdef") == ["a", "b"]
    groups.close()
    larger = PromptGroups(3, run_dir=tmp_path)
    with pytest.raises(RunDirError, match="was begun with update_batch 2, and this process has 3: set it back"):
        larger.begin(1)  # and it leaves the directory to others
    other_order = PromptGroups(2, order="longest-first", run_dir=tmp_path)  # no bound
    other_order.begin(1)
    assert other_order.take("cdef") == ["c", "d"]
    other_order.close()
    assert_proven(tmp_path)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="order must be one of"):
        PromptGroups(2, order="longest")
    with pytest.raises(ConfigError, match="at least one group"):
        PromptGroups(0)


def test_the_proof_finds_a_batch_that_is_not_exact(tmp_path: Path) -> None:
    groups = PromptGroups(2, run_dir=tmp_path)
    groups.begin(0)
    groups.offer([group(name) for name in "abcde"])
    groups.buffer.take(list(groups.buffer.scored.values())[:3])
    groups.buffer.publish(1)
    groups.close()
    with Ledger(tmp_path) as ledger:
        assert [str(found) for found in verify(ledger).violations] == ["exact-batch: update 0 has 3 samples, not 2"]


# ---- NeMo-RL --------------------------------------------------------------------------------------------------------


@dataclass
class Meta:
    sample_ids: list[str]
    tags: list[dict[str, Any]] = field(default_factory=list)
    sequence_lengths: list[int] | None = None

    def concat(self, *others: Meta) -> Meta:
        return Meta([name for meta in (self, *others) for name in meta.sample_ids])


@dataclass
class ReplayBufferDouble:
    """The part of NeMo-RL's buffer that a sampler sees."""

    meta_list: list[Meta | None] = field(default_factory=list)
    start_weight_list: list[int] = field(default_factory=list)
    ready_list: list[bool] = field(default_factory=list)

    def add(self, name: str, weight: int, *, length: int = 5, ready: bool = True) -> None:
        self.meta_list.append(Meta([f"{name}_g0"], [{"group_id": name}], [length]) if ready else None)
        self.start_weight_list.append(weight)
        self.ready_list.append(ready)

    async def remove(self, places: list[int], *, remove_in_dp: bool) -> int:
        assert not remove_in_dp, "selected rows stay for the trainer"
        for kept in (self.meta_list, self.start_weight_list, self.ready_list):
            kept[:] = [value for place, value in enumerate(kept) if place not in places]
        return len(places)


def select(sampler: SortedSampler, weight: int, count: int) -> tuple[list[str] | None, int]:
    meta, number = asyncio.run(
        sampler.select(current_train_weight=weight, min_prompt_groups=count, max_prompt_groups=count)
    )
    return (None if meta is None else meta.sample_ids), number


def test_nemo_rl_gets_whole_steps_and_waits_for_what_is_at_its_bound() -> None:
    buffer = ReplayBufferDouble()
    sampler = SortedSampler(buffer, groups_per_step=2, max_staleness=1)
    sampler.set_dispatch_index(0)
    buffer.add("a", 0, length=9)
    assert select(sampler, 0, 2) == (None, 0)
    buffer.add("b", 0, length=4)
    buffer.add("c", 0, length=6)
    buffer.add("slow", 0, ready=False)
    assert select(sampler, 0, 2) == (["b_g0", "c_g0"], 2)
    buffer.add("d", 1, length=1)
    assert select(sampler, 1, 2) == (None, 0)  # "slow" would be two versions old at the next step
    buffer.ready_list[1], buffer.meta_list[1] = True, Meta(["slow_g0"], [{"group_id": "slow"}], [99])
    assert select(sampler, 1, 2) == (["a_g0", "slow_g0"], 2)  # the due ones, before the short new one
    assert asyncio.run(sampler.evict(current_train_weight=9)) == 0
    assert not sampler.should_abort_inflight(start_weight_version=0, current_train_weight=9)


def test_nemo_rl_admits_no_more_than_can_be_trained_in_time() -> None:
    sampler = SortedSampler(ReplayBufferDouble(), groups_per_step=2, max_staleness=1)
    sampler.set_dispatch_index(0)
    version = 0

    async def admit() -> int | None:
        return await asyncio.wait_for(sampler.admit(trainer_version_fn=lambda: version), timeout=0.05)

    assert asyncio.run(admit()) is None
    assert asyncio.run(admit()) is None
    with pytest.raises(TimeoutError):
        asyncio.run(admit())
    version = 1
    assert asyncio.run(admit()) is None
    assert (sampler.is_on_policy, sampler.required_buffer_capacity(8)) == (False, 16)


def test_nemo_rl_resumes_with_its_ledger(tmp_path: Path) -> None:
    buffer = ReplayBufferDouble()
    sampler = SortedSampler(buffer, groups_per_step=1, run_dir=str(tmp_path))
    sampler.set_dispatch_index(0)
    for name in "abc":
        buffer.add(name, 0)
    for step in range(2):
        assert select(sampler, step, 1)[1] == 1
    sampler.close()
    again = ReplayBufferDouble()
    for name in "bc":  # what NeMo-RL restores from its checkpoint after step 1
        again.add(name, 0)
    resumed = SortedSampler(again, groups_per_step=1, run_dir=str(tmp_path))
    resumed.set_dispatch_index(1)
    assert [select(resumed, step, 1)[0] for step in (1, 2)] == [["b_g0"], ["c_g0"]]
    resumed.close()
    assert_proven(tmp_path)


def test_nemo_rls_sizes_must_agree() -> None:
    with pytest.raises(ConfigError, match="groups_per_step is 2: make them equal"):
        select(SortedSampler(ReplayBufferDouble(), groups_per_step=2), 0, 3)
    with pytest.raises(ConfigError, match="0 or more, not -1"):
        SortedSampler(ReplayBufferDouble(), groups_per_step=2, max_staleness=-1)
