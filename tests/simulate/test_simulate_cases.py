"""Small simulated runs with steps, bubble, waste, staleness and batches worked out by hand in the comments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest

from sortedrl.engine.sim.cost import UnitCost
from sortedrl.simulate.costs import CostModel, RooflineCost
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import Trace
from sortedrl.telemetry.events import BatchTaken, Event
from sortedrl.telemetry.summary import Summary
from tests.simulate.test_costs import PLAIN, TOY


def run(
    prompts: Sequence[int | list[int]], strategy: str, *, cap: int = 64, **options
) -> tuple[Summary, list[list[int]]]:
    """Simulate a run and return its summary and batches; a list in `prompts` has the lengths of siblings."""
    groups = [prompt if isinstance(prompt, list) else [prompt] for prompt in prompts]
    trace = Trace(
        lengths=[length for group in groups for length in group],
        prompts=[number for number, group in enumerate(groups) for _ in group],
        cap=cap,
        source="by hand",
    )
    events: list[Event] = []
    summary = simulate(trace, strategy=strategy, emit=events.append, **options)
    assert summary.ledger is not None
    assert (summary.ledger.lost, summary.ledger.duplicated) == (0, 0)
    return summary, [event.samples for event in events if isinstance(event, BatchTaken)]


@dataclass(slots=True, kw_only=True, frozen=True)
class PlainCost:
    """A second per step, 1/2 s per prefilled token, 1/4 s per verified one, 3 s per update, 2 s per publication."""

    kv_tokens: int | None = None

    def decode_s(self, running: int, context: int, steps: int) -> float:
        return float(steps)

    def prefill_s(self, lengths: Iterable[int]) -> float:
        return 0.5 * sum(lengths)

    def verify_s(self, tokens: int) -> float:
        return 0.25 * tokens

    def update_s(self, tokens: int) -> float:
        return 3.0

    def publish_s(self) -> float:
        return 2.0


# ---- unit cost: every running sequence makes one token per step, the rest is free ------------------------------------


def test_sync() -> None:
    # max(5, 2, 8) + max(1, 1, 4) = 12 steps of 3 slots; 15 + 6 of the 36 slot-steps decode.
    summary, batches = run([5, 2, 8, 1, 1, 4], "sync", slots=3, update_batch=3)
    assert [sorted(batch) for batch in batches] == [[0, 1, 2], [3, 4, 5]]
    assert summary.decode_steps == summary.wall_s == 12
    assert summary.bubble_ratio == pytest.approx(1 - 21 / 36)
    assert summary.goodput == pytest.approx(21 / 36)
    assert (summary.discarded_tokens, summary.staleness_max) == (0, 0)


def test_sync_large() -> None:
    # 0 runs 0..5 and 3 after it 5..6; 1 runs 0..2 and 2 after it 2..10. Dealt at 10: the second batch is one version
    # old.
    summary, batches = run([5, 2, 8, 1], "sync-large", slots=2, update_batch=2, cohort_batches=2)
    assert [len(batch) for batch in batches] == [2, 2]
    assert summary.decode_steps == 10
    assert summary.bubble_ratio == pytest.approx(1 - 16 / 20)
    assert (summary.staleness_mean, summary.staleness_max) == (0.5, 1)


SHARED = {"slots": 3, "update_batch": 2, "cohort_batches": 2}


def test_sorted_partial() -> None:
    # 1 ends at 1 and 3 takes its slot; 2 ends at 2: harvest [1, 2]. 0 has 2 of 6 tokens, 3 has 1 of 3. They go on: 3
    # ends at 4, 0 at 6, and the cohort's second update waits for both. 3 x 2 + 2 x 2 + 2 = 12 of 18 slot-steps decode.
    # Of 12 tokens 3 are one version old, of 4 samples 2.
    summary, batches = run([6, 1, 2, 3], "sorted-partial", **SHARED)
    assert batches == [[1, 2], [3, 0]]
    assert summary.decode_steps == 6
    assert summary.bubble_ratio == pytest.approx(6 / 18)
    assert (summary.staleness_mean, summary.staleness_token_mean, summary.staleness_max) == (0.5, 0.25, 1)
    assert (summary.discarded_tokens, summary.recomputed_tokens) == (0, 3)


def test_sorted_on_policy() -> None:
    # As above up to step 2; then 2 + 1 tokens are discarded, and 3 (2..5) and 0 (2..8) write again.
    # 6 + 3 + 6 = 15 slot-steps decode, 12 of them what is trained, in 8 steps of 3 slots.
    summary, batches = run([6, 1, 2, 3], "sorted-on-policy", **SHARED)
    assert batches == [[1, 2], [3, 0]]
    assert summary.decode_steps == 8
    assert summary.bubble_ratio == pytest.approx(9 / 24)
    assert summary.goodput == pytest.approx(12 / 24)
    assert (summary.discarded_tokens, summary.generated_tokens, summary.staleness_max) == (3, 15, 0)


def test_sorted_replay_that_keeps_everything() -> None:
    # The steps of sorted-partial, at staleness 0: the 3 cached tokens are verified.
    summary, batches = run([6, 1, 2, 3], "sorted-replay", **SHARED)
    assert batches == [[1, 2], [3, 0]]
    assert (summary.decode_steps, summary.staleness_max, summary.discarded_tokens) == (6, 0, 0)
    assert (summary.recomputed_tokens, summary.accepted_prefix, summary.divergence_rate) == (3, 1.0, 0.0)
    assert summary.goodput == pytest.approx(12 / 18)


def test_sorted_replay_that_keeps_nothing() -> None:
    # Every token changes with every version: the steps of sorted-on-policy, plus the cost of verification.
    summary, batches = run([6, 1, 2, 3], "sorted-replay", divergence=1 - 1e-12, **SHARED)
    assert batches == [[1, 2], [3, 0]]
    assert (summary.decode_steps, summary.discarded_tokens, summary.recomputed_tokens) == (8, 3, 3)
    assert (summary.accepted_prefix, summary.divergence_rate) == (0.0, 1.0)


def test_lookahead_fills_the_drain() -> None:
    # Two cohorts of two. Strict: 0 ends at 1: harvest [0]; 1 must be in the next: at 5. Then 2 and 3: harvests at 6
    # and 8.
    strict, batches = run([1, 5, 1, 3], "sorted-partial", slots=2, update_batch=1, cohort_batches=2)
    assert (strict.decode_steps, batches) == (8, [[0], [1], [2], [3]])
    # With one cohort of lookahead 2 starts at 1: harvest [2] at 2; 3 starts there and ends at 5 with 1: one batch.
    ahead, batches = run([1, 5, 1, 3], "sorted-partial", slots=2, update_batch=1, cohort_batches=2, lookahead=1)
    assert (ahead.decode_steps, batches) == (5, [[0], [2], [3, 1]])
    assert ahead.bubble_ratio == pytest.approx(0.0)
    # 1 has tokens of versions 0, 1 and 2 (1 + 1 + 3), 3 of version 2 only; 2 began under version 1.
    assert (ahead.staleness_mean, ahead.staleness_token_mean, ahead.staleness_max) == (0.5, 0.3, 2)


def test_april_leaves_the_long_one_for_last() -> None:
    # Cohorts of one, no bound: 1, 2, 3 end at 1, 2, 3 beside 0, which ends at 9 with its first token three versions
    # old.
    summary, batches = run([9, 1, 1, 1], "april", slots=2, update_batch=1, cohort_batches=1)
    assert batches == [[1], [2], [3], [0]]
    assert (summary.decode_steps, summary.staleness_max, summary.lookahead) == (9, 3, "none")
    # Versions of 0's tokens: 0, 1, 2, then 3 six times; trained at 3: 3 + 2 + 1 of 12 trained tokens.
    assert summary.staleness_token_mean == pytest.approx(6 / 12)


def test_tail_batching() -> None:
    # Rounds of ceil(6 / 2) = 3. 0 and 2 end at 1 and 2: harvest, 1 is set aside (2 tokens lost). 3, 4, 5 start; 3 and
    # 4 end at 3: harvest, 5 is set aside (1 lost). Then 5 (3..7) and 1 (3..8). 14 trained, 17 decoded, in 8 steps of 3
    # slots.
    summary, batches = run([1, 5, 2, 1, 1, 4], "tail-batching", slots=3, update_batch=2, cohort_batches=3)
    assert batches == [[0, 2], [3, 4], [5, 1]]
    assert (summary.decode_steps, summary.discarded_tokens, summary.staleness_max) == (8, 3, 0)
    assert summary.bubble_ratio == pytest.approx(1 - 17 / 24)


def test_async() -> None:
    # 0 ends at 2; its update lasts to 3, while 1 writes its third token; the fourth is of version 1. 1 trains at 4
    # under version 1 with 3 of its tokens one version old; that update ends at 5. 2 x 2 + 2 slot-steps decode in 5 s.
    summary, batches = run(
        [2, 4], "async", slots=2, update_batch=1, cohort_batches=2, lookahead=0, update_s=1.0, prompt_tokens=0
    )
    assert batches == [[0], [1]]
    assert (summary.wall_s, summary.rollout_s, summary.update_s) == (5.0, 5.0, 2.0)
    assert summary.bubble_ratio == pytest.approx(1 - 6 / 10)
    assert summary.staleness_token_mean == pytest.approx(3 / 6)


def test_siblings_wait_for_each_other() -> None:
    # Slots: 0 (0..1), 2 (1..3), 3 (3..5); beside them 1 (0..6). At 5 the second prompt is complete: harvest [2, 3]. 1
    # goes on from 5 tokens and ends at 6: [0, 1], both one version old; 1 + 5 of 11 tokens are.
    summary, batches = run([[1, 6], [2, 2]], "sorted-partial", slots=2, update_batch=2, cohort_batches=2, group_size=2)
    assert batches == [[2, 3], [0, 1]]
    assert summary.decode_steps == 6
    assert summary.bubble_ratio == pytest.approx(1 / 12)
    assert summary.staleness_token_mean == pytest.approx(6 / 11)


def test_drift_makes_later_answers_longer() -> None:
    # Lengths double with every version: 1 under version 0, 2 x 2 under version 1, 2 x 4 under version 2, cut at 7.
    summary, _ = run([1, 2, 2], "sorted-partial", slots=1, update_batch=1, cohort_batches=1, drift=2.0, cap=7)
    assert (summary.decode_steps, summary.trained_tokens) == (1 + 4 + 7, 12)


# ---- work that takes time -------------------------------------------------------------------------------------------


def test_prefill_and_prefill_again() -> None:
    # Prompts of 2: prefill 0.5 x 4 = 2 s, one step, 0 ends at 3. Update to 6, published at 8. 1 goes on from one token:
    # prefill 0.5 x 3 = 1.5 s, two steps: 11.5; update and publication: 16.5. Rollout 16.5 - 6 - 4 = 6.5 s.
    # Slots are taken 2 x 2 + 2 x 1 + 1.5 + 2 = 9.5 of 13 slot-seconds; 4 of them decode trained tokens.
    summary, _ = run(
        [1, 3], "sorted-partial", slots=2, update_batch=1, cohort_batches=2, cost=PlainCost(), prompt_tokens=2
    )
    assert (summary.wall_s, summary.rollout_s, summary.update_s, summary.publish_s) == (16.5, 6.5, 6.0, 4.0)
    assert summary.bubble_ratio == pytest.approx(1 - 9.5 / 13)
    assert summary.goodput == pytest.approx(4 / 13)
    assert summary.recomputed_tokens == 1
    assert summary.tokens_per_s == pytest.approx(4 / 16.5)


def test_replay_of_a_finished_answer_costs_prefill_and_verification_only() -> None:
    # Siblings (1, 3) and (1, 1) on 4 slots, U = 2, at staleness 0. Prompts of 0 tokens: nothing to prefill. At 1
    # sample 0 and the second prompt are complete: harvest [2, 3]; update to 4, published at 6. 0 (1 token) and 1 (1
    # token) are replayed: 0.5 x 2 + 0.25 x 2 = 1.5 s. 0 ends at 7.5 without a step, 1 at 9.5 after two. Update and
    # publication: 14.5.
    summary, batches = run(
        [[1, 3], [1, 1]],
        "sorted-replay",
        slots=4,
        update_batch=2,
        cohort_batches=2,
        group_size=2,
        cost=PlainCost(),
        prompt_tokens=0,
    )
    assert batches == [[2, 3], [0, 1]]
    assert (summary.wall_s, summary.decode_steps, summary.recomputed_tokens) == (14.5, 3, 2)
    assert (summary.staleness_max, summary.discarded_tokens, summary.trained_tokens) == (0, 0, 6)


def test_roofline_by_hand() -> None:
    # 100 weights of a byte, KV 4 bytes and 8 FLOP a token; 100 bytes/s, 1000 FLOP/s, half of them in prefill, a
    # quarter in training, 0.25 s overhead. A prompt of 3: (200 x 3 + 8 x 6) / 500 + 0.25 = 1.546 s. Two tokens at
    # contexts 3 and 4: (100 + 12) / 100 + (100 + 16) / 100 + 0.5 = 2.78 s. Update 600 x 5 / 250 = 12 s; publication
    # 100 / 50 = 2 s.
    model, hardware = TOY, replace(PLAIN, memory_share=1, reduce_s=0)
    cost: CostModel = RooflineCost(hardware=hardware, model=model)
    summary, _ = run([2], "sync", slots=1, update_batch=1, cost=cost, prompt_tokens=3)
    assert summary.rollout_s == pytest.approx(1.546 + 2.78)
    assert (summary.update_s, summary.publish_s) == (pytest.approx(12.0), pytest.approx(2.0))
    assert summary.bubble_ratio == pytest.approx(0.0)
    assert summary.goodput == pytest.approx(2.78 / 4.326)


def test_memory_parks_the_youngest() -> None:
    # Room for 6 tokens, prompts of 1. Two answers of 4: after two steps 2 x (1 + 2) = 6 tokens, full. 1 is parked; 0
    # ends at 4; 1 is prefilled again (2 answer tokens) and ends at 6. 2 x 2 + 2 + 2 = 8 of 12 slot-steps decode.
    summary, _ = run([4, 4], "sync", slots=2, update_batch=2, cost=UnitCost(kv_tokens=6), prompt_tokens=1)
    assert (summary.decode_steps, summary.recomputed_tokens, summary.trained_tokens) == (6, 2, 8)
    assert summary.bubble_ratio == pytest.approx(1 - 8 / 12)
    assert summary.goodput == pytest.approx(8 / 12)


def test_what_does_not_fit_waits() -> None:
    # Room for 5, prompts of 2: the third has no room (2 + 2 + 2 > 5) and waits; 0 and 1 reach 6 > 5 after their first
    # step, so 1 is parked at 0 tokens and 0 runs alone to 2. Then 1 (2..4), then 2 (4..6).
    summary, _ = run([2, 2, 2], "sync", slots=3, update_batch=3, cost=UnitCost(kv_tokens=5), prompt_tokens=2)
    assert (summary.decode_steps, summary.trained_tokens) == (6, 6)
    assert summary.bubble_ratio == pytest.approx(1 - 6 / 18)
