"""Answers of several turns: injected tokens are only context, everywhere from the buffer to the learner."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sortedrl.buffer import Buffer
from sortedrl.engine.base import EngineStats, InFlight, Request, Sampling, Span
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.sim.script import ScriptedAnswers
from sortedrl.learner.torch import TorchLearner
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.store import Store
from sortedrl.ledger.verify import verify
from sortedrl.records import Batch, FinishReason, Mode, Prompt, Sample, Segment, State
from sortedrl.simulate.answers import TraceAnswers
from sortedrl.telemetry.batch_event import batch_taken
from tests.support.learners import (
    Settings,
    assert_same,
    caught_gradients,
    logprobs_of,
    make_batch,
    make_model,
)
from tests.support.scripted_runs import ScriptedPolicy
from tests.support.tiny_models import Answer, Caller, add_noise, make_requests, source, teacher_forced, tiny_model

FED = [5, 9, 5]


def make_sample(number: int = 0, *, budget: int = 12) -> Sample:
    prompt = Prompt(id=f"p{number}", tokens=(1, 2), content="")
    return Sample(id=number, prompt=prompt, index=0, epoch=0, cohort=0, seed=7, budget=budget)


def write(buffer: Buffer, sample: Sample, tokens: list[int], *, start: int | None = None, verified: int = 0) -> None:
    segment = Segment(buffer.version, list(tokens), [-1.0] * len(tokens), float(len(tokens) - verified))
    buffer.append(sample, segment, start=sample.num_tokens if start is None else start, verified=verified)


def one_turn(buffer: Buffer, sample: Sample) -> None:
    """Load the sample and finish a first turn of two tokens."""
    buffer.load([sample])
    buffer.start(sample)
    write(buffer, sample, [3, 4])
    buffer.finish(sample, FinishReason.STOP)


def held(sample: Sample) -> list[tuple[int, list[int], bool]]:
    return [(s.version, list(s.tokens), s.is_masked) for s in sample.segments]


# ---- buffer and ledger ----------------------------------------------------------------------------------------------


def test_a_fed_answer_goes_on_behind_what_it_was_fed() -> None:
    buffer, sample = Buffer(), make_sample()
    one_turn(buffer, sample)
    buffer.feed(sample, FED)
    assert (sample.state, sample.mode, sample.finish_reason) == (State.PENDING, Mode.RESUME, None)
    assert (list(buffer.waiting), list(buffer.pending), list(buffer.finished)) == ([0], [0], [])
    buffer.start(sample)
    write(buffer, sample, [6])
    assert held(sample) == [(0, [3, 4], False), (0, FED, True), (0, [6], False)]
    assert sample.logprobs == [-1.0, -1.0, 0.0, 0.0, 0.0, -1.0]
    assert sample.is_sampled == [True, True, False, False, False, True]
    assert (sample.num_tokens, sample.num_sampled, sample.known_length) == (6, 3, 6)


@pytest.mark.parametrize(
    ("tokens", "reason", "message"),
    [
        ([], FinishReason.STOP, "fed nothing"),
        ([1] * 10, FinishReason.STOP, "beyond its budget of 12"),
        ([1], FinishReason.LENGTH, "fed after length"),
    ],
)
def test_what_cannot_be_fed_is_refused(tokens: list[int], reason: FinishReason, message: str) -> None:
    buffer, sample = Buffer(), make_sample()
    buffer.load([sample])
    buffer.start(sample)
    write(buffer, sample, [3, 4])
    with pytest.raises(AssertionError, match="fed"):
        buffer.feed(sample, [1])  # it is still running
    buffer.finish(sample, reason)
    with pytest.raises(AssertionError, match=message):
        buffer.feed(sample, tokens)
    assert (sample.state, sample.num_tokens) == (State.FINISHED, 2)


def test_a_replay_keeps_the_mask_as_far_as_it_verifies() -> None:
    buffer, sample = Buffer(), make_sample()
    one_turn(buffer, sample)
    buffer.feed(sample, FED)
    buffer.start(sample)
    write(buffer, sample, [6, 7])
    buffer.interrupt(sample)
    buffer.publish(1)
    buffer.requeue(sample, Mode.REPLAY)
    buffer.start(sample)
    write(buffer, sample, [3, 4, *FED, 6, 8], start=0, verified=6)
    assert held(sample) == [(1, [3, 4], False), (1, FED, True), (1, [6, 8], False)]
    # Two tokens of the first turn took 2 s, one of the second is kept with its 1 s, and the new one took 1 s.
    assert [s.slot_s for s in sample.segments] == pytest.approx([2.0, 0.0, 2.0])
    buffer.interrupt(sample)
    buffer.publish(2)
    buffer.requeue(sample, Mode.REPLAY)
    buffer.start(sample)
    write(buffer, sample, [3, 9], start=0, verified=1)
    assert held(sample) == [(2, [3, 9], False)]


def test_the_ledger_gives_fed_answers_back(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "ledger.sqlite", grouped=False, knobs={"update_batch": 1, "max_staleness": None})
    buffer, sample = store.restore(), make_sample()
    one_turn(buffer, sample)
    buffer.publish(1)
    buffer.feed(sample, FED)
    seq = store.seq
    buffer.start(sample)
    write(buffer, sample, [6])
    buffer.interrupt(sample)
    buffer.publish(2)
    buffer.requeue(sample, Mode.REPLAY)
    buffer.start(sample)
    write(buffer, sample, [3, 4, *FED, 6, 8], start=0, verified=6)
    buffer.finish(sample, FinishReason.STOP)
    restored = store.restore().samples[0]
    assert held(restored) == held(sample) == [(2, [3, 4], False), (2, FED, True), (2, [6, 8], False)]
    assert restored == sample
    with Ledger(store.path) as ledger:
        assert verify(ledger).violations == []
    store.truncate(seq)
    again = store.restore().samples[0]
    assert (again.state, held(again)) == (State.PENDING, [(0, [3, 4], False), (1, FED, True)])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("UPDATE steps SET value = 2 WHERE step = 'feed'", "feeds 3 tokens at 2, not 2 at 2"),
        (
            "UPDATE steps SET step = 'requeue', value = 'replay' WHERE step = 'feed'",
            "tokens in row .* while it is pend",
        ),
    ],
)
def test_a_damaged_feed_is_found(tmp_path: Path, damage: str, message: str) -> None:
    store = Store.create(tmp_path / "ledger.sqlite", grouped=False, knobs={"update_batch": 1, "max_staleness": None})
    buffer, sample = store.restore(), make_sample()
    one_turn(buffer, sample)
    buffer.feed(sample, FED)
    store.commit()
    store._connection.execute(damage)
    with Ledger(store.path) as ledger:
        (found,) = verify(ledger).violations
    assert re.search(message, str(found))


# ---- engines --------------------------------------------------------------------------------------------------------


STOP = 3


def run(model: Any, request: Request) -> Answer:
    """Serve one attempt, for a caller that already has the request's cached tokens."""
    caller = Caller(LocalEngine(model, slots=1, max_length=64))
    held = len(request.cached)
    caller.answers[request.sample] = Answer(tokens=list(request.cached), logprobs=[0.0] * held, versions=[0] * held)
    return caller.serve([request])[request.sample]


