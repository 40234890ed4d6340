"""Measures load and memory of the machine during a run, and emits them as events.

The trainer adds a `MachineSink` as the last sink. It emits while the fanout passes on an update, so the measurement is
the next event for every sink.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from sortedrl.telemetry.events import Emit, Event, MachineMeasured, UpdateDone

MIN_INTERVAL_S = 2.0


@dataclass(slots=True, kw_only=True)
class MachineSink:
    """Emits a MachineMeasured after an update, but not more often than every `MIN_INTERVAL_S`."""

    emit_measured: Emit
    run_dir: Path
    kinds: frozenset[type[Event]] = frozenset({UpdateDone})
    _last_s: float | None = None
    _began_s: float = field(default_factory=time.monotonic)
    _cpu_s: float = field(default_factory=time.process_time)

    def emit(self, event: Event) -> None:
        now = time.monotonic()
        if self._last_s is not None and now - self._last_s < MIN_INTERVAL_S:
            return
        cpu_s, elapsed_s = time.process_time(), now - self._began_s
        cores_used = (cpu_s - self._cpu_s) / elapsed_s if elapsed_s > 0 else 0.0
        self._last_s = self._began_s = now
        self._cpu_s = cpu_s
        self.emit_measured(measure(event.t, cores_used, self.run_dir))

    def close(self) -> None:
        """Do nothing: nothing is open."""


def measure(t: float, cores_used: float, run_dir: Path) -> MachineMeasured:
    """Return what the machine tells now; what it does not tell is None."""
    return MachineMeasured(
        t=t,
        cores_used=round(cores_used, 3),
        load=_load(),
        cores=os.cpu_count(),
        process_bytes=_kib_of("/proc/self/status", "VmRSS"),
        available_bytes=_kib_of("/proc/meminfo", "MemAvailable"),
        gpu_bytes=_gpu_bytes(),
        disk_free_bytes=_disk_free(run_dir),
    )


def _load() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # not a POSIX system
        return None


def _kib_of(path: str, name: str) -> int | None:
    """Return a figure of a Linux status file, in bytes."""
    try:
        lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "")
    return int(found) * 1024 if found.isdecimal() else None


def _gpu_bytes() -> int | None:
    """The GPU memory that this process's torch has reserved. A process that has not imported torch has none."""
    torch = sys.modules.get("torch")
    return torch.cuda.memory_reserved() if torch is not None and torch.cuda.is_available() else None


def _disk_free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
