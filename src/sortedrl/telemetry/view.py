"""One run as its pages and its trace show it, computed from its events one by one.

This is the full fold of a run; its figures come from the light one, `RunMetrics`. Each event updates the samples
(`SampleLives`), the timeline and the curves here. `RunReader` feeds it: the report reads a whole file, the dashboard
continues while a run writes, and the trace adds a `TraceWriter`.

Guarantees: memory does not grow with the run. Sums are exact. Series that would grow without limit merge neighbours or
keep only both ends, and say so. Times are seconds since the first cohort was loaded; an evaluation before that is at 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sortedrl.telemetry.curves import (
    EvaluationPoint,
    KnownNames,
    MachinePoint,
    MetricSum,
    ReplayPoint,
    UpdatePoint,
    join_machine,
    join_replays,
    join_sums,
    join_updates,
)
from sortedrl.telemetry.event_file import Record, schema_note
from sortedrl.telemetry.events import (
    AttemptEnded,
    AttemptStarted,
    AttemptVerified,
    BatchTaken,
    CohortLoaded,
    Evaluated,
    Event,
    FunctionsScored,
    MachineMeasured,
    RunResumed,
    RunStarted,
    SampleRequeued,
    ToolsCalled,
    ToolsReturned,
    UpdateDone,
    WeightsPublished,
)
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.perfetto import TraceWriter
from sortedrl.telemetry.sample_lives import SampleLife, SampleLives, TimelineBar, ToolBar
from sortedrl.telemetry.series import Ends, Thinned, TimeBins
from sortedrl.telemetry.summary import Summary, summarize

MAX_BARS = 2000  # drawn at either end of a run
_MAX_POINTS = 1024
_MAX_SLOT_ROWS = 64
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


class RunView:
    """Everything that a page shows of one run. `emit` adds an event."""

    def __init__(self, name: str, *, keep_cohorts: bool = False, trace: TraceWriter | None = None) -> None:
        self.name = name
        self.position = 0  # among the runs of a page; it determines the colour
        self.slots = 1
        self.seconds = 0.0  # until the last step of training
        self.num_events = 0
        self.schema_note: str | None = None  # what the events' schema lacks
        self.recorded: Summary | None = None  # from summary.json
        self.latest: Record = {}  # the last line of metrics.jsonl
        self.slot_time: dict[str, float] = {}  # shares by cause, as the run itself recorded them

        self.metrics = RunMetrics()
        self.samples = SampleLives(keep_cohorts=keep_cohorts)
        self.running: dict[int, SampleLife] = {}  # samples with an attempt in a slot
        self.updates: Thinned[UpdatePoint] = Thinned(_MAX_POINTS, join_updates)
        self.evaluations: Thinned[EvaluationPoint] = Thinned(256, lambda first, second: second)
        self.replays: Thinned[ReplayPoint] = Thinned(_MAX_POINTS, join_replays)
        self.machine: Thinned[MachinePoint] = Thinned(512, join_machine)
        self.staleness: Counter[int] = Counter()
        self.cohort_updates: Ends[int] = Ends(200)  # updates done when a cohort was loaded
        self.harvests: Ends[float] = Ends(MAX_BARS)
        self.bars: Ends[TimelineBar] = Ends(MAX_BARS)
        self.tool_bars: Ends[ToolBar] = Ends(MAX_BARS)
        self.calling: dict[int, ToolBar] = {}  # by sample, while its environment works
        self.occupancy = TimeBins(2)  # slots that decode; slots that wait for an update
        self.busy = TimeBins(1)  # by slot

        self._trace = trace
        self._origin: float | None = None  # when the first cohort was loaded
        self._is_paused = False
        self._is_updating = False
        self._taken: dict[int, UpdatePoint] = {}
        self._replays = ReplayPoint()
        self._metric_names, self._function_names = KnownNames(), KnownNames()
        self._function_rewards: dict[int, dict[str, float]] = {}  # of samples that are not trained yet
        self._actions: dict[type[Event], Callable[[Any, float], None]] = {
            AttemptStarted: self._start,
            AttemptEnded: self._end,
            SampleRequeued: self._requeue,
            AttemptVerified: self._verify,
            ToolsCalled: self._call,
            ToolsReturned: self._return,
            BatchTaken: self._harvest,
            UpdateDone: self._finish_update,
            WeightsPublished: self._publish,
            CohortLoaded: self._load,
            Evaluated: self._evaluate,
            RunStarted: self._begin,
            RunResumed: self._resume,
            FunctionsScored: self._score,
            MachineMeasured: self._measure,
        }

    @property
    def run(self) -> RunStarted | None:
        return self.metrics.run

    @property
    def stride(self) -> int:
        """How many updates one point of a curve stands for."""
        return self.updates.stride

    def emit(self, event: Event) -> None:
        self.num_events += 1
        self.metrics.emit(event)
        if self._trace is not None:
            self._trace.emit(event, self.running)
        act = self._actions.get(type(event))
        if act is None:
            return
        t = 0.0
        if self._origin is not None:
            t = max(event.t - self._origin, 0.0)
        elif isinstance(event, CohortLoaded):
            self._origin = event.t
        if t > self.seconds and not isinstance(event, Evaluated | FunctionsScored):
            self._advance(t)
        act(event, t)

    # ---- event by event ---------------------------------------------------------------------------------------------

    def _advance(self, t: float) -> None:
        decoding = 0 if self._is_paused else len(self.running)
        if decoding:
            self.occupancy.add(0, self.seconds, t, decoding)
        if self._is_updating and decoding < self.slots:
            self.occupancy.add(1, self.seconds, t, self.slots - decoding)
        self.seconds = t

    def _begin(self, event: RunStarted, t: float) -> None:
        self.schema_note = schema_note(event)
        self.slots = max(event.slots, 1)
        self.busy = TimeBins(min(self.slots, _MAX_SLOT_ROWS))

    def _load(self, event: CohortLoaded, t: float) -> None:
        self.cohort_updates.append(event.update)
        self.samples.load(t, event)

    def _start(self, event: AttemptStarted, t: float) -> None:
        life = self.running[event.sample] = self.samples.started(t, event.sample)
        self.bars.append(life.start(t, event))

    def _verify(self, event: AttemptVerified, t: float) -> None:
        life = self.running.get(event.sample)
        if life is not None:
            life.verify(event.accepted)
        if event.cached:
            share = event.accepted / event.cached
            self.samples.count_replay(event.sample, share)
            self._replays = join_replays(
                self._replays,
                ReplayPoint(num_replays=1, share_sum=share, cached=event.cached, accepted=event.accepted),
            )

    def _end(self, event: AttemptEnded, t: float) -> None:
        self.running.pop(event.sample, None)
        life = self.samples.untrained.get(event.sample)
        if life is not None:
            self._end_life(life, t, event.outcome, event.num_tokens)
            if life.longest is None or event.num_tokens > life.longest:
                life.longest = event.num_tokens

    def _call(self, event: ToolsCalled, t: float) -> None:
        taken = {bar.row for bar in self.calling.values()}
        row = next(row for row in range(len(taken) + 1) if row not in taken)
        bar = ToolBar(sample=event.sample, turn=event.turn, num_calls=event.num_calls, row=row, start=t)
        self.calling[event.sample] = bar
        self.tool_bars.append(bar)
        if (life := self.samples.untrained.get(event.sample)) is not None:
            life.call(bar)

    def _return(self, event: ToolsReturned, t: float) -> None:
        if (bar := self.calling.pop(event.sample, None)) is not None:
            bar.end, bar.outcome, bar.num_failed = t, event.outcome, event.num_failed

    def _end_life(self, life: SampleLife, t: float, outcome: str, num_tokens: int) -> None:
        seconds = 0.0
        if life.bar is not None:
            seconds = self._close(life.bar, t, outcome)
            life.bar.num_tokens = num_tokens
        life.end(t, outcome=outcome, num_tokens=num_tokens, seconds=seconds)

    def _close(self, bar: TimelineBar, t: float, outcome: str) -> float:
        """End the bar at `t`, or at the time it was paused; return its length."""
        end = t if bar.end is None else bar.end
        bar.end, bar.outcome = end, outcome
        if end > bar.start:
            row = bar.slot * len(self.busy.rows) // self.slots if 0 <= bar.slot < self.slots else 0
            self.busy.add(row, bar.start, end)
        return end - bar.start

    def _requeue(self, event: SampleRequeued, t: float) -> None:
        life = self.samples.untrained.get(event.sample)
        if life is not None:
            life.discard(event.discarded)

    def _harvest(self, event: BatchTaken, t: float) -> None:
        self.staleness.update(event.staleness)
        self.harvests.append(t)
        self._is_updating = True
        if event.num_paused:
            self._is_paused = True
            for life in self.running.values():
                if life.bar is not None:
                    life.bar.end = t
        self.samples.train(t, event)
        if self._replays.num_replays:
            self.replays.append(replace(self._replays, update=event.update))
            self._replays = ReplayPoint()
        if event.samples:
            self._taken[event.update] = UpdatePoint(
                update=event.update,
                t=t,
                samples_trained=self.metrics.samples,
                num_samples=len(event.samples),
                reward_sum=float(sum(reward for reward in event.rewards if not math.isnan(reward))),
                token_sum=sum(event.lengths),
                lengths=tuple(float(value) for value in np.quantile(event.lengths, _QUANTILES)),
                rewards=self._take_rewards(event.samples),
            )

    def _take_rewards(self, samples: Sequence[int]) -> dict[str, MetricSum]:
        """Return the sums of the batch by reward function; the samples' own figures are forgotten."""
        sums: dict[str, MetricSum] = {}
        for sample in samples:
            sums = join_sums(sums, self._function_names.sums(self._function_rewards.pop(sample, {})))
        return sums

    def _score(self, event: FunctionsScored, t: float) -> None:
        if event.sample in self.samples.untrained:
            self._function_rewards[event.sample] = event.rewards

    def _measure(self, event: MachineMeasured, t: float) -> None:
        self.machine.append(
            MachinePoint(
                t=t,
                cores_used=event.cores_used,
                load=event.load,
                cores=event.cores,
                process_bytes=event.process_bytes,
                available_bytes=event.available_bytes,
                gpu_bytes=event.gpu_bytes,
                disk_free_bytes=event.disk_free_bytes,
            )
        )

    def _finish_update(self, event: UpdateDone, t: float) -> None:
        point = self._taken.pop(event.update, None)
        if point is not None:
            self.updates.append(replace(point, t=t, metrics=self._metric_names.sums(event.metrics)))

    def _publish(self, event: WeightsPublished, t: float) -> None:
        """Continue running attempts under the new weights: their bars end, and bars of the new version begin."""
        self._is_updating = self._is_paused = False
        for life in self.running.values():
            bar = life.bar
            if bar is None:
                continue
            if bar.version == event.version:
                bar.end = None
                continue
            paused = bar.end
            seconds = self._close(bar, t, "published")
            self.bars.append(life.change_version(t, event.version, seconds, paused=paused))

    def _evaluate(self, event: Evaluated, t: float) -> None:
        self.evaluations.append(
            EvaluationPoint(
                t=t,
                samples_trained=event.samples_trained,
                sampled=float(event.sampled_accuracy),
                greedy=float(event.greedy_accuracy),
            )
        )

    def _resume(self, event: RunResumed, t: float) -> None:
        """End the attempts and the tools that were under way when the earlier process ended."""
        for bar in self.calling.values():
            bar.end, bar.outcome = t, "cut"
        self.calling.clear()
        for life in self.running.values():
            if life.bar is not None:
                self._end_life(life, t, "cut", life.bar.num_tokens)
        self.running.clear()
        self._is_updating = self._is_paused = False

    # ---- figures ----------------------------------------------------------------------------------------------------

    @property
    def summary(self) -> Summary:
        """The run's own summary, or one estimated from its events so far."""
        if self.recorded is not None:
            return self.recorded
        stats, timing = self.metrics.measured()
        estimated = summarize(self.metrics, stats=stats, timing=timing, held=None)
        measured = {name: self.latest.get(name) for name in ("bubble_ratio", "goodput", "tokens_per_s")}
        has_measured = None not in measured.values()
        # The events do not contain what only engine and controller measure.
        unknown = dict.fromkeys(("status", "recomputed_tokens", "decode_steps", "update_s", "publish_s", "save_s"))
        return estimated.model_copy(update={**unknown, **(measured if has_measured else {})})
