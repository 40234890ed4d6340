"""Top-k, top-p, min-p and stop strings: which tokens stay, and their log-probs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sortedrl.config import SortedConfig
from sortedrl.engine.base import Sampling
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.sampling.draw import shape_logits
from sortedrl.engine.sampling.filters import filter_logits
from sortedrl.records import FinishReason, Mode
from sortedrl.run.builders.parts import build_sampling
from tests.support.tiny_models import VOCAB, Caller, make_requests, serve, tiny_model

LOGITS = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.79}, [1, 3]),  # .5 and .3 add up to .8
        ({"top_p": 0.81}, [0, 1, 3]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.29}, [0, 1, 3]),  # .15 is .3 of the likeliest
        ({"min_p": 0.31}, [1, 3]),
        ({"top_k": 3, "top_p": 0.6}, [1, 3]),  # .5 of .95 is .53
        ({"top_p": 0.81, "min_p": 0.5}, [1, 3]),
    ],
)
def test_which_tokens_stay(changes: dict, kept: list[int]) -> None:
    filtered = filter_logits(LOGITS, [Sampling(**changes)])
    assert filtered.isfinite().nonzero()[:, 1].tolist() == kept
    assert torch.equal(filtered[0, kept], LOGITS[0, kept])


def test_filters_equal_those_of_transformers() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 2
    for sampling, warper in (
        (Sampling(top_k=17), TopKLogitsWarper(17)),
        (Sampling(top_p=0.7), TopPLogitsWarper(0.7)),
        (Sampling(min_p=0.1), MinPLogitsWarper(0.1)),
    ):
        assert torch.equal(filter_logits(logits, [sampling] * 6), warper(None, logits))


def test_each_row_has_its_own_filters() -> None:
    logits = LOGITS.repeat(2, 1)
    shaped = shape_logits(logits, [Sampling(temperature=0.5), Sampling(temperature=2.0, top_k=1)])
    assert torch.equal(shaped[0], logits[0] / 0.5)
    assert shaped[1].isfinite().sum() == 1
    assert torch.equal(logits, LOGITS.repeat(2, 1)), "arguments must not be written to"
    assert shape_logits(logits, [Sampling()] * 2) is logits


def test_logprobs_belong_to_the_filtered_distribution() -> None:
    model = tiny_model()
    sampling = Sampling(temperature=0.8, top_k=4, top_p=0.9)
    requests = make_requests(5, sampling=sampling)
    answers = serve(model, requests)
    for request in requests:
        answer = answers[request.sample]
        with torch.no_grad():
            logits = model(torch.tensor([[*request.prompt, *answer.tokens]])).logits[0, len(request.prompt) - 1 : -1]
        warped = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(4)(None, logits / 0.8)).log_softmax(-1)
        expected = warped.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).flatten().tolist()
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
    assert all(math.isfinite(value) for answer in answers.values() for value in answer.logprobs)


# Stop strings


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it() -> None:
    model, request = tiny_model(), make_requests(1, budget=30)[0]
    free = serve(model, [request])[0]
    text = letters(free.tokens)
    stop = text[11:14]
    end = text.index(stop) + 3
    stopping = replace(request, sampling=Sampling(stop_strings=("no such text", stop)))
    answer = serve(model, [stopping], decode=letters)[0]
    assert (answer.tokens, answer.reason) == (free.tokens[:end], FinishReason.STOP)
    for mode in (Mode.RESUME, Mode.REPLAY):  # the interruption falls inside the stop string
        caller = Caller(LocalEngine(model, slots=1, max_length=256, decode=letters))
        caller.engine.submit([stopping])
        caller.steps(end - 2)
        caller.interrupt()
        assert caller.answers[0].tokens == free.tokens[: end - 1]
        again = caller.serve([caller.again(stopping, mode)])[0]
        assert (again.tokens, again.reason) == (free.tokens[:end], FinishReason.STOP)


def test_stop_strings_without_a_tokenizer_fail_their_request() -> None:
    request = make_requests(1, sampling=Sampling(stop_strings=("x",)))[0]
    answer = serve(tiny_model(), [request])[0]
    assert "decode=tokenizer.decode" in answer.error
    assert VOCAB <= 26, "every token needs its own letter"


def test_the_configuration_reaches_the_engine() -> None:
    keys = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "stop": ["\n\n", "END"]}
    sampling = build_sampling(SortedConfig(engine=keys), (2,))
    assert sampling == Sampling(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, stop_strings=("\n\n", "END"), stop_tokens=(2,)
    )
    with pytest.raises(ValueError, match="top_p"):
        SortedConfig(engine={"top_p": 0})
