"""The lock of a run directory: one process writes a run, and others are told which.

`run/rundir.py` and the trainer hold a `RunLock`; report and dashboard ask `is_being_written`.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import weakref
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from sortedrl.errors import RunDirError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE = "lock"
# Some network file systems know no flock.
_NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}

log = logging.getLogger(__name__)


class RunLock:
    """Held by the one process that writes a run; whoever else tries gets a RunDirError that names the holder.

    The operating system holds it (flock), so that it ends with the process however that ends, and the text in the file
    is for people only. Where there is no flock the file itself is the lock: after a crash it has to be deleted by hand,
    which the message says.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    @property
    def path(self) -> Path:
        return self.run_dir / LOCK_FILE

    def acquire(self) -> None:
        """Take the lock at once or raise; the run directory has to be there."""
        assert self._descriptor is None, f"the lock of {self.run_dir} is held by this object already"
        try:
            descriptor = self._open()
            self._descriptor = descriptor
            _held.add(self)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _myself().encode())
        except RunDirError:
            raise
        except OSError as error:
            self.release()
            raise unwritable(self.run_dir, error.strerror or str(error)) from None

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if descriptor is None:
            return
        # Deleted while it is held: whoever waits at the old file sees that it is gone, and opens the next.
        if fcntl is not None and _is_at(descriptor, self.path):
            self.path.unlink(missing_ok=True)
        os.close(descriptor)
        if fcntl is None:  # Windows deletes no open file
            self.path.unlink(missing_ok=True)

    def _open(self) -> int:
        if fcntl is None:
            try:
                return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                raise self._in_use(f"wait for it or end it; if it has ended, delete {self.path}") from None
        # A link left here by somebody else must not get what it points to overwritten.
        for _ in range(100):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                self._flock(descriptor)
                if _is_at(descriptor, self.path):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its last holder deleted it between open and flock
        raise self._in_use("wait for it or end it")

    def _flock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use("wait for it or end it") from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            log.warning("%s cannot be locked (%s): see to it that one process writes it", self.run_dir, error.strerror)

    def _in_use(self, remedy: str) -> RunDirError:
        return RunDirError(f"run {self.run_dir} is in use by {_holder(self.path)}: {remedy}")


def is_being_written(run_dir: str | Path) -> bool:
    """Whether a process of this machine holds the run, by what its lock file says: nothing is locked for that.

    A lock file from elsewhere is taken at its word.
    """
    try:
        pid, _, host = (Path(run_dir) / LOCK_FILE).read_text(encoding="utf-8").split(maxsplit=2)
        if host.strip() == socket.gethostname() and fcntl is not None:  # Windows has no harmless signal
            os.kill(int(pid), 0)
    except PermissionError:  # somebody else's process, or somebody else's file
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


# A forked child shares its parent's flock, and would hold the run for as long as it outlives the parent.
_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lock in list(_held):
        if lock._descriptor is not None:
            os.close(lock._descriptor)
            lock._descriptor = None
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that the path names."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _myself() -> str:
    return f"{os.getpid()} {datetime.now(UTC).isoformat(timespec='seconds')} {socket.gethostname()}\n"


def _holder(path: Path) -> str:
    """Who a lock file says its holder is. What is no such text is not repeated."""
    try:
        pid, since, host = path.read_text(encoding="utf-8").split(maxsplit=2)
        where = "" if host.strip() == socket.gethostname() else f" on {host.strip()!r}"
        return f"process {int(pid)}{where} (since {datetime.fromisoformat(since):%Y-%m-%d %H:%M:%S %Z})"
    except (OSError, ValueError):
        return "another process"


def unwritable(run_dir: Path, why: str) -> RunDirError:
    return RunDirError(f"cannot write the run directory {run_dir}: {why}; choose another with run.dir=PATH")
