"""Publications on the local engine: versions, copied weights, and requests in flight."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from sortedrl.engine.base import Delta, InFlight, Partial, Request
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.records import Mode
from tests.support.tiny_models import (
    PATHS,
    add_noise,
    make_caller,
    make_requests,
    serve,
    source,
    teacher_forced,
    tiny_model,
    tokens_of,
)


@pytest.mark.parametrize("path", PATHS)
def test_tokens_get_the_version_of_the_published_weights(path: str) -> None:
    model, requests = tiny_model(), make_requests(3, budget=20)
    other = copy.deepcopy(model)
    add_noise(other, 0.1, seed=5)
    expected = serve(other, requests, path="module")
    caller = make_caller(model, path=path)
    caller.serve(requests)
    assert {v for answer in caller.answers.values() for v in answer.versions} == {0}
    caller.engine.publish(3, source(other)).wait()
    caller.serve(requests)
    assert {v for answer in caller.answers.values() for v in answer.versions} == {3}
    assert tokens_of(caller.answers) == tokens_of(expected)


def test_published_weights_stay_tied_and_are_a_copy() -> None:
    model, other = tiny_model(), tiny_model(seed=4)
    engine = LocalEngine(model, slots=1, max_length=64)
    engine.publish(1, source(other))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert model.lm_head.weight.data_ptr() != other.lm_head.weight.data_ptr()
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("path", PATHS[:2])
def test_copied_weights_change_only_at_publication(path: str) -> None:
    model, requests = tiny_model(), make_requests(3, budget=20)
    caller = make_caller(model, path=path)
    before = copy.deepcopy(tokens_of(caller.serve(requests)))
    add_noise(model, 0.1, seed=5)
    assert tokens_of(caller.serve(requests)) == before
    caller.engine.publish(1, source(model))
    assert tokens_of(caller.serve(requests)) == tokens_of(serve(model, requests)) != before


def test_abort_needs_an_idle_engine() -> None:
    model = tiny_model()
    engine = LocalEngine(model, slots=1, max_length=64)
    engine.submit(make_requests(1))
    with pytest.raises(AssertionError, match="interrupt"):
        engine.publish(1, source(model))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("in_flight", [InFlight.KEEP, InFlight.REPREFILL])
def test_publication_in_flight(in_flight: InFlight, path: str) -> None:
    model, requests = tiny_model("llama-gqa"), make_requests(4, budget=24)
    old = serve(model, requests)
    caller = make_caller(model, slots=5, path=path)
    caller.engine.submit(requests[:3])
    caller.steps(9)
    caller.engine.submit(requests[3:])  # its prefill happens after the publication
    add_noise(model, 0.05, seed=3)
    caller.engine.publish(2, source(model), in_flight).wait()
    answers = caller.serve([])
    for request in requests[:3]:
        answer = answers[request.sample]
        assert answer.versions == [0] * 10 + [2] * 14
        assert answer.tokens[:10] == old[request.sample].tokens[:10]
        forced = teacher_forced(model, request, answer.tokens)[10:]
        if in_flight is InFlight.REPREFILL:
            assert answer.logprobs[10:] == pytest.approx(forced, abs=1e-4)
            resumed = replace(request, mode=Mode.RESUME, cached=answer.tokens[:10])
            assert serve_resumed(model, resumed) == answer.tokens[10:]
        else:
            assert answer.logprobs[10:] != pytest.approx(forced, abs=1e-3)
    assert answers[3].versions == [2] * 24
    assert answers[3].tokens == serve(model, requests[3:])[3].tokens


def serve_resumed(model, request: Request) -> list[int]:
    """The tokens after the cached ones, by an engine that has only these weights."""
    engine = LocalEngine(model, slots=1, max_length=64)
    engine.submit([request])
    (delta,) = (event for event in engine.poll() if isinstance(event, Delta))
    assert delta.start == len(request.cached)
    return delta.tokens


def test_interruption_after_a_publication_loses_nothing() -> None:
    model, request = tiny_model(), make_requests(1, budget=30)[0]
    engine = LocalEngine(model, slots=1, max_length=64)
    engine.submit([request])
    engine.poll(timeout=0)
    engine.publish(1, source(model), InFlight.KEEP)
    engine.poll(timeout=0)
    engine.publish(2, source(model), InFlight.REPREFILL)
    engine.submit([])
    first, second, partial = [*engine.poll(timeout=0), *engine.interrupt()][-3:]
    deltas = [event for event in (first, second) if isinstance(event, Delta)]
    # The second poll after a publication draws a token from the prefill and another from a step.
    assert [(delta.start, len(delta.tokens), delta.version) for delta in deltas] == [(2, 1, 1), (3, 2, 2)]
    assert isinstance(partial, Partial)
