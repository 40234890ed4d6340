"""Folders that appear under their name complete or not at all, and that lose it before they are deleted.

Checkpoints are written and removed with these. What is on its way in or out stands beside its place as a hidden folder
named for the process that is at it, so that whoever comes later knows what a killed one left behind:
.NAME.partial-PID is being written, .NAME.replaced-PID makes way for another, .NAME.removed-PID is being deleted.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

_ASIDE = re.compile(r"\.(?P<name>.+)\.(?P<why>partial|replaced|removed)-[0-9]+")


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Write to the folder that this gives: it replaces `folder` when the block ends, and is dropped if it fails."""
    aside = _beside(folder, "partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        _make(aside)
        yield aside
        _flush(aside)
        _put_in_place(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete a folder. It loses its name first: half of it must not look like the whole."""
    aside = folder
    if aside_of(folder) is None:
        aside = _beside(folder, "removed")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            folder.rename(aside)
        except OSError as error:
            log.warning("%s cannot be removed: %s", folder, error)
            return
    if aside.is_symlink() or aside.is_file():
        aside.unlink(missing_ok=True)
    shutil.rmtree(aside, ignore_errors=True)


def aside_of(path: Path) -> tuple[str, str] | None:
    """Of a folder that stands aside, the name that it had or was to have, and why it stands there; else None."""
    match = _ASIDE.fullmatch(path.name)
    return (match["name"], match["why"]) if match else None


def _beside(folder: Path, why: str) -> Path:
    return folder.with_name(f".{folder.name}.{why}-{os.getpid()}")


def _make(folder: Path) -> None:
    """Make a folder and those above it, each name on disk."""
    made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    folder.mkdir(parents=True)
    for path in made:
        _sync(path.parent)


def _flush(folder: Path) -> None:
    """Have every file, then every folder's list of them, on disk before the name points there."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _put_in_place(aside: Path, folder: Path) -> None:
    """A folder cannot be replaced in one step: an older one is moved away first."""
    replaced = _beside(folder, "replaced")
    try:
        if os.path.lexists(folder):
            folder.rename(replaced)
        aside.rename(folder)
    except BaseException:
        if not os.path.lexists(folder):
            with suppress(OSError):
                replaced.rename(folder)
        raise
    _sync(folder.parent)
    remove(replaced)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows has no such call for folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