def two_turns(model: Any, request: Request) -> tuple[list[int], list[int]]:
    """The model's first turn, and its second turn after FED; neither has a stop token."""
    first = run(model, replace(request, budget=8)).tokens
    resumed = replace(request, budget=20, mode=Mode.RESUME, cached=[*first, *FED])
    return first, run(model, resumed).tokens[len(resumed.cached) :]


def spans_of(first: list[int], rest: list[int] | None = None) -> list[Span]:
    return [Span(0, len(first)), Span(0, len(FED), True), *([Span(0, len(rest))] if rest else [])]


def test_a_resumed_answer_goes_on_behind_stop_tokens_of_earlier_turns() -> None:
    model = tiny_model()
    num_stopped = 0
    for request in make_requests(6):
        first, rest = two_turns(model, request)
        stops = Sampling(stop_tokens=(first[-1], FED[-1], STOP))
        cached = [*first, *FED]
        again = replace(request, budget=20, mode=Mode.RESUME, cached=cached, spans=spans_of(first), sampling=stops)
        answer = run(model, again)
        ends = [place + 1 for place, token in enumerate(rest) if token in stops.stop_tokens]
        assert answer.tokens == [*cached, *rest[: ends[0] if ends else len(rest)]]
        assert answer.reason == (FinishReason.STOP if ends else FinishReason.LENGTH)
        forced = teacher_forced(model, request, answer.tokens)
        assert answer.logprobs[len(cached) :] == pytest.approx(forced[len(cached) :], abs=1e-4)
        num_stopped += bool(ends)
    assert num_stopped > 0


