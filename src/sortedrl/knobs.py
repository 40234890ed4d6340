"""The knobs of the schedule: what each may be, and the presets that make up the known strategies.

`config.py` resolves a configuration into `Knobs`, `schedule.py` decides by them. What peers do is a preset here, never
another loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from sortedrl.errors import ConfigError
from sortedrl.records import Mode


class Strategy(StrEnum):
    SYNC = "sync"
    SYNC_LARGE = "sync-large"
    SORTED_ON_POLICY = "sorted-on-policy"
    SORTED_PARTIAL = "sorted-partial"
    SORTED_REPLAY = "sorted-replay"
    APRIL = "april"
    TAIL_BATCHING = "tail-batching"
    ASYNC = "async"


class Fate(StrEnum):
    """What becomes of a sample that was not in the batch."""

    RESUME = "resume"
    REPLAY = "replay"
    RESTART = "restart"
    WAIT = "wait"  # as `on_bound` only: the harvest waits for it instead

    @property
    def mode(self) -> Mode:
        return Mode.FRESH if self == Fate.RESTART else Mode(self.value)


class Harvest(StrEnum):
    BATCH = "batch"
    DRAIN = "drain"


class Order(StrEnum):
    SHORTEST_FIRST = "shortest-first"
    LONGEST_FIRST = "longest-first"
    INTERLEAVED = "interleaved"
    SHUFFLED = "shuffled"


class Admission(StrEnum):
    LOAD_ORDER = "load-order"
    LONGEST_EXPECTED_FIRST = "longest-expected-first"
    TAIL_LAST = "tail-last"


class RestartNoise(StrEnum):
    SEEDED = "seeded"  # the sample's own noise again: no length is favoured
    FRESH = "fresh"  # new noise: a long answer gets another chance to be short


@dataclass(slots=True, kw_only=True, frozen=True)
class Knobs:
    """The schedule's settings, fully resolved. None means unbounded."""

    update_batch: int
    cohort_batches: int = 4
    lookahead: int | None = 0
    max_staleness: int | None = 0
    interrupted: Fate = Fate.RESTART
    on_bound: Fate = Fate.RESTART
    harvest: Harvest = Harvest.BATCH
    order: Order = Order.SHORTEST_FIRST
    admission: Admission = Admission.LOAD_ORDER
    overlap: bool = False
    restart_noise: RestartNoise = RestartNoise.SEEDED
    flat_extra: int = 0  # samples of groups without signal that an update waits beyond; 0: they count like any other

    @property
    def cohort_samples(self) -> int:
        return self.cohort_batches * self.update_batch

    @property
    def cohort_updates(self) -> int | None:
        """Updates within which a cohort is consumed, or None if the strategy gives no such bound."""
        return None if self.lookahead is None else self.cohort_batches * (1 + self.lookahead)

    def __post_init__(self) -> None:
        if self.interrupted == Fate.WAIT:
            raise ConfigError("schedule.interrupted cannot be wait: choose resume, replay or restart")
        if self.on_bound == Fate.RESUME:
            raise ConfigError("schedule.on_bound cannot be resume: choose replay, restart or wait")
        bound, updates = self.max_staleness, self.cohort_updates
        if bound is None:
            pass
        elif self.overlap and bound == 0 and self.on_bound == Fate.WAIT:
            raise ConfigError(
                "overlap = true with max_staleness = 0 and on_bound = wait cannot be kept: what is sampled during an "
                "update is one version old when it ends; set max_staleness >= 1, or on_bound = replay or restart"
            )
        elif self.harvest == Harvest.DRAIN and self.on_bound == Fate.WAIT:
            oldest = None if updates is None else updates - 1 + self.overlap  # of a drained cohort's last batch
            if oldest is None or bound < oldest:
                raise ConfigError(
                    f"harvest = drain with max_staleness = {bound} and on_bound = wait cannot be kept: the last batch "
                    f"of a drained cohort is {'ever more' if oldest is None else oldest} versions old; raise "
                    "max_staleness, or set on_bound = replay or restart"
                )
        if self.admission == Admission.TAIL_LAST and (self.lookahead != 0 or self.cohort_batches < 2):
            raise ConfigError(
                "admission = tail-last sets long samples aside within one cohort: it needs lookahead = 0 and "
                "cohort_batches >= 2"
            )


