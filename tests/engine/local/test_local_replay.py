"""Replay on the local engine: it writes token for token what a restart under the new weights writes."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch

from sortedrl.engine.base import Delta, Finished, Sampling, Verified
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.sampling.noise import gumbel_scalar
from sortedrl.records import FinishReason, Mode
from tests.support.tiny_models import (
    PATHS,
    VOCAB,
    Caller,
    add_noise,
    make_requests,
    serve,
    source,
    teacher_forced,
    tiny_model,
)


def train(model, steps: int, *, lr: float) -> None:
    """Train with AdamW on random text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        ids = torch.randint(VOCAB, (4, 16), generator=generator)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def common_prefix(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


CHANGES = {
    "none": lambda model: None,
    "small noise": lambda model: add_noise(model, 0.003, seed=9),
    "large noise": lambda model: add_noise(model, 0.03, seed=9),
    "one adamw step": lambda model: train(model, 1, lr=1e-3),
    "five adamw steps": lambda model: train(model, 5, lr=3e-3),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("change", CHANGES)
def test_replay_equals_restart(change: str, path: str) -> None:
    model = tiny_model("llama-gqa")
    temperatures = [1.0, 1.0, 0.6, 0.0, 1.0, 1.3]
    requests = [
        replace(r, budget=60, sampling=Sampling(temperature=t))
        for r, t in zip(make_requests(6), temperatures, strict=True)
    ]
    caller = Caller(LocalEngine(model, slots=6, max_length=128, path=path))
    caller.engine.submit(requests)
    caller.steps(40)
    caller.interrupt()
    before = {sample: list(answer.tokens) for sample, answer in caller.answers.items()}
    CHANGES[change](model)
    caller.engine.publish(1, source(model))
    restarted = serve(model, requests, slots=6, path=path)
    replayed = caller.serve([caller.again(request, Mode.REPLAY) for request in requests])
    kept = 0
    for request in requests:
        answer, expected = replayed[request.sample], restarted[request.sample]
        assert answer.tokens == expected.tokens
        close = 0.0 if path == "native" else 1e-4  # the kernel's prefill equals its decoding, to the last bit
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=close, rel=0.0)
        assert answer.logprobs == pytest.approx(teacher_forced(model, request, answer.tokens), abs=1e-4)
        assert set(answer.versions) == {1}
        accepted = common_prefix(before[request.sample], expected.tokens)
        assert answer.verified == [(41, accepted)]
        kept += accepted
    assert kept == 6 * 41 if change == "none" else 0 < kept < 6 * 41


def test_a_replay_over_several_publications() -> None:
    model, requests = tiny_model(), make_requests(5, budget=40)
    caller = Caller(LocalEngine(model, slots=5, max_length=64))
    caller.engine.submit(requests)
    for version in range(1, 5):
        caller.steps(8)
        caller.interrupt()
        train(model, 1, lr=1e-3)
        caller.engine.publish(version, source(model))
        requests = [caller.again(request, Mode.REPLAY) for request in requests]
        caller.engine.submit(requests)
    caller.serve([])
    expected = serve(model, [replace(r, mode=Mode.FRESH, cached=()) for r in requests], slots=2)
    for sample, answer in caller.answers.items():
        assert answer.tokens == expected[sample].tokens
        assert set(answer.versions) == {4}


def test_events_of_a_replay() -> None:
    model, request = tiny_model(), make_requests(1, budget=20)[0]
    tokens = serve(model, [request])[0].tokens
    wrong = (tokens[8] + 1) % VOCAB
    ticks = itertools.count()
    engine = LocalEngine(model, slots=1, max_length=64, clock=lambda: float(next(ticks)))
    engine.submit([request])
    engine.poll()
    engine.submit([replace(request, attempt=2, mode=Mode.REPLAY, cached=[*tokens[:8], wrong, *tokens[9:12]])])
    verified, checked, decoded, finished = engine.poll()
    assert isinstance(verified, Verified)
    assert (verified.cached, verified.accepted, verified.attempt) == (12, 8, 2)
    assert isinstance(checked, Delta)
    assert (checked.start, checked.tokens, checked.slot_s) == (0, tokens[:9], 0.0)
    assert isinstance(decoded, Delta)
    assert (decoded.start, decoded.tokens) == (9, tokens[9:])
    assert decoded.slot_s == 11.0  # a step takes one tick of this clock
    assert isinstance(finished, Finished)


@pytest.mark.parametrize("ending", ["stop", "length"])
def test_a_finished_answer_that_is_fully_verified_is_not_decoded(ending: str) -> None:
    model, request = tiny_model(), make_requests(1, budget=20)[0]
    tokens = serve(model, [request])[0].tokens
    if ending == "stop":
        request = replace(request, sampling=Sampling(stop_tokens=(tokens[12],)))
        tokens = tokens[: tokens.index(tokens[12]) + 1]
    caller = Caller(LocalEngine(model, slots=2, max_length=64))
    caller.engine.publish(6, source(model))
    answer = caller.serve([replace(request, mode=Mode.REPLAY, cached=tokens)])[0]
    assert (answer.tokens, answer.reason) == (tokens, FinishReason(ending))
    assert answer.verified == [(len(tokens), len(tokens))]
    assert answer.versions == [6] * len(tokens)
    assert answer.logprobs == pytest.approx(teacher_forced(model, request, tokens), abs=1e-4)
    assert caller.engine.stats().decode_steps == caller.engine.stats().decoded_tokens == 0
    assert caller.engine.stats().running == 0


def test_a_finished_answer_that_is_rejected_continues() -> None:
    model, requests = tiny_model(), make_requests(6, budget=25, sampling=Sampling(stop_tokens=(3,)))
    caller = Caller(LocalEngine(model, slots=6, max_length=64))
    before = copy.deepcopy(caller.serve(requests))
    add_noise(model, 0.05, seed=2)
    caller.engine.publish(1, source(model))
    after = caller.serve([caller.again(request, Mode.REPLAY) for request in requests])
    expected = serve(model, requests)
    for sample, answer in after.items():
        assert (answer.tokens, answer.reason) == (expected[sample].tokens, expected[sample].reason)
    assert any(after[sample].tokens != before[sample].tokens for sample in after)
    assert {answer.reason for answer in before.values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_cached_tokens_past_budget_or_stop_are_dropped() -> None:
    model, request = tiny_model(), make_requests(1, budget=20)[0]
    tokens = serve(model, [request])[0].tokens
    stop = tokens[5]
    end = tokens.index(stop) + 1
    for changes, length, reason in (
        ({"budget": 7}, 7, FinishReason.LENGTH),
        ({"sampling": Sampling(stop_tokens=(stop,))}, end, FinishReason.STOP),
    ):
        engine = LocalEngine(model, slots=1, max_length=64)
        engine.submit([replace(request, mode=Mode.REPLAY, cached=tokens, **changes)])
        verified, delta, finished = engine.poll()
        assert isinstance(verified, Verified)
        assert (verified.cached, verified.accepted) == (length, length)
        assert isinstance(delta, Delta)
        assert (delta.start, delta.tokens) == (0, tokens[:length])
        assert isinstance(finished, Finished)
        assert finished.reason is reason


def test_a_stop_drawn_over_a_cached_token_ends_the_answer() -> None:
    model, request = tiny_model(), make_requests(1, budget=20)[0]
    tokens = serve(model, [request])[0].tokens
    stop = next(token for token in tokens[4:] if token not in tokens[:4])
    at = tokens.index(stop)
    cached = [*tokens[:at], (stop + 1) % VOCAB, *tokens[at + 1 :]]
    cached = [token if token != stop else (stop + 1) % VOCAB for token in cached]
    sampling = Sampling(stop_tokens=(stop,))
    caller = Caller(LocalEngine(model, slots=1, max_length=64))
    answer = caller.serve([replace(request, mode=Mode.REPLAY, cached=cached, sampling=sampling)])[0]
    assert (answer.tokens, answer.reason) == (tokens[: at + 1], FinishReason.STOP)
    assert answer.verified == [(20, at)]
    assert caller.engine.stats().decode_steps == 0


def test_a_replay_of_nothing_is_a_fresh_start() -> None:
    model, request = tiny_model(), make_requests(1, budget=20)[0]
    answer = serve(model, [replace(request, mode=Mode.REPLAY)])[0]
    assert answer.tokens == serve(model, [request])[0].tokens
    assert answer.verified == [(0, 0)]


def test_replays_resumes_and_fresh_starts_share_a_prefill() -> None:
    model, requests = tiny_model(), make_requests(6, budget=30)
    expected = serve(model, requests)
    modes = [Mode.REPLAY, Mode.FRESH, Mode.RESUME, Mode.REPLAY, Mode.RESUME, Mode.FRESH]
    caller = Caller(LocalEngine(model, slots=6, max_length=64))
    caller.engine.submit(requests)
    caller.steps(15)
    caller.interrupt()
    mixed = [caller.again(request, mode) for request, mode in zip(requests, modes, strict=True)]
    for sample, answer in caller.serve(mixed).items():
        assert answer.tokens == expected[sample].tokens


def test_tolerance_keeps_tokens_with_nearly_the_best_score() -> None:
    model, request = tiny_model(), make_requests(1, budget=40)[0]
    tokens = serve(model, [request])[0].tokens
    add_noise(model, 0.02, seed=11)
    accepted = []
    for tolerance in (0.0, 0.05, 0.5, 1e9):
        replay = replace(request, mode=Mode.REPLAY, cached=tokens, replay_tolerance=tolerance)
        answer = serve(model, [replay])[0]
        ((_, count),) = answer.verified
        assert answer.tokens[:count] == tokens[:count]
        assert answer.logprobs == pytest.approx(teacher_forced(model, request, answer.tokens), abs=1e-4)
        accepted.append(count)
    assert accepted == sorted(accepted)
    assert accepted[0] == common_prefix(tokens, serve(model, [request])[0].tokens) < accepted[-1] == 40


def test_tolerance_is_a_difference_of_logit_plus_noise() -> None:
    model, request = tiny_model(), make_requests(1, budget=1)[0]
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt])).logits[0, -1].tolist()
    scores = [logit + gumbel_scalar(request.seed, len(request.prompt) - 1, token) for token, logit in enumerate(logits)]
    best, second = sorted(range(VOCAB), key=scores.__getitem__)[:-3:-1]
    gap = scores[best] - scores[second]
    for tolerance, expected in ((gap * 0.99, best), (gap * 1.01, second)):
        replay = replace(request, mode=Mode.REPLAY, cached=[second], replay_tolerance=tolerance)
        assert serve(model, [replay])[0].tokens == [expected]


def test_non_finite_logits_fail_a_replay() -> None:
    model, requests = tiny_model("qwen3"), make_requests(2, budget=12)
    before = serve(model, requests)
    bad = next(token for token in before[0].tokens[:8] if token not in {*requests[1].prompt, *before[1].tokens})
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = float("nan")
    replays = [replace(r, mode=Mode.REPLAY, cached=before[r.sample].tokens) for r in requests]
    after = serve(model, replays)
    assert "non-finite" in after[0].error
    assert after[1].tokens == before[1].tokens
