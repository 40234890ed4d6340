"""The conformance suite of engines: each promise of the engine protocol is a plain function over an `EngineCase`.

`run_checks` and the tests of every engine call the checks. No test runner is needed: a check that fails raises
AssertionError. `guarantee` names the promise of `engine/base.py` that is then broken. `requires` selects the engines
that a check applies to, by their capabilities or by what the case offers. `issue` names the bug of another system that
the check guards against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sortedrl.engine.base import EngineEvent, InFlight, Request, Sampling, SleepingEngine, Span
from sortedrl.engine.sampling.noise import SCHEME, gumbel_scalar
from sortedrl.errors import SortedRLError
from sortedrl.records import FinishReason, Mode
from sortedrl.testing.case import Answer, EngineCase


class Requirement(NamedTuple):
    """What an engine or its case must offer for a check to apply, and the reason that is given if it does not."""

    is_met: Callable[[EngineCase], bool]
    otherwise: str


@dataclass(slots=True, kw_only=True, frozen=True)
class Check:
    name: str
    promise: str
    guarantee: str  # by its name in the docstring of engine/base.py
    run: Callable[[EngineCase], None]
    requires: tuple[Requirement, ...] = ()
    issue: str = ""

    def __str__(self) -> str:
        return self.name

    def needs(self, case: EngineCase) -> bool:
        """Whether the check applies to the engine."""
        return not self.why_not(case)

    def why_not(self, case: EngineCase) -> str:
        """Why the check does not apply to the engine; "" if it does."""
        return next((need.otherwise for need in self.requires if not need.is_met(case)), "")


CHECKS: list[Check] = []


def check(
    promise: str, *, guarantee: str, issue: str = "", requires: Sequence[Requirement] = ()
) -> Callable[[Callable[[EngineCase], None]], Callable[[EngineCase], None]]:
    """A decorator that adds a function to CHECKS, under the function's name."""

    def register(run: Callable[[EngineCase], None]) -> Callable[[EngineCase], None]:
        name = run.__name__.replace("_", "-")
        made = Check(name=name, promise=promise, guarantee=guarantee, run=run, requires=tuple(requires), issue=issue)
        CHECKS.append(made)
        return run

    return register


def is_exact(case: EngineCase) -> bool:
    return case.engine.capabilities.exact_replay


EXACT = Requirement(is_exact, "the engine's capabilities say exact_replay = False")
KEEPS_KV = Requirement(lambda case: case.engine.capabilities.keep_kv, "the engine's capabilities say keep_kv = False")
STOPS = Requirement(
    lambda case: case.has_stop_tokens, "EngineCase.has_stop_tokens = False: it has no tokens to stop at"
)
DECODES = Requirement(lambda case: case.decode is not None, "EngineCase.decode is missing: it finds no stop strings")
DIES = Requirement(lambda case: case.kill is not None, "EngineCase.kill is missing: no process of it can die alone")
SLEEPS = Requirement(lambda case: case.engine.capabilities.sleeps, "the engine's capabilities say sleeps = False")
SHARED_NOISE = Requirement(
    lambda case: case.engine.capabilities.noise == SCHEME, f"the engine's capabilities do not say noise = {SCHEME}"
)


# ---- answers ---------------------------------------------------------------------------------------------------------


@check("an answer uses its budget and no more, and says why it ended", guarantee="budget")
def budgets_are_kept(case: EngineCase) -> None:
    caller = case.caller()
    requests = [replace(r, budget=budget) for r, budget in zip(case.requests(3), (1, 7, 12), strict=True)]
    answers = caller.serve(requests)
    assert [len(answers[r.sample].tokens) for r in requests] == [1, 7, 12]
    assert all(answer.reason is FinishReason.LENGTH for answer in answers.values())


@check("a stop token ends an answer and is part of it", guarantee="stops", requires=[STOPS, EXACT])
def stop_tokens_stop(case: EngineCase) -> None:
    (request,) = case.requests(1, budget=24)
    free = case.caller().serve([request])[request.sample].tokens
    stop = free[10]
    again = replace(request, attempt=1, sampling=replace(request.sampling, stop_tokens=(stop,)))
    answer = case.caller().serve([again])[request.sample]
    assert answer.tokens == free[: free.index(stop) + 1]
    assert answer.reason is FinishReason.STOP


