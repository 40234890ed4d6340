"""Publications that change the last layers only: a replay skips the first layers, and no answer differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sortedrl.engine.base import InFlight, Request
from sortedrl.engine.local.native_decoder import NativeDecoder
from sortedrl.records import Mode
from tests.engine.local.test_mixed_pass import SAMPLINGS, mixing_caller, parts, plain_caller, requests_of
from tests.support.tiny_models import Caller, needs_compiler, source, tiny_model

pytestmark = needs_compiler


def changed_model(*layers: int, seed: int = 5) -> Any:
    """The model with other weights in these layers."""
    model = tiny_model("llama-gqa")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for number in layers:
            for parameter in model.model.layers[number].parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return model


LAST = tiny_model("llama-gqa").config.num_hidden_layers - 1


def full_caller(monkeypatch: pytest.MonkeyPatch) -> Caller:
    """An engine that computes all layers of every token."""
    with monkeypatch.context() as patch:
        patch.setattr("sortedrl.engine.local.engine.make_unchanged_layers", lambda decoder, cache: None)
        return mixing_caller(monkeypatch)


def write(caller: Caller, requests: list[Request], in_flight: InFlight = InFlight.ABORT) -> dict[int, tuple[Any, ...]]:
    """Publish twice; replay whole and cut answers and resume others after it, some of them interrupted on the way."""
    caller.engine.publish(1, source(changed_model(LAST)))
    caller.serve(requests)
    caller.engine.publish(2, source(changed_model(LAST, seed=6)))
    whole = [caller.again(request, Mode.REPLAY) for request in requests[::3]]
    cut = [caller.again(request, Mode.REPLAY) for request in requests[1::3]]
    resumed = [caller.again(request, Mode.RESUME) for request in requests[2::3]]
    caller.serve([*whole, *(replace(request, cached=request.cached[:17]) for request in (*cut, *resumed))])
    caller.engine.submit([caller.again(request, Mode.FRESH) for request in requests[:4]])
    caller.steps(9)
    if in_flight is InFlight.ABORT:
        caller.interrupt()
    caller.engine.publish(3, source(changed_model(LAST, seed=7)), in_flight)
    caller.serve([] if in_flight is not InFlight.ABORT else [caller.again(r, Mode.REPLAY) for r in requests[:4]])
    return {sample: parts(answer) for sample, answer in caller.answers.items()}


@pytest.mark.parametrize("in_flight", [InFlight.ABORT, InFlight.REPREFILL])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_the_same_to_the_last_bit(name: str, in_flight: InFlight, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that both take as many passes.
    monkeypatch.setattr("sortedrl.engine.local.mixed_pass._LATE_ROWS", 8)
    monkeypatch.setattr("sortedrl.engine.local.engine._MAX_IDLE_TOKENS", 0)
    requests = requests_of(SAMPLINGS[name])
    mixed, full = mixing_caller(monkeypatch), full_caller(monkeypatch)
    assert write(mixed, requests, in_flight) == write(full, requests, in_flight)
    extra = mixed.engine.stats().extra
    assert extra["unchanged_layers"] == LAST
    assert extra["late_tokens"] > 0


def test_drafts_of_late_answers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of()
    drafting, full = mixing_caller(monkeypatch, drafts="always"), full_caller(monkeypatch)
    for caller in (drafting, full):
        for version in range(1, 4):
            caller.engine.publish(version, source(changed_model(LAST, seed=version)))
            caller.serve([caller.again(request, Mode.REPLAY) for request in requests])
    assert {n: parts(a) for n, a in drafting.answers.items()} == {n: parts(a) for n, a in full.answers.items()}
    assert drafting.engine.stats().extra["accepted_tokens"] > 0
    assert drafting.engine.stats().extra["late_tokens"] > 0


def test_late_tokens_skip_the_first_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With wrong weights in the first layers a late token still gets the right log-prob."""
    requests = requests_of()[:4]
    caller = mixing_caller(monkeypatch)
    caller.engine.publish(1, source(changed_model(LAST)))
    caller.serve(requests)
    decoder = caller.engine._decoder  # type: ignore[attr-defined]
    assert isinstance(decoder, NativeDecoder)
    before = {request.sample: list(caller.answers[request.sample].logprobs) for request in requests}
    decoder._panels[0].zero_()
    caller.serve([caller.again(request, Mode.REPLAY) for request in requests])
    for request in requests:
        answer = caller.answers[request.sample]
        assert answer.logprobs == before[request.sample]
        assert answer.verified[-1] == (len(answer.tokens), len(answer.tokens))


