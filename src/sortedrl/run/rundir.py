"""Prepare the run directory: check that it can be written, and rename an earlier run of the same name.

The trainer calls `check_writable` first, then `prepare_run_dir` for a new run, and holds a `RunLock` while it writes.
Guarantees: an earlier run is renamed and never overwritten; a run that another process writes is not touched. The name
of a new run directory is synced to disk, so that a power loss cannot take it with all its checkpoints.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from sortedrl.errors import RunDirError
from sortedrl.ledger.run_lock import LOCK_FILE, RunLock, unwritable
from sortedrl.run.atomic_folder import make_folder

log = logging.getLogger(__name__)


def check_writable(run_dir: Path) -> None:
    """Raise a RunDirError if no run directory can be made here."""
    try:
        there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
        if not there.is_dir():
            raise unwritable(run_dir, f"{there} is not a folder")
        with tempfile.TemporaryFile(dir=there):
            pass
    except RunDirError:
        raise
    except OSError as error:
        raise unwritable(run_dir, error.strerror or str(error)) from None


def prepare_run_dir(run_dir: Path) -> None:
    """Make an empty run directory; an earlier run of that name is renamed to NAME.1, NAME.2, ..."""
    try:
        if run_dir.exists() and any(entry.name != LOCK_FILE for entry in run_dir.iterdir()):
            _rename_earlier(run_dir)
        make_folder(run_dir, exist_ok=True)
    except RunDirError:
        raise
    except OSError as error:
        raise unwritable(run_dir, error.strerror or str(error)) from None


def _rename_earlier(run_dir: Path) -> None:
    with RunLock(run_dir) as lock:
        number = 1
        while (renamed := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
            number += 1
        run_dir.rename(renamed)
        lock.run_dir = renamed  # the lock file moved with the folder, and is released there
    log.warning("an earlier run was in %s: it is now in %s", run_dir, renamed)
