"""Drafts on the local engine: several tokens a pass, and the same answers as without, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.engine.attempt import Attempt
from sortedrl.engine.base import InFlight, Request, Sampling
from sortedrl.engine.local import drafts as drafts_module
from sortedrl.engine.local.draft_gate import DraftGate
from sortedrl.engine.local.drafts import NUM_KINDS, Draft, DraftSources
from sortedrl.records import Mode
from sortedrl.run.builders.engine import build_engine
from sortedrl.testing import Answer
from tests.support.tiny_models import (
    Caller,
    add_noise,
    make_caller,
    make_requests,
    needs_compiler,
    serve,
    source,
    tiny_model,
)

SAMPLINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.3),
    "greedy": Sampling(temperature=0.0),
    "filtered": Sampling(temperature=0.5, top_k=5, top_p=0.9),
    "stop tokens": Sampling(temperature=0.3, stop_tokens=(3, 11)),
    "stop strings": Sampling(temperature=0.3, stop_strings=("ad", "k")),
}
PROMPT = [5, 1]
SURE = [1.0] * NUM_KINDS  # every guess counts as certain, so drafts end only at their limit
OWN, AFTER_LONG, AFTER_SHORT = 0, 1, 5  # kinds of guesses; the streak is added to the last two


def letters(tokens: list[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


def changed_model() -> Any:
    model = tiny_model("llama-gqa")
    add_noise(model, 0.02, seed=5)
    return model


def make_request(**changes: Any) -> Request:
    greedy = Sampling(temperature=0.0)  # answers repeat themselves, so drafts are long
    return replace(Request(sample=0, attempt=0, prompt=PROMPT, budget=60, seed=0, sampling=greedy), **changes)


def siblings(sampling: Sampling) -> list[Request]:
    """Three siblings of each of four prompts."""
    prompts = [request.prompt for request in make_requests(4)]
    return [make_request(sample=n, prompt=prompts[n % 4], seed=31 * n, sampling=sampling) for n in range(12)]


def write(requests: list[Request], **options: Any) -> Caller:
    """Serve all requests; then replay the first 40 tokens of every other answer under changed weights."""
    caller = make_caller(tiny_model("llama-gqa"), 4, path="native", decode=letters, **options)
    caller.serve(requests)
    caller.engine.publish(1, source(changed_model()))
    again = [caller.again(request, Mode.REPLAY) for request in requests[::2]]
    caller.serve([replace(request, cached=request.cached[:40]) for request in again])
    return caller


def parts(answer: Answer) -> tuple[Any, ...]:
    return answer.tokens, answer.logprobs, answer.versions, answer.reason, answer.verified, answer.error


@needs_compiler
@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_the_same_to_the_last_bit(name: str) -> None:
    requests = siblings(SAMPLINGS[name])
    drafted, plain = write(requests, drafts="always", stream_every=3), write(requests)
    for request in requests:
        assert parts(drafted.answers[request.sample]) == parts(plain.answers[request.sample])
    stats, plain_stats = drafted.engine.stats(), plain.engine.stats()
    assert stats.decoded_tokens == plain_stats.decoded_tokens
    assert stats.decode_steps < plain_stats.decode_steps
    assert 0 < stats.extra["accepted_tokens"] < stats.extra["drafted_tokens"]


@needs_compiler
def test_the_gate_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sortedrl.engine.local.speculation._MIN_PARAMETERS", 0)
    requests = siblings(Sampling(temperature=0.3))
    drafted, plain = write(requests, drafts="auto"), write(requests)
    for request in requests:
        assert parts(drafted.answers[request.sample]) == parts(plain.answers[request.sample])


@needs_compiler
def test_a_replay_drafts_from_what_it_discarded() -> None:
    """Only one token of the cached answer is wrong: the rest is right as soon as that token is replaced."""
    request = make_request(seed=4, sampling=Sampling(), budget=50)
    tokens = serve(tiny_model(), [request])[0].tokens
    wrong = [*tokens[:10], (tokens[10] + 1) % 23, *tokens[11:]]
    caller = make_caller(tiny_model(), 1, path="native", drafts="always")
    answer = caller.serve([replace(request, mode=Mode.REPLAY, cached=wrong)])[0]
    assert answer.tokens == tokens
    # The replay draws token 10. A pass without a draft draws token 11, which agrees again. Then each pass takes over
    # 8 tokens and draws one: 12 + 4 * 9 = 48. The last pass has room for a draft of one token.
    assert caller.engine.stats().decode_steps == 1 + 4 + 1
    assert caller.engine.stats().extra["accepted_tokens"] == 4 * 8 + 1


@needs_compiler
@pytest.mark.parametrize("in_flight", [InFlight.KEEP, InFlight.REPREFILL])
def test_weights_that_change_under_a_running_attempt(in_flight: InFlight) -> None:
    request, earlier = make_request(budget=100), make_request(sample=1, budget=100)
    drafted = make_caller(tiny_model("llama-gqa"), 4, path="native", drafts="always")
    drafted.serve([earlier])  # a draft for every token
    drafted.engine.submit([request])
    drafted.steps(4)
    drafted.engine.publish(1, source(changed_model()), in_flight)
    drafted.serve([])
    num_old = drafted.answers[0].versions.count(0)
    assert num_old > 5, "four passes must have taken over drafts"
    plain = make_caller(tiny_model("llama-gqa"), 4, path="native")
    plain.engine.submit([request])
    plain.steps(num_old - 1)  # the first step draws two tokens
    plain.engine.publish(1, source(changed_model()), in_flight)
    assert parts(drafted.answers[0]) == parts(plain.serve([])[0])


@needs_compiler
@pytest.mark.parametrize("mode", [Mode.RESUME, Mode.REPLAY, Mode.FRESH])
def test_interruptions_between_passes(mode: Mode) -> None:
    requests = siblings(Sampling(temperature=0.3))[:4]
    caller = make_caller(tiny_model("llama-gqa"), 4, path="native", drafts="always")
    for _ in range(5):
        caller.engine.submit(requests)
        caller.steps(4)
        caller.interrupt()
        requests = [caller.again(request, mode) for request in requests]
    answers, expected = caller.serve(requests), serve(tiny_model("llama-gqa"), siblings(Sampling(temperature=0.3))[:4])
    assert {s: a.tokens for s, a in answers.items()} == {s: a.tokens for s, a in expected.items()}
    assert {s: a.logprobs for s, a in answers.items()} == {s: a.logprobs for s, a in expected.items()}


@needs_compiler
def test_logits_that_are_not_finite_inside_a_draft() -> None:
    """The draft is the same answer of better weights. After one of its tokens the new weights give no number."""
    answers = []
    for drafts in ("always", "off"):
        caller = make_caller(tiny_model("llama-gqa"), 1, path="native", drafts=drafts)
        request = make_request(sampling=Sampling(), budget=30)
        tokens = caller.serve([request])[0].tokens
        last = next(token for token in tokens[12:] if token not in tokens[:12])
        model = tiny_model("llama-gqa")
        with torch.no_grad():
            model.model.embed_tokens.weight[last] = torch.nan
        caller.engine.publish(1, source(model))
        caller.answers.clear()
        answers.append(caller.serve([replace(request, attempt=1)])[0])
        assert answers[-1].tokens == tokens[: tokens.index(last) + 1]
        after = caller.serve([replace(request, sample=1, prompt=[8], budget=3)])[1]
        assert after.error or len(after.tokens) == 3
    assert parts(answers[0]) == parts(answers[1])
    assert "non-finite logits" in str(answers[0].error)


def test_other_decoders_have_no_drafts() -> None:
    caller = make_caller(tiny_model(), 2, path="lean", drafts="always")
    caller.serve([make_request(budget=5)])
    assert "drafted_tokens" not in caller.engine.stats().extra


@needs_compiler
@pytest.mark.parametrize(
    ("drafts", "smallest", "is_on"),
    [("auto", 0, True), ("auto", 10_000_000, False), ("always", 10_000_000, True), ("off", 0, False)],
)
def test_the_configuration_turns_drafts_on_and_off(
    drafts: str, smallest: int, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sortedrl.engine.local.speculation._MIN_PARAMETERS", smallest)
    config = SortedConfig(engine={"drafts": drafts, "slots": 2, "max_new_tokens": 64})
    engine = build_engine(config, tiny_model(), config.knobs)
    assert ("drafted_tokens" in engine.stats().extra) == is_on
    engine.close()
    assert SortedConfig().engine.drafts == "auto"


# Sources


def begin(tokens: list[int], *, seed: int = 0, sample: int = 0, budget: int = 100) -> Attempt:
    """A running attempt that has written these tokens."""
    request = make_request(sample=sample, seed=seed, budget=budget, mode=Mode.RESUME, cached=tokens)
    return Attempt.begin(request)


def test_an_answer_that_repeats_itself() -> None:
    draft = DraftSources().propose(begin([1, 2, 3, 9, 1, 2, 3]), SURE, 0.5)
    # After 9, 1 and 2 the last six tokens are those before the second 3.
    kinds = [AFTER_SHORT, AFTER_SHORT, AFTER_SHORT, AFTER_LONG]
    assert draft == Draft([9, 1, 2, 3, 9, 1, 2, 3], kinds * 2)


def test_the_streak_counts_how_often_the_same_token_followed() -> None:
    attempt = begin([1, 2, 3, 9, 4, 1, 2, 3, 9, 5, 1, 2, 3])
    draft = DraftSources().propose(attempt, SURE, 0.5)
    assert draft.tokens[:2] == [9, 5]
    assert draft.kinds[:2] == [AFTER_SHORT + 1, AFTER_SHORT]  # 9 followed twice; after (2, 3, 9) came 4, then 5


def test_siblings_that_ended_and_siblings_that_run() -> None:
    sources = DraftSources()
    sources.end(begin([1, 2, 3, 4, 5, 6, 7], seed=1, sample=1))
    assert sources.propose(begin([8, 1, 2, 3], seed=2, sample=2), SURE, 0.5).tokens == [4, 5, 6, 7]
    running = begin([7, 7, 7, 6, 6], seed=3, sample=3)
    sources.propose(running, SURE, 0.5)
    assert sources.propose(begin([7, 7, 7], seed=4, sample=4), SURE, 0.5).tokens[:2] == [6, 6]


def test_the_same_seed_is_aligned_by_position() -> None:
    sources = DraftSources()
    sources.keep(begin([], seed=1), [4, 5, 6, 5, 7, 5, 8])
    attempt = begin([0, 5], seed=1)
    assert sources.propose(attempt, SURE, 0.5) == Draft([6, 5, 7, 5, 8], [OWN] * 5)
    assert sources.propose(begin([0, 1], seed=1, sample=1), SURE, 0.5).tokens == []  # its last token differs there


def test_a_draft_ends_where_it_is_unlikely_and_before_the_budget() -> None:
    sources = DraftSources()
    sources.keep(begin([], seed=1), list(range(10)))
    rates = [0.8] * NUM_KINDS
    assert len(sources.propose(begin([0, 1], seed=1), rates, 0.5).tokens) == 3  # .8 ** 3 = .512, .8 ** 4 = .41
    assert len(sources.propose(begin([0, 1], seed=1, sample=1, budget=5), SURE, 0.5).tokens) == 2
    assert sources.propose(begin([0, 1], seed=1, sample=2, budget=3), SURE, 0.5).tokens == []


def test_the_oldest_answers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_module, "_MAX_TOKENS", 10)
    sources = DraftSources()
    for prompt in (1, 2, 3):
        attempt = begin([4, 4, 4, 5], seed=prompt, sample=prompt)
        attempt.request.prompt = [prompt]
        sources.end(attempt)
    found = []
    for prompt in (1, 2, 3):
        attempt = begin([4, 4, 4], seed=9, sample=10 + prompt)
        attempt.request.prompt = [prompt]
        found.append(sources.propose(attempt, SURE, 0.5).tokens)
    assert found == [[], [5], [5]]


# Gate


def pass_seconds(gate: DraftGate, *, running: int, row_s: float, num_right: int) -> tuple[float, int]:
    """Run one pass of 1 s, plus `row_s` for each draft token; drafts have 4 tokens. Returns seconds and tokens."""
    least = gate.least(running)
    if least is None:
        if gate.is_measuring:
            gate.count_plain(running, 1.0)
        return 1.0, running
    seconds, tokens = 1.0 + 4 * running * row_s, running * (1 + num_right)
    for _ in range(running):
        gate.count_guesses([AFTER_LONG] * 4, num_right)
    gate.count_drafted(running, 5 * running, tokens, seconds)
    return seconds, tokens


def speed(gate: DraftGate, **changes: Any) -> float:
    """Tokens a second over 20,000 passes, relative to passes without drafts."""
    done = [pass_seconds(gate, **changes) for _ in range(20_000)]
    return sum(tokens for _, tokens in done) / sum(seconds for seconds, _ in done) / changes["running"]


def test_drafts_that_pay_are_used() -> None:
    # A pass takes 1.4 s and gives 3 tokens: 2.14 times as fast, less the passes that measure the time without drafts.
    assert speed(DraftGate(slots=8), running=1, row_s=0.1, num_right=2) == pytest.approx(3 / 1.4, rel=0.05)


@pytest.mark.parametrize(("row_s", "num_right"), [(0.1, 0), (0.5, 1), (1.0, 2), (2.0, 4)])
def test_drafts_that_do_not_pay_cost_little(row_s: float, num_right: int) -> None:
    assert speed(DraftGate(slots=8), running=1, row_s=row_s, num_right=num_right) > 0.99


def test_drafts_that_pay_are_tried_with_one_more_slot_up_to_a_quarter() -> None:
    gate, free = DraftGate(slots=8), {"row_s": 0.0, "num_right": 4}
    assert speed(gate, running=2, **free) == 1.0
    assert speed(gate, running=1, **free) > 4
    assert speed(gate, running=2, **free) > 4
    assert speed(gate, running=3, **free) == 1.0


def test_drafts_are_tried_again_after_a_pause() -> None:
    gate = DraftGate(slots=8)
    speed(gate, running=1, row_s=0.1, num_right=0)
    assert speed(gate, running=1, row_s=0.1, num_right=2) > 1.5


def test_a_rate_is_how_often_a_guess_is_right() -> None:
    gate = DraftGate(slots=4)
    for _ in range(300):
        gate.count_guesses([OWN, AFTER_LONG, AFTER_SHORT], 1)  # the first is right, the second wrong
    assert gate.rates[OWN] > 0.95
    assert gate.rates[AFTER_LONG] < 0.05
    assert gate.rates[AFTER_SHORT] == 0.6  # never tested
