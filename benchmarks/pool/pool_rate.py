"""How fast the controller schedules a pool of many engines: finished samples per second, and the longest harvest.

    python -m benchmarks.pool.pool_rate [--engines 256] [--slots 64] [--samples 131072] [--json]

The real controller, buffer, schedule and pool run over simulated engines in this process, which take no time: at each
poll an engine reports that its shortest answers are finished. The measured CPU time is therefore the cost of
scheduling, including routing to the engines and collecting from all of them. A harvest is everything between two polls:
the interruption of all engines, the batch, an update (which takes no time), the publication, and the decision what
happens to each interrupted sample. With overlap it is publication, decisions and the next batch. `sorted-partial` keeps
samples in their slots; `sorted-on-policy` interrupts all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, save
from benchmarks.schedule.controller_rate import GOAL_HARVEST_S, GOAL_RATE, Stopwatch
from sortedrl.buffer import Buffer
from sortedrl.clock import WallClock
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import EngineEvent, EngineStats, Finished, InFlight, Partial, Request, Sampling, SegmentDelta
from sortedrl.engine.pool.actor_loop import Report
from sortedrl.engine.pool.pool import Pool
from sortedrl.learner.base import UpdateResult
from sortedrl.records import Batch, FinishReason, Prompt, Sample, Segment, sample_seed
from sortedrl.run.gc_tuning import rare_collections
from sortedrl.schedule import resolve_knobs
from sortedrl.simulate.run import InstantScorer
from sortedrl.telemetry.metrics import RunMetrics

STRATEGIES = ("sorted-partial", "sorted-on-policy", "async")
BUDGET, PROMPT_TOKENS = 32, 64
SHARE = 8  # at each poll one in eight running answers is finished


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class InstantMember:
    """A simulated engine that finishes some answers at every poll; all tokens of an answer come when it ends."""

    def __init__(self, slots: int) -> None:
        self.num_slots = slots
        self.version = self.number = 0
        self.running: list[Request] = []

    def slots(self) -> Future[int]:
        return done(self.num_slots)

    def submit(self, requests: list[Request]) -> Future[None]:
        self.running.extend(requests)
        return done(None)

    def take(self, wait_s: float, pause_id: int) -> Future[Report]:
        self.running.sort(key=lambda request: request.seed % 997)  # the order of lengths is the same at every attempt
        count = -(-len(self.running) // SHARE)
        ended, self.running = self.running[:count], self.running[count:]
        events: list[EngineEvent] = []
        for request in ended:
            rest = self._rest(request, request.budget)
            events.append(
                Finished(request.sample, request.attempt, 0.0, FinishReason.LENGTH, len(request.cached), [rest])
            )
        return self._report(events)

    def interrupt(self, samples: list[int] | None, pause_id: int) -> Future[Report]:
        stopped = [r for r in self.running if samples is None or r.sample in samples]
        self.running = [r for r in self.running if not (samples is None or r.sample in samples)]
        events: list[EngineEvent] = []
        for request in stopped:
            rest = self._rest(request, min(len(request.cached) + 4, request.budget - 1))
            if rest.tokens:
                events.append(SegmentDelta(request.sample, request.attempt, 0.0, len(request.cached), [rest]))
            events.append(Partial(request.sample, request.attempt, 0.0))
        return self._report(events)

    def publish(self, version: int, weights: Any, in_flight: InFlight) -> Future[None]:
        self.version = version
        return done(None)

    def sleep(self) -> Future[None]:
        return done(None)

    def wake(self) -> Future[None]:
        return done(None)

    def stats(self) -> Future[EngineStats]:
        return done(EngineStats(running=len(self.running)))

    def kill(self) -> None:
        pass

    def _rest(self, request: Request, upto: int) -> Segment:
        count = max(upto - len(request.cached), 0)
        return Segment(self.version, [1] * count, [-1.0] * count)

    def _report(self, events: list[EngineEvent]) -> Future[Report]:
        self.number += 1
        return done(Report(number=self.number, events=events))


class InstantMembers:
    def __init__(self, slots: int) -> None:
        self.slots = slots

    def launch(self, index: int) -> InstantMember:
        return InstantMember(self.slots)

    def prepare_spare(self) -> None:
        pass

    def put(self, source: Any) -> Any:
        return source

    def wait_any(self, futures: Sequence[Future[Any]], seconds: float) -> None:
        pass  # every answer has come already

    def close(self) -> None:
        pass


class InstantUpdate:
    def done(self) -> bool:
        return True

    def result(self) -> UpdateResult:
        return UpdateResult(optimizer_steps=1)


class InstantLearner:
    source: object = None

    def start(self, batch: Batch) -> InstantUpdate:
        return InstantUpdate()


def loader(total: int) -> Any:
    noise = random.Random(0)
    prompts = [tuple(noise.randrange(1000) for _ in range(PROMPT_TOKENS)) for _ in range(4096)]
    num_loaded = 0

    def load(cohort: int, count: int) -> list[Sample]:
        nonlocal num_loaded
        numbers = range(num_loaded, min(num_loaded + count, total))
        num_loaded = numbers.stop
        return [
            Sample(n, Prompt(str(n), prompts[n % 4096], "", {}), 0, 0, cohort, sample_seed(0, 0, str(n), 0), BUDGET)
            for n in numbers
        ]

    return load


def measure(strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    pool = Pool(
        InstantMembers(options.slots),
        size=options.engines,
        slots=options.slots,
        exact_replay=True,
        keep_kv=True,
        waits=True,
    )
    slots, metrics = pool.capabilities.slots, RunMetrics()
    controller = Controller(
        Buffer(),
        LoopParts(engine=pool, learner=InstantLearner(), scorer=InstantScorer(), load_samples=loader(options.samples)),
        LoopSettings(
            knobs=resolve_knobs(strategy, slots // 4, cohort_batches=8),
            total_samples=options.samples,
            sampling=Sampling(),
        ),
        clock=WallClock(),
        emit=metrics.emit,
    )
    harvest, settle = Stopwatch(Controller, "harvest"), Stopwatch(Controller, "settle")
    inside = Stopwatch(InstantMember, "submit", "take", "interrupt", "publish", "stats")
    began = time.process_time()
    with rare_collections(), harvest, settle, inside:  # as in training
        controller.run()
    seconds = time.process_time() - began - inside.total
    assert metrics.samples == options.samples, "samples were lost"
    return {
        "strategy": strategy,
        "samples_per_s": options.samples / seconds,
        "us_per_sample": 1e6 * seconds / options.samples,
        "harvest_s": settle.longest + (0.0 if controller.knobs.overlap else harvest.longest),
        "updates": metrics.updates,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--samples", type=int, default=131_072)
    options = parser.parse_args()
    rows = [measure(strategy, options) for strategy in STRATEGIES]
    is_met = all(row["samples_per_s"] >= GOAL_RATE and row["harvest_s"] < GOAL_HARVEST_S for row in rows)
    record = {**{k: v for k, v in vars(options).items() if k != "json"}, "rows": rows, "within_goal": is_met}
    save("pool_rate", record)
    if options.json:
        print(json.dumps(record))
        return
    table = Table("strategy", "samples / s", "us / sample", "longest harvest, ms", "updates", box=None)
    for row in rows:
        rate, each, harvest = row["samples_per_s"], row["us_per_sample"], 1e3 * row["harvest_s"]
        table.add_row(row["strategy"], f"{rate:,.0f}", f"{each:.1f}", f"{harvest:.0f}", str(row["updates"]))
    Console().print(table)


if __name__ == "__main__":
    main()
