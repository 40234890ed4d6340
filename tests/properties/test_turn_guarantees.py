"""Property tests: the guarantees hold for trajectories with tools, for every preset and kind of environment.

The fast tests draw 200 schedules of each preset, the slow ones 1,000.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.engine.base import Request
from sortedrl.environment.base import Kind
from sortedrl.records import FinishReason
from sortedrl.schedule import Knobs, Strategy, resolve_knobs
from sortedrl.telemetry import events
from tests.properties import test_guarantees as plain
from tests.support.scripted_runs import ScriptedRun, scripted_run, uniform
from tests.support.scripted_turns import Adder, ScriptedTools, TurnPolicy, expected_feeds

MAX_TURNS = 4


@st.composite
def tool_runs(draw: st.DrawFn, strategy: Strategy, exact: bool = False) -> tuple[ScriptedRun, ScriptedTools]:
    siblings = draw(st.sampled_from([1, 1, 2, 3]))
    slots = draw(st.integers(1, 9))
    open_trajectories = draw(st.sampled_from([None, slots, slots + 3]))
    knobs: Knobs = draw(plain.drawn_knobs(strategy, siblings, exact=exact, open_trajectories=open_trajectories))
    failure_rate, seed = draw(st.sampled_from([0.0, 0.0, 0.2])), draw(st.integers(0, 10**6))

    def fails(request: Request) -> int | None:
        doomed = uniform("fail", seed, request.sample, request.attempt) < failure_rate
        return len(request.cached) + int(4 * uniform("when", request.sample, request.attempt)) if doomed else None

    tools = ScriptedTools(
        kind=draw(st.sampled_from(list(Kind))),
        knobs=knobs,
        max_turns=draw(st.sampled_from([1, MAX_TURNS])),
        longest_s=draw(st.sampled_from([0.0, 5.0, 60.0])),
        loss_rate=draw(st.sampled_from([0.0, 0.1])),
        seed=seed,
    )
    run = scripted_run(
        knobs,
        policy=TurnPolicy(
            end_rate=draw(st.sampled_from([0.1, 0.3])), divergence=draw(st.sampled_from([0.0, 0.01, 0.2]))
        ),
        slots=slots,
        num_samples=siblings * draw(st.integers(1, 12)),
        siblings=siblings,
        grouped=siblings > 1 and draw(st.booleans()),
        budget=draw(st.sampled_from([6, 30, 64])),
        update_s=draw(st.sampled_from([0.0, 1.0, 5.0, 2.5])),
        score_lag=draw(st.sampled_from([0, 0, 1, 3])),
        lost_scores=draw(st.sampled_from([0.0, 0.0, 0.2])),
        run_seed=seed,
        fails=fails,
        make_turns=tools.make,
    )
    return run, tools


@pytest.mark.parametrize("strategy", list(Strategy))
def test_guarantees_hold_with_tools(strategy: Strategy) -> None:
    plain.MANY(given(made=tool_runs(strategy))(check))()


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("strategy", list(Strategy))
def test_guarantees_hold_with_tools_in_a_thousand_schedules(strategy: Strategy, exact: bool) -> None:
    plain.MORE(given(made=tool_runs(strategy, exact=exact))(check))()


def test_a_score_of_tokens_that_a_replay_lost_is_not_given_to_another_answer() -> None:
    """A complete trajectory is scored while a replay loses one of its tokens, and then ends with a turn in tools."""
    knobs = resolve_knobs("async-on-policy", 1, cohort_batches=4, lookahead=2, max_unverified=1, exact_batch=True)
    tools = ScriptedTools(kind=Kind.STATELESS, knobs=knobs, max_turns=1, longest_s=5.0, loss_rate=0.0, seed=42)
    settings = {"num_samples": 12, "slots": 2, "budget": 6, "update_s": 2.5, "score_lag": 3, "run_seed": 42}
    policy = TurnPolicy(end_rate=0.3, divergence=0.2)
    check((scripted_run(knobs, policy=policy, make_turns=tools.make, **settings), tools))


def check(made: tuple[ScriptedRun, ScriptedTools]) -> None:
    run, tools = made
    Adder.made.clear()
    assert run.controller.run()
    num_made = len(Adder.made)
    plain.assert_exactly_once(run)
    plain.assert_no_starvation(run)
    plain.assert_staleness(run)
    plain.assert_batch_sizes(run)
    plain.assert_budgets(run)
    plain.assert_rewards_are_of_the_trained_tokens(run)
    assert_tokens_are_of_their_versions(run)
    assert_tokens_add_up(run)
    assert_results_are_of_the_kept_turns(run, tools)
    assert_each_call_is_counted(run, tools, num_made)
    assert_few_are_open(run)


def assert_tokens_are_of_their_versions(run: ScriptedRun) -> None:
    policy = run.engine.script
    for sample in run.trained:
        written = zip(sample.tokens, sample.logprobs, sample.versions, sample.is_sampled, strict=True)
        for position, (token, logprob, version, is_sampled) in enumerate(written):
            if is_sampled:
                assert token == policy.token(sample.seed, position, version)
                assert logprob == policy.logprob(sample.seed, position, version)
            else:
                assert token < 0
                assert logprob == 0.0


def assert_tokens_add_up(run: ScriptedRun) -> None:
    """Every token that was decoded or fed was trained or discarded."""
    rejected = sum(e.cached - e.accepted for e in run.events if isinstance(e, events.AttemptVerified))
    discarded = sum(e.discarded for e in run.events if isinstance(e, events.SampleRequeued))
    fed = sum(e.num_fed for e in run.events if isinstance(e, events.ToolsReturned))
    trained = sum(sample.num_tokens for sample in run.trained)
    assert run.engine.stats().decoded_tokens + fed == trained + discarded + rejected


def assert_results_are_of_the_kept_turns(run: ScriptedRun, tools: ScriptedTools) -> None:
    """What a trained trajectory was fed is what a fresh environment gives for its turns, whatever was replayed."""
    for sample in run.trained:
        assert sample.num_turns <= tools.max_turns
        if sample.finish_reason == FinishReason.FAILED:
            continue
        fed = [list(segment.tokens) for segment in sample.segments if segment.is_masked]
        assert fed == expected_feeds(tools.kind, sample)


def assert_each_call_is_counted(run: ScriptedRun, tools: ScriptedTools, num_made: int) -> None:
    """Every call is one of a turn that was not kept before, or counted as made again, by repeatable environments."""
    asked = [e for e in run.events if isinstance(e, events.ToolsCalled)]
    ended = [e for e in run.events if isinstance(e, events.ToolsReturned)]
    assert sorted((e.sample, e.attempt, e.turn) for e in asked) == sorted((e.sample, e.attempt, e.turn) for e in ended)
    results = [r for result in tools.results for r in result.results]
    assert tools.loop is not None
    num_repeated = tools.loop.counts["repeated"]
    assert num_made == num_repeated + sum(r.error != "malformed" for r in results)
    assert num_repeated == 0 or tools.kind is Kind.REPEATABLE
    assert tools.kind is Kind.NONE or not any(result.is_lost for result in tools.results)
    loop = tools.loop
    assert loop is not None
    scorer: Any = run.controller.scorer
    assert loop.counts["lost"] <= sum(result.is_lost for result in tools.results) + scorer.num_lost


def assert_few_are_open(run: ScriptedRun) -> None:
    """No more trajectories are open than allowed; due ones are exempt, and so are those that went on after a loss."""
    bound = run.controller.knobs.open_trajectories
    if bound is None or run.controller.knobs.cohort_updates is not None or run.controller.knobs.on_bound == "wait":
        return
    begun: set[int] = set()
    for event in run.events:
        match event:
            case events.AttemptStarted():
                begun.add(event.sample)
                assert len(begun) <= bound
            case events.SampleScored():
                begun.discard(event.sample)
            case events.SampleRequeued(decision="restart" | "lost"):
                begun.discard(event.sample)
            case _:
                pass
