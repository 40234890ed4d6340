"""Where slot time went: every second of every slot has one cause, and the causes add up to slots x wall time.

`RunMetrics` advances one `SlotTime` from event to event, in live runs, in simulations and when a file is read again.
This costs a few additions per event; the split into causes is computed only on request.

Guarantees: a slot has one cause at a time, by these rules.
1. If the slot's attempt advances, the slot works, whatever else happens at the same time. Work is split into `trained`,
   `discarded` and `in_flight` (decoding, by what happened to the tokens), `recomputed` and `prefill` (prefill, by what
   was read) and `overhead`.
2. Otherwise the slot waits. The cause is the first of `publish`, `update`, `save`, `reward` that is under way; else
   `tool` for as many slots as trajectories are with their environments; else `tail` while any other slot works or a
   tool does; else `start_up`.
An attempt that is paused in its slot, for an update, new weights or scores, waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Cause(StrEnum):
    """In the order of tables and charts: useful work, lost work, waiting."""

    TRAINED = "trained"  # decoded tokens that were then trained, each counted once
    IN_FLIGHT = "in_flight"  # decoded tokens that are neither trained nor discarded yet
    DISCARDED = "discarded"  # decoded tokens that a restart or a replay threw away
    RECOMPUTED = "recomputed"  # prefilled answer tokens again, to resume or replay them
    PREFILL = "prefill"  # prefilled prompts
    OVERHEAD = "overhead"  # held an attempt while the engine did not compute: the loop's work, or a full KV cache
    TAIL = "tail"  # had nothing left to start, while other slots still decoded
    TOOL = "tool"  # idle, while the trajectory that could use it waits for its environment
    REWARD = "reward"  # waited for scores
    UPDATE = "update"  # waited for the update
    PUBLISH = "publish"  # from the end of an update until its weights are published
    SAVE = "save"  # waited for a checkpoint
    START_UP = "start_up"  # nothing runs yet: prompts are loaded, slots are filled


MEANINGS: dict[Cause, str] = {
    Cause.TRAINED: "decoding tokens that were trained",
    Cause.IN_FLIGHT: "decoding tokens that are not trained yet",
    Cause.DISCARDED: "decoding tokens that were thrown away",
    Cause.RECOMPUTED: "prefill of answer tokens again",
    Cause.PREFILL: "prefill of prompts",
    Cause.OVERHEAD: "overhead between steps",
    Cause.TAIL: "idle: tail of the harvest",
    Cause.TOOL: "idle: tools work",
    Cause.REWARD: "waiting for rewards",
    Cause.UPDATE: "waiting for the update",
    Cause.PUBLISH: "waiting for new weights",
    Cause.SAVE: "waiting for a checkpoint",
    Cause.START_UP: "idle: start-up",
}
_TAIL, _TOOL, _START_UP = (
    Cause.TAIL,
    Cause.TOOL,
    Cause.START_UP,
)  # used at every event; Python 3.11 looks up enum members slowly
WAITING = (Cause.TAIL, Cause.TOOL, Cause.REWARD, Cause.UPDATE, Cause.PUBLISH, Cause.SAVE, Cause.START_UP)


@dataclass(slots=True)
class SlotTime:
    """Slot-seconds on the events' clock, up to `now`.

    Time counts as rollout while at least one slot works. `wall_s` starts with the first cohort, so that evaluations
    before and after do not count. The causes start with the run.
    """

    slots: int = 0
    origin: float = 0.0  # when the run started
    started: float | None = None  # when the first cohort was loaded
    now: float = 0.0
    running: int = 0  # attempts in slots
    paused: int = 0  # those of them that are paused
    calling: int = 0  # trajectories that left their slots while their environments work
    waiting_for: Cause | None = None  # what idle slots wait for, if not for other slots
    busy_slot_s: float = 0.0
    rollout_s: float = 0.0
    waited: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(WAITING, 0.0))  # slot-seconds
    # The engine's reports at harvests, in slot-seconds and tokens, and the state of this clock at the last harvest.
    computed_s: float = 0.0
    prefill_s: float = 0.0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    busy_at_harvest_s: float = 0.0  # `busy_slot_s`
    start_up_at_harvest_s: float = 0.0  # `waited[START_UP]`

    def begin(self, t: float, slots: int) -> None:
        """Start the clock of a run at `t`."""
        self.slots, self.origin, self.now = slots, t, t

    def advance(self, t: float) -> None:
        """Account for the time from `now` to `t`."""
        elapsed, working = t - self.now, self.running - self.paused
        self.now = t
        if working:
            self.busy_slot_s += elapsed * working
            self.rollout_s += elapsed
        if working < self.slots:
            idle = self.slots - working
            if self.calling and self.waiting_for is None:  # as many idle slots as trajectories in tools wait for these
                num_tool = min(idle, self.calling)
                self.waited[_TOOL] += elapsed * num_tool
                idle -= num_tool
            cause = self.waiting_for or (_TAIL if working or self.calling else _START_UP)
            self.waited[cause] += elapsed * idle

    def record_wait(self, t: float, cause: Cause, *, seconds: float, paused: int) -> None:
        """Account for a wait for `cause` that took the `seconds` before `t`, during which `paused` attempts paused."""
        self.advance(max(t - seconds, self.now))
        before = self.paused, self.waiting_for
        self.paused, self.waiting_for = max(paused, self.paused), self.waiting_for or cause
        self.advance(max(t, self.now))
        self.paused, self.waiting_for = before

    def record_harvest(
        self, *, busy_s: float | None, prefill_s: float, prompt_tokens: int, recomputed_tokens: int, paused: int
    ) -> None:
        """Add the engine's report since the last harvest; `busy_s` is None if the engine reported nothing."""
        seen_s = self.busy_slot_s - self.busy_at_harvest_s
        if busy_s and not seen_s:
            self._use_engine_time(busy_s)
        self.computed_s += seen_s if busy_s is None else busy_s
        self.prefill_s += prefill_s
        self.prompt_tokens += prompt_tokens
        self.recomputed_tokens += recomputed_tokens
        self.busy_at_harvest_s, self.start_up_at_harvest_s = self.busy_slot_s, self.waited[Cause.START_UP]
        self.paused, self.waiting_for = min(paused, self.running), Cause.UPDATE

    def _use_engine_time(self, busy_s: float) -> None:
        """Use the engine's busy time where no attempts are reported, as in a simulation that only needs its summary.

        Time that looked like start-up was work, and the rest of it the tail of the harvest. Work beyond that time was
        done while an update was under way.
        """
        idle_s = self.waited[Cause.START_UP] - self.start_up_at_harvest_s
        left_s = max(busy_s - idle_s, 0.0)
        self.waited[Cause.START_UP] -= idle_s
        self.waited[Cause.TAIL] += max(idle_s - busy_s, 0.0)
        for cause in (Cause.UPDATE, Cause.PUBLISH):
            part_s = min(left_s, self.waited[cause])
            self.waited[cause] -= part_s
            left_s -= part_s
        self.busy_slot_s += busy_s - left_s

    @property
    def wall_s(self) -> float:
        return 0.0 if self.started is None else self.now - self.started

    def seconds(self, *, trained_s: float, discarded_tokens: int, in_flight_tokens: int) -> dict[Cause, float]:
        """Return slot-seconds by cause.

        `trained_s` decoded the trained tokens. The rest of the decoding time is divided between discarded tokens and
        tokens in flight, in proportion to their number: exact once nothing is in flight. Work since the last harvest
        counts as in flight.
        """
        computed = min(self.computed_s, self.busy_at_harvest_s)
        reading = min(self.prefill_s, computed)
        decoding = max(computed - reading, 0.0)
        trained = min(trained_s, self.busy_at_harvest_s)
        open_tokens = discarded_tokens + in_flight_tokens
        discarded = max(decoding - trained, 0.0) * (discarded_tokens / open_tokens if open_tokens else 0.0)
        tokens_read = self.prompt_tokens + self.recomputed_tokens
        recomputed = reading * (self.recomputed_tokens / tokens_read if tokens_read else 0.0)
        overhead = self.busy_at_harvest_s - max(computed, reading + trained)
        known = {
            Cause.TRAINED: trained,
            Cause.DISCARDED: discarded,
            Cause.RECOMPUTED: recomputed,
            Cause.PREFILL: reading - recomputed,
            Cause.OVERHEAD: overhead,
        }
        known[Cause.IN_FLIGHT] = self.busy_slot_s - sum(known.values())
        return {cause: known[cause] if cause in known else self.waited[cause] for cause in Cause}

    def shares(self, *, trained_s: float, discarded_tokens: int, in_flight_tokens: int) -> dict[str, float] | None:
        """Return `seconds` as shares of slots x time since the run started; they add up to 1. None at time 0."""
        whole = self.slots * (self.now - self.origin)
        if not whole:
            return None
        seconds = self.seconds(
            trained_s=trained_s, discarded_tokens=discarded_tokens, in_flight_tokens=in_flight_tokens
        )
        return {cause.value: part / whole for cause, part in seconds.items()}
