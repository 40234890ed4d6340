"""Strategies: the names behind which sets of knobs stand, and what each name promises.

The configuration turns a name and explicit knobs into `Knobs` here (`resolve_knobs`), refuses knobs that contradict the
name (`check_strategy`), and reports a schedule that is no longer the named one as custom (`reported_name`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

from sortedrl.errors import ConfigError
from sortedrl.schedule.knobs import Admission, Fate, HarvestRule, Knobs, Order, RestartNoise


class Strategy(StrEnum):
    SYNC = "sync"
    SYNC_LARGE = "sync-large"
    SORTED_ON_POLICY = "sorted-on-policy"
    SORTED_PARTIAL = "sorted-partial"
    SORTED_REPLAY = "sorted-replay"
    APRIL = "april"
    TAIL_BATCHING = "tail-batching"
    ASYNC = "async"
    ASYNC_ON_POLICY = "async-on-policy"


_RESUME = {"interrupted": Fate.RESUME, "max_staleness": None, "on_bound": Fate.WAIT}
_RESTART = {"interrupted": Fate.RESTART, "max_staleness": 0, "on_bound": Fate.RESTART}
_REPLAY = {"interrupted": Fate.REPLAY, "max_staleness": 0, "on_bound": Fate.REPLAY}
_DRAIN = {"harvest": HarvestRule.DRAIN, "lookahead": 0, "overlap": False, "interrupted": Fate.RESUME}

# The knobs of each strategy. All others keep the defaults of `Knobs` and may be changed.
PRESETS: Mapping[Strategy, Mapping[str, Any]] = {
    Strategy.SYNC: {**_DRAIN, "cohort_batches": 1, "max_staleness": 0, "on_bound": Fate.RESTART},
    Strategy.SYNC_LARGE: {**_DRAIN, "max_staleness": None, "on_bound": Fate.WAIT},
    Strategy.SORTED_ON_POLICY: {"harvest": HarvestRule.BATCH, **_RESTART},
    Strategy.SORTED_PARTIAL: {"harvest": HarvestRule.BATCH, **_RESUME},
    Strategy.SORTED_REPLAY: {"harvest": HarvestRule.BATCH, **_REPLAY},
    Strategy.APRIL: {"harvest": HarvestRule.BATCH, "lookahead": None, **_RESUME},
    Strategy.TAIL_BATCHING: {
        "harvest": HarvestRule.BATCH,
        "lookahead": 0,
        "admission": Admission.TAIL_LAST,
        **_RESTART,
    },
    Strategy.ASYNC: {"harvest": HarvestRule.BATCH, "overlap": True, **_RESUME, "max_staleness": 2},
    Strategy.ASYNC_ON_POLICY: {"harvest": HarvestRule.BATCH, "overlap": True, **_REPLAY},
}
# Knobs of a strategy that bound it and do not define it: with other values it keeps its name.
_BOUNDS: Mapping[Strategy, frozenset[str]] = {
    Strategy.SORTED_PARTIAL: frozenset({"max_staleness", "on_bound"}),
    Strategy.APRIL: frozenset({"max_staleness", "on_bound"}),
    Strategy.ASYNC: frozenset({"max_staleness", "on_bound"}),
}
# Knobs whose other values contradict the strategy's name, each with what the name promises and what to choose instead.
_ONE_COHORT = "starts no answer of a later cohort while an earlier one waits", "a sorted strategy"
_WHOLE_COHORT = "waits for all answers that it started", "a sorted strategy"
_NO_OVERLAP = "stops rollout during updates", "async"
_RESTARTS = "would start over whatever is sampled during an update", "async-on-policy or async"
_OVERLAP = "continues rollout during updates"
_ON_POLICY = "trains no token of older weights"
_CONTRADICTIONS: Mapping[Strategy, Mapping[str, tuple[str, str]]] = {
    Strategy.SYNC: {
        "cohort_batches": ("generates one update batch at a time", "sync-large"),
        "lookahead": _ONE_COHORT,
        "harvest": _WHOLE_COHORT,
        "overlap": _NO_OVERLAP,
    },
    Strategy.SYNC_LARGE: {"lookahead": _ONE_COHORT, "harvest": _WHOLE_COHORT, "overlap": _NO_OVERLAP},
    Strategy.SORTED_ON_POLICY: {
        "max_staleness": (_ON_POLICY, "sorted-partial"),
        "overlap": _RESTARTS,
    },
    Strategy.TAIL_BATCHING: {"overlap": _RESTARTS},
    Strategy.ASYNC: {"overlap": (_OVERLAP, "sorted-partial")},
    Strategy.ASYNC_ON_POLICY: {
        "overlap": (_OVERLAP, "sorted-replay"),
        "max_staleness": (_ON_POLICY, "async"),
        "on_bound": ("verifies whatever is sampled during an update", "async"),
    },
}
CUSTOM = "custom"  # the name of a schedule that differs from its strategy in a knob that defines it
# Defaults of a strategy that differ from those of `Knobs`, and may be changed.
_PREFERENCES: Mapping[Strategy, Mapping[str, Any]] = {
    Strategy.SYNC: {"order": Order.SHUFFLED},
    Strategy.SYNC_LARGE: {"order": Order.SHUFFLED},
    Strategy.ASYNC: {"lookahead": 1},
    Strategy.ASYNC_ON_POLICY: {"lookahead": 2},
}


def resolve_knobs(strategy: Strategy | str | Mapping[str, Any], update_batch: int, **explicit: Any) -> Knobs:
    """A strategy's knobs with `explicit` ones on top. "none" removes a bound; None leaves a knob to the strategy.

    A strategy is a name, or the knobs of a strategy of your own.
    """
    if isinstance(strategy, Mapping):
        preset = _parse_knobs({name: value for name, value in strategy.items() if value is not None})
    elif strategy in list(Strategy):
        preset = {**PRESETS[Strategy(strategy)], **_PREFERENCES.get(Strategy(strategy), {})}
    else:
        raise ConfigError(f"unknown strategy {strategy!r}: choose one of {', '.join(Strategy)}")
    if update_batch < 1:
        raise ConfigError(f"update_batch must be at least 1, not {update_batch}")
    chosen = _parse_knobs({name: value for name, value in explicit.items() if value is not None})
    return Knobs(update_batch=update_batch, **{**preset, **chosen})


def _parse_knobs(chosen: dict[str, Any]) -> dict[str, Any]:
    """Knobs by name, with texts turned into the enums that `Knobs` holds."""
    names = {field.name for field in fields(Knobs)} - {"update_batch"}
    unknown = sorted(set(chosen) - names)
    if unknown:
        raise ConfigError(f"unknown knob {unknown[0]!r}: the knobs are {', '.join(sorted(names))}")
    types: dict[str, Callable[[Any], Any]] = {
        "interrupted": _one_of(Fate),
        "on_bound": _one_of(Fate),
        "harvest": _one_of(HarvestRule),
        "order": _one_of(Order),
        "admission": _one_of(Admission),
        "restart_noise": _one_of(RestartNoise),
        "lookahead": _bound,
        "max_staleness": _bound,
        "max_unverified": _bound,
    }
    for name, value in chosen.items():
        try:
            chosen[name] = types.get(name, lambda same: same)(value)
        except ValueError as error:
            raise ConfigError(f"schedule.{name} must be {error}, not {value!r}") from None
    return chosen


def defining_knobs(strategy: str) -> dict[str, Any]:
    """The knobs, with their values, without which a schedule is not this strategy."""
    strategy = Strategy(strategy)
    bounds = _BOUNDS.get(strategy, frozenset())
    return {name: value for name, value in PRESETS[strategy].items() if name not in bounds}


def reported_name(strategy: str, knobs: Knobs) -> str:
    """The strategy's name, or "custom" if a knob that defines the strategy has another value."""
    if strategy not in list(Strategy):
        return strategy
    is_whole = all(getattr(knobs, name) == value for name, value in defining_knobs(strategy).items())
    return Strategy(strategy).value if is_whole else CUSTOM


def check_strategy(strategy: str, knobs: Knobs) -> None:
    """Refuse knobs that contradict what the strategy's name promises."""
    if strategy not in list(Strategy):
        return
    strategy = Strategy(strategy)
    for name, (promise, instead) in _CONTRADICTIONS.get(strategy, {}).items():
        value, kept = getattr(knobs, name), {"overlap": False, **PRESETS[strategy]}[name]
        if value != kept:
            shown = "none" if value is None else str(value).lower()
            raise ConfigError(
                f"schedule.{name} = {shown} contradicts schedule.strategy = {strategy}, which {promise}: leave it out, "
                f"or choose {instead}"
            )


def _one_of(choices: type[StrEnum]) -> Callable[[Any], StrEnum]:
    def parse(value: Any) -> StrEnum:
        if value not in list(choices):
            raise ValueError(f"one of {', '.join(choices)}")
        return choices(value)

    return parse


def _bound(value: Any) -> int | None:
    if value == "none":
        return None
    if not isinstance(value, int) or value < 0:
        raise ValueError("0 or more, or none for no bound")
    return value
