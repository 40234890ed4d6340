"""What one fuzzed run tries: a configuration, then stages, each with a fault, and what is changed before a resume.

`draw.py` makes scenarios from seeds. A scenario is plain data and survives a trip through JSON, so that a failure is
one command line: `python -m fuzz --scenario '...'`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """Which program runs."""

    TRAIN = "train"  # `sortedrl train quickstart`
    TOOLS = "tools"  # `sortedrl train tools`: a model that calls tools, which may misbehave
    DATA = "data"  # the quickstart's rows from a file, which may be damaged or unpack to gigabytes
    TRL = "trl"  # TRL's trainer with our scheduler inside
    RANKS = "ranks"  # the quickstart with two learner processes under Ray
    VLLM = "vllm"  # the quickstart on vLLM


class Fault(StrEnum):
    """What happens to a process while it trains."""

    NONE = "none"
    KILL_AT_CALL = "kill-at-call"  # SIGKILL at the n-th call that changes any file
    KILL_AT_WRITE = "kill-at-write"  # the same, counting only files of the run
    KILL = "kill"  # SIGKILL soon after the n-th call
    TERM = "term"
    INTERRUPT = "interrupt"
    HANG_UP = "hang-up"
    DISK_FULL = "disk-full"  # from the n-th call on, no file of the run grows
    FREEZE = "freeze"  # SIGSTOP, then SIGCONT half a second later
    FREEZE_MINUTE = "freeze-minute"  # SIGCONT a minute later
    CLOCK_JUMP = "clock-jump"  # from the n-th call on, the wall clock is off
    OUT_OF_MEMORY = "out-of-memory"  # the process may have little more memory than at its start
    ENGINE_RAISES = "engine-raises"
    SAMPLE_FAILS = "sample-fails"  # some attempts fail, the engine works on
    HELPER_KILLED = "helper-killed"  # SIGKILL to a process that it started: a reward worker, an engine, a rank


MAX_CALLS = 1500  # that change files; a process makes 300 to 1,500
SIGNALS = {Fault.TERM: 15, Fault.INTERRUPT: 2, Fault.HANG_UP: 1}
KILLS = (Fault.KILL, Fault.KILL_AT_CALL, Fault.KILL_AT_WRITE)
FREEZES = {Fault.FREEZE: 0.5, Fault.FREEZE_MINUTE: 60.0}  # seconds
OUTSIDE = (*SIGNALS, *FREEZES, Fault.KILL, Fault.HELPER_KILLED)  # the fuzzer causes them while the process runs
# A process that meets one of these goes on as before, or ends without saving what it did since its last checkpoint. So
# the weights at the end are those of a run that was left alone.
HARMLESS = frozenset((Fault.NONE, *KILLS, *FREEZES, Fault.CLOCK_JUMP, Fault.DISK_FULL))
COMPARED = (Kind.TRAIN, Kind.DATA)  # the kinds whose weights are compared with those of an undisturbed run
# Settings under which batches depend on when something happens.
TIMELY = ("async", "overlap=true", "chaos", "own_process")


@dataclass(slots=True, kw_only=True, frozen=True)
class Stage:
    """One process: what happens to it, and what is damaged or changed before it starts."""

    fault: Fault = Fault.NONE
    at: float = 0.0  # in [0, 1): when, on the scale of the fault
    damage: tuple[str, str] | None = None  # a file of `draw.DAMAGED` and one of `draw.DAMAGES`
    changes: tuple[str, ...] = ()  # overrides that this process gets besides those of the run
    ends_normally: bool = False  # the interpreter takes down its modules; otherwise the process leaves at once

    @property
    def call(self) -> int:
        """The number of the call at which it happens: small ones are as likely as large ones."""
        return max(1, round(MAX_CALLS**self.at))


@dataclass(slots=True, kw_only=True, frozen=True)
class Scenario:
    seed: int
    kind: Kind = Kind.TRAIN
    overrides: tuple[str, ...]
    stages: tuple[Stage, ...] = field(default_factory=lambda: (Stage(),))

    @property
    def has_twin(self) -> bool:
        """Whether the final weights must equal those of the same run without faults."""
        text = " ".join(self.overrides)
        is_even = all(s.fault in HARMLESS and not s.changes for s in self.stages)
        is_timely = any(word in text for word in TIMELY) or "schedule.strategy=" not in text  # the default overlaps
        return self.kind in COMPARED and is_even and not is_timely

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        record = json.loads(text)
        stages = tuple(
            Stage(
                fault=Fault(stage["fault"]),
                at=stage["at"],
                damage=tuple(stage["damage"]) if stage["damage"] else None,
                changes=tuple(stage["changes"]),
                ends_normally=stage.get("ends_normally", False),  # older command lines do not have it
            )
            for stage in record["stages"]
        )
        overrides = tuple(record["overrides"])
        return cls(seed=record["seed"], kind=Kind(record["kind"]), overrides=overrides, stages=stages)
