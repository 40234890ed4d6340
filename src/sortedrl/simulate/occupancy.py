"""How many slots run, over a run's clock: the curve that shows the bubble.

The `simulate` command folds a run's events into one `OccupancyCurve` per strategy, and `page.py` draws them. What it
keeps true: a bin's height is the mean number of running slots over its time, so areas are slot-seconds however long
the run; memory is two numbers per attempt.
"""

from __future__ import annotations

from array import array

import numpy as np

from sortedrl.telemetry.events import AttemptEnded, AttemptStarted, BatchTaken, Event, UpdateDone, WeightsPublished


class OccupancyCurve:
    def __init__(self) -> None:
        self._times, self._changes = array("d"), array("l")
        self._num_paused = 0
        self._updates = array("d")
        self._end = 0.0

    def emit(self, event: Event) -> None:
        """Fold one event in."""
        self._end = max(self._end, event.t)
        if isinstance(event, AttemptStarted):
            self._change(event.t, 1)
        elif isinstance(event, AttemptEnded):
            self._change(event.t, -1)
        elif isinstance(event, BatchTaken):
            self._num_paused = event.num_paused
            self._change(event.t, -self._num_paused)
        elif isinstance(event, WeightsPublished):
            self._change(event.t, self._num_paused)
            self._num_paused = 0
        elif isinstance(event, UpdateDone):
            self._updates.append(event.t)

    def _change(self, t: float, by: int) -> None:
        self._times.append(t)
        self._changes.append(by)

    @property
    def end(self) -> float:
        return self._end

    @property
    def updates(self) -> list[float]:
        """When updates ended."""
        return list(self._updates)

    def binned(self, num_bins: int) -> tuple[list[float], list[float]]:
        """Edges of equal bins from 0 to the end, and the mean of running slots in each."""
        if not self._times:
            return [0.0, self._end], [0.0]
        times, changes = np.asarray(self._times), np.asarray(self._changes, dtype=np.int64)
        order = np.argsort(times, kind="stable")
        times, running = times[order], np.cumsum(changes[order])
        # The integral up to each change, and by interpolation up to each edge: exact, since the curve is in steps.
        area = np.concatenate([[0.0], np.cumsum(np.diff(times) * running[:-1])])
        edges = np.linspace(0.0, self._end, num_bins + 1)
        upto = np.interp(edges, times, area)
        return edges.tolist(), (np.diff(upto) / np.maximum(np.diff(edges), 1e-300)).tolist()
