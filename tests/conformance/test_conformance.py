"""The conformance suite on the engines that run everywhere; test_conformance_vllm.py has vLLM."""

from __future__ import annotations

import pytest
from cases import local_case, sim_case

from sortedrl.testing import CHECKS, Check, EngineCase

MAKERS = {"sim": sim_case, "local-lean": lambda: local_case("lean"), "local-module": lambda: local_case("module")}


@pytest.fixture(params=list(MAKERS))
def case(request: pytest.FixtureRequest) -> EngineCase:
    return MAKERS[request.param]()


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_engine(check: Check, case: EngineCase) -> None:
    if not check.needs(case):
        pytest.skip(f"not promised by this engine: {check.promise}")
    check.run(case)
    assert case.engine.stats().running == 0
