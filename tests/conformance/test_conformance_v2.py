"""The conformance suite on the vLLM engine with stock decoding: vLLM's V2 model runner, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sortedrl.testing import CHECKS, Check, EngineCase
from tests.conformance.cases import keep_promise
from tests.conformance.process_cases import vllm_case
from tests.support.interpreted_vllm import MARKS

pytestmark = MARKS


SPLIT_CHECKS = {
    "answers-do-not-depend-on-neighbours",
    "interruption-returns-every-token",
    "a-publication-takes-effect",
    "replay-equals-restart",
    "a-reprefilled-cache-is-new",
}


@pytest.fixture(scope="module")
def case() -> Iterator[EngineCase]:
    with vllm_case() as case:
        assert all(worker.is_v2 for worker in case.engine.workers)  # type: ignore[attr-defined]
        yield case


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_vllm_v2(check: Check, case: EngineCase) -> None:
    keep_promise(check, case)


@pytest.fixture(scope="module")
def split_case() -> Iterator[EngineCase]:
    with vllm_case(tensor_parallel=2) as case:
        assert [worker.tensor_parallel for worker in case.engine.workers] == [2, 2]  # type: ignore[attr-defined]
        yield case


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in SPLIT_CHECKS], ids=str)
def test_vllm_v2_on_two_workers(check: Check, split_case: EngineCase) -> None:
    keep_promise(check, split_case)


def test_the_checks_on_two_workers_exist() -> None:
    assert {check.name for check in CHECKS} >= SPLIT_CHECKS