_RESUME = {"interrupted": Fate.RESUME, "max_staleness": None, "on_bound": Fate.WAIT}
_RESTART = {"interrupted": Fate.RESTART, "max_staleness": 0, "on_bound": Fate.RESTART}
_DRAIN = {"harvest": Harvest.DRAIN, "lookahead": 0, "overlap": False, "interrupted": Fate.RESUME}

# What makes a strategy what it is. Knobs that are not named here stay open and keep the defaults of `Knobs`.
PRESETS: Mapping[Strategy, Mapping[str, Any]] = {
    Strategy.SYNC: {**_DRAIN, "cohort_batches": 1, "max_staleness": 0, "on_bound": Fate.RESTART},
    Strategy.SYNC_LARGE: {**_DRAIN, "max_staleness": None, "on_bound": Fate.WAIT},
    Strategy.SORTED_ON_POLICY: {"harvest": Harvest.BATCH, **_RESTART},
    Strategy.SORTED_PARTIAL: {"harvest": Harvest.BATCH, **_RESUME},
    Strategy.SORTED_REPLAY: {
        "harvest": Harvest.BATCH,
        "interrupted": Fate.REPLAY,
        "max_staleness": 0,
        "on_bound": Fate.REPLAY,
    },
    Strategy.APRIL: {"harvest": Harvest.BATCH, "lookahead": None, **_RESUME},
    Strategy.TAIL_BATCHING: {
        "harvest": Harvest.BATCH,
        "lookahead": 0,
        "admission": Admission.TAIL_LAST,
        **_RESTART,
    },
    Strategy.ASYNC: {"harvest": Harvest.BATCH, "overlap": True, **_RESUME, "max_staleness": 2},
}
# Open knobs that a strategy would rather have otherwise than `Knobs` does.
_PREFERENCES: Mapping[Strategy, Mapping[str, Any]] = {
    Strategy.SYNC: {"order": Order.SHUFFLED},
    Strategy.SYNC_LARGE: {"order": Order.SHUFFLED},
    Strategy.ASYNC: {"lookahead": 1},
}


def resolve_knobs(strategy: Strategy | str, update_batch: int, **explicit: Any) -> Knobs:
    """The preset's knobs with explicit ones on top; the word "none" lifts a bound, None leaves a knob to the preset."""
    names = {field.name for field in fields(Knobs)}
    unknown = sorted(set(explicit) - names)
    if unknown:
        raise ConfigError(f"unknown knob {unknown[0]!r}: the knobs are {', '.join(sorted(names))}")
    if strategy not in list(Strategy):
        raise ConfigError(f"unknown strategy {strategy!r}: choose one of {', '.join(Strategy)}")
    if update_batch < 1:
        raise ConfigError(f"update_batch must be at least 1, not {update_batch}")
    chosen = {name: value for name, value in explicit.items() if value is not None}
    types: dict[str, Callable[[Any], Any]] = {
        "interrupted": Fate,
        "on_bound": Fate,
        "harvest": Harvest,
        "order": Order,
        "admission": Admission,
        "restart_noise": RestartNoise,
        "lookahead": _bound("lookahead"),
        "max_staleness": _bound("max_staleness"),
    }
    for name, value in chosen.items():
        try:
            chosen[name] = types.get(name, lambda same: same)(value)
        except ValueError as error:
            raise ConfigError(f"schedule.{name}: {error}") from None
    strategy = Strategy(strategy)
    return Knobs(update_batch=update_batch, **{**PRESETS[strategy], **_PREFERENCES.get(strategy, {}), **chosen})


def _bound(name: str) -> Callable[[Any], int | None]:
    def parse(value: Any) -> int | None:
        if value == "none":
            return None
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be 0 or more, or none for no bound, not {value!r}")
        return value

    return parse
