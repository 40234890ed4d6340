"""The cache of a trajectory is kept while its tools work, and changes nothing but the work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sortedrl.engine.base import Delta, Finished, InFlight, Request, Sampling, Span
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.records import FinishReason, Mode
from tests.support.tiny_models import VOCAB, add_noise, make_requests, needs_compiler, source, tiny_model

STOPS = Sampling(stop_tokens=tuple(range(0, VOCAB, 3)))  # turns end after a few tokens
FED = [5, 7, 8]

pytestmark = needs_compiler


class Trajectories:
    """Drives an engine over turns: what ends with a stop token is fed `FED` and submitted again."""

    def __init__(self, **options: Any) -> None:
        self.model = tiny_model("llama-gqa")
        self.engine = LocalEngine(self.model, slots=3, max_length=256, path="native", **options)
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.spans: dict[int, list[Span]] = {}

    def run(self, requests: list[Request], *, until: int = 10_000) -> list[Request]:
        """Run at most `until` turns; returns the requests of what would come next."""
        waiting, running = list(requests), {}
        for _ in range(until):
            while waiting and len(running) < 3:
                request = waiting.pop(0)
                running[request.sample] = request
                self.engine.submit([request])
            if not running:
                return waiting
            for event in self.engine.poll():
                if isinstance(event, Delta):
                    self.extend(event)
                elif isinstance(event, Finished):
                    waiting += self.next_turn(running.pop(event.sample), event)
        return [*waiting, *running.values()]

    def extend(self, event: Delta) -> None:
        self.tokens.setdefault(event.sample, [])[event.start :] = event.tokens
        self.logprobs.setdefault(event.sample, [])[event.start :] = event.logprobs
        self.spans.setdefault(event.sample, []).append(Span(event.version, len(event.tokens)))

    def next_turn(self, done: Request, event: Finished) -> list[Request]:
        sample = done.sample
        if event.reason is not FinishReason.STOP or len(self.tokens[sample]) + len(FED) >= done.budget:
            return []
        self.tokens[sample] += FED
        self.logprobs[sample] += [0.0] * len(FED)
        self.spans[sample].append(Span(0, len(FED), is_masked=True))
        again = replace(done, attempt=done.attempt + 1, mode=Mode.RESUME)
        return [replace(again, cached=list(self.tokens[sample]), spans=list(self.spans[sample]))]

    def stat(self, name: str) -> int:
        stats = self.engine.stats()
        return stats.extra.get(name, 0) if name == "kept_prefix_tokens" else getattr(stats, name)


def requests() -> list[Request]:
    return make_requests(7, budget=60, sampling=STOPS)


@pytest.fixture(params=[False, True], ids=["own passes", "mixed passes"])
def is_mixing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether prefills share passes with decoding slots, as with a large model."""
    if request.param:
        monkeypatch.setattr("sortedrl.engine.local.mixed_pass._MIN_PARAMETERS", 0)
    return request.param


def test_trajectories_are_the_same_with_kept_prefixes(is_mixing: bool) -> None:
    plain = Trajectories()
    assert plain.engine._is_mixing == is_mixing
    plain.run(requests())
    assert max(sum(span.is_masked for span in spans) for spans in plain.spans.values()) >= 3, "too few turns"
    saved = []
    for num_kept in (1, 4, 7):
        kept = Trajectories(kept_prefixes=num_kept)
        kept.run(requests())
        assert kept.tokens == plain.tokens
        assert kept.logprobs == plain.logprobs  # to the last bit
        saved.append(kept.stat("kept_prefix_tokens"))
        prefilled = kept.stat("prompt_tokens") + kept.stat("recomputed_tokens")
        assert prefilled + saved[-1] == plain.stat("prompt_tokens") + plain.stat("recomputed_tokens")
    assert saved == sorted(saved)  # the oldest prefix gives way where there are too few rows
    assert 0 < saved[1] < saved[2]
    num_returns = sum(span.is_masked for spans in plain.spans.values() for span in spans)
    assert kept.stat("recomputed_tokens") == num_returns * (len(FED) + 1)  # nothing else is read twice


@pytest.mark.parametrize("in_flight", [InFlight.REPREFILL, InFlight.KEEP])
def test_new_weights_drop_what_is_kept(in_flight: InFlight) -> None:
    answers = []
    for num_kept in (0, 7):
        run = Trajectories(kept_prefixes=num_kept)
        left = run.run(requests(), until=6)
        before = run.stat("kept_prefix_tokens")
        assert run.engine.num_running > 0
        add_noise(run.model, 0.05, seed=3)
        run.engine.publish(1, source(run.model), in_flight)
        _go_on(run, left)
        answers.append((run.tokens, run.logprobs))
        assert num_kept == 0 or run.stat("kept_prefix_tokens") > before > 0  # used before and after
    assert answers[0] == answers[1]


def test_new_weights_restart_a_prefill_that_follows_a_kept_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for num_kept, smallest in ((0, 1 << 40), (1, 0)):  # in one call under the new weights; begun under the old ones
        monkeypatch.setattr("sortedrl.engine.local.mixed_pass._MIN_PARAMETERS", smallest)
        run = Trajectories(kept_prefixes=num_kept)
        (first,) = make_requests(1, budget=60, sampling=STOPS)
        run.run([first], until=1)
        cached = [*run.tokens[first.sample], *FED * 8]
        spans = [Span(0, len(cached) - len(FED) * 8), Span(0, len(FED) * 8, is_masked=True)]
        again = replace(first, attempt=1, mode=Mode.RESUME, cached=cached, spans=spans)
        if num_kept:
            run.engine.submit([again])
            run.engine.poll(0.0)
            (gradual,) = run.engine._prefilling
            assert len(cached) - len(FED) * 8 < gradual.num_done < len(cached)
        add_noise(run.model, 0.05, seed=3)
        run.engine.publish(1, source(run.model), InFlight.REPREFILL)
        if not num_kept:
            run.engine.submit([again])
        ended = [event for event in run.engine.poll() if isinstance(event, Delta)]
        answers.append([(event.start, event.tokens, event.logprobs, event.version) for event in ended])
    assert answers[0]
    assert answers[0] == answers[1]


def _go_on(run: Trajectories, left: list[Request]) -> None:
    """Run on with some of the requests in the engine already."""
    in_engine = {attempt.request.sample for attempt in (*run.engine._active, *run.engine._pending)}
    running = {request.sample: request for request in left if request.sample in in_engine}
    waiting = [request for request in left if request.sample not in in_engine]
    while running:
        for event in run.engine.poll():
            if isinstance(event, Delta):
                run.extend(event)
            elif isinstance(event, Finished):
                waiting += run.next_turn(running.pop(event.sample), event)
    run.run(waiting)


def test_other_decoders_keep_nothing() -> None:
    lean = LocalEngine(tiny_model(), slots=2, max_length=64, path="lean", kept_prefixes=9)
    plain = LocalEngine(tiny_model(), slots=2, max_length=64, path="lean")
    assert lean.stats().extra["cache_bytes"] == plain.stats().extra["cache_bytes"]
