"""The conformance suite on real vLLM, and what only vLLM can get wrong. `make test-vllm` runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sortedrl.engine.vllm.core import vllm_version
from sortedrl.testing import CHECKS, Check, EngineCase
from tests.conformance.cases import keep_promise
from tests.conformance.process_cases import vllm_case

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module", params=["core", "server"])
def case(request: pytest.FixtureRequest) -> Iterator[EngineCase]:
    with vllm_case(is_server=request.param == "server") as case:
        yield case


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_vllm(check: Check, case: EngineCase) -> None:
    keep_promise(check, case)