@check(
    "a stop string ends an answer with the token that completes it",
    guarantee="stops",
    requires=[DECODES, EXACT],
)
def stop_strings_stop(case: EngineCase) -> None:
    assert case.decode is not None, "selected by `requires`"
    (request,) = case.requests(1, budget=24)
    free = case.caller().serve([request])[request.sample].tokens
    string = case.decode(free[9:11])
    again = replace(request, attempt=1, sampling=replace(request.sampling, stop_strings=(string,)))
    answer = case.caller().serve([again])[request.sample]
    end = next(end for end in range(1, 25) if string in case.decode(free[:end]))
    assert answer.tokens == free[:end]
    assert len(answer.logprobs) == end
    assert answer.reason is FinishReason.STOP


@check("log-probs are those of a teacher-forced pass", guarantee="log-probs")
def logprobs_match_a_forced_pass(case: EngineCase) -> None:
    requests = case.requests(4, budget=24)
    answers = case.caller().serve(requests)
    for request in requests:
        answer = answers[request.sample]
        assert case.is_close(answer.logprobs, case.logprobs(case.version, request, answer.tokens))


@check(
    "log-probs are those of the distribution that was sampled, including temperature",
    guarantee="log-probs",
    issue="verl #6240",
    requires=[STOPS],
)
def logprobs_are_the_processed_ones(case: EngineCase) -> None:
    (request,) = case.requests(1, budget=24, sampling=Sampling(temperature=0.6))
    answer = case.caller().serve([request])[request.sample]
    assert case.is_close(answer.logprobs, case.logprobs(case.version, request, answer.tokens))
    raw = replace(request, sampling=Sampling(temperature=1.0))
    assert not case.is_close(answer.logprobs, case.logprobs(case.version, raw, answer.tokens))


@check("an answer depends on its seed, not on its neighbours", guarantee="seed", requires=[EXACT])
def answers_do_not_depend_on_neighbours(case: EngineCase) -> None:
    requests = case.requests(4, budget=20)
    together = case.caller().serve(requests)
    for request in requests[:2]:
        alone = case.caller().serve([replace(request, attempt=1)])
        assert alone[request.sample].tokens == together[request.sample].tokens
    other = case.caller().serve([replace(requests[0], attempt=2, seed=requests[0].seed + 1)])
    assert other[requests[0].sample].tokens != together[requests[0].sample].tokens


@check("tokens are drawn with the noise scheme that the engine names", guarantee="noise", requires=[SHARED_NOISE])
def tokens_are_drawn_with_the_shared_noise(case: EngineCase) -> None:
    requests = case.requests(2, budget=6)
    answers = case.caller().serve(requests)
    rivals = {token for request in requests for token in (*request.prompt, *answers[request.sample].tokens)}

    def score(request: Request, before: list[int], token: int) -> float:
        position = len(request.prompt) + len(before) - 1
        logprob = case.logprobs(case.version, request, [*before, token])[-1]
        return logprob + gumbel_scalar(request.seed, position, token)

    for request in requests:
        tokens = answers[request.sample].tokens
        for index, drawn in enumerate(tokens):
            best = score(request, tokens[:index], drawn) + case.tolerance
            for token in rivals:
                assert score(request, tokens[:index], token) <= best, f"token {token} beats {drawn} at {index}"


# ---- interruption ----------------------------------------------------------------------------------------------------


@check("interruption returns every sample with its tokens, and every event names its attempt", guarantee="interruption")
def interruption_returns_every_token(case: EngineCase) -> None:
    caller = case.caller()
    requests = case.requests(3, attempt=5)
    before = case.engine.stats().decoded_tokens
    case.engine.submit(requests)
    case.run_until(caller, 12)
    events = case.engine.interrupt()
    assert {event.attempt for event in events} == {5}
    caller.take(events)
    decoded = case.engine.stats().decoded_tokens - before
    assert sum(len(answer.tokens) for answer in caller.answers.values()) == decoded
    assert all(caller.answers[r.sample].has_ended for r in requests)
    for request in requests:
        answer = caller.answers[request.sample]
        assert case.is_close(answer.logprobs, case.logprobs(case.version, request, answer.tokens))


@check("nothing decodes after an interruption", guarantee="interruption", issue="slime #2340")
def no_orphan_survives_an_interruption(case: EngineCase) -> None:
    caller = case.caller()
    case.engine.submit(case.requests(4))
    case.run_until(caller, 8)
    caller.interrupt()
    stats = case.engine.stats()
    late: list[EngineEvent] = []
    for _ in range(5):
        late += case.engine.poll(0.02)
    assert stats.running == case.engine.stats().running == 0
    assert late == []
    assert case.engine.stats().decoded_tokens == stats.decoded_tokens
    assert case.engine.interrupt() == []


