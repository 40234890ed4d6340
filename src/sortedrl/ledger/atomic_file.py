"""Write a file atomically: the name gets the complete file or keeps what it had. And sync files and names to disk.

The trainer, the report, the trace, summaries and simulations write their files through `atomic_file`; a resume calls
`remove_unfinished`. For folders see `run/atomic_folder.py`, which calls `sync` and `sync_name` too.
Guarantees: no symbolic link is followed, because another user may have put links into a run directory. The temporary
file has a random name and is created anew, and the rename replaces a link instead of the file that it points to. It is
locked (flock) while it is written, so what a killed process left can be told from what a living one writes.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.part")


@contextmanager
def atomic_file(path: Path) -> Iterator[TextIO]:
    """Yield a text file that replaces `path` when the block ends, and is deleted if the block raises."""
    temporary, file = _open_temporary(path.parent)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:  # Windows cannot rename an open file
                file.close()
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot sync folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_name(path: Path) -> None:
    """Sync the folder that a file or folder is in, so that its name survives a power loss.

    A folder that may be written but not read cannot be synced, and is left to the system.
    """
    with suppress(PermissionError):
        sync(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of killed processes in `folder`, and none that a process still writes.

    Where files cannot be locked, or not be removed, they stay.
    """
    if fcntl is None:
        return
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if _TEMPORARY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _open_temporary(folder: Path) -> tuple[Path, TextIO]:
    while True:
        temporary = folder / f".{secrets.token_hex(8)}.part"
        file = temporary.open("x", encoding="utf-8")  # "x" fails if the name exists, even as a dead link
        if fcntl is not None:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        if temporary.exists():
            return temporary, file
        file.close()  # a resume removed it before it was locked
