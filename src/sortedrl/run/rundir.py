"""The run directory: whether it can be written, how an earlier one makes way, and the lock of who writes it.

The trainer calls `check_writable` before it does anything else, then `prepare_run_dir` for a run from the start, and
holds a `RunLock` as long as it writes. An earlier run of the same name is moved aside, never overwritten, and a run
that another process is writing is left alone.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from sortedrl.errors import RunDirError
from sortedrl.ledger.run_lock import LOCK_FILE, RunLock, unwritable

log = logging.getLogger(__name__)


def check_writable(run_dir: Path) -> None:
    """Refuse a place where no run directory can be made, before anything else is done."""
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise unwritable(run_dir, f"{there} is no folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise unwritable(run_dir, error.strerror or str(error)) from None


def prepare_run_dir(run_dir: Path) -> None:
    """Make an empty run directory; an earlier run of that name is moved aside, never overwritten."""
    try:
        if run_dir.exists() and any(entry.name != LOCK_FILE for entry in run_dir.iterdir()):
            _move_aside(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
    except RunDirError:
        raise
    except OSError as error:
        raise unwritable(run_dir, error.strerror or str(error)) from None


def _move_aside(run_dir: Path) -> None:
    with RunLock(run_dir) as lock:
        number = 1
        while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
            number += 1
        run_dir.rename(aside)
        lock.run_dir = aside  # the lock goes along, and is released there
    log.info("%s existed: moved to %s", run_dir, aside)