@check("some samples can be interrupted while the others continue", guarantee="interruption")
def some_are_interrupted_and_others_go_on(case: EngineCase) -> None:
    caller = case.caller()
    requests = case.requests(4)
    case.engine.submit(requests)
    case.run_until(caller, 8)
    stopped = {requests[0].sample, requests[2].sample}
    events = case.engine.interrupt([*stopped, 10**9])
    assert {event.sample for event in events} == stopped
    caller.take(events)
    caller.serve([])
    for request in requests:
        answer = caller.answers[request.sample]
        is_stopped = request.sample in stopped
        assert answer.num_partials == is_stopped
        assert (len(answer.tokens) < request.budget) == is_stopped
        assert case.is_close(answer.logprobs, case.logprobs(case.version, request, answer.tokens))


@check("a resumed answer has only the rest of its budget", guarantee="budget", issue="slime #2260")
def a_resumed_answer_keeps_its_budget(case: EngineCase) -> None:
    caller = case.caller()
    (request,) = case.requests(1)
    for _ in range(3):
        case.engine.submit([caller.again(request, Mode.RESUME)])
        case.run_until(caller, 4)
        caller.interrupt()
    caller.serve([caller.again(request, Mode.RESUME)])
    answer = caller.answers[request.sample]
    assert answer.num_partials == 3
    assert len(answer.tokens) == request.budget
    assert answer.reason is FinishReason.LENGTH


@check(
    "tokens, log-probs and versions keep the same count after every interruption",
    guarantee="interruption",
    issue="slime #1440",
)
def lengths_agree_after_partials(case: EngineCase) -> None:
    caller = case.caller()
    requests = case.requests(3)
    for _ in range(3):
        case.engine.submit([caller.again(r, Mode.RESUME) for r in requests])
        case.run_until(caller, 6)
        caller.interrupt()
        case.publish()
        for answer in caller.answers.values():
            assert len(answer.tokens) == len(answer.logprobs) == len(answer.versions)
            assert answer.versions == sorted(answer.versions)


@check("a resumed answer equals the uninterrupted answer", guarantee="seed", requires=[EXACT])
def resumed_equals_uninterrupted(case: EngineCase) -> None:
    requests = case.requests(3)
    expected = case.caller().serve(requests)
    caller = case.caller()
    for _ in range(2):
        case.engine.submit([caller.again(r, Mode.RESUME) for r in requests])
        case.run_until(caller, 9)
        caller.interrupt()
    caller.serve([caller.again(r, Mode.RESUME) for r in requests])
    for request in requests:
        assert caller.answers[request.sample].tokens == expected[request.sample].tokens


# ---- publication -----------------------------------------------------------------------------------------------------


@check("after a publication, answers come from the new weights and have the new version", guarantee="publication")
def a_publication_takes_effect(case: EngineCase) -> None:
    requests = case.requests(3, budget=20)
    case.caller().serve(requests)  # fills the prefix cache, whose entries must not survive the publication
    before = case.version
    case.publish()
    again = [replace(request, attempt=1) for request in requests]
    answers = case.caller().serve(again)
    for request in again:
        answer = answers[request.sample]
        assert set(answer.versions) == {case.version}
        assert case.is_close(answer.logprobs, case.logprobs(case.version, request, answer.tokens))
        assert not case.is_close(answer.logprobs, case.logprobs(before, request, answer.tokens))


@check("a resumed answer has tokens of the old version, then of the new one", guarantee="versions")
def a_resumed_answer_spans_versions(case: EngineCase) -> None:
    caller = case.caller()
    (request,) = case.requests(1)
    case.engine.submit([request])
    case.run_until(caller, 6)
    caller.interrupt()
    before, cut = case.version, len(caller.answers[request.sample].tokens)
    case.publish()
    caller.serve([caller.again(request, Mode.RESUME)])
    answer = caller.answers[request.sample]
    assert answer.versions == [before] * cut + [case.version] * (request.budget - cut)
    assert case.is_close(answer.logprobs[:cut], case.logprobs(before, request, answer.tokens)[:cut])
    assert case.is_close(answer.logprobs[cut:], case.logprobs(case.version, request, answer.tokens)[cut:])


@check("an on-policy answer has tokens of one version only", guarantee="versions", issue="slime #2092")
def on_policy_answers_hold_one_version(case: EngineCase) -> None:
    mode = Mode.REPLAY if is_exact(case) else Mode.FRESH
    caller = case.caller()
    requests = case.requests(3)
    case.engine.submit(requests)
    case.run_until(caller, 9)
    caller.interrupt()
    case.publish()
    caller.serve([caller.again(r, mode) for r in requests])
    for request in requests:
        answer = caller.answers[request.sample]
        assert set(answer.versions) == {case.version}
        assert case.is_close(answer.logprobs, case.logprobs(case.version, request, answer.tokens))


