"""Where slot time went: every second of every slot has one cause, and the causes add up to slots x wall time.

`RunMetrics` advances one `SlotTime` from event to event, live, in a simulation, or when a file is read again. It costs
a few additions per event; the split into causes is worked out only when somebody asks.

Precedence, where several things are true of a slot at once:
1. Its attempt advances. Then the slot works, whatever else goes on; `trained`, `discarded`, `in_flight` (decoding, by
   what became of the tokens), `recomputed` and `prefill` (reading tokens, by what was read) and `overhead` share it.
2. Otherwise the slot waits, and the first of these is the cause: `publish`, `update`, `save`, `reward`, then `tail` as
   long as any other slot works, `start_up` if none does.
An attempt that stands still in its slot, for an update, new weights or scores, waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Cause(StrEnum):
    """In the order in which tables and charts show them: work that counts, work that does not, waiting."""

    TRAINED = "trained"  # decoded tokens that were then trained, each counted once
    IN_FLIGHT = "in_flight"  # decoded tokens whose fate is open: at the end of a run, those nobody trained on
    DISCARDED = "discarded"  # decoded tokens that a restart or a replay threw away
    RECOMPUTED = "recomputed"  # read answer tokens again that were decoded before: resumed or replayed
    PREFILL = "prefill"  # read prompts
    OVERHEAD = "overhead"  # the engine held the attempt and did not compute: the loop's own work, or a full cache
    TAIL = "tail"  # nothing left to start, while others are still being written
    REWARD = "reward"  # scores were awaited
    UPDATE = "update"
    PUBLISH = "publish"  # from the end of an update until its weights are in force
    SAVE = "save"  # a checkpoint was made
    START_UP = "start_up"  # nothing runs yet: prompts are loaded, slots are filled


MEANINGS: dict[Cause, str] = {
    Cause.TRAINED: "decoding tokens that were trained",
    Cause.IN_FLIGHT: "decoding tokens that were not trained yet",
    Cause.DISCARDED: "decoding tokens that were thrown away",
    Cause.RECOMPUTED: "reading cached tokens again",
    Cause.PREFILL: "reading prompts",
    Cause.OVERHEAD: "between steps",
    Cause.TAIL: "idle: the tail of the harvest",
    Cause.REWARD: "waiting on rewards",
    Cause.UPDATE: "waiting on the update",
    Cause.PUBLISH: "waiting on new weights",
    Cause.SAVE: "waiting on a checkpoint",
    Cause.START_UP: "idle: starting up",
}
TAIL, START_UP = Cause.TAIL, Cause.START_UP  # asked for at every event, and Python 3.11 finds members slowly
WAITING = (Cause.TAIL, Cause.REWARD, Cause.UPDATE, Cause.PUBLISH, Cause.SAVE, Cause.START_UP)


@dataclass(slots=True)
class SlotTime:
    """Slots over the events' clock, up to `now`.

    Time counts as rollout while at least one slot works. The wall clock of `wall_s` starts with the first cohort, so
    that evaluations before and after do not count; that of the causes starts with the run.
    """

    slots: int = 0
    origin: float = 0.0  # when the run started
    started: float | None = None  # when the first cohort was loaded
    now: float = 0.0
    running: int = 0
    paused: int = 0  # of these, those that stand still
    waiting_for: Cause | None = None  # what slots that do not work wait for, if it is not other slots
    busy_slot_s: float = 0.0
    rollout_s: float = 0.0
    waited: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(WAITING, 0.0))  # slot-seconds
    # What the engine told at harvests, in slot-seconds and tokens, and `busy_slot_s` at the last of them.
    computed_s: float = 0.0
    prefill_s: float = 0.0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    harvested_s: float = 0.0
    started_up_s: float = 0.0  # of `waited`, until the last harvest

    def begin(self, t: float, slots: int) -> None:
        """A run starts."""
        self.slots, self.origin, self.now = slots, t, t

    def advance(self, t: float) -> None:
        """Move on to a later time."""
        elapsed, working = t - self.now, self.running - self.paused
        self.now = t
        if working:
            self.busy_slot_s += elapsed * working
            self.rollout_s += elapsed
        if working < self.slots:
            cause = self.waiting_for or (TAIL if working else START_UP)
            self.waited[cause] += elapsed * (self.slots - working)

    def stood_still(self, t: float, cause: Cause, *, seconds: float, paused: int) -> None:
        """The `seconds` before `t` went into waiting for `cause`, for `paused` of the attempts too."""
        self.advance(max(t - seconds, self.now))
        before = self.paused, self.waiting_for
        self.paused, self.waiting_for = max(paused, self.paused), self.waiting_for or cause
        self.advance(max(t, self.now))
        self.paused, self.waiting_for = before

    def harvest(
        self, *, busy_s: float | None, prefill_s: float, prompt_tokens: int, recomputed_tokens: int, paused: int
    ) -> None:
        """An update batch is taken; the figures are the engine's since the last time, None if it told nothing."""
        seen_s = self.busy_slot_s - self.harvested_s
        if busy_s and not seen_s:
            self._trust(busy_s)
        self.computed_s += seen_s if busy_s is None else busy_s
        self.prefill_s += prefill_s
        self.prompt_tokens += prompt_tokens
        self.recomputed_tokens += recomputed_tokens
        self.harvested_s, self.started_up_s = self.busy_slot_s, self.waited[Cause.START_UP]
        self.paused, self.waiting_for = min(paused, self.running), Cause.UPDATE

    def _trust(self, busy_s: float) -> None:
        """Nobody told of attempts, as in a simulation that only wants its summary: the engine's account stands in.

        What looked like starting up was work, and for the rest the tail of the harvest; work beyond it was done while
        an update was waited for.
        """
        idle_s = self.waited[Cause.START_UP] - self.started_up_s
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
        """Slot-seconds by cause.

        `trained_s` decoded what was trained. The rest of the decoding time is shared by the tokens that were discarded
        and those in flight: exact once nothing is in flight. What was done since the last harvest is in flight.
        """
        computed = min(self.computed_s, self.harvested_s)
        reading = min(self.prefill_s, computed)
        decoding = max(computed - reading, 0.0)
        trained = min(trained_s, self.harvested_s)
        open_tokens = discarded_tokens + in_flight_tokens
        discarded = max(decoding - trained, 0.0) * (discarded_tokens / open_tokens if open_tokens else 0.0)
        tokens_read = self.prompt_tokens + self.recomputed_tokens
        recomputed = reading * (self.recomputed_tokens / tokens_read if tokens_read else 0.0)
        overhead = self.harvested_s - max(computed, reading + trained)
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
        """The same as shares of slots x time since the run started, which add up to 1; None before any time passed."""
        whole = self.slots * (self.now - self.origin)
        if not whole:
            return None
        seconds = self.seconds(
            trained_s=trained_s, discarded_tokens=discarded_tokens, in_flight_tokens=in_flight_tokens
        )
        return {cause.value: part / whole for cause, part in seconds.items()}
