"""Runs the checks on one engine and says what became of each.

Guarantees: every check has a result, whatever the engine does. An engine that raises fails the check that it raised
in, and the checks before and after it keep their results. If the engine cannot be made idle again, the checks after
that are reported as not run, with the reason.
"""

from __future__ import annotations

import linecache
import traceback
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sortedrl.errors import first_line
from sortedrl.testing.case import EngineCase
from sortedrl.testing.checks import CHECKS, Check


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"


@dataclass(slots=True, kw_only=True, frozen=True)
class CheckResult:
    """What became of one check, and why, unless it passed."""

    check: Check
    outcome: Outcome
    reason: str = ""

    def __str__(self) -> str:
        if self.outcome is Outcome.FAILED:
            return f"failed: it breaks {self.check.guarantee!r} ({self.check.promise}): {self.reason}"
        return f"{self.outcome}: {self.reason}" if self.reason else self.outcome.value


def check_engine(case: EngineCase) -> list[CheckResult]:
    """Run every check on the engine and return all results."""
    results: list[CheckResult] = []
    unusable = ""
    for check in CHECKS:
        outcome, reason = (Outcome.NOT_RUN, unusable) if unusable else _run(check, case)
        results.append(CheckResult(check=check, outcome=outcome, reason=reason))
        if outcome is Outcome.FAILED and (why := _make_idle(case)):
            unusable = f"the engine could not be made idle after {check.name}: {why}"
    return results


def run_checks(case: EngineCase) -> dict[str, str]:
    """The result of each check by name: "passed", or "failed", "not applicable" or "not run" with the reason."""
    return {result.check.name: str(result) for result in check_engine(case)}


def _run(check: Check, case: EngineCase) -> tuple[Outcome, str]:
    try:
        if why := check.why_not(case):
            return Outcome.NOT_APPLICABLE, why
        check.run(case)
    except Exception as error:  # the engine is the user's code
        return Outcome.FAILED, _describe(error)
    return Outcome.PASSED, ""


def _make_idle(case: EngineCase) -> str:
    """Interrupt everything that a failed check left running; returns what prevents that."""
    try:
        case.engine.interrupt()
        num_running = case.engine.stats().running
    except Exception as error:  # the engine is the user's code
        return _describe(error)
    return f"interrupt() leaves {num_running} samples running" if num_running else ""


def _describe(error: Exception) -> str:
    """What failed and where. An assertion without a message is described by its line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    if not isinstance(error, AssertionError):
        return f"{type(error).__name__}: {first_line(error)} (raised in {frame.name}, {place})"
    said = first_line(error) if str(error) else linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{said} ({place})"