@pytest.mark.parametrize("scale", [0.0, 0.005])
def test_a_replay_takes_fed_tokens_as_given(scale: float) -> None:
    model = tiny_model()
    requests = make_requests(4 if scale == 0.0 else 16)
    written = {request.sample: two_turns(model, request) for request in requests}
    add_noise(model, scale, seed=9)
    cuts: list[str] = []
    for request in requests:
        first, rest = written[request.sample]
        cached = [*first, *FED, *rest]
        # An independent way to the same result: restart the first turn, then resume after the injected tokens.
        first_again, rest_again = two_turns(model, request)
        if first_again != first:
            cuts.append("first")
            accepted = next(i for i, pair in enumerate(zip(first, first_again, strict=True)) if len(set(pair)) == 2)
        else:
            differ = [i for i, pair in enumerate(zip(rest, rest_again, strict=True)) if len(set(pair)) == 2]
            cuts.append("rest" if differ else "none")
            accepted = len(first) + len(FED) + (differ[0] if differ else len(rest))
        replay = replace(request, budget=20, mode=Mode.REPLAY, cached=cached, spans=spans_of(first, rest))
        answer = run(model, replay)
        assert answer.verified == [(20, accepted)]
        forced = teacher_forced(model, request, answer.tokens)
        if accepted >= len(first) + len(FED):
            assert answer.tokens == [*first, *FED, *rest_again]
            forced[len(first) : len(first) + len(FED)] = [0.0] * len(FED)
        else:
            assert answer.tokens[: len(first)] == first_again
        assert answer.logprobs == pytest.approx(forced, abs=1e-4)
    assert set(cuts) == ({"none"} if scale == 0.0 else {"first", "rest", "none"})


def test_without_the_mask_a_replay_rejects_what_was_fed() -> None:
    model, (request,) = tiny_model(), make_requests(1)
    first, rest = two_turns(model, request)
    replay = replace(request, budget=20, mode=Mode.REPLAY, cached=[*first, *FED, *rest])
    assert run(model, replay).verified == [(20, len(first))]


def test_weights_published_under_way_leave_the_turns_as_they_are() -> None:
    """The engine prefills running answers again; stop tokens of earlier turns must not end them."""
    model, (request,) = tiny_model(), make_requests(1)
    first, rest = two_turns(model, request)
    stops = Sampling(stop_tokens=(first[-1],))
    again = replace(request, budget=20, mode=Mode.REPLAY, cached=[*first, *FED], spans=spans_of(first), sampling=stops)
    caller = Caller(LocalEngine(model, slots=1, max_length=64))
    caller.engine.submit([again])
    caller.steps(2)
    caller.engine.publish(1, source(model), InFlight.REPREFILL)
    answer = caller.serve([])[request.sample]
    end = next((place + 1 for place, token in enumerate(rest) if token == first[-1]), len(rest))
    assert answer.tokens == [*first, *FED, *rest[:end]]


def test_simulated_answers_take_fed_tokens_as_given() -> None:
    policy = ScriptedPolicy(lengths={7: 4}, divergence=0.0)
    first = [policy.token(7, position, 0) for position in range(4)]  # the last token ends the turn
    second = [policy.token(7, position, 0) for position in (7, 8)]
    cached = [*first, *FED, *second]
    request = Request(
        sample=0,
        attempt=1,
        prompt=(1,),
        budget=20,
        seed=7,
        sampling=Sampling(),
        mode=Mode.REPLAY,
        cached=cached,
        spans=spans_of(first, second),
    )
    answers = ScriptedAnswers(script=policy)
    assert answers.accepted(request, 1) == 9
    assert answers.accepted(replace(request, spans=()), 1) == 4
    tokens, logprobs = answers.written(request, 0, 9, 1, 1)
    assert tokens == cached
    assert [place for place, logprob in enumerate(logprobs) if logprob == 0.0] == [4, 5, 6]
    # Half of all tokens of version 0 differ under version 1, but no injected token does.
    traced = TraceAnswers([100], [7], divergence=0.5, cap=100)
    fed = replace(request, budget=90, cached=bytearray(80), spans=[Span(0, 80, True)])
    assert traced.accepted(fed, 1) == 80
    assert traced.accepted(replace(fed, spans=[Span(0, 80)]), 1) < 80


