"""Schedules on the simulated engine, with steps, batches, staleness and waste worked out by hand in the comments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sortedrl.engine.base import Capabilities
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.errors import ConfigError
from sortedrl.records import FinishReason, Mode, Segment, State
from sortedrl.schedule import (
    Fate,
    Order,
    Strategy,
    admission_needs_scores,
    decide_fates,
    is_provisional,
    lacks_only_scores,
    resolve_knobs,
)
from sortedrl.telemetry import events
from tests.support.scripted_runs import DelayedScorer, ScriptedPolicy, ScriptedRun, ScriptedScore, scripted_run


def run_lengths(
    strategy: Strategy, lengths: list[int], *, slots: int, update_batch: int, **knobs: object
) -> ScriptedRun:
    """Run samples 0, 1, ... with these lengths under every version; sample i has seed i."""
    options = {name: knobs.pop(name) for name in ("siblings", "grouped", "update_s", "score_lag") if name in knobs}
    run = scripted_run(
        resolve_knobs(strategy, update_batch, **knobs),
        policy=ScriptedPolicy(lengths=dict(enumerate(lengths))),
        slots=slots,
        num_samples=len(lengths),
        seed_of=lambda number: number,
        **options,
    )
    assert run.controller.run()
    return run


def discarded(run: ScriptedRun) -> int:
    return sum(event.discarded for event in run.events if isinstance(event, events.SampleRequeued))


def staleness(run: ScriptedRun) -> list[list[int]]:
    return [[s.staleness(batch.version) for s in batch.samples] for batch in run.learner.batches]


def test_sync_waits_for_the_longest() -> None:
    # Two batches of two, one after the other: max(1, 9) + max(2, 3) = 12 steps.
    # 15 of 2 x 12 slot-steps decode: bubble 9/24.
    run = run_lengths(Strategy.SYNC, [1, 9, 2, 3], slots=2, update_batch=2)
    assert run.batches == [[0, 1], [2, 3]]
    assert run.clock.now() == 12
    assert run.engine.stats().busy_slot_s == 15
    assert staleness(run) == [[0, 0], [0, 0]]


def test_sync_large_drains_then_deals_in_order() -> None:
    # Slots: 0 (1 step), then 2 (1..3), then 3 (3..6); beside it 1 (0..9). Drained at step 9.
    # Dealt shortest first: lengths 1 2 | 3 9. The second batch is one version old.
    run = run_lengths(
        Strategy.SYNC_LARGE, [1, 9, 2, 3], slots=2, update_batch=2, cohort_batches=2, order="shortest-first"
    )
    assert run.clock.now() == 9
    assert run.batches == [[0, 2], [3, 1]]
    assert staleness(run) == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("order", "batches"),
    [
        (Order.SHORTEST_FIRST, [[0, 2], [3, 1]]),
        (Order.LONGEST_FIRST, [[1, 3], [2, 0]]),
        # Ranks by length: 0 2 3 1. Two batches are left, so every second: 0 and 3; then 2 and 1.
        (Order.INTERLEAVED, [[0, 3], [2, 1]]),
        # By seed, and sample i has seed i.
        (Order.SHUFFLED, [[0, 1], [2, 3]]),
    ],
)
def test_a_drain_is_dealt_in_order(order: Order, batches: list[list[int]]) -> None:
    run = run_lengths(Strategy.SYNC_LARGE, [1, 9, 2, 3], slots=2, update_batch=2, cohort_batches=2, order=order)
    assert run.batches == batches


def test_sorted_partial_resumes_the_long_one() -> None:
    # Steps: 0 ends at 1, 2 starts; 2 ends at 3: harvest {0, 2}; 1 has 3 tokens, resumed; 3 runs 3..6.
    # Cohort of 4: the second update is its last and waits for 1, which ends at 9.
    run = run_lengths(Strategy.SORTED_PARTIAL, [1, 9, 2, 3], slots=2, update_batch=2, cohort_batches=2)
    assert run.batches == [[0, 2], [3, 1]]
    assert run.clock.now() == 9
    assert staleness(run) == [[0, 0], [0, 1]]
    assert discarded(run) == 0
    assert [segment.version for segment in run.trained[-1].segments] == [0, 1]
    assert [len(segment.tokens) for segment in run.trained[-1].segments] == [3, 6]


def test_sorted_on_policy_restarts_the_long_one_last() -> None:
    # Harvest at 3 as above; 1 loses 3 tokens. Never-started 3 first, and 1 in the other slot: 3 ends at 6, 1 at 12.
    run = run_lengths(Strategy.SORTED_ON_POLICY, [1, 9, 2, 3], slots=2, update_batch=2, cohort_batches=2)
    assert run.batches == [[0, 2], [3, 1]]
    assert run.clock.now() == 12
    assert discarded(run) == 3
    assert staleness(run) == [[0, 0], [0, 0]]
    assert run.trained[-1].attempt == 2


def test_sorted_replay_keeps_what_still_holds() -> None:
    # Frozen weights: the 3 cached tokens of 1 are verified at no cost, so it ends at 9 as if resumed, but on-policy.
    run = run_lengths(Strategy.SORTED_REPLAY, [1, 9, 2, 3], slots=2, update_batch=2, cohort_batches=2)
    assert run.clock.now() == 9
    assert discarded(run) == 0
    assert staleness(run) == [[0, 0], [0, 0]]
    assert [segment.version for segment in run.trained[-1].segments] == [1]
    verified = [event for event in run.events if isinstance(event, events.AttemptVerified)]
    assert [(event.cached, event.accepted) for event in verified] == [(3, 3)]


def test_lookahead_fills_idle_slots() -> None:
    # Cohorts of 2, one batch each. L = 0: sample 1 holds the cohort for 9 steps beside an idle slot, then 2 and 3.
    # L = 1: at step 1 a slot would idle, so cohort 1 is loaded: 2 (1..3); {0, 2} harvested at 3; cohort 0 has two
    # updates, the second is its last and waits for 1 (ends at 9); 3 (3..6) goes with it.
    strict = run_lengths(Strategy.SORTED_PARTIAL, [1, 9, 2, 3], slots=2, update_batch=2, cohort_batches=1)
    ahead = run_lengths(Strategy.SORTED_PARTIAL, [1, 9, 2, 3], slots=2, update_batch=2, cohort_batches=1, lookahead=1)
    assert (strict.batches, strict.clock.now()) == ([[0, 1], [2, 3]], 12)
    assert (ahead.batches, ahead.clock.now()) == ([[0, 2], [3, 1]], 9)


def test_april_never_waits_for_a_cohort() -> None:
    # Like an unlimited lookahead: 1 is interrupted at every harvest and ends at 9 = 3 + 6, after the short ones.
    lengths = [1, 9, 2, 3, 2, 2]
    run = run_lengths(Strategy.APRIL, lengths, slots=2, update_batch=2, cohort_batches=1)
    # Slot A: 1 (0..9). Slot B: 0 (0..1), 2 (1..3): harvest {0, 2}; 3 (3..6), 4 (6..8): harvest {4, 3};
    # 5 (8..10) and 1 (..9): harvest {5, 1} at 10.
    assert run.batches == [[0, 2], [4, 3], [5, 1]]
    assert run.clock.now() == 10
    assert staleness(run) == [[0, 0], [0, 0], [0, 2]]


def test_samples_that_finish_together_are_taken_together() -> None:
    run = run_lengths(Strategy.SORTED_PARTIAL, [2, 2, 2, 5], slots=4, update_batch=2, cohort_batches=2)
    assert run.batches == [[0, 1, 2], [3]]


def test_tail_batching_sets_long_ones_aside() -> None:
    # n = 3 batches of 2: a short round starts ceil(6 / 2) = 3 and trains 2. Slots 3.
    # Round 1: 0 (1), 1 (9), 2 (2): harvest {0, 2} at 2, 1 set aside with 2 tokens lost.
    # Round 2: 3 (1), 4 (8), 5 (2); all have started when 3 ends at 3, so 1 fills its slot. Harvest {3, 5} at 4: 4 loses
    # 2 tokens, 1 loses 1. Long round: 1 and 4 restart: ends at 4 + 9 = 13.
    run = run_lengths(Strategy.TAIL_BATCHING, [1, 9, 2, 1, 8, 2], slots=3, update_batch=2, cohort_batches=3)
    assert run.batches == [[0, 2], [3, 5], [4, 1]]
    assert run.clock.now() == 13
    assert discarded(run) == 5


def test_async_rolls_on_during_the_update() -> None:
    # U = 1, Q = 2, an update takes 4. Sample 0 ends at 1 and 2 takes its slot. Without overlap the engine is paused
    # during every update: 1 ends after 5 steps, 2 after 7, and with three updates that is 7 + 3 x 4 = 19.
    knobs = {"slots": 2, "update_batch": 1, "cohort_batches": 3, "lookahead": 0, "update_s": 4.0}
    apart = run_lengths(Strategy.SORTED_PARTIAL, [1, 5, 6], **knobs)
    assert (apart.batches, apart.clock.now()) == ([[0], [1], [2]], 19)
    # With overlap: updates 1..5, 5..9 and 9..13; sample 1 is there at 5, sample 2 at 7.
    beside = run_lengths(Strategy.ASYNC, [1, 5, 6], **knobs)
    assert (beside.batches, beside.clock.now()) == ([[0], [1], [2]], 13)
    assert beside.engine.stats().busy_slot_s == 12


def test_async_trains_batches_of_their_size_and_starts_no_more_than_they_hold() -> None:
    # U = 2, Q = 4, s = 2, an update takes 10. 0 and 1 end at 1; what starts during their update, at version 0, can be
    # trained at versions 1 and 2: in two batches, 4 samples. So 4 and 5 start at 1, and at 2, when 2 and 3 are ready,
    # no more, though slots are free. At 11 the batch is 2 and 3, as short as any, and 6 and 7 may start; at 21 it is 4
    # and 5, which are at the bound, though 6 and 7 are shorter; and so on, an update every 10.
    lengths = [1, 1, 2, 2, 3, 3, 2, 2, 1, 1]
    knobs = {"slots": 4, "update_batch": 2, "cohort_batches": 5, "lookahead": 0, "update_s": 10.0}
    run = run_lengths(Strategy.ASYNC, lengths, **knobs)
    assert run.batches == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert staleness(run) == [[0, 0], [1, 1], [2, 2], [2, 2], [2, 2]]
    started = {e.sample: e.t for e in run.events if isinstance(e, events.AttemptStarted)}
    assert [started[number] for number in range(10)] == [0, 0, 0, 0, 1, 1, 11, 11, 21, 21]
    assert run.clock.now() == 51


def test_a_drain_with_overlap_starts_all_of_its_cohort() -> None:
    # Batches are made when all eight samples are scored, so holding six of them back for the bound would never end.
    knobs = {"overlap": True, "max_staleness": 1, "on_bound": "restart", "order": "shortest-first"}
    run = run_lengths(Strategy.SYNC_LARGE, [1] * 8, slots=2, update_batch=2, cohort_batches=4, update_s=3.0, **knobs)
    assert sorted(number for batch in run.batches for number in batch) == list(range(8))


def test_async_takes_on_top_of_a_batch_what_the_bound_would_make_it_write_again() -> None:
    # U = 2, and four answers are ready at 1. At s = 0 two that waited would be restarted after the update.
    knobs = {"slots": 4, "update_batch": 2, "cohort_batches": 2, "on_bound": "restart", "update_s": 3.0}
    assert run_lengths(Strategy.ASYNC, [1, 1, 1, 1], max_staleness=0, **knobs).batches == [[0, 1, 2, 3]]
    assert run_lengths(Strategy.ASYNC, [1, 1, 1, 1], max_staleness=1, **knobs).batches == [[0, 1], [2, 3]]


def verified(run: ScriptedRun) -> list[tuple[int, int]]:
    return [(e.sample, e.cached) for e in run.events if isinstance(e, events.AttemptVerified)]


def test_async_on_policy_verifies_what_was_written_during_an_update() -> None:
    # As above, an update takes 4: 1..5, 5..9 and 9..13. At 5 sample 1 has ended with 5 tokens, and 2 has 4. Both are
    # verified, 1 is trained, and 2 goes on to its end at 7. At 9 its 6 tokens are verified once more.
    run = run_lengths(
        Strategy.ASYNC_ON_POLICY, [1, 5, 6], slots=2, update_batch=1, cohort_batches=3, lookahead=0, update_s=4.0
    )
    assert (run.batches, run.clock.now()) == ([[0], [1], [2]], 13)
    assert staleness(run) == [[0], [0], [0]]
    assert verified(run) == [(1, 5), (2, 4), (2, 6)]
    assert [number for number, _ in run.controller.scorer.asked] == [0, 1, 2]  # no token changed: one reward each


def test_async_on_policy_verifies_only_what_the_next_batch_needs() -> None:
    # U = 2, Q = 4, all answers have one token, an update takes 10. At 1 samples 0 to 3 are complete: 0 and 1 are
    # trained, 4 to 7 start. At 2 six complete answers wait, more than two batches, so 8 and 9 do not start. After each
    # update two answers are verified and trained. At 21 that leaves two, and 8 and 9 start.
    knobs = {"slots": 4, "update_batch": 2, "cohort_batches": 5, "lookahead": 0, "update_s": 10.0}
    run = run_lengths(Strategy.ASYNC_ON_POLICY, [1] * 10, **knobs)
    assert run.batches == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert staleness(run) == [[0, 0]] * 5
    assert verified(run) == [(number, 1) for number in range(2, 10)]
    assert [number for number, _ in run.controller.scorer.asked] == list(range(10))
    started = {e.sample: e.t for e in reversed(run.events) if isinstance(e, events.AttemptStarted)}  # first attempts
    assert [started[number] for number in range(10)] == [0, 0, 0, 0, 1, 1, 1, 1, 21, 21]
    assert run.clock.now() == 51


def test_async_on_policy_verifies_siblings_when_the_last_of_them_is_complete() -> None:
    # Two prompts with two samples each, U = 2, Q = 3, an update takes 2: (1, 6) and (2, 2). The second prompt is
    # trained at 3 (its second sample runs from 1 to 3). At 5 new weights come: 0 waits unverified, 1 is verified with 5
    # tokens and ends at 6. Only then is 0 verified.
    knobs = {"slots": 3, "update_batch": 2, "cohort_batches": 2, "lookahead": 0, "update_s": 2.0}
    run = run_lengths(Strategy.ASYNC_ON_POLICY, [1, 6, 2, 2], siblings=2, grouped=True, **knobs)
    assert run.batches == [[2, 3], [0, 1]]
    assert staleness(run) == [[0, 0], [0, 0]]
    assert verified(run) == [(1, 5), (0, 1)]
    assert run.clock.now() == 8


def test_an_answer_goes_on_through_updates_and_is_verified_once() -> None:
    # As for sorted-partial: 0 and 2 are trained at 3, then 3 ends at 6 and 1, whose slot is never interrupted, at 9.
    # Its 9 tokens are verified there, three of them of version 0. 3 began under version 1 and needs no verification.
    knobs = {"slots": 2, "update_batch": 2, "cohort_batches": 2, "max_unverified": "none"}
    run = run_lengths(Strategy.SORTED_REPLAY, [1, 9, 2, 3], **knobs)
    assert (run.batches, run.clock.now()) == ([[0, 2], [3, 1]], 9)
    assert staleness(run) == [[0, 0], [0, 0]]
    assert verified(run) == [(1, 9)]
    assert run.engine.stats().recomputed_tokens == 9
    assert run.trained[3].num_interrupts == 0
    assert [number for number, _ in run.controller.scorer.asked] == [0, 2, 3, 1]  # no token changed: one reward each


def test_an_answer_goes_on_through_updates_with_overlap() -> None:
    # As for async-on-policy above, updates 1..5, 5..9 and 9..13. At 5 sample 1 has ended with 5 tokens and is verified;
    # 2 goes on from 4 to 6 tokens, over the cache of version 0, and ends at 7, during an update. It is verified at 9.
    run = run_lengths(
        Strategy.ASYNC_ON_POLICY,
        [1, 5, 6],
        slots=2,
        update_batch=1,
        cohort_batches=3,
        lookahead=0,
        update_s=4.0,
        max_unverified="none",
    )
    assert (run.batches, run.clock.now()) == ([[0], [1], [2]], 13)
    assert staleness(run) == [[0], [0], [0]]
    assert verified(run) == [(1, 5), (2, 6)]


def test_unverified_answers_of_a_group_are_verified_when_the_last_of_them_is_complete() -> None:
    # (1, 9) and (2, 3) on two slots: the second prompt is trained at 6. Sample 0, complete since 1, waits for 1, which
    # ends at 9.
    knobs = {"slots": 2, "update_batch": 2, "cohort_batches": 2, "max_unverified": "none"}
    run = run_lengths(Strategy.SORTED_REPLAY, [1, 9, 2, 3], siblings=2, grouped=True, **knobs)
    assert (run.batches, run.clock.now()) == ([[2, 3], [0, 1]], 9)
    assert verified(run) == [(0, 1), (1, 9)]


def test_an_engine_that_cannot_keep_its_cache_verifies_at_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    # At 3 sample 1 has three tokens. They are verified, and it goes on under version 1.
    can = Capabilities(slots=2, exact_replay=True, keep_kv=False, waits=True)
    monkeypatch.setattr(SimEngine, "capabilities", property(lambda engine: can))
    knobs = {"slots": 2, "update_batch": 2, "cohort_batches": 2, "max_unverified": "none"}
    run = run_lengths(Strategy.SORTED_REPLAY, [1, 9, 2, 3], **knobs)
    assert (run.batches, run.clock.now()) == ([[0, 2], [3, 1]], 9)
    assert verified(run) == [(1, 3)]


def test_a_score_that_comes_during_the_verification_is_used() -> None:
    # Each score takes six polls, longer than an update: it arrives while its answer is pending or running again.
    knobs = {"slots": 2, "update_batch": 2, "cohort_batches": 4, "lookahead": 0, "update_s": 1.0}
    run = run_lengths(Strategy.ASYNC_ON_POLICY, [1, 2, 3, 4, 1, 2, 3, 4], score_lag=6, **knobs)
    assert sorted(number for number, _ in run.controller.scorer.asked) == list(range(8))
    assert all(sample.reward == float(sum(sample.tokens) % 2) for sample in run.trained)
    assert sum(sample.reward_attempt != sample.attempt for sample in run.trained) > 0


def test_a_bound_with_wait_holds_the_harvest() -> None:
    # U = 1, staleness at most 1: 0 and 2 are trained at steps 1 and 2 as they end; then sample 1 (version 0 tokens,
    # version 2 in force next) must be in the second batch: the harvest waits until it ends at 6.
    run = run_lengths(Strategy.SORTED_PARTIAL, [1, 6, 1, 1], slots=2, update_batch=1, cohort_batches=4, max_staleness=1)
    assert run.batches[0] == [0]
    assert 1 in run.batches[1]
    assert max(max(batch) for batch in staleness(run)) == 1


def test_siblings_are_trained_together() -> None:
    # Two prompts with two samples each: (1, 9) and (2, 3). The second prompt is ready at step 4: slot B runs 0 (0..1),
    # 2 (1..3), 3 (3..6); ready at 6. Sample 0 waits for its sibling 1 and is replayed at staleness 0.
    run = run_lengths(
        Strategy.SORTED_REPLAY, [1, 9, 2, 3], slots=2, update_batch=2, cohort_batches=2, siblings=2, grouped=True
    )
    assert run.batches == [[2, 3], [0, 1]]
    assert staleness(run) == [[0, 0], [0, 0]]
    assert run.clock.now() == 9
    replayed = [event.sample for event in run.events if isinstance(event, events.AttemptVerified)]
    assert replayed == [0, 1]


def test_longest_expected_first_uses_siblings() -> None:
    # One slot, k = 2: prompt 0 has lengths (5, 6), prompt 1 (1, 2). After 0 (5) and, in load order of unknowns, ... the
    # known length of prompt 0 sends its second sample before those of prompt 1.
    run = run_lengths(
        Strategy.SORTED_PARTIAL,
        [5, 6, 1, 2],
        slots=1,
        update_batch=4,
        cohort_batches=1,
        siblings=2,
        grouped=True,
        admission="longest-expected-first",
    )
    started = [event.sample for event in run.events if isinstance(event, events.AttemptStarted)]
    assert started == [0, 1, 2, 3]


@pytest.mark.parametrize(("admission", "order"), [("load-order", [0, 1, 2, 1, 3]), ("new-first", [0, 1, 2, 3, 1])])
def test_interrupted_answers_before_or_after_new_ones(admission: str, order: list[int]) -> None:
    # Two slots: 0 and 2 end first and are trained; then 1 is interrupted, and 3 has never run.
    run = run_lengths(
        Strategy.SORTED_REPLAY, [1, 9, 1, 1], slots=2, update_batch=2, cohort_batches=2, admission=admission
    )
    assert [event.sample for event in run.events if isinstance(event, events.AttemptStarted)] == order


def test_slow_scores_do_not_hold_the_engine() -> None:
    run = run_lengths(Strategy.SORTED_PARTIAL, [1, 9, 2, 3], slots=2, update_batch=2, cohort_batches=2, score_lag=5)
    assert sorted(s.id for s in run.trained) == [0, 1, 2, 3]


def test_seeded_restarts_select_nothing_and_fresh_ones_shorten() -> None:
    def trained_lengths(noise: str) -> list[int]:
        run = scripted_run(
            resolve_knobs(Strategy.SORTED_ON_POLICY, 8, cohort_batches=4, lookahead=1, restart_noise=noise),
            policy=ScriptedPolicy(longest=60),
            slots=8,
            num_samples=512,
            budget=100,
        )
        assert run.controller.run()
        return sorted(sample.num_tokens for sample in run.trained)

    sync = scripted_run(
        resolve_knobs(Strategy.SYNC, 8), policy=ScriptedPolicy(longest=60), slots=8, num_samples=512, budget=100
    )
    assert sync.controller.run()
    loaded = sorted(sample.num_tokens for sample in sync.trained)
    assert trained_lengths("seeded") == loaded
    assert sum(trained_lengths("fresh")) < 0.8 * sum(loaded)


@pytest.mark.parametrize("strategy", list(Strategy))
def test_at_frozen_weights_every_preset_trains_the_same_answers(strategy: Strategy) -> None:
    def answers(name: Strategy) -> list[tuple[int, ...]]:
        policy = ScriptedPolicy(longest=40)
        run = scripted_run(resolve_knobs(name, 4), policy=policy, slots=6, num_samples=96, update_s=3.0)
        assert run.controller.run()
        return sorted(tuple(sample.tokens) for sample in run.trained)

    assert answers(strategy) == answers(Strategy.SYNC)


def test_stop_gives_back_what_runs() -> None:
    run = scripted_run(
        resolve_knobs(Strategy.SORTED_PARTIAL, 2), policy=ScriptedPolicy(longest=30), slots=4, num_samples=40
    )
    run.controller.should_stop = lambda: run.controller.buffer.num_trained >= 6
    assert not run.controller.run()
    buffer = run.controller.buffer
    assert not run.engine.running
    assert buffer.num_loaded == buffer.num_trained + len(buffer.samples)
    assert not buffer.in_state[State.RUNNING]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_staleness": -1}, "max_staleness must be 0 or more"),
        ({"lookahead": -1}, "lookahead must be 0 or more"),
        ({"interrupted": "wait"}, "interrupted cannot be wait"),
        ({"on_bound": "resume"}, "on_bound cannot be resume"),
        ({"overlap": True, "max_staleness": 0, "on_bound": "wait"}, "overlap = true with max_staleness = 0"),
        ({"harvest": "drain", "max_staleness": 1, "on_bound": "wait"}, "harvest = drain with max_staleness = 1"),
        ({"admission": "tail-last", "lookahead": 2}, "tail-last"),
        ({"order": "sideways"}, "schedule.order must be one of .*, not 'sideways'"),
        ({"patience": 3}, "unknown knob 'patience'"),
    ],
)
def test_knobs_that_cannot_be_kept_are_refused(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_knobs(Strategy.SORTED_PARTIAL, 4, **knobs)


def test_explicit_knobs_override_the_preset() -> None:
    knobs = resolve_knobs("sorted-replay", 8, max_staleness=2, interrupted="resume", lookahead="none")
    assert (knobs.max_staleness, knobs.interrupted, knobs.lookahead) == (2, Fate.RESUME, None)
    assert knobs.on_bound == Fate.REPLAY
    with pytest.raises(ConfigError, match="unknown strategy"):
        resolve_knobs("sortedreplay", 8)


def test_waiting_siblings_are_admitted_while_the_harvest_waits_for_them() -> None:
    # Staleness 0 with wait, k = 2, three slots: when prompt 0 is ready, sample 2 is running or done and its sibling 3
    # has not started. The batch must take both, so 3 gets a slot although there are enough samples for a batch.
    run = run_lengths(
        Strategy.SORTED_PARTIAL,
        [2, 2, 3, 4],
        slots=3,
        update_batch=2,
        cohort_batches=2,
        siblings=2,
        grouped=True,
        max_staleness=0,
        on_bound="wait",
    )
    assert sorted(sample.id for sample in run.trained) == [0, 1, 2, 3]
    assert all(max(batch) == 0 for batch in staleness(run))


def test_a_due_sample_that_failed_is_tried_again_while_the_harvest_waits() -> None:
    run = scripted_run(
        resolve_knobs(Strategy.SORTED_PARTIAL, 1, max_staleness=0, on_bound="wait"),
        policy=ScriptedPolicy(lengths={0: 1, 1: 6, 2: 2, 3: 2}),
        slots=2,
        num_samples=4,
        seed_of=lambda number: number,
        fails=lambda request: 3 if request.sample == 1 and request.attempt == 1 else None,
    )
    assert run.controller.run()
    assert sorted(sample.id for sample in run.trained) == [0, 1, 2, 3]


def test_a_drain_that_overlaps_needs_one_version_more() -> None:
    knobs = {"harvest": "drain", "overlap": True, "on_bound": "wait", "cohort_batches": 2, "lookahead": 1}
    with pytest.raises(ConfigError, match="4 versions old"):
        resolve_knobs(Strategy.SORTED_PARTIAL, 2, max_staleness=3, **knobs)
    run = run_lengths(
        Strategy.SORTED_PARTIAL, [1, 9, 2, 3] * 4, slots=3, update_batch=2, max_staleness=4, update_s=3.0, **knobs
    )
    assert max(max(batch) for batch in staleness(run)) <= 4


@pytest.mark.parametrize(("finished", "hinges"), [([0, 1], False), ([0, 1, 2, 3], True)])
def test_a_drain_hinges_on_scores_only_when_all_has_ended(finished: list[int], hinges: bool) -> None:
    run = scripted_run(
        resolve_knobs(Strategy.SYNC_LARGE, 2, cohort_batches=2), policy=ScriptedPolicy(), slots=4, num_samples=4
    )
    run.controller.load()
    buffer = run.controller.buffer
    for number in finished:
        buffer.start(buffer.samples[number])
        buffer.finish(buffer.samples[number], FinishReason.STOP)
    assert lacks_only_scores(buffer, run.controller.knobs) == hinges


@pytest.mark.parametrize(
    ("slots", "num_samples", "lookahead", "needs"),
    [
        (3, 4, 0, True),  # sample 3 may start in the free slot, if the rewards of 0 and 1 are equal
        (1, 4, 0, False),  # no slot is free
        (3, 3, 0, False),  # no sample is left
        (3, 4, 1, True),
        (4, 8, 1, True),  # the next cohort may be loaded
        (4, 8, 0, False),
    ],
)
def test_scores_decide_what_starts_only_if_something_can_start(
    slots: int, num_samples: int, lookahead: int, needs: bool
) -> None:
    bounds = {"max_staleness": 0, "on_bound": "wait", "lookahead": lookahead}
    knobs = resolve_knobs(Strategy.SORTED_PARTIAL, 2, cohort_batches=2, flat_extra=2, **bounds)
    run = scripted_run(knobs, policy=ScriptedPolicy(), slots=slots, num_samples=num_samples)
    run.controller.load()
    buffer = run.controller.buffer
    num_started = 4 if slots == 4 else 3
    for number in range(num_started):
        buffer.start(buffer.samples[number])
    for number in (0, 1):
        buffer.finish(buffer.samples[number], FinishReason.STOP)
    has_data = run.controller.has_data
    assert admission_needs_scores(buffer, knobs, slots, has_data=has_data) == needs
    assert not admission_needs_scores(buffer, replace(knobs, flat_extra=0), slots, has_data=has_data)


@pytest.mark.parametrize("on_bound", ["replay", "restart"])
def test_what_waits_for_a_replay_is_not_resumed_after_another_publication(on_bound: str) -> None:
    # Its attempt began at version 0 and went on over a kept cache; its tokens carry version 2, within the bound at 3.
    knobs = {"interrupted": "resume", "on_bound": on_bound, "max_staleness": 1, "max_unverified": "none"}
    resolved = resolve_knobs(Strategy.SORTED_PARTIAL, 1, lookahead=2, **knobs)
    run = scripted_run(resolved, policy=ScriptedPolicy(), slots=1, num_samples=1)
    run.controller.load()
    buffer = run.controller.buffer
    (sample,) = buffer.samples.values()
    buffer.start(sample)
    buffer.publish(1)
    buffer.publish(2)
    assert is_provisional(buffer, resolved, sample, 2) == (on_bound == "replay")
    buffer.append(sample, Segment(2, [5, 6], [-1.0, -1.0]), start=0)
    buffer.interrupt(sample)
    if on_bound == "replay":
        run.controller.await_verification(sample)
    buffer.publish(3)
    assert decide_fates(buffer, resolved) == ([] if on_bound == "replay" else [(sample, Fate.RESUME)])
    assert sample.mode == (Mode.REPLAY if on_bound == "replay" else Mode.RESUME)


class NearlyReadyScorer(DelayedScorer):
    """Has no score at the moment that it is asked, but every score a little later."""

    def poll(self, timeout: float) -> list[ScriptedScore]:
        return super().poll(timeout) if timeout > 0 else []


@pytest.mark.parametrize("scorer", [DelayedScorer(), NearlyReadyScorer(), DelayedScorer(lag=50)])
def test_when_scores_come_does_not_change_what_starts_before_an_update_that_waits(scorer: DelayedScorer) -> None:
    # 0 and 1 end at step 1 and fill a batch, so that no other sample starts until 2 ends, which the update waits for.
    run = scripted_run(
        resolve_knobs(Strategy.SORTED_REPLAY, 2, on_bound="wait"),
        policy=ScriptedPolicy(lengths=dict(enumerate([1, 1, 6, 2, 2, 2]))),
        slots=3,
        num_samples=6,
        seed_of=lambda number: number,
    )
    run.controller.scorer = scorer
    assert run.controller.run()
    assert run.batches == [[0, 1, 2], [3, 4, 5]]
