"""The schedule's settings, all resolved: when a batch is taken, in which order, and how interrupted samples continue.

A strategy's name stands for a set of them (`strategies.py`); the decisions (`decisions.py`) read them. Combinations
that cannot keep the staleness bound are refused when `Knobs` are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sortedrl.errors import ConfigError
from sortedrl.records import Mode


class Fate(StrEnum):
    """How a sample that was not in the batch continues after the update."""

    RESUME = "resume"
    REPLAY = "replay"
    RESTART = "restart"
    WAIT = "wait"  # only for `on_bound`: the next batch waits until the sample is ready

    @property
    def mode(self) -> Mode:
        return Mode.FRESH if self == Fate.RESTART else Mode(self.value)


class HarvestRule(StrEnum):
    """When a batch is taken: as soon as one is ready, or when the whole cohort is."""

    BATCH = "batch"
    DRAIN = "drain"


class Order(StrEnum):
    SHORTEST_FIRST = "shortest-first"
    LONGEST_FIRST = "longest-first"
    INTERLEAVED = "interleaved"
    SHUFFLED = "shuffled"


class Admission(StrEnum):
    LOAD_ORDER = "load-order"
    NEW_FIRST = "new-first"
    LONGEST_EXPECTED_FIRST = "longest-expected-first"
    TAIL_LAST = "tail-last"


class RestartNoise(StrEnum):
    SEEDED = "seeded"  # the sample's own noise again, so that restarts favour no length
    FRESH = "fresh"  # new noise, so that a long answer may come out short


@dataclass(slots=True, kw_only=True, frozen=True)
class Knobs:
    """The schedule's settings, all resolved. None means no bound."""

    update_batch: int
    cohort_batches: int = 4
    lookahead: int | None = 0
    max_staleness: int | None = 0
    interrupted: Fate = Fate.RESTART
    on_bound: Fate = Fate.RESTART
    harvest: HarvestRule = HarvestRule.BATCH
    order: Order = Order.SHORTEST_FIRST
    admission: Admission = Admission.LOAD_ORDER
    overlap: bool = False
    max_unverified: int | None = 0  # updates that an unfinished answer goes through unverified; None: until its end
    restart_noise: RestartNoise = RestartNoise.SEEDED
    flat_extra: int = 0  # how many samples of groups with equal rewards a batch may hold on top; 0: none
    open_trajectories: int | None = None  # most trajectories that are begun and not complete; None: no bound
    exact_batch: bool = (
        False  # a batch never holds more than `update_batch` samples; only the run's last may hold fewer
    )

    @property
    def cohort_samples(self) -> int:
        return self.cohort_batches * self.update_batch

    @property
    def cohort_updates(self) -> int | None:
        """Number of updates within which a cohort is trained, or None without such a bound."""
        return None if self.lookahead is None else self.cohort_batches * (1 + self.lookahead)

    @property
    def goes_on_unverified(self) -> bool:
        """Whether unfinished answers go on through updates as they are, and are verified later (`max_unverified`).

        A drain has no unfinished answers at an update, and `tail-last` postpones them.
        """
        return (
            self.max_unverified != 0
            and self.on_bound == Fate.REPLAY
            and self.harvest == HarvestRule.BATCH
            and self.admission != Admission.TAIL_LAST
        )

    @property
    def waits_at_zero(self) -> bool:
        """Whether an update waits for every sample that has begun, because none may be trained one version later."""
        return self.max_staleness == 0 and self.on_bound == Fate.WAIT

    def __post_init__(self) -> None:
        if self.interrupted == Fate.WAIT:
            raise ConfigError("schedule.interrupted cannot be wait: choose resume, replay or restart")
        if self.on_bound == Fate.RESUME:
            raise ConfigError("schedule.on_bound cannot be resume: choose replay, restart or wait")
        bound, updates = self.max_staleness, self.cohort_updates
        if bound is None:
            pass
        elif self.overlap and self.waits_at_zero:
            raise ConfigError(
                "overlap = true with max_staleness = 0 and on_bound = wait cannot be kept: what is sampled during an "
                "update is one version old when it ends; set max_staleness >= 1, or on_bound = replay or restart"
            )
        elif (self.harvest == HarvestRule.DRAIN or self.exact_batch) and self.on_bound == Fate.WAIT:
            oldest = None if updates is None else updates - 1 + self.overlap  # in a cohort's last batch
            if oldest is None or bound < oldest:
                rule = "harvest = drain" if self.harvest == HarvestRule.DRAIN else "exact_batch = true"
                raise ConfigError(
                    f"{rule} with max_staleness = {bound} and on_bound = wait cannot be kept: the last batch of a "
                    f"cohort is {'ever more' if oldest is None else oldest} versions old; raise max_staleness, or set "
                    "on_bound = replay or restart"
                )
        if self.open_trajectories is not None and self.open_trajectories < 1:
            raise ConfigError(f"schedule.open_trajectories must be at least 1 or none, not {self.open_trajectories}")
        if self.exact_batch and self.flat_extra:
            raise ConfigError(
                "exact_batch = true leaves no room for the samples that learner.flat_groups = replace adds to a batch: "
                "set learner.flat_groups to keep or zero, or exact_batch = false"
            )
        if self.admission == Admission.TAIL_LAST and (self.lookahead != 0 or self.cohort_batches < 2):
            raise ConfigError(
                "admission = tail-last postpones long samples to the end of their cohort: it needs lookahead = 0 and "
                "cohort_batches >= 2"
            )
