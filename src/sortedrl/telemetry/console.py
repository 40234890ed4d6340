"""The progress of a run: a live panel in a terminal, plain lines elsewhere, nothing when quiet.

This is one of the sinks of a run; the shared `RunMetrics` must receive each event before it. It writes only to the
console that it is given (standard error, so that standard output stays free for results).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from sortedrl.telemetry.events import (
    AttemptEnded,
    AttemptStarted,
    BatchTaken,
    Evaluated,
    Event,
    RunEnded,
    RunResumed,
    RunStarted,
    UpdateDone,
    WeightsPublished,
)
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.slot_time import Cause
from sortedrl.telemetry.summary import number, share

_REFRESH_S = 0.5  # drawing takes milliseconds of the run's thread
_BAR_CELLS = 32
_SHOWN_CAUSES = 4
_ACTIVITY = {None: "", Cause.UPDATE: "updating", Cause.PUBLISH: "publishing"}


class ConsoleSink:
    """Shows the progress of one run on `console`.

    If `console` is not a terminal, it prints a line once `every_updates` updates or `every_s` seconds of the run's
    clock have passed since the last line. `clock` sets the pace of the live panel.
    """

    def __init__(
        self,
        console: Console,
        metrics: RunMetrics,
        *,
        quiet: bool = False,
        every_updates: int = 20,
        every_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._metrics = metrics
        self._quiet = quiet
        self._every_updates = every_updates
        self._every_s = every_s
        self._clock = clock
        self._live: Live | None = None
        self._progress = Progress(
            BarColumn(bar_width=None), _SamplesColumn(), _TimeLeftColumn(metrics), console=console, expand=True
        )
        self.kinds = frozenset({RunStarted, RunResumed, UpdateDone, Evaluated, RunEnded})
        if console.is_terminal and not quiet:
            self.kinds |= {AttemptStarted, AttemptEnded, BatchTaken, WeightsPublished}  # for the live panel
        self._drawn_at = 0.0
        self._printed_update = 0
        self._printed_t = 0.0

    def emit(self, event: Event) -> None:
        if self._quiet:
            return
        match event:
            case RunStarted():
                self._start(event)
            case RunResumed() if self._metrics.run is not None:
                self._console.print(f"resumed at version {event.version}", highlight=False)
                if not self._progress.task_ids:
                    self._start(self._metrics.run)
            case UpdateDone() if self._live is None:
                self._print_progress(event)
            case Evaluated():
                self._console.print(_evaluated_line(event), highlight=False, soft_wrap=True)
            case RunEnded():
                self._end(event)
            case _:
                pass
        if self._live is not None and self._clock() - self._drawn_at >= _REFRESH_S:
            self._draw()

    def close(self) -> None:
        """Stop the live panel; safe to call twice."""
        if self._live is not None:
            self._draw()
            self._live.stop()
            self._live = None

    def _start(self, event: RunStarted) -> None:
        self._console.print(
            f"{escape(event.strategy)}: {event.total_samples:,} samples, {event.update_batch} an update, "
            f"{event.slots} slots, seed {event.seed}",
            highlight=False,
            soft_wrap=True,
        )
        self._printed_t = event.t
        self._progress.add_task("", total=max(event.total_samples, 1))
        if self._console.is_terminal:
            # `emit` refreshes the panel in the run's thread, so no timer thread competes with the engine. Standard
            # output is not redirected, because results go there.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
            self._draw()

    def _end(self, event: RunEnded) -> None:
        if self._live is None:
            self._console.print(_progress_line(self._metrics), highlight=False, soft_wrap=True)
        self.close()
        self._console.print(f"run {escape(event.reason)} after {event.t:,.1f} s", highlight=False)

    def _print_progress(self, event: UpdateDone) -> None:
        updates = self._metrics.updates
        is_due = updates - self._printed_update >= self._every_updates or event.t - self._printed_t >= self._every_s
        if is_due:
            self._printed_update, self._printed_t = updates, event.t
            self._console.print(_progress_line(self._metrics), highlight=False, soft_wrap=True)

    def _draw(self) -> None:
        assert self._live is not None, "there is no live panel to draw"
        self._drawn_at = self._clock()
        for task_id in self._progress.task_ids:
            self._progress.update(task_id, completed=self._metrics.samples)
        is_ascii = self._console.options.ascii_only
        rows = (self._progress.get_renderable(), *_panel_rows(self._metrics, is_ascii=is_ascii))
        self._live.update(Group(*rows), refresh=True)


class _SamplesColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:,.0f}/{task.total or 0:,.0f} samples")


class _TimeLeftColumn(ProgressColumn):
    def __init__(self, metrics: RunMetrics) -> None:
        super().__init__()
        self._metrics = metrics

    def render(self, task: Task) -> Text:
        return Text(f"{time_left(self._metrics)} left")


def time_left(metrics: RunMetrics) -> str:
    """Return the time until all samples are trained, at the mean speed so far."""
    if metrics.run is None or not metrics.samples:
        return "–:––"
    left = max(metrics.run.total_samples - metrics.samples, 0)
    seconds = round(metrics.occupancy.wall_s * left / metrics.samples)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _progress_line(metrics: RunMetrics) -> str:
    """Return one line of progress: reward and length of the last batch, the other figures for the run so far."""
    total = metrics.run.total_samples if metrics.run is not None else 0
    done = f"{metrics.samples:,}/{total:,} samples ({metrics.samples / max(total, 1):.0%})"
    figures = ", ".join(f"{name} {value}" for name, value in _figures(metrics))
    return f"update {metrics.updates}, {done}: {figures}, {time_left(metrics)} left"


def _evaluated_line(event: Evaluated) -> str:
    # If rewards are only 0 or 1, the mean reward equals the accuracy and is not repeated.
    reward = event.sampled_reward
    has_reward = reward is not None and abs(reward - event.sampled_accuracy) > 1e-9
    return (
        f"held-out accuracy after {event.samples_trained:,} samples: {event.sampled_accuracy:.3f} sampled, "
        f"{event.greedy_accuracy:.3f} greedy, mean length {event.mean_length:.1f}"
        + (f", mean reward {reward:.3f}" if has_reward else "")
    )


def _panel_rows(metrics: RunMetrics, *, is_ascii: bool = False) -> list[Text]:
    """Return the rows of the live panel below its progress bar: figures, slots, and the largest causes of slot time."""
    figures = _figures(metrics)
    rows = [_named(figures[:3]), _named(figures[3:]), slots_bar(metrics, is_ascii)]
    if (shares := metrics.slot_time()) is not None:
        largest = sorted(shares.items(), key=lambda item: -item[1])[:_SHOWN_CAUSES]
        spent = [(cause.replace("_", " "), f"{share:.0%}") for cause, share in largest if share >= 0.005]
        rows.append(Text.assemble(("slot time ", "dim"), _named(spent)))
    return rows


def _named(figures: Sequence[tuple[str, str]]) -> Text:
    return Text("   ").join(Text.assemble((f"{name} ", "dim"), value) for name, value in figures)


def slots_bar(metrics: RunMetrics, is_ascii: bool = False) -> Text:
    """Return a bar that shows how many slots work at this moment."""
    slots, running = metrics.slots, metrics.occupancy.running - metrics.occupancy.paused
    cells = min(slots, _BAR_CELLS)
    busy = round(cells * running / slots) if slots else 0
    full, empty = ("#", ".") if is_ascii else ("■", "·")
    return Text.assemble(
        ("slots ", "dim"),
        (full * busy, "blue"),
        (empty * (cells - busy), "dim"),
        f" {running}/{slots}",
        (f"  {_ACTIVITY[metrics.occupancy.waiting_for]}", "dim"),
    )


def _figures(metrics: RunMetrics) -> list[tuple[str, str]]:
    stats, timing = metrics.measured()
    batch = metrics.last_batch
    count = len(batch.samples) if batch is not None else 0
    reward = sum(batch.rewards) / count if batch is not None and count else None
    length = sum(batch.lengths) / count if batch is not None and count else None
    return [
        ("reward", number(reward, 3)),
        ("length", number(length, 1)),
        ("staleness", f"{number(metrics.staleness_mean, 2)} (max {number(metrics.staleness_max)})"),
        ("bubble", share(metrics.bubble_ratio(stats, timing))),
        ("goodput", share(metrics.goodput(timing))),
        ("tokens/s", number(metrics.tokens_per_s(timing))),
    ]
