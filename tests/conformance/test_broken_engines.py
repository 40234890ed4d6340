"""The conformance suite on engines that are broken on purpose: each fault is told, by the promise that it breaks."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sortedrl.engine import base
from sortedrl.engine.base import Delta, EngineEvent, Partial, Request
from sortedrl.testing import CHECKS, CheckResult, EngineCase, Outcome, check_engine

ROOT = Path(__file__).parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "own_engine.py"))
TableEngine: Any = EXAMPLE["TableEngine"]


class RaisesOnce(TableEngine):
    """Fails in the middle of the suite, and works again afterwards."""

    num_polls = 0

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        self.num_polls += 1
        if self.num_polls == 20:
            raise KeyError("block table")
        return super().poll(timeout)


class Breaks(RaisesOnce):
    """Fails in the middle of the suite and stays broken."""

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        if self.num_polls >= 20:
            raise RuntimeError("the worker is gone")
        return super().interrupt(samples)


class LiesAboutVersions(TableEngine):
    """Samples from the new weights and says that its first ones wrote the tokens."""

    def _take_events(self, samples: set[int] | None = None) -> list[EngineEvent]:
        events = super()._take_events(samples)
        return [replace(event, version=0) if isinstance(event, Delta) else event for event in events]


class LosesTokens(TableEngine):
    """Drops what was decoded since the last event when it is interrupted."""

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        return [event for event in super().interrupt(samples) if isinstance(event, Partial)]


class LosesSamples(TableEngine):
    """Forgets every fifth request."""

    def submit(self, requests: Iterable[Request]) -> None:
        super().submit([request for request in requests if request.sample % 5])


class Stalls(TableEngine):
    """Never ends an answer of more than ten tokens."""

    def _step(self) -> bool:
        return max(len(attempt.tokens) for attempt in self.attempts.values()) > 10 or super()._step()


def results_of(kind: type, limit_s: float = 120.0) -> dict[str, CheckResult]:
    engine = kind(EXAMPLE["table_of"](0), slots=4)
    case = EngineCase(
        engine=engine,
        prompts=[[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8]],
        source=EXAMPLE["table_of"],
        logprobs=EXAMPLE["forced_logprobs"],
        spoil=lambda request: replace(request, prompt=[10**6]),
        advance=lambda: engine.poll(0),
        limit_s=limit_s,
    )
    results = check_engine(case)
    assert [result.check for result in results] == CHECKS, "every check has a result"
    assert all(result.reason for result in results if result.outcome is not Outcome.PASSED)
    return {result.check.name: result for result in results}


def failed(results: dict[str, CheckResult]) -> dict[str, str]:
    """The broken guarantee of every check that failed."""
    return {name: r.check.guarantee for name, r in results.items() if r.outcome is Outcome.FAILED}


def test_an_engine_that_raises_once_keeps_its_other_results() -> None:
    results = results_of(RaisesOnce)
    (name,) = failed(results)
    assert re.search(r"breaks '[a-z -]+' \(.*\): KeyError: 'block table' \(raised in poll, ", str(results[name]))
    assert {r.outcome for n, r in results.items() if n != name} == {Outcome.PASSED, Outcome.NOT_APPLICABLE}


def test_after_an_engine_broke_the_rest_is_not_run() -> None:
    results = results_of(Breaks)
    (name,) = failed(results)
    place = [check.name for check in CHECKS].index(name)
    assert 0 < place < len(CHECKS) - 1
    before, after = list(results.values())[:place], list(results.values())[place + 1 :]
    assert {result.outcome for result in before} <= {Outcome.PASSED, Outcome.NOT_APPLICABLE}
    assert {result.outcome for result in after} == {Outcome.NOT_RUN}
    expected = f"not run: the engine could not be made idle after {name}: RuntimeError: the worker is gone"
    assert str(after[0]).startswith(expected)


def test_wrong_versions_break_the_promises_about_versions() -> None:
    found = failed(results_of(LiesAboutVersions))
    assert found["a-publication-takes-effect"] == "publication"
    assert found["a-resumed-answer-spans-versions"] == found["on-policy-answers-hold-one-version"] == "versions"
    assert not {"budget", "stops", "log-probs", "seed", "slots"} & set(found.values())


def test_lost_tokens_break_the_promise_about_interruption() -> None:
    results = results_of(LosesTokens)
    found = failed(results)
    assert found["interruption-returns-every-token"] == "interruption"
    assert "assert sum(len(answer.tokens)" in results["interruption-returns-every-token"].reason
    assert results["budgets-are-kept"].outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("kind", "reason"), [(LosesSamples, "no event ended sample 0"), (Stalls, "samples run and make no progress")]
)
def test_a_sample_that_never_ends_is_told_and_not_waited_for(kind: type, reason: str) -> None:
    results = results_of(kind, limit_s=0.05)
    assert reason in results["budgets-are-kept"].reason
    assert results["budgets-are-kept"].check.guarantee == "budget"


def test_every_check_names_a_guarantee_of_the_protocol() -> None:
    assert base.__doc__ is not None
    named = set(re.findall(r"^- ([a-z -]+): ", base.__doc__, re.MULTILINE))
    assert {check.guarantee for check in CHECKS} == named
    page = (ROOT / "docs" / "reference" / "engines.md").read_text(encoding="utf-8")
    assert [check.name for check in CHECKS if f"| {check.promise} | {check.guarantee} |" not in page] == []


def test_what_does_not_apply_has_a_reason() -> None:
    results = results_of(TableEngine)
    assert failed(results) == {}
    skipped = {name: r.reason for name, r in results.items() if r.outcome is Outcome.NOT_APPLICABLE}
    assert skipped["stop-strings-stop"] == "EngineCase.decode is missing: it finds no stop strings"
    assert skipped["a-kept-cache-goes-on"] == "the engine's capabilities say keep_kv = False"
    assert len(skipped) == 8  # the four of engines that sleep among them
