"""A folder's manifest: the size and SHA-256 of every file, to find damage before a checkpoint is used.

`checkpoint_folder.py` writes it last and checks it first. It finds faults of disks, copies and killed processes; it
does not protect against a person who changes a file and the manifest. Guarantees: no name in a manifest leads out of
the folder; a folder with a symbolic link counts as damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sortedrl.errors import RunDirError

MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 1


def write_manifest(folder: Path, known: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write the manifest of all files in the folder; raises if it holds anything but files and folders.

    `known`: size and SHA-256 of files that other processes wrote, by name. They must be there, and are not read again.
    """
    try:
        sizes = dict(_files(folder))
        for name, entry in (known or {}).items():
            if name not in sizes or sizes[name] != entry["size"]:
                raise _Damage(name, f"{sizes.get(name, 0)} bytes here, {entry['size']} were written")
        files = {
            name: dict(known[name]) if known and name in known else {"size": size, "sha256": _digest(folder / name)}
            for name, size in sizes.items()
        }
    except _Damage as damage:
        raise RunDirError(f"{damage}: write only regular files to {folder}") from None
    document = {"schema_version": SCHEMA_VERSION, "files": files}
    (folder / MANIFEST_FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


def find_damage(folder: Path, *, required: tuple[str, ...] = ()) -> str | None:
    """What is wrong with a folder, as "file: why"; None if every listed file is there and unchanged.

    Files that are not listed are allowed: a file browser or an opened database may leave some.
    """
    try:
        sizes = dict(_files(folder))
        listed = _read(folder)
        for name in (*required, *listed):
            if name not in listed:
                raise _Damage(name, f"not in {MANIFEST_FILE}")
            if name not in sizes:
                raise _Damage(name, "missing")
            if sizes[name] != listed[name]["size"]:
                raise _Damage(name, f"{sizes[name]} bytes, {listed[name]['size']} expected")
        for name, entry in listed.items():
            if _digest(folder / name) != entry["sha256"]:
                raise _Damage(name, "the content does not match its checksum")
    except _Damage as damage:
        return str(damage)
    except OSError as error:
        return f"{Path(str(error.filename or folder)).name}: {error.strerror or error}"
    return None


def num_bytes(folder: Path) -> int:
    """The total size of a folder's files; 0 if it cannot be read."""
    try:
        return sum(size for _, size in _files(folder))
    except (_Damage, OSError):
        return 0


class _Damage(Exception):
    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    """The manifest's entries by file name, each with a size and a digest."""
    try:
        document = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        if document["schema_version"] != SCHEMA_VERSION:
            raise _Damage(MANIFEST_FILE, f"version {document['schema_version']}, this package reads {SCHEMA_VERSION}")
        entries = {
            str(name): {key: entry[key] for key in ("size", "sha256")} for name, entry in document["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Damage(MANIFEST_FILE, f"unreadable ({type(error).__name__})") from None
    for name in entries:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name or ":" in name:
            raise _Damage(MANIFEST_FILE, f"names {name!r}, which is not a plain path inside the folder")
    return entries


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Relative names (with forward slashes) and sizes of all files except the manifest, sorted."""
    if folder.is_symlink():
        raise _Damage(folder.name, "a symbolic link")
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders.sort()
        for name in sorted([*folders, *names]):
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode):
                continue
            # A link may point anywhere, and reading a pipe would block.
            if not stat.S_ISREG(found.st_mode):
                raise _Damage(relative, "a symbolic link" if path.is_symlink() else "not a regular file")
            if relative != MANIFEST_FILE:
                yield relative, found.st_size


def _raise(error: OSError) -> None:
    raise error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