@check("replay gives the same tokens as a restart", guarantee="seed", requires=[EXACT])
def replay_equals_restart(case: EngineCase) -> None:
    caller = case.caller()
    requests = case.requests(4)
    case.engine.submit(requests)
    case.run_until(caller, 4 * case.answer_tokens // 2)
    caller.interrupt()
    cached = {r.sample: len(caller.answers[r.sample].tokens) for r in requests}
    case.publish()
    caller.serve([caller.again(r, Mode.REPLAY) for r in requests])
    restarted = case.caller().serve([replace(r, attempt=2) for r in requests])
    for request in requests:
        replayed = caller.answers[request.sample]
        assert replayed.tokens == restarted[request.sample].tokens
        assert case.is_close(replayed.logprobs, restarted[request.sample].logprobs)
        assert replayed.verified[0][0] == cached[request.sample]


@check(
    "a replay that is interrupted before or after its verification continues",
    guarantee="interruption",
    requires=[EXACT],
)
def interrupted_replays_continue(case: EngineCase) -> None:
    caller = case.caller()
    requests = case.requests(4)
    case.engine.submit(requests)
    case.run_until(caller, 4 * case.answer_tokens // 2)
    caller.interrupt()
    case.publish()
    for stopped_first in ([requests[0].sample, requests[2].sample], None):
        case.engine.submit([caller.again(r, Mode.REPLAY) for r in requests])
        caller.interrupt(stopped_first)
        caller.interrupt()
        assert case.engine.stats().running == 0
    caller.serve([caller.again(r, Mode.REPLAY) for r in requests])
    restarted = case.caller().serve([replace(r, attempt=2) for r in requests])
    for request in requests:
        replayed = caller.answers[request.sample]
        assert replayed.tokens == restarted[request.sample].tokens
        assert set(replayed.versions) == {case.version}
        assert case.is_close(replayed.logprobs, restarted[request.sample].logprobs)


@check("a replay keeps injected tokens unchanged and continues after them", guarantee="masked tokens", requires=[EXACT])
def a_replay_keeps_fed_tokens(case: EngineCase) -> None:
    (request,) = case.requests(1)
    first = case.caller().serve([replace(request, budget=8)])[request.sample].tokens
    fed = list(case.prompts[0])
    cached = (*first, *fed)
    spans = [Span(case.version, len(first)), Span(case.version, len(fed), is_masked=True)]
    answers: list[Answer] = []
    for mode in (Mode.RESUME, Mode.REPLAY):
        caller = case.caller()
        held = Answer(tokens=[*cached], logprobs=[0.0] * len(cached), versions=[case.version] * len(cached))
        caller.answers[request.sample] = held
        again = replace(request, attempt=1, mode=mode, cached=cached, spans=spans)
        answers.append(caller.serve([again])[request.sample])
    resumed, replayed = answers
    assert replayed.verified == [(len(cached), len(cached))]
    assert replayed.tokens == resumed.tokens
    assert len(replayed.tokens) == request.budget
    assert replayed.logprobs[len(first) : len(cached)] == [0.0] * len(fed)
    assert case.is_close(replayed.logprobs[len(cached) :], resumed.logprobs[len(cached) :])


@check(
    "running answers continue with their old KV cache under the new weights (mixed-kv)",
    guarantee="publication",
    requires=[KEEPS_KV],
)
def a_kept_cache_goes_on(case: EngineCase) -> None:
    _publish_in_flight(case, InFlight.KEEP)


@check("running answers are prefilled again under the new weights", guarantee="publication")
def a_reprefilled_cache_is_new(case: EngineCase) -> None:
    for request, answer, cut in _publish_in_flight(case, InFlight.REPREFILL):
        forced = case.logprobs(case.version, request, answer)
        assert case.is_close(cut, forced[len(answer) - len(cut) :])


def _publish_in_flight(case: EngineCase, in_flight: InFlight) -> list[tuple[Request, list[int], list[float]]]:
    """Publish while samples run; returns requests, answers, and the log-probs of the tokens of the new version."""
    caller = case.caller()
    requests = case.requests(3)
    case.engine.submit(requests)
    case.run_until(caller, 9)
    before = case.version
    case.publish(in_flight)
    caller.serve([])
    found = []
    for request in requests:
        answer = caller.answers[request.sample]
        cut = answer.versions.count(before)
        assert answer.versions == [before] * cut + [case.version] * (request.budget - cut)
        assert case.is_close(answer.logprobs[:cut], case.logprobs(before, request, answer.tokens)[:cut])
        found.append((request, answer.tokens, answer.logprobs[cut:]))
    assert any(0 < len(new) < case.answer_tokens for _, _, new in found), "no answer ran across the publication"
    return found


# ---- faults ----------------------------------------------------------------------------------------------------------


@check("a request that cannot be served fails alone", guarantee="failures", issue="slime #1562")
def one_failure_is_no_more_than_that(case: EngineCase) -> None:
    good, bad, other = case.requests(3, budget=10)
    bad = case.spoil(bad)
    answers = case.caller().serve([good, bad, other])
    assert answers[bad.sample].error
    assert answers[bad.sample].reason is None
    assert {answers[r.sample].reason for r in (good, other)} == {FinishReason.LENGTH}


@check("more requests than free slots are refused", guarantee="slots")
def slots_are_a_limit(case: EngineCase) -> None:
    caller = case.caller()
    slots = case.engine.capabilities.slots
    requests = case.requests(slots + 1)
    try:
        case.engine.submit(requests)
    except (SortedRLError, AssertionError):
        caller.interrupt()
        return
    raise AssertionError(f"the engine accepted {slots + 1} requests for {slots} slots")


# ---- sleep -----------------------------------------------------------------------------------------------------------


def put_to_sleep(case: EngineCase) -> SleepingEngine:
    assert isinstance(case.engine, SleepingEngine), "an engine with `sleeps` has the methods sleep and wake"
    case.engine.sleep()
    return case.engine


@check(
    "after a sleep, interrupted answers continue under the weights published meanwhile",
    guarantee="sleep",
    requires=[SLEEPS],
)
def answers_continue_after_a_sleep(case: EngineCase) -> None:
    caller = case.caller()
    requests = case.requests(3)
    case.engine.submit(requests)
    case.run_until(caller, 9)
    caller.interrupt()
    before = {request.sample: len(caller.answers[request.sample].tokens) for request in requests}
    for _ in range(2):  # memory that is freed once must come back a second time
        engine = put_to_sleep(case)
        case.publish()
        engine.wake()
    caller.serve([caller.again(request, Mode.RESUME) for request in requests])
    for request in requests:
        answer = caller.answers[request.sample]
        assert len(answer.tokens) == request.budget
        assert set(answer.versions[before[request.sample] :]) == {case.version}
        fresh = case.logprobs(case.version, request, answer.tokens)[before[request.sample] :]
        assert case.is_close(answer.logprobs[before[request.sample] :], fresh)


@check("what was verified before a sleep is verified after it", guarantee="sleep", requires=[SLEEPS, EXACT])
def replay_survives_a_sleep(case: EngineCase) -> None:
    caller = case.caller()
    (request,) = case.requests(1, budget=16)
    caller.serve([request])
    engine = put_to_sleep(case)
    case.publish()
    engine.wake()
    replayed = caller.serve([caller.again(request, Mode.REPLAY)])[request.sample]
    restarted = case.caller().serve([replace(request, attempt=2)])[request.sample]
    assert replayed.tokens == restarted.tokens
    assert case.is_close(replayed.logprobs, case.logprobs(case.version, request, replayed.tokens))


@check("a sleeping engine serves nothing, and does not wake without weights", guarantee="sleep", requires=[SLEEPS])
def calls_in_another_order_are_refused(case: EngineCase) -> None:
    (request,) = case.requests(1)
    engine = put_to_sleep(case)
    for name, call in {
        "serves a request": lambda: engine.submit([request]),
        "wakes without weights": engine.wake,
        "sleeps twice": engine.sleep,
    }.items():
        try:
            call()
        except (SortedRLError, AssertionError):
            continue
        raise AssertionError(f"a sleeping engine {name}")
    case.publish()
    engine.wake()
    case.caller().serve([replace(request, budget=4)])


@check(
    "an engine that dies returns its samples and continues with the same version", guarantee="failures", requires=[DIES]
)
def a_dead_engine_gives_its_samples_back(case: EngineCase) -> None:
    assert case.kill is not None, "selected by `requires`"
    case.publish()
    caller = case.caller()
    requests = case.requests(3)
    case.engine.submit(requests)
    case.run_until(caller, 9)
    case.kill()
    while case.engine.stats().running:
        caller.take(case.engine.poll(1.0))
    assert all(caller.answers[r.sample].num_partials == 1 for r in requests)
    caller.serve([caller.again(r, Mode.RESUME) for r in requests])
    for request in requests:
        answer = caller.answers[request.sample]
        assert len(answer.tokens) == request.budget
        assert set(answer.versions) == {case.version}
        assert case.is_close(answer.logprobs, case.logprobs(case.version, request, answer.tokens))
