"""The local engine's guarantees: what an answer depends on, interruptions, budgets, failures, accounting."""

from __future__ import annotations

import gc
import itertools
import random
from dataclasses import replace

import pytest
import torch

from sortedrl.engine.base import Delta, Engine, Failed, Finished, Partial, Request, Sampling
from sortedrl.engine.local.cache import split_into_groups
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.errors import EngineError
from sortedrl.records import FinishReason, Mode, sample_seed
from tests.support.tiny_models import PATHS, VOCAB, Caller, make_caller, make_requests, serve, tiny_model, tokens_of

# What an answer depends on


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_does_not_depend_on_slots_or_neighbours(path: str) -> None:
    model, requests = tiny_model(), make_requests(9)
    alone = {request.sample: serve(model, [request], slots=1, path=path)[request.sample] for request in requests}
    for slots in (1, 2, 5, 9):
        together = serve(model, requests[::-1], slots=slots, path=path)
        assert tokens_of(together) == tokens_of(alone)
        for sample, answer in together.items():
            close = 0.0 if path == "native" else 1e-4  # the kernel computes every row alike, to the last bit
            assert answer.logprobs == pytest.approx(alone[sample].logprobs, abs=close, rel=0.0)


@pytest.mark.parametrize("call_cost", [0, 1 << 30])
def test_very_different_lengths_do_not_affect_each_other(call_cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sortedrl.engine.local.cache._CALL_ELEMENTS", call_cost)  # many groups, or one
    model = tiny_model("llama-gqa")
    requests = make_requests(6, budget=12)
    long = [replace(request, prompt=[(i * 5) % VOCAB for i in range(200)]) for request in requests[4:]]
    requests = requests[:4] + long
    alone = {request.sample: serve(model, [request], slots=1, path="lean")[request.sample] for request in requests}
    for order in (requests, requests[::-1]):
        assert tokens_of(serve(model, order, slots=6, path="lean")) == tokens_of(alone)


def cost_of(groups: list[int], lengths: list[int], position_elements: int) -> int:
    ends = list(itertools.accumulate(groups))
    parts = [lengths[end - count : end] for end, count in zip(ends, groups, strict=True)]
    return sum(len(part) * max(part) * position_elements + 16384 for part in parts)


def test_the_longest_attend_in_their_own_group_when_that_is_cheaper() -> None:
    # One group reads 16 x 500 x 64 elements. Two read 15 x 10 x 64 + 500 x 64; each call counts as 16,384 more.
    assert split_into_groups([10] * 15 + [500], 64) == [15, 1]
    assert split_into_groups([10] * 7 + [500] + [12] * 8, 64) == [7, 1, 8]
    assert split_into_groups([30, 30, 30], 64) == [3]
    assert split_into_groups([20, 60], 64) == [2]  # 7,680 and one call, against 5,120 and two calls
    assert split_into_groups([7], 64) == [1]


@pytest.mark.parametrize("seed", range(5))
def test_no_other_split_into_groups_is_cheaper(seed: int) -> None:
    lengths = [random.Random(seed * 100 + i).randrange(1, 600) for i in range(9)]
    found = split_into_groups(lengths, 64)
    assert sum(found) == 9
    splits = [
        [end - start for start, end in itertools.pairwise((0, *ends, 9))]
        for count in range(9)
        for ends in itertools.combinations(range(1, 9), count)
    ]
    assert len(splits) == 2**8
    assert cost_of(found, lengths, 64) == min(cost_of(split, lengths, 64) for split in splits)


def test_answers_depend_on_seed_and_temperature() -> None:
    model, request = tiny_model(), make_requests(1, budget=30)[0]
    base = serve(model, [request])[0].tokens
    assert serve(model, [replace(request, seed=request.seed + 1)])[0].tokens != base
    hot = serve(model, [replace(request, sampling=Sampling(temperature=3.0))])[0].tokens
    assert hot != base
    greedy = replace(request, sampling=Sampling(temperature=0.0))
    assert serve(model, [greedy])[0].tokens == serve(model, [replace(greedy, seed=99)])[0].tokens


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    model, requests = tiny_model(), make_requests(4, budget=20)
    temperatures = [0.0, 1.0, 0.5, 0.0]
    mixed = [replace(r, sampling=Sampling(temperature=t)) for r, t in zip(requests, temperatures, strict=True)]
    alone = {request.sample: serve(model, [request], slots=1)[request.sample] for request in mixed}
    assert tokens_of(serve(model, mixed, slots=4)) == tokens_of(alone)


def test_samples_follow_the_models_distribution() -> None:
    model, count = tiny_model(), 3000
    base = make_requests(1, budget=2)[0]
    requests = [replace(base, sample=i, seed=sample_seed(0, 0, "p", i)) for i in range(count)]
    answers = serve(model, requests, slots=100)
    with torch.no_grad():
        first_v = model(torch.tensor([base.prompt])).logits[0, -1].double().softmax(-1)
        common = int(first_v.argmax())
        second_v = model(torch.tensor([[*base.prompt, common]])).logits[0, -1].double().softmax(-1)
    for expected_v, drawn in (
        (first_v, [answer.tokens[0] for answer in answers.values()]),
        (second_v, [answer.tokens[1] for answer in answers.values() if answer.tokens[0] == common]),
    ):
        expected = expected_v * len(drawn)
        observed = torch.tensor(drawn).bincount(minlength=VOCAB).double()
        is_rare = expected < 5  # merged, because a chi-square test needs at least 5 expected draws per cell
        cells = torch.stack([observed, expected])
        if is_rare.any():
            cells = torch.cat([cells[:, ~is_rare], cells[:, is_rare].sum(1, keepdim=True)], 1)
        chi_square = ((cells[0] - cells[1]) ** 2 / cells[1]).sum().item()
        freedom = cells.shape[1] - 1
        assert freedom >= 3
        assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


# Prefill


def test_siblings_share_a_prefill() -> None:
    model, request = tiny_model(), make_requests(1, budget=15)[0]
    siblings = [replace(request, sample=i, seed=i) for i in range(4)]
    alone = {s.sample: serve(model, [s], slots=1)[s.sample] for s in siblings}
    caller = make_caller(model)
    assert tokens_of(caller.serve(siblings)) == tokens_of(alone)
    assert len({tuple(answer.tokens) for answer in caller.answers.values()}) > 1
    assert caller.engine.stats().prompt_tokens == len(request.prompt)


def test_splitting_prefills_into_packs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = tiny_model(), make_requests(6)
    expected = tokens_of(serve(model, requests, slots=6))
    monkeypatch.setattr("sortedrl.engine.local.prefill._PACK_TOKENS", 10)
    assert tokens_of(serve(model, requests, slots=6)) == expected


# Stops, budgets, events


def test_the_stop_token_ends_the_answer_and_is_part_of_it() -> None:
    model, request = tiny_model(), make_requests(1, budget=30)[0]
    free = serve(model, [request])[0]
    stop = free.tokens[10]
    end = free.tokens.index(stop) + 1
    answer = serve(model, [replace(request, sampling=Sampling(stop_tokens=(VOCAB + 5, stop)))])[0]
    assert answer.tokens == free.tokens[:end]
    assert answer.logprobs == pytest.approx(free.logprobs[:end], abs=1e-5)
    assert (answer.reason, free.reason) == (FinishReason.STOP, FinishReason.LENGTH)


def test_a_stop_as_first_token_ends_at_the_prefill() -> None:
    model, request = tiny_model(), make_requests(1, budget=30)[0]
    first = serve(model, [request])[0].tokens[0]
    caller = make_caller(model)
    answer = caller.serve([replace(request, sampling=Sampling(stop_tokens=(first,)))])[0]
    assert (answer.tokens, answer.reason) == ([first], FinishReason.STOP)
    assert caller.engine.stats().decode_steps == 0


def test_one_poll_returns_all_that_end_in_a_step() -> None:
    engine = LocalEngine(tiny_model(), slots=3, max_length=64)
    requests = [replace(r, budget=budget) for r, budget in zip(make_requests(3), (6, 9, 6), strict=True)]
    engine.submit(requests)
    events = engine.poll()
    assert [event.sample for event in events if isinstance(event, Finished)] == [0, 2]
    assert [(e.sample, e.start, len(e.tokens)) for e in events if isinstance(e, Delta)] == [(0, 0, 6), (2, 0, 6)]
    assert engine.stats().running == 1
    assert [event.sample for event in engine.poll() if isinstance(event, Finished)] == [1]
    assert engine.poll() == []


def test_a_poll_without_time_decodes_one_step() -> None:
    engine: Engine = LocalEngine(tiny_model(), slots=2, max_length=64)
    assert engine.poll(timeout=0) == []
    engine.submit(make_requests(2, budget=30))
    for steps in (1, 2, 3):
        assert engine.poll(timeout=0) == []
        assert engine.stats().decode_steps == steps
    assert engine.stats().decoded_tokens == 2 * 4  # the first token comes from the prefill


def test_stream_every_delivers_tokens_early() -> None:
    model, request = tiny_model(), make_requests(1, budget=11)[0]
    engine = LocalEngine(model, slots=1, max_length=64, stream_every=4)
    engine.submit([request])
    deltas = [event for event in engine.poll() if isinstance(event, Delta)]
    assert [(delta.start, len(delta.tokens)) for delta in deltas] == [(0, 5), (5, 4), (9, 2)]
    assert [token for delta in deltas for token in delta.tokens] == serve(model, [request])[0].tokens


# Interruptions


def test_interruption_returns_every_token() -> None:
    model, requests = tiny_model(), make_requests(3, budget=30, attempt=5)
    expected = serve(model, requests)
    engine = LocalEngine(model, slots=4, max_length=64)
    engine.submit(requests)
    for _ in range(7):
        engine.poll(timeout=0)
    pending = make_requests(4, budget=30)[3]
    engine.submit([pending])  # not prefilled yet
    events = engine.interrupt()
    deltas = {event.sample: event for event in events if isinstance(event, Delta)}
    assert {sample: delta.tokens for sample, delta in deltas.items()} == {
        sample: expected[sample].tokens[:8] for sample in range(3)
    }
    assert all(delta.logprobs == pytest.approx(expected[s].logprobs[:8], abs=1e-4) for s, delta in deltas.items())
    assert [(e.sample, e.attempt) for e in events if isinstance(e, Partial)] == [(0, 5), (1, 5), (2, 5), (3, 0)]
    assert engine.stats().running == 0
    assert engine.poll() == engine.interrupt() == []


def test_some_samples_are_interrupted_while_others_continue() -> None:
    model, requests = tiny_model(), make_requests(4, budget=30)
    expected = serve(model, requests)
    caller = make_caller(model)
    caller.engine.submit(requests)
    caller.steps(5)
    caller.interrupt([0, 2, 77])
    assert {s: len(a.tokens) for s, a in caller.answers.items()} == {0: 6, 2: 6}
    caller.serve([])
    assert tokens_of(caller.answers) | {0: [], 2: []} == tokens_of(expected) | {0: [], 2: []}
    assert caller.answers[0].tokens == expected[0].tokens[:6]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_resumed_equals_uninterrupted(seed: int, path: str) -> None:
    model, requests = tiny_model(seed=seed), make_requests(8, seed=seed)
    expected = serve(model, requests, slots=8)
    rng = random.Random(seed)
    caller, waiting = make_caller(model, slots=3, path=path), list(requests)
    running: dict[int, Request] = {}
    while waiting or running:
        while waiting and len(running) < 3:
            request = caller.again(waiting.pop(0), Mode.RESUME)
            caller.engine.submit([request])
            running[request.sample] = request
        caller.steps(rng.randrange(4))
        stopped = rng.sample(sorted(running), rng.randrange(len(running) + 1))
        caller.interrupt(stopped)
        for sample in list(running):
            if caller.answers.get(sample) and caller.answers[sample].reason:
                del running[sample]
            elif sample in stopped:
                waiting.append(running.pop(sample))
    assert tokens_of(caller.answers) == tokens_of(expected)
    for sample, answer in caller.answers.items():
        assert answer.logprobs == pytest.approx(expected[sample].logprobs, abs=1e-4)
        assert len(answer.tokens) == requests[sample].budget
    assert sum(answer.num_partials for answer in caller.answers.values()) > 3


def test_resuming_a_complete_answer_finishes_it() -> None:
    model, request = tiny_model(), make_requests(1, budget=10)[0]
    tokens = tuple(serve(model, [request])[0].tokens)
    stopping = Sampling(stop_tokens=(tokens[3],))
    end = tokens.index(tokens[3]) + 1
    for changes, length, reason in (
        ({"cached": tokens}, 10, FinishReason.LENGTH),
        ({"cached": tokens, "budget": 6}, 6, FinishReason.LENGTH),
        ({"cached": tokens[:end], "sampling": stopping}, end, FinishReason.STOP),
        ({"cached": tokens, "sampling": stopping}, end, FinishReason.STOP),
    ):
        caller = make_caller(model)
        cached = changes["cached"]
        caller.take(
            [Delta(sample=0, attempt=0, clock=0, start=0, tokens=[*cached], logprobs=[-1.0] * len(cached), version=0)]
        )
        answer = caller.serve([replace(request, mode=Mode.RESUME, **changes)])[0]
        assert (answer.tokens, answer.reason) == (list(tokens[:length]), reason)
        assert caller.engine.stats().decode_steps == caller.engine.stats().prompt_tokens == 0


def test_memory_does_not_grow_with_interruptions() -> None:
    model, requests = tiny_model(), make_requests(4, budget=200)
    caller = make_caller(model)

    def held() -> int:
        gc.collect()
        return sum(t.numel() * t.element_size() for t in gc.get_objects() if type(t) is torch.Tensor)

    def interrupt_often(count: int) -> None:
        for _ in range(count):
            caller.answers.clear()
            caller.engine.submit(requests)
            caller.steps(1)
            caller.interrupt()

    interrupt_often(20)
    before = held()
    interrupt_often(980)
    assert held() <= before
    assert caller.engine.stats().extra["cache_bytes"] == 2 * 2 * 4 * 4 * 256 * 8 * 4  # kv, layers, slots, heads, ...


# Failures


def test_invalid_requests_fail_without_affecting_others() -> None:
    model, requests = tiny_model(), make_requests(4, budget=10)
    bad = [
        replace(requests[0], budget=60),
        replace(requests[1], prompt=[]),
        replace(requests[2], prompt=[1, VOCAB]),
    ]
    caller = Caller(LocalEngine(model, slots=4, max_length=64))
    caller.engine.submit([*bad, requests[3]])
    assert caller.engine.stats().running == 1
    events = caller.engine.poll()
    assert [event.sample for event in events if isinstance(event, Failed)] == [0, 1, 2]
    caller.take(events)
    assert f"{len(requests[0].prompt) + 60}, more than the engine's max_length of 64" in caller.answers[0].error
    assert "empty" in caller.answers[1].error
    assert "vocabulary of 23" in caller.answers[2].error
    caller.serve([])
    assert caller.answers[3].reason is FinishReason.LENGTH


def test_more_requests_than_slots_are_refused() -> None:
    engine = LocalEngine(tiny_model(), slots=2, max_length=64)
    engine.submit(make_requests(1))
    with pytest.raises(EngineError, match="2 requests for 1 free slots of 2"):
        engine.submit(make_requests(3)[1:])
    with pytest.raises(AssertionError, match="running already"):
        engine.submit(make_requests(1))
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.submit([])
    with pytest.raises(EngineError, match=r"set engine\.slots to at least 1"):
        LocalEngine(tiny_model(), slots=0, max_length=64)


@pytest.mark.parametrize("path", PATHS)
def test_non_finite_logits_fail_only_their_own_request(path: str) -> None:
    model = tiny_model("qwen3")  # its head is not tied to the embedding, so only the embedding breaks
    requests = make_requests(4, budget=25)
    sound = serve(model, requests, path=path)
    seen = [{*request.prompt, *sound[request.sample].tokens} for request in requests]
    # A token that some answers contain and others do not.
    bad = next(
        t for t in range(VOCAB) if 0 < sum(t in s for s in seen) < 4 and any(t in sound[r].tokens[2:20] for r in sound)
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = float("nan")
    caller = make_caller(model, path=path)
    answers = caller.serve(requests)
    for request in requests:
        answer, before = answers[request.sample], sound[request.sample].tokens
        if bad in request.prompt:
            assert answer.tokens == []
            assert "position 0" in answer.error
        elif bad in before[:-1]:
            assert answer.tokens == before[: before.index(bad) + 1]
            assert f"non-finite logits at answer position {len(answer.tokens)}" in answer.error
        else:
            assert (answer.tokens, answer.error) == (before, "")
    assert 0 < sum(bool(answer.error) for answer in answers.values()) < 4
    # The next requests in those slots must not read NaN that was left there.
    healthy = next(request for request in requests if not answers[request.sample].error)
    answers = caller.serve([replace(healthy, sample=sample) for sample in range(10, 14)])
    assert [answers[sample].tokens for sample in range(10, 14)] == [sound[healthy.sample].tokens] * 4


# Accounting


def test_time_and_tokens_are_counted() -> None:
    ticks = itertools.count()
    model = tiny_model()
    caller = make_caller(model, slots=3, clock=lambda: float(next(ticks)))
    requests = [replace(r, budget=b) for r, b in zip(make_requests(3), (5, 9, 9), strict=True)]
    answers = caller.serve(requests)
    stats = caller.engine.stats()
    # Every step takes one tick of this clock; the first token comes from the prefill and costs no decoding.
    assert [answers[sample].slot_s for sample in range(3)] == [4.0, 8.0, 8.0]
    assert (stats.decode_steps, stats.decoded_tokens) == (8, 23)
    assert stats.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert stats.extra["decode_s"] == 8.0
    assert stats.busy_slot_s == pytest.approx(4 * 3 + 4 * 2 + 3 * stats.extra["prefill_s"])
    assert stats.recomputed_tokens == 0
    resumed = replace(requests[0], attempt=1, mode=Mode.RESUME, cached=answers[0].tokens[:3])
    caller.serve([resumed])
    assert caller.engine.stats().recomputed_tokens == 3
    assert answers[0].slot_s == 4.0 + 1.0  # its fourth token came from the prefill, the fifth from a step


def test_a_failed_step_can_be_repeated() -> None:
    model, requests = tiny_model(), make_requests(3, budget=20)
    expected = serve(model, requests)
    caller = make_caller(model)
    caller.engine.submit(requests)
    caller.steps(3)
    forward = caller.engine._decoder.forward

    def failing(*arguments):
        forward(*arguments)
        raise RuntimeError("out of memory")

    caller.engine._decoder.forward = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        caller.engine.poll(timeout=0)
    del caller.engine._decoder.forward
    assert tokens_of(caller.serve([])) == tokens_of(expected)
