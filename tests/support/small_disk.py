"""A small file system, for tests that fill a disk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def mount_small_disk(size: str, parent: Path) -> Iterator[Path]:
    """Mount a file system of this size (such as "2m") for one fixture; skips the test where mounting is not allowed."""
    folder = parent / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("this test needs the command `mount`")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a small file system failed (it needs root): {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
