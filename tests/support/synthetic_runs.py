"""Synthetic runs with consistent events, for tests of the code that reads run directories."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sortedrl.engine.base import EngineStats
from sortedrl.telemetry.events import (
    AttemptEnded,
    AttemptStarted,
    AttemptVerified,
    BatchTaken,
    CohortLoaded,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    SampleRequeued,
    SampleScored,
    UpdateDone,
    WeightsPublished,
)
from sortedrl.telemetry.metrics import RunMetrics, Timing
from sortedrl.telemetry.sinks import Fanout, JsonlSink, MetricsSink
from sortedrl.telemetry.summary import summarize

STEP_S, UPDATE_S, PUBLISH_S = 0.01, 0.12, 0.02


@dataclass(slots=True, kw_only=True)
class SyntheticAnswer:
    """One sample: its final length, the tokens it has so far, and the version that wrote each token."""

    id: int
    length: int
    tokens: int = 0
    attempt: int = 0
    slot: int = -1
    mode: str = "fresh"
    versions: list[int] = field(default_factory=list)  # one per token


class SyntheticRun:
    """A small model of the training loop: one token per step and slot, heavy-tailed lengths, no language model.

    `interrupted` is what happens to interrupted answers: "resume", "replay" or "restart". With `drain`, an update waits
    for the whole cohort and interrupts nothing.
    """

    def __init__(
        self, strategy: str, *, interrupted: str = "replay", drain: bool = False, updates: int = 60, seed: int = 0
    ) -> None:
        self.strategy, self.interrupted, self.drain, self.num_updates = strategy, interrupted, drain, updates
        self.slots, self.update_batch, self.cohort_batches = 16, 16, 1 if drain else 4
        self.random = random.Random(seed)
        self.t, self.version = 0.0, 0
        self.stats = EngineStats()
        self.rollout_s = self.update_s = self.publish_s = 0.0
        self.pending: list[SyntheticAnswer] = []
        self.running: dict[int, SyntheticAnswer] = {}
        self.done: list[SyntheticAnswer] = []
        self.num_loaded = self.num_cohorts = self.num_trained = 0

    def events(self) -> Iterator[Event]:
        total = self.num_updates * self.update_batch
        yield RunStarted(
            t=0.0, strategy=self.strategy, seed=1, slots=self.slots, update_batch=self.update_batch, total_samples=total
        )
        yield self.evaluated()
        while self.version < self.num_updates:
            if not (self.pending or self.running or self.done):
                yield self.load()
            for slot in range(self.slots):
                if slot not in self.running and self.pending:
                    yield from self.start(slot)
            yield from self.decode()
            is_empty = not self.running and not self.pending
            if is_empty or (len(self.done) >= self.update_batch and not self.drain):
                yield from self.harvest()
                if self.version % 20 == 0:
                    yield self.evaluated()
        yield RunEnded(t=self.t, reason="complete")

    def held(self) -> list[int]:
        return [answer.id for answer in (*self.pending, *self.running.values(), *self.done)]

    def timing(self) -> Timing:
        return Timing(rollout_s=self.rollout_s, update_s=self.update_s, publish_s=self.publish_s, wall_s=self.t)

    def load(self) -> CohortLoaded:
        ids = list(range(self.num_loaded, self.num_loaded + self.update_batch * self.cohort_batches))
        self.num_loaded += len(ids)
        self.num_cohorts += 1
        self.pending = [SyntheticAnswer(id=sample, length=self.draw_length()) for sample in ids]
        return CohortLoaded(t=self.t, cohort=self.num_cohorts - 1, update=self.version, samples=ids)

    def draw_length(self) -> int:
        median = 30 + 40 * self.version / self.num_updates
        return min(max(int(self.random.lognormvariate(np.log(median), 0.9)), 4), 400)

    def start(self, slot: int) -> Iterator[Event]:
        answer = self.pending.pop(0)
        answer.attempt += 1
        answer.slot = slot
        self.running[slot] = answer
        key = {"t": self.t, "sample": answer.id, "attempt": answer.attempt}
        yield AttemptStarted(**key, mode=answer.mode, cached=answer.tokens, slot=slot, version=self.version)
        if answer.mode == "replay":
            cached = answer.tokens
            if self.random.random() < 0.25:
                answer.tokens = self.random.randrange(cached)
                answer.length = max(answer.tokens + 1, self.draw_length())
            answer.versions = [self.version] * answer.tokens
            self.stats.recomputed_tokens += cached
            yield AttemptVerified(**key, cached=cached, accepted=answer.tokens)

    def decode(self) -> Iterator[Event]:
        """Decode until the next answer is complete."""
        steps = min(answer.length - answer.tokens for answer in self.running.values())
        self.t += steps * STEP_S
        self.rollout_s += steps * STEP_S
        self.stats.decode_steps += steps
        self.stats.decoded_tokens += steps * len(self.running)
        self.stats.busy_slot_s += steps * STEP_S * len(self.running)
        for answer in list(self.running.values()):
            answer.tokens += steps
            answer.versions += [self.version] * steps
            if answer.tokens == answer.length:
                yield self.end(answer, "length" if answer.length == 400 else "stop")
                reward = float(self.random.random() < 0.25 + 0.5 * self.version / self.num_updates)
                yield SampleScored(t=self.t, sample=answer.id, attempt=answer.attempt, reward=reward)
                self.done.append(answer)

    def end(self, answer: SyntheticAnswer, outcome: str) -> AttemptEnded:
        del self.running[answer.slot]
        key = {"t": self.t, "sample": answer.id, "attempt": answer.attempt}
        return AttemptEnded(**key, outcome=outcome, num_tokens=answer.tokens, slot=answer.slot)

    def harvest(self) -> Iterator[Event]:
        batch, self.done = self.done, []
        cut = list(self.running.values())
        for answer in cut:
            yield self.end(answer, "interrupted")
        yield BatchTaken(
            t=self.t,
            update=self.version,
            version=self.version,
            samples=[answer.id for answer in batch],
            lengths=[answer.tokens for answer in batch],
            rewards=[
                float(self.random.random() < 0.25 + 0.5 * self.version / self.num_updates) for _ in range(len(batch))
            ],
            staleness=[self.version - min(answer.versions) for answer in batch],
            staleness_token_sum=[sum(self.version - version for version in answer.versions) for answer in batch],
            truncated=sum(answer.length == 400 for answer in batch),
            num_interrupted=len(cut),
            slot_s=sum(answer.tokens for answer in batch) * STEP_S,
        )
        for answer in cut:
            answer.mode = "fresh" if self.interrupted == "restart" else self.interrupted
            discarded = answer.tokens if answer.mode == "fresh" else 0
            yield SampleRequeued(t=self.t, sample=answer.id, decision=self.interrupted, discarded=discarded)
            if discarded:
                answer.tokens, answer.length = 0, self.draw_length()
                answer.versions.clear()
        self.pending = self.pending + cut if self.interrupted == "restart" else cut + self.pending
        self.num_trained += len(batch)
        self.version += 1
        self.t += UPDATE_S
        self.update_s += UPDATE_S
        loss = self.random.gauss(0.0, 0.1)
        yield UpdateDone(
            t=self.t,
            update=self.version - 1,
            version=self.version,
            optimizer_steps=1,
            seconds=UPDATE_S,
            metrics={"loss": loss},
        )
        self.t += PUBLISH_S
        self.publish_s += PUBLISH_S
        yield WeightsPublished(t=self.t, version=self.version, seconds=PUBLISH_S)

    def evaluated(self) -> Evaluated:
        share = self.version / self.num_updates
        return Evaluated(
            t=self.t,
            version=self.version,
            samples_trained=self.num_trained,
            sampled_accuracy=0.27 + 0.5 * share,
            greedy_accuracy=0.2 + 0.6 * share,
            mean_length=35 + 40 * share,
            by_group={"2": {"sampled_accuracy": 0.5 + 0.4 * share}, "5": {"sampled_accuracy": 0.1 + 0.2 * share}},
        )


def write_run(run_dir: Path, run: SyntheticRun, *, has_summary: bool = True) -> RunMetrics:
    run_dir.mkdir(parents=True)
    metrics = RunMetrics(probe=lambda: (run.stats, run.timing()))
    emit = Fanout([metrics, JsonlSink(run_dir / "events.jsonl"), MetricsSink(run_dir / "metrics.jsonl", metrics)])
    for event in run.events():
        emit(event)
    emit.close()
    assert not emit.num_failures
    if has_summary:
        summary = summarize(
            metrics,
            stats=run.stats,
            timing=run.timing(),
            held=run.held(),
            cohort_batches=run.cohort_batches,
            lookahead=0,
        )
        summary.write(run_dir / "summary.json")
    return metrics
