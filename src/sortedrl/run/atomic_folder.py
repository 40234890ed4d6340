"""Write and delete folders atomically: a folder has its name only while it is complete.

Checkpoints use it. An incomplete folder is a hidden sibling with the process id in its name, so that a later process
recognises what a killed one left: .NAME.partial-PID is being written, .NAME.replaced-PID was renamed to be replaced,
.NAME.removed-PID is being deleted.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sortedrl.ledger.atomic_file import sync, sync_name

log = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<why>partial|replaced|removed)-[0-9]+")


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` when the block ends, and is deleted if the block raises."""
    temporary = begin_folder(folder)
    try:
        yield temporary
        complete_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def begin_folder(folder: Path) -> Path:
    """Make the temporary folder for a folder that takes long to write: call `complete_folder`, or remove it."""
    temporary = _temporary_path(folder, "partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        make_folder(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return temporary


def complete_folder(temporary: Path, folder: Path) -> None:
    """Sync a temporary folder to disk and give it its name."""
    _flush(temporary)
    _put_in_place(temporary, folder)


def remove(folder: Path) -> None:
    """Rename a folder, then delete it, so that a partly deleted folder never has its name."""
    temporary = folder
    if parse_temporary(folder) is None:
        temporary = _temporary_path(folder, "removed")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            folder.rename(temporary)
        except OSError as error:
            log.warning("%s cannot be removed: %s", folder, error)
            return
    if temporary.is_symlink() or temporary.is_file():
        temporary.unlink(missing_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)


def parse_temporary(path: Path) -> tuple[str, str] | None:
    """The final name and the reason (partial, replaced, removed) of a temporary folder; None for any other path."""
    match = _TEMPORARY.fullmatch(path.name)
    return (match["name"], match["why"]) if match else None


def _temporary_path(folder: Path, why: str) -> Path:
    return folder.with_name(f".{folder.name}.{why}-{os.getpid()}")


def make_folder(folder: Path, *, exist_ok: bool = False) -> None:
    """Make a folder and its missing parents, and sync each new name to disk."""
    made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=exist_ok)
    for path in made:
        sync_name(path)


def _flush(folder: Path) -> None:
    """Sync every file, then every folder, before the folder gets its name."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`. An existing folder cannot be replaced in one step, so it is renamed first."""
    replaced = _temporary_path(folder, "replaced")
    try:
        if os.path.lexists(folder):
            folder.rename(replaced)
        temporary.rename(folder)
    except BaseException:
        if not os.path.lexists(folder):
            with suppress(OSError):
                replaced.rename(folder)
        raise
    sync_name(folder)
    remove(replaced)
