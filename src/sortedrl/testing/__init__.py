"""Checks of your own engine against the protocol that the controller relies on, as a public API.

    from sortedrl.testing import EngineCase, run_checks
    print(run_checks(EngineCase(engine=..., ...)))

or with pytest, one test per promise:

    from sortedrl.testing import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    def test_my_engine(check, case):
        if why := check.why_not(case):
            pytest.skip(why)
        check.run(case)
"""

from __future__ import annotations

from sortedrl.testing import loop_checks as loop_checks  # importing it adds its checks to CHECKS
from sortedrl.testing.case import Answer, Caller, EngineCase
from sortedrl.testing.checks import CHECKS, Check
from sortedrl.testing.results import CheckResult, Outcome, check_engine, run_checks

__all__ = [
    "CHECKS",
    "Answer",
    "Caller",
    "Check",
    "CheckResult",
    "EngineCase",
    "Outcome",
    "check_engine",
    "run_checks",
]
