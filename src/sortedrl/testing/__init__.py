"""Check an engine of your own against the protocol that sortedrl's controller relies on.

    from sortedrl.testing import EngineCase, run_checks
    print(run_checks(EngineCase(engine=..., ...)))

or, under pytest, one test for each promise:

    from sortedrl.testing import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    def test_my_engine(check, case):
        if check.needs(case):
            check.run(case)
"""

from __future__ import annotations

from sortedrl.errors import SortedRLError
from sortedrl.testing import runs as runs  # its checks join the suite
from sortedrl.testing.case import Answer, Caller, EngineCase
from sortedrl.testing.checks import CHECKS, Check

__all__ = ["CHECKS", "Answer", "Caller", "Check", "EngineCase", "run_checks"]


def run_checks(case: EngineCase) -> dict[str, str]:
    """What became of each check: "passed", "not applicable", or what was wrong."""
    found: dict[str, str] = {}
    for check in CHECKS:
        if not check.needs(case):
            found[check.name] = "not applicable"
            continue
        try:
            check.run(case)
        except (AssertionError, SortedRLError) as error:
            found[check.name] = f"failed: {error}"
            case.engine.interrupt()
        else:
            found[check.name] = "passed"
    return found
