"""Adapters published as they are, on real vLLM: weights, versions, replay, a core that dies; by `make test-vllm`."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from sortedrl.engine.base import Request
from sortedrl.engine.vllm.core import vllm_version
from sortedrl.learner.lora import adapt
from sortedrl.testing import CHECKS, Caller, Check, EngineCase
from sortedrl.weights import ModuleWeights, base_copy
from tests.conformance.cases import MAX_LENGTH, SLOTS, keep_promise, letters, model_case
from tests.conformance.process_cases import HEADS
from tests.support.tiny_models import make_requests, teacher_forced, tiny_model

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.timeout(900),
]
# What adapters could break: all that looks at weights, versions or cached tokens.
NAMES = (
    "a-publication-takes-effect",
    "a-resumed-answer-spans-versions",
    "replay-equals-restart",
    "a-replay-keeps-fed-tokens",
    "a-kept-cache-goes-on",
    "a-reprefilled-cache-is-new",
    "a-run-is-exact",
    "a-dead-engine-gives-its-samples-back",  # the last: it takes another start of vLLM
)
CHOSEN = [check for name in NAMES for check in CHECKS if check.name == name]


def steps_of(model: Any) -> Callable[[int], Any]:
    """The model after so many publications: its adapters move, its base stays."""

    @cache
    def step(number: int) -> Any:
        if number == 0:
            return model
        moved = copy.deepcopy(step(number - 1))
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        return moved

    return step


@pytest.fixture(scope="module")
def case() -> Iterator[EngineCase]:
    from sortedrl.engine.vllm.engine import VllmEngine

    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules="all-linear")
    step = steps_of(adapt(tiny_model(**HEADS), settings))
    engine = VllmEngine(step(0), slots=SLOTS, max_length=MAX_LENGTH, decode=letters)

    def logprobs(number: int, request: Request, tokens: Sequence[int]) -> list[float]:
        return teacher_forced(step(number), request, tokens)

    yield model_case(
        engine,
        None,
        source=lambda number: ModuleWeights(step(number)),
        logprobs=logprobs,
        kill=lambda: os.kill(engine.pids[0], signal.SIGKILL),
        tolerance=1e-4,
        answer_tokens=160,  # short ones would be over before weights change under them
    )
    engine.close()


def test_fresh_adapters_add_nothing_and_moved_ones_do(case: EngineCase) -> None:
    base, requests = base_copy(case.source(0)._trained), make_requests(3)
    answers = Caller(case.engine).serve(requests)
    for request in requests:
        answer = answers[request.sample]
        assert case.is_close(answer.logprobs, teacher_forced(base, request, answer.tokens))
    case.publish()
    again = Caller(case.engine).serve(requests)
    for request in requests:
        answer = again[request.sample]
        assert case.is_close(answer.logprobs, case.logprobs(case.version, request, answer.tokens))
        assert not case.is_close(answer.logprobs, teacher_forced(base, request, answer.tokens))


@pytest.mark.parametrize("check", CHOSEN, ids=str)
def test_adapters(check: Check, case: EngineCase) -> None:
    assert check.needs(case), "in float32 vLLM promises everything"
    keep_promise(check, case)


def test_the_base_model_stays_as_it_is(case: EngineCase) -> None:
    """After all those publications, adapters that add nothing leave the base model."""
    base, silent = base_copy(case.source(0)._trained), ModuleWeights(case.source(0)._trained)
    case.version += 1
    case.engine.publish(case.version, silent).wait()
    requests = make_requests(3, seed=5)
    answers = Caller(case.engine).serve(requests)
    for request in requests:
        answer = answers[request.sample]
        assert case.is_close(answer.logprobs, teacher_forced(base, request, answer.tokens))
        assert set(answer.versions) == {case.version}
