"""Make a failing scenario smaller: leave out stages, damages, changes and overrides while the failure stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from fuzz.child import OutOfTimeError
from fuzz.scenario import Fault, Scenario, Stage

MAX_TRIES = 60


def shrink(scenario: Scenario, still_fails: Callable[[Scenario], bool]) -> Scenario:
    """The smallest scenario found that `still_fails`, after at most `MAX_TRIES` plays, or when no time is left."""
    num_tries = 0
    has_shrunk = True
    with suppress(OutOfTimeError):  # raised by `still_fails`
        while has_shrunk:
            has_shrunk = False
            for smaller in _smaller(scenario):
                if num_tries == MAX_TRIES:
                    return scenario
                num_tries += 1
                if still_fails(smaller):
                    scenario, has_shrunk = smaller, True
                    break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    stages, overrides = scenario.stages, scenario.overrides
    for index in range(len(stages) - 1):  # the last stage is the calm one
        yield replace(scenario, stages=stages[:index] + stages[index + 1 :])
    for half in (overrides[len(overrides) // 2 :], overrides[: len(overrides) // 2]):
        if len(half) < len(overrides):
            yield replace(scenario, overrides=half)
    for index in range(len(overrides)):
        yield replace(scenario, overrides=overrides[:index] + overrides[index + 1 :])
    for index, stage in enumerate(stages):
        for simpler in _simpler(stage):
            yield replace(scenario, stages=(*stages[:index], simpler, *stages[index + 1 :]))


def _simpler(stage: Stage) -> Iterator[Stage]:
    if stage.damage:
        yield replace(stage, damage=None)
    if stage.changes:
        yield replace(stage, changes=())
    if stage.ends_normally:
        yield replace(stage, ends_normally=False)
    if stage.fault != Fault.NONE:
        yield replace(stage, fault=Fault.NONE)
