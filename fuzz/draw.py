"""Draws random scenarios: `draw(seed)` always gives the same one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fuzz.rows import FILES
from fuzz.scenario import COMPARED, HARMLESS, TIMELY, Fault, Kind, Scenario, Stage

EVERYDAY = {Kind.TRAIN: 0.66, Kind.TOOLS: 0.17, Kind.DATA: 0.07, Kind.TRL: 0.1}  # how often each kind is drawn

STRATEGIES = (
    *("sync", "sync-large", "sorted-on-policy", "sorted-partial", "sorted-replay", "april", "tail-batching"),
    *("async", "async-on-policy"),
)
ON_POLICY = ("sync", "sorted-on-policy", "sorted-replay", "tail-batching", "async-on-policy")  # those that TRL takes
# Keys with the values that they may get. Each is set with the probability before it.
Choices = tuple[tuple[float, str, Sequence[Any]], ...]
CHOICES: Choices = (
    (0.7, "schedule.update_batch", (4, 8)),
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
    (0.7, "engine.slots", (1, 3, 8, 16)),
    (0.5, "engine.max_new_tokens", (8, 24, 48)),
    (0.1, "engine.temperature", (0.7, 1.3)),
    (0.1, "learner.inner_steps", (2,)),
    (0.1, "learner.inner_epochs", (2,)),
    (0.1, "learner.kl_coef", (0.01,)),
    (0.1, "learner.flat_groups", ("keep", "zero", "replace")),
    (0.1, "learner.overlong", ("mask", "shape")),
    (0.1, "learner.advantage_scope", ("cohort", "running")),
    (0.1, "eval.every_samples", (8, 20)),
    (0.1, "reward.on_error", ("zero", "skip")),
    (0.1, "reward.workers", (2,)),
    (0.2, "checkpoint.keep", (1, 3)),
    (0.5, "learner.group_size", (1, 2, 4)),
    (
        0.5,
        "learner.algorithm",
        ("reinforce++", "reinforce++-baseline", "grpo", "dr_grpo", "rloo", "dapo", "gspo", "ppo"),
    ),
)
LOCAL_CHOICES: Choices = (
    (0.1, "engine.in_flight", ("keep", "reprefill")),
    (0.1, "engine.drafts", ("always", "off")),
    (0.04, "engine.own_process", ("true",)),
    (0.06, "lora.rank", (4,)),
)
TOOL_CHOICES: Choices = (
    (0.5, "environment.run_in", ("process", "thread")),
    (0.5, "environment.max_turns", (1, 2, 4)),
    (0.3, "environment.workers", (1, 3)),
    (0.3, "environment.max_output_chars", (1, 40)),
    (0.5, "schedule.open_trajectories", (1, 8, 32)),
)
TRL_CHOICES: Choices = (
    (1.0, "strategy", ON_POLICY),
    (1.0, "max_steps", (2, 3, 5)),
    (1.0, "save_steps", (1, 1, 2)),
    (0.5, "lookahead", (0, 1, 2)),
    (0.5, "slots", (2, 5, 16)),
    (1.0, "seed", range(100)),
)
# Values that a run cannot have; each alone must give one line.
MISTAKES = (
    *("run.samples=0", "run.samples=-3", "engine.slots=0", "schedule.update_batch=0", "learner.lr=nan", "run.seed=-1"),
    *("schedule.strategy=sortd", "engine.max_new_tokens=x", "learner.algorithm=grpp", "task.name=none", "a.b.c=1"),
    *("schedule.lookahead=-1", "engine.temperature=-1", "checkpoint.keep=0", "model.path=./nothing"),
    *("reward.workers=0", "environment.factory=fuzz.nothing:There", "task.reward=fuzz.rewards:nothing"),
)
CHANGES = ("learner.lr=1e-4", "checkpoint.keep=2", "checkpoint.every_updates=2", "reward.timeout_s=5", "run.threads=1")
REFUSED_CHANGES = ("schedule.update_batch=5", "engine.max_new_tokens=7", "learner.algorithm=rloo", "run.seed=99")

# Keys that contradict the promise of a strategy; setting one is refused, so it is drawn rarely.
DEFINING = {
    "sync": ("cohort_batches", "lookahead", "max_staleness", "on_bound", "interrupted", "overlap"),
    "sync-large": ("lookahead", "max_staleness", "on_bound", "interrupted", "overlap"),
    "sorted-on-policy": ("max_staleness", "on_bound", "interrupted", "overlap"),
    "tail-batching": (
        *("cohort_batches", "lookahead", "max_staleness", "on_bound", "interrupted", "overlap", "admission"),
    ),
    "async": ("max_staleness", "on_bound", "overlap"),
    "async-on-policy": ("max_staleness", "on_bound", "overlap"),
}
NEEDS_SIBLINGS = ("reinforce++-baseline", "grpo", "dr_grpo", "rloo", "dapo", "gspo")

# Files of a run directory that may be damaged between two stages, and how.
DAMAGED = ("events.jsonl", "metrics.jsonl", "summary.json", "ledger.sqlite", "ledger.sqlite-wal", "checkpoint", "lock")
DAMAGES = ("cut", "flip", "delete", "empty")

_NORMAL_ENDS = 0.25  # of all processes; the others leave without the interpreter's own end, which takes time
_OFTEN = (Fault.KILL_AT_CALL, Fault.KILL_AT_WRITE, Fault.KILL_AT_WRITE, Fault.KILL)
_ANY = tuple(fault for fault in Fault if fault not in (Fault.NONE, Fault.FREEZE_MINUTE))
_OF_HELPERS = (*_OFTEN, Fault.TERM, Fault.INTERRUPT, Fault.FREEZE, Fault.HELPER_KILLED, Fault.HELPER_KILLED)
FAULTS: dict[Kind, tuple[Fault, ...]] = {
    **dict.fromkeys((Kind.TRAIN, Kind.TOOLS, Kind.DATA), (*_ANY, *_OFTEN)),
    Kind.TRL: (*_OFTEN, Fault.TERM, Fault.FREEZE, Fault.CLOCK_JUMP, Fault.DISK_FULL),
    Kind.RANKS: _OF_HELPERS,
    Kind.VLLM: _OF_HELPERS,
}


def draw(seed: int, kinds: Sequence[Kind] = tuple(EVERYDAY)) -> Scenario:
    """The scenario of this seed, of one of these kinds."""
    rng = random.Random(seed)
    kind = rng.choices(kinds, [EVERYDAY.get(kind, 1.0) for kind in kinds])[0]
    overrides = _trl_overrides(rng) if kind == Kind.TRL else _overrides(rng, kind)
    can_compare = kind in COMPARED and not any(word in override for override in overrides for word in TIMELY)
    is_compared = can_compare and rng.random() < 0.5
    stages = _draw_stages(rng, kind, is_compared=is_compared)
    ends = random.Random(f"ends of {seed}")  # of its own, so that all else of a seed stays as it was before
    stages = tuple(replace(stage, ends_normally=ends.random() < _NORMAL_ENDS) for stage in stages)
    return Scenario(seed=seed, kind=kind, overrides=tuple(overrides), stages=stages)


def _chosen(rng: random.Random, choices: Choices) -> dict[str, Any]:
    return {key: rng.choice(values) for chance, key, values in choices if rng.random() < chance}


def _trl_overrides(rng: random.Random) -> list[str]:
    chosen = _chosen(rng, TRL_CHOICES)
    if chosen["strategy"] in ("sync", "tail-batching"):
        chosen.pop("lookahead", None)
    return [f"{key}={value}" for key, value in chosen.items()]


def _overrides(rng: random.Random, kind: Kind) -> list[str]:
    """Of keys of the configuration. One in eight may be refused."""
    is_wild = rng.random() < 0.125
    strategy = rng.choice(STRATEGIES)
    chosen = _chosen(rng, CHOICES)
    if kind != Kind.VLLM:
        chosen |= _chosen(rng, LOCAL_CHOICES)
    if kind == Kind.TOOLS:
        chosen |= _chosen(rng, TOOL_CHOICES)
        chosen.pop("engine.max_new_tokens", None)
    if not is_wild:
        for name in DEFINING.get(strategy, ()):
            chosen.pop(f"schedule.{name}", None)
        if chosen.get("learner.algorithm", "") in NEEDS_SIBLINGS:
            chosen["learner.group_size"] = rng.choice((2, 4))
        if chosen.get("learner.flat_groups") == "replace":
            chosen.pop("schedule.exact_batch", None)
    chosen.setdefault("learner.group_size", 1)
    overrides = [f"schedule.strategy={strategy}", f"run.samples={rng.choice((16, 24, 40))}"]
    overrides.append(f"run.seed={rng.randrange(1000)}")
    overrides += [f"{key}={value}" for key, value in chosen.items()]
    overrides.append(f"checkpoint.every_updates={rng.choice((0, 1, 1, 2, 3))}")
    if kind == Kind.DATA:
        overrides += ["task.name=dataset", f"task.path={rng.choice(FILES)}", "task.reward=fuzz.rewards:length"]
    elif rng.random() < 0.15:
        overrides.append(f"task.reward=fuzz.rewards:chaos_{rng.choice(('mild', 'wild'))}")
    if kind == Kind.TOOLS and rng.random() < 0.5:
        overrides.append(f"environment.factory=fuzz.environments:Chaos{rng.choice(('', 'Saved', 'Again', 'Lost'))}")
    if is_wild and rng.random() < 0.5:
        overrides.append(rng.choice(MISTAKES))
    return overrides


def _draw_stages(rng: random.Random, kind: Kind, *, is_compared: bool) -> tuple[Stage, ...]:
    """`is_compared`: only what leaves the final weights as they are without it."""
    stages = []
    faults = [fault for fault in FAULTS[kind] if fault in HARMLESS or not is_compared]
    for number in range(rng.choice((2, 2, 3, 3, 4))):
        is_resume = number > 0
        damage = (rng.choice(DAMAGED), rng.choice(DAMAGES)) if is_resume and rng.random() < 0.25 else None
        changes: tuple[str, ...] = ()
        if is_resume and kind != Kind.TRL and not is_compared and rng.random() < 0.2:
            changes = (rng.choice(CHANGES if rng.random() < 0.7 else REFUSED_CHANGES),)
        fault = Fault.FREEZE_MINUTE if rng.random() < 0.005 else rng.choice(faults)
        stages.append(Stage(fault=fault, at=rng.random(), damage=damage, changes=changes))
    return (*stages, Stage())  # the last process is left alone