# ---- learning -------------------------------------------------------------------------------------------------------


def mask_the_middle(batch: Batch) -> None:
    """Mark the 6th to the 9th token of the sample with 14 tokens as injected."""
    sample = batch.samples[4]
    (whole,) = sample.segments
    sample.segments = [
        Segment(version=0, tokens=whole.tokens[:5], logprobs=whole.logprobs[:5]),
        Segment(version=0, tokens=whole.tokens[5:9], logprobs=[0.0] * 4, is_masked=True),
        Segment(version=0, tokens=whole.tokens[9:], logprobs=whole.logprobs[9:]),
    ]


LENGTHS = [3, 9, 1, 5, 14, 2, 7, 4]


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
@pytest.mark.parametrize("micro_tokens", [16384, 1])
def test_a_masked_middle_trains_as_computed_by_hand(loss_mean: str, micro_tokens: int) -> None:
    model = make_model()
    batch = make_batch(model)
    mask_the_middle(batch)
    rewards = torch.tensor([sample.reward for sample in batch.samples])
    advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
    for place, sample in enumerate(batch.samples):
        logprobs = logprobs_of(model, list(sample.prompt.tokens), sample.tokens)
        num_counted = LENGTHS[place]
        if place == 4:
            logprobs, num_counted = torch.cat([logprobs[:5], logprobs[9:]]), 10
        divisor = sum(LENGTHS) - 4 if loss_mean == "token" else 8 * num_counted
        (-advantages[place] * logprobs.sum() / divisor).backward()
    reference = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    learner = TorchLearner(model, Settings(loss_mean=loss_mean, micro_tokens=micro_tokens), temperature=1.0)
    caught = caught_gradients(learner)
    metrics = learner.start(batch).result().metrics
    assert_same(caught, reference, 1e-5)
    assert (metrics["learned_tokens"], metrics["num_tokens"]) == (sum(LENGTHS) - 4, sum(LENGTHS))
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)  # a masked token's 0.0 is in no ratio
    assert metrics["kl_behaviour"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "variant",
    [
        {"algorithm": "grpo", "kl_coef": 0.1},
        {"algorithm": "grpo", "kl_coef": 0.1, "kl_in": "reward"},
        {"algorithm": "ppo", "kl_coef": 0.1, "kl_in": "reward"},
        {"algorithm": "gspo"},
        {"algorithm": "dr_grpo", "importance": "sequence"},
    ],
)
def test_what_a_masked_token_carries_changes_nothing(variant: dict[str, Any]) -> None:
    caught: list[dict[str, Tensor]] = []
    for carried in (0.0, -50.0):
        model = make_model()
        batch = make_batch(model, off_policy=0.3)
        mask_the_middle(batch)
        batch.samples[4].segments[1].logprobs = [carried] * 4
        learner = TorchLearner(model, Settings(**variant), temperature=1.0)
        caught.append(caught_gradients(learner))
        assert learner.start(batch).result().optimizer_steps == 1
    assert_same(caught[1], caught[0], 1e-9)


def test_masked_tokens_are_not_stale() -> None:
    batch = make_batch(make_model())
    mask_the_middle(batch)
    batch = replace(batch, version=3)
    taken = batch_taken(0.0, batch, EngineStats(), num_interrupted=0, num_paused=0)
    assert taken.staleness == [3] * 8
    assert taken.staleness_token_sum == [3 * length for length in (3, 9, 1, 5, 10, 2, 7, 4)]
    assert taken.lengths == LENGTHS
