"""Dynamic sampling: groups whose rewards are all equal are trained with weight 0, and updates wait for other groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.records import Batch, Sample
from sortedrl.schedule import Strategy, resolve_knobs
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import BatchTaken, UpdateDone
from sortedrl.trainer import SortedTrainer
from tests.properties.test_guarantees import (
    MANY,
    assert_budgets,
    assert_exactly_once,
    assert_logprobs_of_named_version,
    assert_no_starvation,
    assert_staleness,
    assert_tokens_add_up,
    runs,
)
from tests.support.scripted_runs import DelayedScorer, ScriptedPolicy, ScriptedRun, ScriptedScore, scripted_run

DRAINING = (Strategy.SYNC, Strategy.SYNC_LARGE)


@dataclass(slots=True, kw_only=True)
class SignalByPrompt(DelayedScorer):
    """Gives all siblings the same reward, except for the prompts in `with_signal`."""

    with_signal: frozenset[str]

    def submit(self, sample: Sample) -> None:
        reward = float(sample.index) if sample.prompt.id in self.with_signal else 1.0
        self.queue.append((0, ScriptedScore(key=(sample.id, sample.attempt), reward=reward)))


def num_flat(batch: Batch) -> int:
    """Samples whose siblings, at least one, all have the same reward."""
    rewards: dict[Any, list[float | None]] = {}
    for sample in batch.samples:
        rewards.setdefault(sample.group, []).append(sample.reward)
    return sum(len(group) for group in rewards.values() if len(group) > 1 and len(set(group)) == 1)


@pytest.mark.parametrize("strategy", [strategy for strategy in Strategy if strategy not in DRAINING])
def test_guarantees_hold_and_updates_have_signal(strategy: Strategy) -> None:
    @settings(MANY, max_examples=40)
    @given(run=runs(strategy), extra=st.integers(1, 3))
    def check(run: ScriptedRun, extra: int) -> None:
        controller = run.controller
        knobs = replace(controller.knobs, flat_extra=extra * controller.knobs.update_batch)
        controller.knobs = knobs
        assert controller.run()
        assert_exactly_once(run)
        assert_no_starvation(run)
        assert_staleness(run)
        assert_budgets(run)
        assert_logprobs_of_named_version(run)
        assert_tokens_add_up(run)
        for batch in run.learner.batches[:-1]:  # the last takes what is there
            flat = num_flat(batch) if controller.buffer.grouped else 0
            assert len(batch.samples) - min(flat, knobs.flat_extra) >= knobs.update_batch

    check()


def pairs(with_signal: set[int], *, lookahead: int = 0, flat_extra: int = 8) -> list[list[int]]:
    """The batches of a run, as numbers of pairs: 16 pairs, answers of one token, 4 slots, U = 4, n = 2."""
    knobs = resolve_knobs("sorted-partial", 4, cohort_batches=2, lookahead=lookahead, flat_extra=flat_extra)
    run = scripted_run(knobs, policy=ScriptedPolicy(longest=1), slots=4, num_samples=32, siblings=2, grouped=True)
    run.controller.scorer = SignalByPrompt(with_signal=frozenset(f"p{number}" for number in with_signal))
    assert run.controller.run()
    return [sorted({sample // 2 for sample in batch}) for batch in run.batches]


def test_by_hand() -> None:
    everything = set(range(16))
    assert pairs(everything) == [[at, at + 1] for at in range(0, 16, 2)]
    # Pairs 1 and 2 lack signal: the first update waits for pair 3, and 4 slots finish two pairs at a time.
    assert pairs(everything - {1, 2})[:2] == [[0, 1, 2, 3], [4, 5]]
    # The first cohort has signal in pair 0 only: the second one is loaded for it, though lookahead is 0.
    assert pairs(everything - {1, 2, 3})[:2] == [[0, 1, 2, 3, 4, 5], [6, 7]]
    # Nothing but flat pairs: 8 samples come on top of 4, so an update is 6 pairs; the last takes what is there.
    assert pairs(set()) == [[*range(6)], [*range(6, 12)], [*range(12, 16)]]
    assert pairs(set(), flat_extra=0) == [[at, at + 1] for at in range(0, 16, 2)]


def config(folder: Path, **learner: Any) -> SortedConfig:
    return SortedConfig(
        run={"dir": str(folder), "samples": 96, "report": False, "on_no_signal": "warn"},
        engine={"slots": 8, "max_new_tokens": 40},
        schedule={"strategy": "sorted-partial", "update_batch": 8},
        learner={"algorithm": "grpo", "group_size": 2, **learner},
        eval={"prompts": 0},
        checkpoint={"save": False},
    )


@pytest.mark.parametrize("flat_groups", ["keep", "zero", "replace"])
def test_a_run_counts_them_and_its_ledger_is_exact(flat_groups: str, tmp_path: Path) -> None:
    summary = SortedTrainer(args=config(tmp_path, flat_groups=flat_groups), quiet=True).train()
    assert summary.ledger is not None
    assert summary.ledger.model_dump() == {"loaded": 96, "trained": 96, "lost": 0, "duplicated": 0}
    happened = list(read_events(tmp_path / "run" / "events.jsonl"))
    batches = [event for event in happened if isinstance(event, BatchTaken)]
    groups: list[set[float]] = []  # the rewards of each pair; siblings have neighbouring numbers
    for batch in batches:
        rewards = dict(zip(batch.samples, batch.rewards, strict=True))
        groups += [{rewards[sample], rewards[sample + 1]} for sample in batch.samples if sample % 2 == 0]
    flat = sum(len(group) == 1 for group in groups)
    assert 0 < flat < 48
    assert summary.flat_groups == flat
    assert summary.filtered_samples == (0 if flat_groups == "keep" else 2 * flat)
    learned = [event.metrics["filtered_samples"] for event in happened if isinstance(event, UpdateDone)]
    sizes = [len(batch.samples) for batch in batches]
    if flat_groups == "replace":
        assert all(size - min(lost, 16) >= 8 for size, lost in zip(sizes[:-1], learned[:-1], strict=True))
        assert max(sizes) > 8


def test_what_cannot_be_replaced_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a drained cohort has no other groups"):
        SortedConfig(learner={"flat_groups": "replace"}, schedule={"strategy": "sync"})
    with pytest.raises(ConfigError, match="compares siblings, and reinforce"):
        config(tmp_path, algorithm="reinforce++", flat_groups="replace")
    with pytest.raises(ConfigError, match="compares siblings, and rloo with"):
        config(tmp_path, algorithm="rloo", group_size=1, flat_groups="replace")
