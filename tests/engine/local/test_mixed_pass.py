"""Mixed passes on the local engine: prefills that share passes with decoding change no answer, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sortedrl.engine.base import InFlight, Request, Sampling, Span
from sortedrl.engine.local.mixed_pass import rows_for_prefills
from sortedrl.records import Mode
from sortedrl.testing import Answer
from tests.support.tiny_models import (
    Caller,
    add_noise,
    make_caller,
    make_requests,
    needs_compiler,
    source,
    tiny_model,
)

pytestmark = needs_compiler

SAMPLINGS = {
    "plain": Sampling(),
    "filtered": Sampling(temperature=0.5, top_k=5, top_p=0.9),
    "greedy": Sampling(temperature=0.0, stop_tokens=(3, 11)),
}


def mixing_caller(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Caller:
    with monkeypatch.context() as patch:
        patch.setattr("sortedrl.engine.local.mixed_pass._MIN_PARAMETERS", 0)
        return plain_caller(**options)


def plain_caller(**options: Any) -> Caller:
    return make_caller(tiny_model("llama-gqa"), 4, path="native", **options)


def changed_model() -> Any:
    model = tiny_model("llama-gqa")
    add_noise(model, 0.02, seed=5)
    return model


def requests_of(sampling: Sampling = SAMPLINGS["plain"]) -> list[Request]:
    """Twelve samples with long and short prompts, three siblings of each."""
    made = make_requests(4, budget=40, sampling=sampling)
    prompts = [[*request.prompt] * repeats for request, repeats in zip(made, (1, 9, 3, 35), strict=True)]
    return [replace(made[n % 4], sample=n, prompt=prompts[n % 4], seed=31 * n) for n in range(12)]


def parts(answer: Answer) -> tuple[Any, ...]:
    return answer.tokens, answer.logprobs, answer.versions, answer.reason, answer.verified, answer.error


def write(caller: Caller, requests: list[Request]) -> dict[int, tuple[Any, ...]]:
    """Serve all requests; then replay half of them, whole and in part, and resume others under changed weights."""
    caller.serve(requests)
    caller.engine.publish(1, source(changed_model()))
    whole = [caller.again(request, Mode.REPLAY) for request in requests[::3]]
    cut = [caller.again(request, Mode.REPLAY) for request in requests[1::3]]
    resumed = [caller.again(request, Mode.RESUME) for request in requests[2::3]]
    caller.serve([*whole, *(replace(request, cached=request.cached[:17]) for request in (*cut, *resumed))])
    return {sample: parts(answer) for sample, answer in caller.answers.items()}


@pytest.mark.parametrize("drafts", ["off", "always"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_the_same_to_the_last_bit(name: str, drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(SAMPLINGS[name])
    mixed, plain = mixing_caller(monkeypatch, drafts=drafts, stream_every=3), plain_caller()
    assert write(mixed, requests) == write(plain, requests)
    stats, plain_stats = mixed.engine.stats(), plain.engine.stats()
    assert stats.decoded_tokens == plain_stats.decoded_tokens
    # A replay that is rejected early does not read the rest of its answer.
    assert plain_stats.recomputed_tokens >= stats.recomputed_tokens > 0
    assert 0 < stats.prefill_slot_s < stats.busy_slot_s


def test_running_slots_go_on_during_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = requests_of()[0], requests_of()[3]
    caller = mixing_caller(monkeypatch)
    caller.engine.submit([first])
    caller.steps(3)
    before = caller.engine.stats().decoded_tokens
    caller.engine.submit([second])
    assert len(second.prompt) > 60
    caller.steps(4)  # a pass prefills at most 15 tokens beside one that decodes
    assert caller.engine.stats().decoded_tokens == before + 4
    assert caller.engine.stats().prompt_tokens == len(first.prompt) + 4 * 15


def test_new_prompts_of_an_idle_engine_are_prefilled_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slot has to wait for them, and slots that start together end together."""
    requests = requests_of()[:4]
    caller = mixing_caller(monkeypatch)
    caller.engine.submit(requests)
    caller.steps(1)
    assert caller.engine.stats().decoded_tokens == 2 * len(requests)  # one each by the prefill, one by the pass


