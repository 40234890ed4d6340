"""The page of memory that tells `syscalls.c` what to do, and how that library is built and loaded."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

NOTHING, KILL, DISK_FULL, CLOCK_JUMP, RECORD = range(5)  # `enum action`
_LAYOUT = struct.Struct("=7q1024s")  # `struct control`
_HIT = 6 * 8  # where `hit` is in it
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_SOURCE = Path(__file__).with_name("syscalls.c")


class Control:
    """The page of this process; the processes that it forks share it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _LAYOUT.size)

    def set(
        self, action: int, *, pid: int, at: int = 0, jump_s: int = 0, log_fd: int = -1, folder: Path | str = ""
    ) -> None:
        self._page[: _LAYOUT.size] = _LAYOUT.pack(0, action, at, 0, jump_s, log_fd, 0, str(folder).encode())
        self._page[:8] = struct.pack("=q", pid)  # last: from here on the calls of this process count

    def clear(self) -> None:
        self._page[: _LAYOUT.size] = bytes(_LAYOUT.size)

    def mark_hit(self) -> None:
        """Note that a fault happened which the library does not cause."""
        self._page[_HIT : _HIT + 8] = struct.pack("=q", 1)

    @property
    def count(self) -> int:
        return _LAYOUT.unpack(self._page[: _LAYOUT.size])[3]

    @property
    def is_hit(self) -> bool:
        return bool(_LAYOUT.unpack(self._page[: _LAYOUT.size])[6])


def open_control() -> Control:
    """The page that `start_again` made for this process."""
    return Control(Path(os.environ["FUZZ_CONTROL"]))


def left_shared_memory() -> list[str]:
    """The shared memory that processes with the library made since the last call and that still exists; removes it."""
    log = Path(os.environ["FUZZ_SHARED_MEMORY"])
    names = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    left = [name for name in dict.fromkeys(names) if (_SHARED_MEMORY / name).exists()]
    for name in left:
        (_SHARED_MEMORY / name).unlink(missing_ok=True)
    return left


def environment(folder: Path) -> dict[str, str]:
    """The environment in which a process of the fuzzer runs: with the library loaded and a page of its own."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if sys.platform != "linux" or compiler is None:
        raise SystemExit("error: the fuzzer needs Linux and a C compiler (cc, gcc or clang)")
    library = folder / "syscalls.so"
    if not library.exists():
        flags = ("-O1", "-shared", "-fPIC", "-D_LARGEFILE64_SOURCE", "-Wno-nonnull")
        subprocess.run([compiler, *flags, "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    handle, page = tempfile.mkstemp(prefix="control-", dir=folder)
    os.write(handle, bytes(_LAYOUT.size))
    os.close(handle)
    own = {"FUZZ_CONTROL": page, "FUZZ_SHARED_MEMORY": f"{page}.shared-memory", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "LD_PRELOAD": str(library)}
