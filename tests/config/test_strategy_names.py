"""Keys that contradict a strategy are refused, or the run is reported as `custom`; other keys leave it its name."""

from __future__ import annotations

from typing import Any

import pytest

from sortedrl.config.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.run.session import run_started
from sortedrl.schedule import Strategy

REFUSED, CUSTOM, KEPT = "refused", "custom", "kept"
KNOBS = (
    *("cohort_batches", "lookahead", "max_staleness", "interrupted", "on_bound"),
    *("harvest", "order", "admission", "overlap", "restart_noise", "exact_batch", "max_unverified"),
)
# What becomes of each strategy if one knob, in the order of KNOBS, gets a value that the preset does not have.
OUTCOMES = {
    "sync": (REFUSED, REFUSED, CUSTOM, CUSTOM, CUSTOM, REFUSED, KEPT, KEPT, REFUSED, KEPT, KEPT, KEPT),
    "sync-large": (KEPT, REFUSED, CUSTOM, CUSTOM, CUSTOM, REFUSED, KEPT, KEPT, REFUSED, KEPT, KEPT, KEPT),
    "sorted-on-policy": (KEPT, KEPT, REFUSED, CUSTOM, CUSTOM, CUSTOM, KEPT, KEPT, REFUSED, KEPT, KEPT, KEPT),
    "sorted-partial": (KEPT, KEPT, KEPT, CUSTOM, KEPT, CUSTOM, KEPT, KEPT, KEPT, KEPT, KEPT, KEPT),
    "sorted-replay": (KEPT, KEPT, CUSTOM, CUSTOM, CUSTOM, CUSTOM, KEPT, KEPT, KEPT, KEPT, KEPT, KEPT),
    "april": (KEPT, CUSTOM, KEPT, CUSTOM, KEPT, CUSTOM, KEPT, KEPT, KEPT, KEPT, KEPT, KEPT),
    "tail-batching": (KEPT, REFUSED, CUSTOM, CUSTOM, CUSTOM, CUSTOM, KEPT, CUSTOM, REFUSED, KEPT, KEPT, KEPT),
    "async": (KEPT, KEPT, KEPT, CUSTOM, KEPT, REFUSED, KEPT, KEPT, REFUSED, KEPT, REFUSED, KEPT),
    "async-on-policy": (KEPT, KEPT, REFUSED, CUSTOM, REFUSED, CUSTOM, KEPT, KEPT, REFUSED, KEPT, KEPT, KEPT),
}
OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "cohort_batches": (3,),
    "lookahead": (2,),
    "max_staleness": (3,),
    "interrupted": ("resume", "replay", "restart"),
    "on_bound": ("replay", "restart", "wait"),
    "harvest": ("batch", "drain"),
    "order": ("longest-first",),
    "admission": ("longest-expected-first",),
    "overlap": (True, False),
    "restart_noise": ("fresh",),
    "exact_batch": (True,),  # async waits for what is at its bound, which cannot be kept
    "max_unverified": (2, "none"),
}


def outcome(strategy: str, **knobs: Any) -> str:
    try:
        name = SortedConfig(schedule={"strategy": strategy, **knobs}).strategy_name
    except ConfigError:
        return REFUSED
    assert name in (strategy, "custom")
    return KEPT if name == strategy else CUSTOM


def test_the_table_has_every_strategy() -> None:
    assert set(OUTCOMES) == {strategy.value for strategy in Strategy}
    fields = set(SortedConfig().schedule.model_dump()) - {"strategy", "update_batch"}
    assert fields == set(KNOBS) == set(OTHER_VALUES)


@pytest.mark.parametrize("strategy", list(OUTCOMES))
@pytest.mark.parametrize("knob", KNOBS)
def test_every_knob_that_differs_is_refused_reported_or_open(strategy: str, knob: str) -> None:
    expected = OUTCOMES[strategy][KNOBS.index(knob)]
    preset = SortedConfig(schedule={"strategy": strategy}).resolved()["schedule"][knob]
    for value in OTHER_VALUES[knob]:
        assert outcome(strategy, **{knob: value}) == (KEPT if value == preset else expected), value
    assert outcome(strategy, **{knob: preset}) == KEPT


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"strategy": "sync", "lookahead": 1}, r"^schedule\.lookahead = 1 contradicts .* sync, which .*: leave it out"),
        ({"strategy": "sync", "lookahead": "none"}, r"^schedule\.lookahead = none contradicts"),
        ({"strategy": "async", "exact_batch": True}, r"^exact_batch = true with max_staleness = 2 and on_bound = wait"),
        ({"strategy": "sync", "cohort_batches": 4}, r"one update batch at a time: .* choose sync-large$"),
        ({"strategy": "async", "overlap": False}, r"^schedule\.overlap = false contradicts .* choose sorted-partial$"),
        ({"strategy": "sorted-on-policy", "max_staleness": 1}, r"^schedule\.max_staleness = 1 contradicts"),
        ({"strategy": "async-on-policy", "max_staleness": 2}, r"^schedule\.max_staleness = 2 .* choose async$"),
        ({"strategy": "async-on-policy", "overlap": False}, r"^schedule\.overlap = false .* choose sorted-replay$"),
        ({"strategy": "async-on-policy", "on_bound": "restart"}, r"^schedule\.on_bound = restart contradicts"),
    ],
)
def test_refusals_name_the_key_and_the_remedy(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SortedConfig(schedule=schedule)


def test_a_run_is_reported_under_the_name_that_holds() -> None:
    plain = SortedConfig(schedule={"strategy": "sorted-replay", "lookahead": 2})
    changed = SortedConfig(schedule={"strategy": "sorted-replay", "max_staleness": 2})
    assert run_started(plain, 0.0).strategy == "sorted-replay"
    assert run_started(changed, 0.0).strategy == "custom"


def test_greedy_siblings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.temperature = 0 makes all 8 answers to a prompt equal"):
        SortedConfig(engine={"temperature": 0.0})
    SortedConfig(engine={"temperature": 0.0}, learner={"algorithm": "reinforce++", "group_size": 1})
