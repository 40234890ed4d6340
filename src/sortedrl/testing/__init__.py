"""Checks of your own engine against the protocol that the controller relies on, as a public API.

    from sortedrl.testing import EngineCase, run_checks
    print(run_checks(EngineCase(engine=..., ...)))

or with pytest, one test per promise:

    from sortedrl.testing import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    def test_my_engine(check, case):
        if check.needs(case):
            check.run(case)
"""

from __future__ import annotations

from sortedrl.errors import SortedRLError
from sortedrl.testing import loop_checks as loop_checks  # importing it adds its checks to CHECKS
from sortedrl.testing.case import Answer, Caller, EngineCase
from sortedrl.testing.checks import CHECKS, Check

__all__ = ["CHECKS", "Answer", "Caller", "Check", "EngineCase", "run_checks"]


def run_checks(case: EngineCase) -> dict[str, str]:
    """The result of each check by name: "passed", "not applicable", or "failed: " and the reason."""
    results: dict[str, str] = {}
    for check in CHECKS:
        if not check.needs(case):
            results[check.name] = "not applicable"
            continue
        try:
            check.run(case)
        except (AssertionError, SortedRLError) as error:
            results[check.name] = f"failed: {error}"
            case.engine.interrupt()
        else:
            results[check.name] = "passed"
    return results
