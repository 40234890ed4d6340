"""What one fuzzed run tries: a configuration, then stages, each with a fault, and what is changed before a resume.

`draw` makes a scenario from a seed. A scenario is plain data and survives a trip through JSON, so that a failure is one
command line: `python -m fuzz --scenario '...'`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Fault(StrEnum):
    """What happens to a process while it trains."""

    NONE = "none"
    KILL_AT_CALL = "kill-at-call"  # SIGKILL at the n-th call that changes any file
    KILL_AT_WRITE = "kill-at-write"  # the same, counting only files of the run
    KILL = "kill"  # SIGKILL after some seconds
    TERM = "term"
    INTERRUPT = "interrupt"
    HANG_UP = "hang-up"
    DISK_FULL = "disk-full"  # from the n-th call on, no file of the run grows
    FREEZE = "freeze"  # SIGSTOP, then SIGCONT
    CLOCK_JUMP = "clock-jump"  # from the n-th call on, the wall clock is off
    ENGINE_RAISES = "engine-raises"
    SAMPLE_FAILS = "sample-fails"  # some attempts fail, the engine works on
    WORKER_KILLED = "worker-killed"  # SIGKILL to a reward worker


SIGNALS = {Fault.TERM: 15, Fault.INTERRUPT: 2, Fault.HANG_UP: 1}
COUNTED = (Fault.KILL_AT_CALL, Fault.KILL_AT_WRITE, Fault.DISK_FULL, Fault.CLOCK_JUMP)
# A process that meets one of these goes on as before, or ends without saving what it did since its last checkpoint. So
# the weights at the end are those of a run that was left alone.
HARMLESS = frozenset(
    (Fault.NONE, Fault.KILL_AT_CALL, Fault.KILL_AT_WRITE, Fault.KILL, Fault.FREEZE, Fault.CLOCK_JUMP, Fault.DISK_FULL)
)
# Files of a run directory that may be damaged between two stages, and how.
DAMAGED = ("events.jsonl", "metrics.jsonl", "summary.json", "ledger.sqlite", "ledger.sqlite-wal", "checkpoint", "lock")
DAMAGES = ("cut", "flip", "delete", "empty")


@dataclass(slots=True, kw_only=True, frozen=True)
class Stage:
    """One process: what happens to it, and what is damaged or changed before it starts."""

    fault: Fault = Fault.NONE
    at: float = 0.0  # in [0, 1): when, on the scale of the fault
    damage: tuple[str, str] | None = None  # a file of `DAMAGED` and one of `DAMAGES`
    changes: tuple[str, ...] = ()  # overrides that this process gets besides those of the run

    @property
    def call(self) -> int:
        """The number of the call for a counted fault: from 1 to 4,000, small ones as likely as large ones."""
        return max(1, round(4000**self.at))

    @property
    def seconds(self) -> float:
        return 4.0 * self.at


@dataclass(slots=True, kw_only=True, frozen=True)
class Scenario:
    seed: int
    overrides: tuple[str, ...]
    stages: tuple[Stage, ...] = field(default_factory=lambda: (Stage(),))

    @property
    def has_twin(self) -> bool:
        """Whether the final weights must equal those of the same run without faults."""
        text = " ".join(self.overrides)
        is_even = all(s.fault in HARMLESS and not s.changes for s in self.stages)
        return is_even and not any(word in text for word in ("async", "overlap=true", "chaos", "own_process"))

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
            )
            for stage in record["stages"]
        )
        return cls(seed=record["seed"], overrides=tuple(record["overrides"]), stages=stages)

    @property
    def num_faults(self) -> int:
        return sum((s.fault != Fault.NONE) + (s.damage is not None) + bool(s.changes) for s in self.stages)


# ---- configurations -------------------------------------------------------------------------------------------------

STRATEGIES = (
    *("sync", "sync-large", "sorted-on-policy", "sorted-partial", "sorted-replay", "april", "tail-batching"),
    *("async", "async-on-policy"),
)
# Keys with the values that they may get. Each is set with the probability before it.
CHOICES: tuple[tuple[float, str, Sequence[Any]], ...] = (
    (0.7, "schedule.update_batch", (4, 8, 16)),
    (0.4, "schedule.cohort_batches", (1, 2, 3, 4)),
    (0.4, "schedule.lookahead", (0, 1, 2, "none")),
    (0.15, "schedule.max_staleness", (0, 1, 2, 4, "none")),
    (0.15, "schedule.on_bound", ("replay", "restart", "wait")),
    (0.1, "schedule.interrupted", ("resume", "replay", "restart")),
    (0.2, "schedule.order", ("shortest-first", "longest-first", "interleaved", "shuffled")),
    (0.15, "schedule.admission", ("load-order", "new-first", "longest-expected-first")),
    (0.1, "schedule.overlap", ("true", "false")),
    (0.15, "schedule.restart_noise", ("seeded", "fresh")),
    (0.3, "schedule.exact_batch", ("true", "false")),
    (0.7, "engine.slots", (1, 3, 8, 16, 24)),
    (0.5, "engine.max_new_tokens", (8, 24, 64)),
    (0.1, "engine.temperature", (0.7, 1.3)),
    (0.1, "engine.in_flight", ("keep", "reprefill")),
    (0.1, "engine.drafts", ("always", "off")),
    (0.05, "engine.own_process", ("true",)),
    (
        0.5,
        "learner.algorithm",
        ("reinforce++", "reinforce++-baseline", "grpo", "dr_grpo", "rloo", "dapo", "gspo", "ppo"),
    ),
    (0.5, "learner.group_size", (1, 2, 4)),
    (0.1, "learner.inner_steps", (2,)),
    (0.1, "learner.inner_epochs", (2,)),
    (0.1, "learner.kl_coef", (0.01,)),
    (0.1, "learner.flat_groups", ("keep", "zero", "replace")),
    (0.1, "learner.overlong", ("mask", "shape")),
    (0.1, "learner.advantage_scope", ("cohort", "running")),
    (0.1, "lora.rank", (4,)),
    (0.2, "eval.every_samples", (16, 40)),
    (0.1, "reward.on_error", ("zero", "skip")),
    (0.1, "reward.workers", (2,)),
    (0.2, "checkpoint.keep", (1, 3)),
)
# Values that a run cannot have; each alone must give one line.
MISTAKES = (
    *("run.samples=0", "run.samples=-3", "engine.slots=0", "schedule.update_batch=0", "learner.lr=nan", "run.seed=-1"),
    *("schedule.strategy=sortd", "engine.max_new_tokens=x", "learner.algorithm=grpp", "task.name=none", "a.b.c=1"),
    *(
        "schedule.lookahead=-1",
        "engine.temperature=-1",
        "checkpoint.keep=0",
        "model.path=./nothing",
        "reward.workers=0",
    ),
)
CHANGES = ("learner.lr=1e-4", "checkpoint.keep=2", "checkpoint.every_updates=2", "reward.timeout_s=5", "run.threads=1")
REFUSED_CHANGES = ("schedule.update_batch=5", "engine.max_new_tokens=7", "learner.algorithm=rloo", "run.seed=99")


# Keys that contradict the promise of a strategy; setting one is refused, so it is drawn rarely.
DEFINING = {
    "sync": ("cohort_batches", "lookahead", "max_staleness", "on_bound", "interrupted", "overlap"),
    "sync-large": ("lookahead", "max_staleness", "on_bound", "interrupted", "overlap"),
    "sorted-on-policy": ("max_staleness", "on_bound", "interrupted", "overlap"),
    "tail-batching": (
        "cohort_batches",
        "lookahead",
        "max_staleness",
        "on_bound",
        "interrupted",
        "overlap",
        "admission",
    ),
    "async": ("max_staleness", "on_bound", "overlap"),
    "async-on-policy": ("max_staleness", "on_bound", "overlap"),
}
NEEDS_SIBLINGS = ("reinforce++-baseline", "grpo", "dr_grpo", "rloo", "dapo", "gspo")


def draw(seed: int) -> Scenario:
    """The scenario of this seed. One in eight has a configuration that may be refused."""
    rng = random.Random(seed)
    is_wild = rng.random() < 0.125
    strategy = rng.choice(STRATEGIES)
    chosen = {key: rng.choice(values) for chance, key, values in CHOICES if rng.random() < chance}
    if not is_wild:
        for name in DEFINING.get(strategy, ()):
            chosen.pop(f"schedule.{name}", None)
        if chosen.get("learner.algorithm", "") in NEEDS_SIBLINGS:
            chosen["learner.group_size"] = rng.choice((2, 4))
        if chosen.get("learner.flat_groups") == "replace":
            chosen.pop("schedule.exact_batch", None)
    chosen.setdefault("learner.group_size", 1)
    overrides = [f"schedule.strategy={strategy}", f"run.samples={rng.choice((24, 40, 64, 96))}"]
    overrides.append(f"run.seed={rng.randrange(1000)}")
    overrides += [f"{key}={value}" for key, value in chosen.items()]
    overrides.append(f"checkpoint.every_updates={rng.choice((0, 1, 1, 2, 3))}")
    if rng.random() < 0.15:
        overrides.append(f"task.reward=fuzz.rewards:chaos_{rng.choice(('mild', 'wild'))}")
    if is_wild and rng.random() < 0.5:
        overrides.append(rng.choice(MISTAKES))
    return Scenario(seed=seed, overrides=tuple(overrides), stages=_draw_stages(rng))


def _draw_stages(rng: random.Random) -> tuple[Stage, ...]:
    faults = [fault for fault in Fault if fault != Fault.NONE]
    faults += [Fault.KILL_AT_CALL, Fault.KILL_AT_WRITE, Fault.KILL_AT_WRITE, Fault.KILL]
    stages = []
    for number in range(rng.choice((1, 2, 2, 3, 4))):
        is_resume = number > 0
        damage = (rng.choice(DAMAGED), rng.choice(DAMAGES)) if is_resume and rng.random() < 0.25 else None
        changes: tuple[str, ...] = ()
        if is_resume and rng.random() < 0.2:
            changes = (rng.choice(CHANGES if rng.random() < 0.7 else REFUSED_CHANGES),)
        stages.append(Stage(fault=rng.choice(faults), at=rng.random(), damage=damage, changes=changes))
    return (*stages, Stage())  # the last process is left alone
