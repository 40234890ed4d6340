"""Slot time by cause: exact on a run worked out by hand, and complete on simulated and live runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.buffer import Buffer
from sortedrl.config import SortedConfig
from sortedrl.schedule import Strategy, resolve_knobs
from sortedrl.simulate.costs import load_cost
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import (
    AttemptEnded,
    AttemptStarted,
    BatchTaken,
    CheckpointSaved,
    CohortLoaded,
    Evaluated,
    Event,
    RewardCalled,
    RunEnded,
    RunStarted,
    SampleRequeued,
    SampleScored,
    ScoresAwaited,
    UpdateDone,
    WeightsPublished,
)
from sortedrl.telemetry.slot_time import MEANINGS, WAITING, Cause
from sortedrl.telemetry.summary import Summary
from sortedrl.trainer import SortedTrainer
from tests.support.scripted_runs import ScriptedPolicy, ScriptedRun, scripted_run
from tests.telemetry.test_telemetry import folded


def started(t: float, sample: int, slot: int, cached: int = 0) -> AttemptStarted:
    mode = "resume" if cached else "fresh"
    return AttemptStarted(t=t, sample=sample, attempt=1 + (cached > 0), mode=mode, cached=cached, slot=slot, version=0)


def ended(t: float, sample: int, slot: int, outcome: str, num_tokens: int) -> AttemptEnded:
    return AttemptEnded(t=t, sample=sample, attempt=1, outcome=outcome, num_tokens=num_tokens, slot=slot)


def taken(t: float, update: int, sample: int, length: int, **engine: float) -> BatchTaken:
    return BatchTaken(
        t=t,
        update=update,
        version=update,
        samples=[sample],
        lengths=[length],
        rewards=[1.0],
        staleness=[0],
        staleness_token_sum=[0],
        truncated=0,
        num_interrupted=1,
        slot_s=float(length),
        **engine,
    )


# Three slots; a running slot writes a token a second once its prompt is read.
#  1 to  2 s: nothing runs: the cohort is loaded                                                    start-up     3
#  2 to  7 s: 0, 1 and 2 read their prompts (1 s each: prefill 3) and write: 0 four tokens. 1 and 2 hold four each.
#  7 to  8 s: the loop waits for 0's score, and the engine pauses                                    reward       3
#  8 to 10 s: update;  10 to 10.5 s: weights;  10.5 to 11 s: a checkpoint           update 6, publish 1.5, save 1.5
# 11 to 15 s: 1 resumes, reads its 4 tokens and its prompt again in 2 s (a prompt has 4 tokens too: 1 s each), writes 2;
#             2 starts again, reads its prompt in 1 s, waits 1 s while the loop works, writes 2. One slot is free.
RUN: list[Event] = [
    RunStarted(t=1.0, strategy="sorted", seed=0, slots=3, update_batch=1, total_samples=3),
    CohortLoaded(t=1.5, cohort=0, update=0, samples=[0, 1, 2]),
    started(2.0, 0, 0),
    started(2.0, 1, 1),
    started(2.0, 2, 2),
    ended(7.0, 0, 0, "stop", 4),
    RewardCalled(t=7.9, worker=0, seconds=0.8, lag_s=0.0, num_samples=1),
    ScoresAwaited(t=8.0, seconds=1.0, num_paused=2),
    SampleScored(t=8.0, sample=0, attempt=1, reward=1.0),
    ended(8.0, 1, 1, "interrupted", 4),
    ended(8.0, 2, 2, "interrupted", 4),
    taken(8.0, 0, 0, 4, busy_s=15.0, prefill_s=3.0, prompt_tokens=12),
    UpdateDone(t=10.0, update=0, version=1, optimizer_steps=1, seconds=2.0),
    WeightsPublished(t=10.5, version=1, seconds=0.5),
    CheckpointSaved(t=11.0, version=1, seq=1, seconds=0.5),
    SampleRequeued(t=11.0, sample=1, decision="resume", discarded=0),
    SampleRequeued(t=11.0, sample=2, decision="restart", discarded=4),
    started(11.0, 1, 0, cached=4),
    started(11.0, 2, 1),
    ended(15.0, 1, 0, "stop", 6),
    SampleScored(t=15.0, sample=1, attempt=2, reward=1.0),
    ended(15.0, 2, 1, "interrupted", 2),
    taken(15.0, 1, 1, 6, busy_s=7.0, prefill_s=3.0, prompt_tokens=8, recomputed_tokens=4),
    UpdateDone(t=16.0, update=1, version=2, optimizer_steps=1, seconds=1.0),
    Evaluated(t=16.0, version=2, samples_trained=2, sampled_accuracy=0.5, greedy_accuracy=0.5, mean_length=3.0),
    RunEnded(t=20.0, reason="stopped"),
]
SECONDS = {  # of 3 x 15
    "trained": 4 + 6,
    "in_flight": 2,  # of the 16 seconds of decoding, 6 are left, by tokens: 2 that sample 2 holds
    "discarded": 4,  # and 4 that it threw away
    "recomputed": 1.0,  # of 6 s of reading: 4 of the 24 tokens that were read had been decoded before
    "prefill": 5.0,
    "overhead": 1.0,  # 8 slot-seconds in the second rollout, of which the engine computed 7
    "tail": 4.0,
    "tool": 0.0,
    "reward": 3.0,
    "update": 6.0 + 3.0,
    "publish": 1.5,
    "save": 1.5,
    "start_up": 3.0,
}


def test_a_run_worked_out_by_hand():
    assert folded(RUN).slot_time() == pytest.approx({cause: part / 45 for cause, part in SECONDS.items()})


def test_an_attempt_that_is_interrupted_while_it_is_paused():
    events: list[Event] = [
        replace(RUN[0], t=0.0, slots=2),
        started(0.0, 0, 0),
        started(0.0, 1, 1),
        ended(2.0, 0, 0, "stop", 2),
        replace(taken(2.0, 0, 0, 2, busy_s=4.0), num_paused=1),
        UpdateDone(t=3.0, update=0, version=1, optimizer_steps=1, seconds=1.0),
        ended(3.0, 1, 1, "interrupted", 2),
        WeightsPublished(t=4.0, version=1, seconds=1.0),
    ]
    expected = {"trained": 2 / 8, "in_flight": 2 / 8, "update": 2 / 8, "publish": 2 / 8}
    assert folded(events).slot_time() == pytest.approx({**dict.fromkeys(SECONDS, 0.0), **expected})


OVERLAPPED = (Strategy.ASYNC, Strategy.ASYNC_ON_POLICY)


@pytest.mark.parametrize("count", range(len(RUN) + 1))
def test_at_every_moment_the_causes_are_complete(count: int):
    metrics = folded(RUN[:count])
    found = metrics.slot_time()
    if metrics.occupancy.now == metrics.occupancy.origin:
        assert found is None
    else:
        assert found is not None
        assert sum(found.values()) == pytest.approx(1.0)
        assert min(found.values()) >= 0.0


def test_every_cause_has_a_meaning():
    assert set(MEANINGS) == set(Cause)
    assert set(WAITING) < set(Cause)


@settings(max_examples=40)
@given(
    strategy=st.sampled_from(list(Strategy)),
    slots=st.integers(1, 24),
    update_batch=st.sampled_from([4, 8, 16]),
    hardware=st.sampled_from([None, "h100", "cpu"]),
    update_s=st.sampled_from([None, 0.0, 7.5]),
    seed=st.integers(0, 3),
)
def test_the_causes_of_simulated_runs_agree_with_their_summary(
    strategy: Strategy, slots: int, update_batch: int, hardware: str | None, update_s: float | None, seed: int
):
    summary = simulate(
        load_trace("lognormal(40, 1.0, 400)", samples=96, seed=seed),
        strategy=strategy,
        slots=slots,
        update_batch=update_batch,
        cost=None if hardware is None else load_cost("roofline", hardware=hardware, model="smollm2-135m"),
        divergence=0.01,
        update_s=update_s,
        seed=seed,
    )
    check_complete(summary)
    found, wall = summary.slot_time, summary.wall_s
    working = sum(found[cause] for cause in Cause if cause not in (*WAITING, Cause.OVERHEAD))
    assert working == pytest.approx((1.0 - summary.bubble_ratio) * summary.rollout_s / wall, abs=1e-6)
    if strategy not in OVERLAPPED:  # nothing runs during an update: the parts of the wall clock are known
        assert found["update"] == pytest.approx(summary.update_s / wall, abs=1e-6)
        assert found["publish"] == pytest.approx(summary.publish_s / wall, abs=1e-6)
        idle = sum(found[cause] for cause in ("tail", "reward", "start_up", "overhead"))
        assert idle == pytest.approx(summary.bubble_ratio * summary.rollout_s / wall, abs=1e-6)
    if not summary.recomputed_tokens:
        assert found["recomputed"] == 0.0
    if not summary.discarded_tokens:
        assert found["discarded"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("strategy", [strategy for strategy in Strategy if strategy not in OVERLAPPED])
def test_without_attempts_the_engine_reports_how_busy_slots_were(strategy: Strategy):
    events: list[Event] = []
    summary = simulate(
        load_trace("lognormal(40, 1.0, 400)", samples=96),
        strategy=strategy,
        slots=8,
        update_batch=8,
        cost=load_cost("roofline", hardware="cpu", model="smollm2-135m"),
        divergence=0.01,
        emit=events.append,
    )
    kept = [event for event in events if not isinstance(event, AttemptStarted | SampleScored)]
    few = [
        replace(event, slot=-1) if isinstance(event, AttemptEnded) else event
        for event in kept
        if not isinstance(event, AttemptEnded) or event.outcome == "interrupted"
    ]
    assert folded(few).slot_time() == pytest.approx(summary.slot_time, abs=1e-6)


def check_complete(summary: Summary) -> None:
    found = summary.slot_time
    assert found is not None
    assert set(found) == {cause.value for cause in Cause}
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-6)
    assert min(found.values()) >= -1e-6
    assert found["trained"] == pytest.approx(summary.goodput * summary.rollout_s / summary.wall_s, abs=1e-6)
    assert found["in_flight"] == pytest.approx(0.0, abs=1e-6) or summary.status == "stopped"


@dataclass(slots=True, kw_only=True)
class SlowCheckpoints:
    """A checkpoint after every update, which takes two seconds."""

    run_of: ScriptedRun

    def is_due(self, num_updates: int) -> bool:
        return True

    def run(self, buffer: Buffer, state: Mapping[str, Any]) -> None:
        clock = self.run_of.clock
        clock.advance(clock.now() + 2.0)
        self.run_of.events.append(CheckpointSaved(t=clock.now(), version=buffer.version, seq=1, seconds=2.0))


@pytest.mark.parametrize("strategy", list(Strategy))
def test_the_causes_of_a_run_of_the_real_controller_agree_with_its_timing(strategy: Strategy):
    run = scripted_run(
        resolve_knobs(strategy, update_batch=8),
        policy=ScriptedPolicy(longest=60, length_change=0.2, divergence=0.01),
        slots=8,
        num_samples=64,
        update_s=5.0,
    )
    run.controller.checkpoints = SlowCheckpoints(run_of=run)
    assert run.controller.run()
    start = RunStarted(t=0.0, strategy=strategy, seed=0, slots=8, update_batch=8, total_samples=64)
    metrics, timing = folded([start, *run.events]), run.controller.timing()
    found = metrics.slot_time()
    assert found is not None
    assert sum(found.values()) == pytest.approx(1.0)
    assert timing.save_s > 0.0
    assert found["save"] == pytest.approx(timing.save_s / timing.wall_s)
    assert found["trained"] == pytest.approx(metrics.goodput(timing) * timing.rollout_s / timing.wall_s)
    if strategy not in OVERLAPPED:
        assert found["update"] == pytest.approx(timing.update_s / timing.wall_s)


@pytest.mark.parametrize("strategy", ["sorted-replay", "sorted-partial", "async", "async-on-policy"])
def test_the_causes_of_a_live_run_are_complete(tmp_path: Path, strategy: str):
    config = SortedConfig(
        run={"name": "live", "dir": str(tmp_path), "samples": 48, "report": False},
        schedule={"strategy": strategy, "update_batch": 16, "cohort_batches": 3},
        engine={"slots": 8, "max_new_tokens": 96},
        learner={"group_size": 4},
        eval={"prompts": 4, "every_samples": 16},
        checkpoint={"every_updates": 1},
    )
    summary = SortedTrainer(args=config, quiet=True).train()
    found = summary.slot_time
    assert found is not None
    assert set(found) == {cause.value for cause in Cause}
    assert sum(found.values()) == pytest.approx(1.0)
    assert min(found.values()) >= -1e-9
    assert found["prefill"] > 0.0
    assert found["save"] > 0.0
    # The file alone gives the same result.
    metrics = folded(list(read_events(tmp_path / "live" / "events.jsonl")))
    assert metrics.slot_time() == pytest.approx(found)
    assert summary.emit_s > 0.0
