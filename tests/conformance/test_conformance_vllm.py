"""The conformance suite on real vLLM, and what only vLLM can get wrong. `make test-vllm` runs it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.vllm.core import vllm_version
from sortedrl.testing import CHECKS, Caller, Check, EngineCase
from sortedrl.testing.checks import DIES
from tests.conformance.cases import MAX_LENGTH, SLOTS, keep_promise
from tests.conformance.process_cases import vllm_case
from tests.support.tiny_models import make_requests

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.timeout(900),
]


MAKERS = {
    "core": lambda: vllm_case(),
    "server": lambda: vllm_case(is_server=True),
    "core-tp2": lambda: vllm_case(tensor_parallel=2),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def case(request: pytest.FixtureRequest) -> Iterator[EngineCase]:
    with MAKERS[request.param]() as case:
        yield case


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_vllm(check: Check, case: EngineCase) -> None:
    before = case.engine.stats().extra["losses"]
    keep_promise(check, case)
    assert DIES in check.requires or case.engine.stats().extra["losses"] == before, "vLLM was lost and started again"


def test_answers_are_those_of_the_local_engine(case: EngineCase) -> None:
    """In float32 with the same noise: also with tensor parallelism, before and after a publication."""
    requests = make_requests(4, budget=80)
    for _ in range(2):
        local = LocalEngine(copy.deepcopy(case.source(case.version).module), slots=SLOTS, max_length=MAX_LENGTH)
        expected, answers = Caller(local).serve(requests), Caller(case.engine).serve(requests)
        assert {sample: answer.tokens for sample, answer in answers.items()} == {
            sample: answer.tokens for sample, answer in expected.items()
        }
        case.publish()
