"""A session: everything that one call of `SortedTrainer.train` works with, from the announced start to the last update.

The trainer opens it (`_open_session`) and writes the results afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.engine.base import EngineStats
from sortedrl.errors import NothingLearnedError
from sortedrl.run.gc_tuning import rare_collections
from sortedrl.telemetry.event_file import damage_of, read_events
from sortedrl.telemetry.events import RunResumed, RunStarted
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.sinks import Fanout

if TYPE_CHECKING:
    from sortedrl.controller import Controller
    from sortedrl.run.builders.parts import RunParts
    from sortedrl.run.callbacks import CallbackSink, ProgressSink
    from sortedrl.run.evaluate import Evaluator
    from sortedrl.run.save_and_resume import RunFiles, RunSaver

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Session:
    """Everything that one call of `train` works with."""

    parts: RunParts
    files: RunFiles
    metrics: RunMetrics
    emit: Fanout
    clock: WallClock
    evaluator: Evaluator
    saver: RunSaver
    controller: Controller
    stats: Callable[[], EngineStats]
    gap: str = ""  # what is missing of the telemetry of a resumed run

    def replay(self, sinks: Sequence[ProgressSink | CallbackSink]) -> None:
        """Pass the recorded events of a resumed run to metrics and sinks, and note what is missing of them (`gap`)."""
        files, metrics, buffer = self.files, self.metrics, self.controller.buffer
        faults: list[str] = [files.events.gap] if files.events.gap else []
        for event in read_events(files.events.path, damage=faults):
            try:
                metrics.emit(event)
                for sink in sinks:
                    sink.replay([event])
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                faults.append(f"a {event.kind} is damaged ({type(error).__name__}: {error})")
        if not faults and not metrics.agrees_with(buffer.num_trained, buffer.samples):
            faults.append("it tells of other samples than the ledger")
        of_metrics = [files.metrics.gap, damage_of(files.metrics.path)]
        gaps = []
        for path, found in ((files.events.path, faults), (files.metrics.path, of_metrics)):
            if what := "; ".join(filter(None, found)):
                log.warning("%s is incomplete: %s; the run continues, but figures lack what was lost", path, what)
                gaps.append(f"{path.name}: {what}")
        self.gap = ". ".join(gaps)

    def announce(self, config: SortedConfig, *, is_new: bool) -> None:
        """Emit the event that tells of the start, or of the resume."""
        if is_new:
            self.emit(run_started(config, self.clock.now()))
            return
        if self.metrics.run is None:  # it was lost; readers need it
            started = run_started(config, self.clock.now())
            self.metrics.emit(started)
            self.files.events.emit(started)
        assert self.metrics.run is not None, "a resumed run has a RunStarted event"
        self.metrics.run = replace(self.metrics.run, total_samples=config.run.samples)
        self.emit(self._resumed_event())

    def _resumed_event(self) -> RunResumed:
        """The event, with the ledger's counts if events before it were lost."""
        buffer = self.controller.buffer
        now, version, lineage = self.clock.now(), buffer.version, self.files.store.lineage or 0
        if not self.gap:
            return RunResumed(t=now, version=version, lineage=lineage)
        return RunResumed(
            t=now,
            version=version,
            lineage=lineage,
            gap=self.gap,
            updates=buffer.num_updates,
            samples_trained=buffer.num_trained,
            waiting=list(buffer.samples),
        )

    def run_loop(self) -> bool:
        """Train, with an evaluation before and after; returns whether all samples are trained."""
        controller, clock, evaluator, alarm = self.controller, self.clock, self.evaluator, self.parts.alarm
        buffer, complete = controller.buffer, False
        try:
            if buffer.num_trained == 0:
                with clock.stopped():
                    evaluator.run(buffer.version, 0)
            with rare_collections():
                complete = controller.run()
            if complete:
                alarm.watch_end()
            if complete and alarm.error is None:
                with clock.stopped():
                    evaluator.run(buffer.version, buffer.num_trained)
        except NothingLearnedError:  # of an evaluation; it is raised again once the run is saved
            assert alarm.error is not None, "only the alarm raises it"
        return complete


def run_started(config: SortedConfig, t: float) -> RunStarted:
    return RunStarted(
        t=t,
        strategy=config.strategy_name,
        seed=config.run.seed,
        slots=config.slots,
        update_batch=config.schedule.update_batch,
        total_samples=config.run.samples,
        max_staleness=config.knobs.max_staleness,
    )
