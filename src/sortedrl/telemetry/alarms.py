"""Alarms: what a user must know about a run at once, computed from its events.

`RunMetrics` passes events here. `metrics.jsonl` has the messages at each update, where the dashboard's list of runs
reads them; pages show those of the last event.

Guarantees: an alarm disappears when its cause does, except for answers without a score, which stay counted. Memory does
not grow with the run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sortedrl.telemetry.events import BatchTaken, MachineMeasured, UpdateDone

RECENT_UPDATES = 8
MIN_DISK_BYTES = 2 * 10**9
_MAX_STILL = (
    1  # updates in a row without an optimizer step that need no alarm: a batch of equal rewards has no gradient
)


@dataclass(slots=True, kw_only=True)
class Alarms:
    """Counts since the start, and over the most recent updates."""

    num_still: int = 0  # updates in a row without an optimizer step
    num_truncated: int = 0  # batches in a row whose answers all reached the token limit
    disk_free_bytes: int | None = None
    _stale: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT_UPDATES))

    def take_batch(self, event: BatchTaken, bound: int | None) -> None:
        """Count a batch; `bound` is the largest staleness that the schedule allows, None without one."""
        count = len(event.samples)
        self.num_truncated = self.num_truncated + 1 if count and event.truncated >= count else 0
        if bound:  # at 0 every sample is at the bound, as intended
            self._stale.append((sum([staleness >= bound for staleness in event.staleness]), count))

    def finish_update(self, event: UpdateDone) -> None:
        self.num_still = 0 if event.optimizer_steps else self.num_still + 1

    def measure(self, event: MachineMeasured) -> None:
        self.disk_free_bytes = event.disk_free_bytes

    def messages(self, *, num_unscored: int, bound: int | None) -> list[str]:
        """Return the alarms, each as a clause."""
        found = []
        if num_unscored:
            found.append(f"the reward of {_plural(num_unscored, 'sample')} could not be computed")
        if self.num_still > _MAX_STILL:
            found.append(f"the last {self.num_still:,} updates took no optimizer step")
        if self.num_truncated:
            found.append(f"every answer of the last {_plural(self.num_truncated, 'batch', 'batches')} was truncated")
        at_bound, count = (sum(part) for part in zip(*self._stale, strict=True)) if self._stale else (0, 0)
        if bound and at_bound > count / 2:
            found.append(f"{at_bound / count:.0%} of the samples trained last are at the staleness bound of {bound}")
        if self.disk_free_bytes is not None and self.disk_free_bytes < MIN_DISK_BYTES:
            found.append(disk_message(self.disk_free_bytes))
        return found


def disk_message(free_bytes: int) -> str:
    return f"only {free_bytes / 1e9:.1f} GB are free on the disk of the run"


def _plural(count: int, one: str, several: str = "") -> str:
    return f"1 {one}" if count == 1 else f"{count:,} {several or one + 's'}"