def test_many_new_prompts_of_an_idle_engine_are_prefilled_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll without time ends after one pass, so that the caller is not kept waiting for all of them."""
    requests = requests_of()[:4]
    num_tokens = sum(len(request.prompt) for request in requests)
    monkeypatch.setattr("sortedrl.engine.local.engine._MAX_IDLE_TOKENS", num_tokens - 1)
    caller = mixing_caller(monkeypatch)
    caller.engine.submit(requests)
    caller.steps(1)
    assert 0 < caller.engine.stats().prompt_tokens <= 32 < num_tokens
    caller.serve([])
    expected = plain_caller().serve(requests)
    assert {n: parts(a) for n, a in caller.answers.items()} == {n: parts(a) for n, a in expected.items()}


@pytest.mark.parametrize("mode", [Mode.RESUME, Mode.REPLAY, Mode.FRESH])
def test_interruptions_during_prefills(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of()[:4]
    caller = mixing_caller(monkeypatch)
    for round_ in range(6):
        first, *others = [caller.again(request, mode if round_ else Mode.FRESH) for request in requests]
        caller.engine.submit([first])
        caller.steps(1)
        caller.engine.submit(others)
        caller.steps(round_)  # too few for the long prompts at first
        caller.interrupt()
        assert caller.num_running == 0
        caller.take(caller.engine.poll(timeout=0))
    again = [caller.again(request, mode) for request in requests]
    assert all(answer.num_partials == 6 for answer in caller.answers.values())
    caller.serve(again)
    expected = plain_caller().serve(requests)
    for request in requests:
        answer, wanted = caller.answers[request.sample], expected[request.sample]
        assert (answer.tokens, answer.logprobs, answer.reason) == (wanted.tokens, wanted.logprobs, wanted.reason)


def test_a_sibling_goes_on_when_the_prefilled_one_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request for request in requests_of() if request.sample % 4 == 3]
    caller = mixing_caller(monkeypatch)
    caller.engine.submit([requests_of()[0]])
    caller.steps(1)
    caller.engine.submit(requests)
    caller.steps(1)
    caller.interrupt([requests[0].sample])
    caller.serve([])
    expected = plain_caller().serve(requests)
    assert caller.answers[requests[0].sample].tokens == []
    for request in requests[1:]:
        assert parts(caller.answers[request.sample]) == parts(expected[request.sample])


@pytest.mark.parametrize("in_flight", [InFlight.KEEP, InFlight.REPREFILL])
def test_a_publication_during_a_prefill(in_flight: InFlight, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that has begun under the old weights begins again: the whole answer is of the new version."""
    runs, replayed = requests_of()[0], requests_of()[3]
    answered = plain_caller().serve([replayed])[replayed.sample]
    caller = mixing_caller(monkeypatch)
    caller.engine.submit([runs])
    caller.steps(3)
    caller.engine.submit([replace(replayed, mode=Mode.REPLAY, cached=answered.tokens)])
    caller.steps(2)
    caller.engine.publish(1, source(changed_model()), in_flight)
    caller.serve([])
    plain = plain_caller()
    plain.engine.publish(1, source(changed_model()))
    assert caller.answers[3].tokens == plain.serve([replace(replayed, mode=Mode.FRESH)])[3].tokens
    assert caller.answers[3].logprobs == plain.answers[3].logprobs
    assert set(caller.answers[3].versions) == {1}
    assert set(caller.answers[0].versions) == {0, 1}


def test_injected_tokens_are_kept_without_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    request = requests_of()[0]
    spans = (
        Span(num_tokens=2, version=0, is_masked=False),
        Span(num_tokens=30, version=0, is_masked=True),
    )
    tokens = plain_caller().serve([request])[0].tokens
    replay = replace(request, mode=Mode.REPLAY, cached=[*tokens[:2], *[7] * 30], spans=spans, budget=60)
    mixed, plain = mixing_caller(monkeypatch), plain_caller()
    assert parts(mixed.serve([replay])[0]) == parts(plain.serve([replay])[0])
    assert mixed.answers[0].verified == [(32, 32)]


def test_broken_weights_fail_the_attempt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama-gqa")
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = float("nan")
    with monkeypatch.context() as patch:
        patch.setattr("sortedrl.engine.local.mixed_pass._MIN_PARAMETERS", 0)
        caller = make_caller(model, 4, path="native")
    good, bad = requests_of()[0], replace(requests_of()[3], prompt=[9] * 40)
    good = replace(good, prompt=[5, 1])
    caller.serve([good, bad])
    assert "non-finite logits" in caller.answers[bad.sample].error
    assert caller.num_running == 0


def test_rows_of_a_pass() -> None:
    assert rows_for_prefills(7, 1) == 9  # 16 rows in all
    assert rows_for_prefills(0, 1) == 8
    assert rows_for_prefills(4, 4) == 36
    assert rows_for_prefills(0, 64) == 96
    assert rows_for_prefills(200, 1) == 8
