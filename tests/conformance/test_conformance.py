"""The conformance suite on the engines that run everywhere; test_conformance_vllm.py has vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sortedrl.testing import CHECKS, Check, EngineCase, run_checks
from tests.conformance.cases import local_case, sim_case
from tests.support.tiny_models import needs_compiler

MAKERS = {
    "sim": sim_case,
    "local-lean": lambda: local_case("lean"),
    "local-module": lambda: local_case("module"),
    "local-native": lambda: local_case("native"),
    "local-int16": lambda: local_case("native", torch.int16, tolerance=0.02),
}
COMPILED = ("local-native", "local-int16")


@pytest.fixture(params=[pytest.param(name, marks=needs_compiler if name in COMPILED else ()) for name in MAKERS])
def case(request: pytest.FixtureRequest) -> EngineCase:
    return MAKERS[request.param]()


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_engine(check: Check, case: EngineCase) -> None:
    if why := check.why_not(case):
        pytest.skip(f"not promised by this engine: {why}")
    check.run(case)
    assert case.engine.stats().running == 0


def test_the_page_on_engines_names_every_promise() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "engines.md").read_text(encoding="utf-8")
    for check in CHECKS:
        assert f"| {check.promise} |" in page, "make the table again: python -m benchmarks.engine.engines_table"


def test_a_broken_promise_is_told_and_not_raised() -> None:
    case = local_case("lean")
    case.logprobs = lambda step, request, tokens: [0.0] * len(tokens)
    found = run_checks(case)
    assert found["logprobs-match-a-forced-pass"].startswith("failed")
    assert found["budgets-are-kept"] == "passed"
    assert found["a-dead-engine-gives-its-samples-back"] == (
        "not applicable: EngineCase.kill is missing: no process of it can die alone"
    )


def test_no_test_runner_is_needed() -> None:
    code = "import sys, sortedrl.testing; sys.exit('pytest' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