def test_a_change_of_a_first_layer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of()
    mixed, full = mixing_caller(monkeypatch), full_caller(monkeypatch)
    for caller in (mixed, full):
        caller.engine.publish(1, source(changed_model(LAST)))
        caller.serve(requests)
        caller.engine.publish(2, source(changed_model(0, LAST)))
        caller.serve([caller.again(request, Mode.REPLAY) for request in requests])
    assert {n: parts(a) for n, a in mixed.answers.items()} == {n: parts(a) for n, a in full.answers.items()}
    assert mixed.engine.stats().extra["unchanged_layers"] == 0
    assert mixed.engine.stats().extra["late_tokens"] == 0


def test_answers_that_began_before_are_computed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first publication tells which layers change; hidden states of earlier tokens were not kept."""
    requests = requests_of()[:4]
    mixed, full = mixing_caller(monkeypatch), full_caller(monkeypatch)
    for caller in (mixed, full):
        caller.engine.submit(requests)
        caller.steps(14)  # all prompts are read
        caller.engine.publish(1, source(changed_model(LAST)), InFlight.KEEP)
        caller.serve([])
        caller.serve([caller.again(request, Mode.REPLAY) for request in requests])
    assert {n: parts(a) for n, a in mixed.answers.items()} == {n: parts(a) for n, a in full.answers.items()}
    assert mixed.engine.stats().extra["late_tokens"] == 0


def test_answers_that_all_restart_on_an_idle_engine_start_late_too(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of()[:4]
    mixed, full = mixing_caller(monkeypatch), full_caller(monkeypatch)
    for caller in (mixed, full):
        caller.engine.publish(1, source(changed_model(LAST)))
        caller.engine.submit(requests)
        caller.steps(5)
        caller.interrupt()
        caller.engine.publish(2, source(changed_model(LAST, seed=6)))
        caller.serve([caller.again(request, Mode.FRESH) for request in requests])
    assert {n: parts(a) for n, a in mixed.answers.items()} == {n: parts(a) for n, a in full.answers.items()}
    assert mixed.engine.stats().extra["late_tokens"] == sum(len(request.prompt) for request in requests)


def test_new_prompts_of_an_idle_engine_are_complete_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples ran when the first unchanged layer was another one. They start again, and are copied when they end."""
    requests = requests_of()[:4]
    caller = mixing_caller(monkeypatch)
    caller.engine.submit(requests)
    caller.steps(3)
    caller.engine.publish(1, source(changed_model(LAST)), InFlight.KEEP)
    caller.interrupt()
    caller.serve([caller.again(request, Mode.FRESH) for request in requests])
    caller.engine.publish(2, source(changed_model(LAST, seed=6)))
    caller.serve([caller.again(request, Mode.REPLAY) for request in requests])
    assert caller.engine.stats().extra["late_tokens"] > sum(len(request.prompt) for request in requests)


def test_the_decoder_tells_the_first_layer_that_changed() -> None:
    caller = plain_caller()
    decoder = caller.engine._decoder  # type: ignore[attr-defined]
    assert isinstance(decoder, NativeDecoder)
    head = tiny_model("llama-gqa")
    with torch.no_grad():
        head.lm_head.weight[0, 0] += 1
    assert decoder.refresh(tiny_model("llama-gqa")) == LAST + 1
    assert decoder.refresh(changed_model(LAST)) == LAST
    assert decoder.refresh(changed_model(0)) == 0
    assert decoder.refresh(tiny_model("llama-gqa")) == 0
    assert decoder.refresh(head) in (0, LAST + 1)  # 0 if the head is the embedding too
    assert decoder.refresh(head) == LAST + 1


def test_copies_take_no_more_memory_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = mixing_caller(monkeypatch)
    caller.engine.publish(1, source(changed_model(LAST)))
    requests = [replace(request, sample=n) for n, request in enumerate(requests_of() * 8)]
    caller.serve(requests)
    unchanged: Any = caller.engine._unchanged  # type: ignore[attr-defined]
    sizes = [copy.num_bytes for copy in unchanged._copies.values()]
    assert 0 < len(sizes) < len(requests)
    assert sum(sizes) == unchanged._num_bytes <= caller.engine.stats().extra["cache_bytes"]
