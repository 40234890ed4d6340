"""The conformance suite on a pool of two vLLM engines, each in a Ray actor. `make test-vllm` runs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from sortedrl.engine.vllm.core import vllm_version
from sortedrl.testing import CHECKS, Check, EngineCase
from tests.conformance.cases import keep_promise
from tests.conformance.process_cases import vllm_pool_case

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="a pool needs Ray: make test-vllm"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def case() -> Iterator[EngineCase]:
    with vllm_pool_case() as case:
        yield case


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_pool_of_vllm(check: Check, case: EngineCase) -> None:
    keep_promise(check, case)
