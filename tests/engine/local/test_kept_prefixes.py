"""The cache of a trajectory is kept while its tools work, and changes nothing but the work."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.engine.base import Delta, Finished, InFlight, Request, Sampling, Span
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.records import FinishReason, Mode
from sortedrl.run.builders.engine import num_kept_prefixes
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


class UpdatedTrajectories(Trajectories):
    """The same over updates of the last layer, after each of which all trajectories are replayed.

    So in the end each is what a restart under the last weights writes, however far the engine had come at an update.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_masked: dict[int, list[bool]] = {}
        self.version = self.num_attempts = 0
        self.optimizer = torch.optim.Adam(self.model.model.layers[-1].parameters(), lr=5e-3)

    def extend(self, event: Delta) -> None:
        super().extend(event)
        flags = self.is_masked.setdefault(event.sample, [])
        flags[event.start + event.verified :] = [False] * (len(event.tokens) - event.verified)

    def next_turn(self, done: Request, event: Finished) -> list[Request]:
        found = super().next_turn(done, event)
        self.is_masked[done.sample] += [True] * len(FED) if found else []
        return [self.again(request, Mode.RESUME) for request in found]

    def again(self, request: Request, mode: Mode) -> Request:
        sample = request.sample
        parts = groupby(self.is_masked.get(sample, []))
        spans = [Span(self.version, len(list(flags)), is_masked=is_masked) for is_masked, flags in parts]
        self.num_attempts += 1
        again = replace(request, attempt=self.num_attempts, mode=mode if spans else Mode.FRESH, spans=spans)
        return replace(again, cached=list(self.tokens.get(sample, [])))

    def update(self) -> list[Request]:
        """Interrupt everything, take a gradient step on the prompts, and publish it; returns the replays."""
        for event in self.engine.interrupt():
            if isinstance(event, Delta):
                self.extend(event)
        self.optimizer.zero_grad()
        for request in requests():
            text = torch.tensor([request.prompt])
            self.model(text, labels=text).loss.backward()
        self.optimizer.step()
        self.version += 1
        self.engine.publish(self.version, source(self.model))
        return [self.again(request, Mode.REPLAY) for request in requests()]


def test_kept_prefixes_and_unchanged_layers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates change the last layer only, so replays start late; between them turns go on after kept prefixes."""
    monkeypatch.setattr("sortedrl.engine.local.mixed_pass._MIN_PARAMETERS", 0)
    answers, kept_tokens = [], []
    for num_kept in (0, 5, 7):  # with five some come back to a row and others do not
        run, left = UpdatedTrajectories(kept_prefixes=num_kept), requests()
        for _ in range(4):
            run.run(left, until=14)
            left = run.update()
        before = run.stat("kept_prefix_tokens")
        run.run(left)
        answers.append((run.tokens, run.logprobs, run.is_masked))
        extra = run.engine.stats().extra
        kept_tokens.append((before, extra["kept_prefix_tokens"]))
        assert extra["unchanged_layers"] == run.model.config.num_hidden_layers - 1
        assert extra["late_tokens"] > 0
    assert kept_tokens[0] == (0, 0)
    assert kept_tokens[1][1] > 0
    assert kept_tokens[2][1] > kept_tokens[2][0] > 0  # used between updates, and after the last
    assert answers[0] == answers[1] == answers[2]  # log-probs to the last bit


@pytest.mark.parametrize(
    ("changes", "room", "rows"),
    [
        ({}, None, 6),  # twice the slots
        ({"schedule": {"open_trajectories": 5}}, None, 5),
        ({"schedule": {"open_trajectories": 5}}, 8 * 4 * 131_072, 4),  # an eighth of the memory
        ({"engine": {"slots": 3, "kept_prefixes": 9}}, 1, 9),
    ],
)
def test_the_default_is_a_row_for_each_open_trajectory(
    changes: dict[str, Any], room: int | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the tiny model has 131,072 bytes: 2 layers, keys and values, 2 heads, 16 numbers, 4 bytes, 256 steps."""
    monkeypatch.setattr("sortedrl.run.builders.engine._machine_bytes", lambda: room)
    config = SortedConfig(**{"engine": {"slots": 3}, **changes})
    model = tiny_model("llama-gqa")
    assert num_kept_prefixes(config, model, 256, has_tools=True) == rows
    assert num_kept_prefixes(config, model, 256, has_tools=False) == (9 if rows == 9 else 0)


def test_other_decoders_keep_nothing() -> None:
    lean = LocalEngine(tiny_model(), slots=2, max_length=64, path="lean", kept_prefixes=9)
    plain = LocalEngine(tiny_model(), slots=2, max_length=64, path="lean")
    assert lean.stats().extra["cache_bytes"] == plain.stats().extra["cache_bytes"]
