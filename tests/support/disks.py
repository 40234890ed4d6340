"""Small file systems of their own, for tests that fill a disk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def small_disk_of(size: str, parent: Path) -> Iterator[Path]:
    """For a fixture: a folder that is a file system of this size, spelled as mount has it; skips where none may be."""
    folder = parent / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("a small file system needs the command mount")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here, which needs root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
