"""Property tests: the guarantees of docs/reference/guarantees.md, for every preset, on random schedules.

The fast tests draw 200 schedules of each preset, the slow ones 1,000.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sortedrl.engine.base import Request
from sortedrl.errors import ConfigError
from sortedrl.records import FinishReason, Sample
from sortedrl.schedule import Admission, Fate, HarvestRule, Order, Strategy, resolve_knobs
from sortedrl.telemetry import events
from tests.support.scripted_runs import ScriptedPolicy, ScriptedRun, scripted_run, uniform

MANY = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
MORE = settings(MANY, max_examples=1000)


@st.composite
def runs(draw: st.DrawFn, strategy: Strategy, exact: bool = False) -> ScriptedRun:
    siblings = draw(st.sampled_from([1, 1, 2, 3]))
    update_batch = siblings * draw(st.integers(1, 4))
    explicit = {
        "cohort_batches": draw(st.sampled_from([None, 1, 2, 3])),
        "order": draw(st.sampled_from([None, *Order])),
    }
    if strategy in (Strategy.SYNC, Strategy.TAIL_BATCHING):
        explicit.pop("cohort_batches")
    if strategy not in (Strategy.SYNC, Strategy.SYNC_LARGE, Strategy.APRIL, Strategy.TAIL_BATCHING):
        explicit["lookahead"] = draw(st.sampled_from([None, 0, 1, 2]))
        explicit["admission"] = draw(st.sampled_from([None, *(a for a in Admission if a != Admission.TAIL_LAST)]))
    if "lookahead" in explicit and strategy != Strategy.ASYNC_ON_POLICY:
        explicit["max_staleness"] = draw(st.sampled_from([None, None, 0, 1, 2, "none"]))
        explicit["on_bound"] = draw(st.sampled_from([None, "replay", "restart", "wait"]))
        explicit["interrupted"] = draw(st.sampled_from([None, None, "resume", "replay", "restart"]))
        explicit["overlap"] = draw(st.sampled_from([None, None, True]))
    explicit["max_unverified"] = draw(st.sampled_from([None, 1, 2, "none", "none"]))
    if exact:
        explicit["exact_batch"] = True
    try:
        knobs = resolve_knobs(strategy, update_batch, **explicit)
    except ConfigError:
        knobs = resolve_knobs(strategy, update_batch, **{**explicit, "on_bound": "restart"})
    failure_rate, seed = draw(st.sampled_from([0.0, 0.0, 0.2])), draw(st.integers(0, 10**6))

    def fails(request: Request) -> int | None:
        doomed = uniform("fail", seed, request.sample, request.attempt) < failure_rate
        return len(request.cached) + int(4 * uniform("when", request.sample, request.attempt)) if doomed else None

    return scripted_run(
        knobs,
        policy=ScriptedPolicy(
            longest=draw(st.sampled_from([1, 3, 12, 40])),
            length_change=draw(st.sampled_from([0.0, 0.2, 0.9])),
            divergence=draw(st.sampled_from([0.0, 0.01, 0.2])),
        ),
        slots=draw(st.integers(1, 9)),
        num_samples=siblings * draw(st.integers(1, 25)),
        siblings=siblings,
        grouped=siblings > 1 and draw(st.booleans()),
        budget=draw(st.sampled_from([4, 30, 64])),
        update_s=draw(st.sampled_from([0.0, 1.0, 5.0, 2.5])),
        score_lag=draw(st.sampled_from([0, 0, 1, 3])),
        run_seed=seed,
        fails=fails,
    )


@pytest.mark.parametrize("strategy", list(Strategy))
def test_guarantees_hold(strategy: Strategy) -> None:
    MANY(given(run=runs(strategy))(check_guarantees))()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(Strategy))
def test_guarantees_hold_in_a_thousand_schedules(strategy: Strategy) -> None:
    MORE(given(run=runs(strategy))(check_guarantees))()


@pytest.mark.parametrize("strategy", list(Strategy))
def test_guarantees_hold_with_exact_batches(strategy: Strategy) -> None:
    MANY(given(run=runs(strategy, exact=True))(check_guarantees))()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(Strategy))
def test_guarantees_hold_with_exact_batches_in_a_thousand_schedules(strategy: Strategy) -> None:
    MORE(given(run=runs(strategy, exact=True))(check_guarantees))()


def check_guarantees(run: ScriptedRun) -> None:
    assert run.controller.run()
    assert_exactly_once(run)
    assert_no_starvation(run)
    assert_staleness(run)
    assert_batch_sizes(run)
    assert_budgets(run)
    assert_logprobs_of_named_version(run)
    assert_tokens_add_up(run)
    assert_rewards_are_of_the_trained_tokens(run)


def assert_exactly_once(run: ScriptedRun) -> None:
    trained = [sample.id for sample in run.trained]
    assert sorted(trained) == list(range(run.controller.settings.total_samples))
    assert not run.controller.buffer.samples
    assert not run.engine.running


def assert_no_starvation(run: ScriptedRun) -> None:
    bound = run.controller.knobs.cohort_updates
    loaded_at = {e.cohort: e.update for e in run.events if isinstance(e, events.CohortLoaded)}
    for batch in run.learner.batches:
        for sample in batch.samples:
            assert bound is None or batch.update < loaded_at[sample.cohort] + bound


def assert_staleness(run: ScriptedRun) -> None:
    bound = run.controller.knobs.max_staleness
    for batch in run.learner.batches:
        for sample in batch.samples:
            assert all(batch.version >= version for version in sample.versions)
            assert bound is None or all(batch.version - version <= bound for version in sample.versions)


def assert_batch_sizes(run: ScriptedRun) -> None:
    """With overlap, a batch is larger than U plus one group only if its samples cannot wait. Exact batches are of U."""
    knobs = run.controller.knobs
    if knobs.exact_batch:
        full, rest = divmod(len(run.trained), knobs.update_batch)
        assert [len(batch.samples) for batch in run.learner.batches] == [knobs.update_batch] * full + [rest] * (
            rest > 0
        )
        return
    loaded_at = {e.cohort: e.update for e in run.events if isinstance(e, events.CohortLoaded)}
    for batch in run.learner.batches if knobs.overlap and knobs.harvest == HarvestRule.BATCH else ():
        groups: dict[object, list[Sample]] = {}
        for sample in batch.samples:
            groups.setdefault(sample.group if run.controller.buffer.grouped else sample.id, []).append(sample)
        can_wait = [
            group
            for group in groups.values()
            if not (knobs.cohort_updates and batch.update + 1 >= loaded_at[group[0].cohort] + knobs.cohort_updates)
            and (
                knobs.max_staleness is None
                or knobs.on_bound == Fate.REPLAY
                or all(
                    batch.version + 1 - version <= knobs.max_staleness
                    for s in group
                    for version in s.versions or [batch.version]  # an answer that was given up is empty
                )
            )
        ]
        assert not can_wait or len(batch.samples) < knobs.update_batch + max(map(len, groups.values()))


def assert_budgets(run: ScriptedRun) -> None:
    for sample in run.trained:
        assert sample.num_tokens <= sample.budget
        assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions)


def assert_logprobs_of_named_version(run: ScriptedRun) -> None:
    policy = run.engine.script
    for sample in run.trained:
        written = zip(sample.tokens, sample.logprobs, sample.versions, strict=True)
        for position, (token, logprob, version) in enumerate(written):
            assert token == policy.token(sample.seed, position, version)
            assert logprob == policy.logprob(sample.seed, position, version)


def assert_rewards_are_of_the_trained_tokens(run: ScriptedRun) -> None:
    """The reward is that of the trained tokens. It is asked again only after a replay changed a token, or a restart."""
    asked: dict[int, list[list[int]]] = {}
    for number, tokens in run.controller.scorer.asked:
        asked.setdefault(number, []).append(tokens)
    changed = Counter(e.sample for e in run.events if isinstance(e, events.AttemptVerified) and e.accepted < e.cached)
    for sample in run.trained:
        answers = asked.get(sample.id, [])
        # The simulated engine adds a token to a complete answer that it resumes after a failure. It may also continue
        # one that a replay has confirmed, because the scripted length of an answer changes apart from its tokens.
        extended = sum(len(after) > len(before) == common(before, after) for before, after in pairwise(answers))
        assert len(answers) <= 1 + changed[sample.id] + extended + sample.num_restarts + sample.num_failures
        if sample.finish_reason != FinishReason.FAILED:
            assert sample.reward == float(sum(sample.tokens) % 2)
            assert answers[-1] == sample.tokens


def common(first: list[int], second: list[int]) -> int:
    """How many tokens two answers begin with in common."""
    return next(
        (place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first)
    )


def assert_tokens_add_up(run: ScriptedRun) -> None:
    """Every decoded token was trained or discarded; the slot time of each trained token is counted once."""
    rejected = sum(e.cached - e.accepted for e in run.events if isinstance(e, events.AttemptVerified))
    discarded = sum(e.discarded for e in run.events if isinstance(e, events.SampleRequeued))
    trained = sum(sample.num_tokens for sample in run.trained)
    assert run.engine.stats().decoded_tokens == trained + discarded + rejected
    slot_s = sum(segment.slot_s for sample in run.trained for segment in sample.segments)
    assert slot_s == pytest.approx(trained * run.engine.step_s)


def test_decisions_do_not_depend_on_time() -> None:
    knobs = resolve_knobs(Strategy.SORTED_REPLAY, 4, lookahead=1)
    policy = ScriptedPolicy(longest=30, length_change=0.3, divergence=0.05)
    first, second = (
        scripted_run(knobs, policy=policy, slots=4, num_samples=40, update_s=update_s) for update_s in (0.0, 7.0)
    )
    assert first.controller.run()
    assert second.controller.run()
    assert first.batches == second.batches
