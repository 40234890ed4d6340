"""The lock of a run directory: only one process writes a run, and the error names that process.

`run/rundir.py` and the trainer hold a `RunLock`; the report and the dashboard call `is_being_written`.
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
# Some network file systems do not support flock.
_NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}

log = logging.getLogger(__name__)


class RunLock:
    """Held by the process that writes a run. A second process that acquires it gets a RunDirError naming the holder.

    The operating system keeps the lock (flock) and drops it when the process ends in any way; the text in the file is
    only for people. Without flock (Windows) the file itself is the lock: after a crash a user must delete it, and the
    error says so.
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
        """Take the lock or raise, without waiting; the run directory must exist."""
        assert self._descriptor is None, f"the lock of {self.run_dir} is already held by this object"
        try:
            descriptor = self._open()
            self._descriptor = descriptor
            _held.add(self)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _own_entry().encode())
        except RunDirError:
            raise
        except OSError as error:
            self.release()
            raise unwritable(self.run_dir, error.strerror or str(error)) from None

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if descriptor is None:
            return
        # Delete the file while it is locked: a process that has opened it sees that it is gone, and opens a new one.
        if fcntl is not None and _is_at(descriptor, self.path):
            self.path.unlink(missing_ok=True)
        os.close(descriptor)
        if fcntl is None:  # Windows cannot delete an open file
            self.path.unlink(missing_ok=True)

    def _open(self) -> int:
        if fcntl is None:
            try:
                return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                raise self._in_use(f"wait for it or stop it; if it has ended, delete {self.path}") from None
        # Refuse a symbolic link: writing the holder's name would overwrite the file that it points to.
        for _ in range(100):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                self._flock(descriptor)
                if _is_at(descriptor, self.path):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the last holder deleted it between our open and flock
        raise self._in_use("wait for it or stop it")

    def _flock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use("wait for it or stop it") from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            log.warning("%s cannot be locked (%s): let only one process write it", self.run_dir, error.strerror)

    def _in_use(self, remedy: str) -> RunDirError:
        return RunDirError(f"run {self.run_dir} is in use by {_holder(self.path)}: {remedy}")


def is_being_written(run_dir: str | Path) -> bool:
    """Whether the process named in the lock file still runs; takes no lock.

    A process on another machine cannot be checked, and counts as running.
    """
    try:
        pid, _, host = (Path(run_dir) / LOCK_FILE).read_text(encoding="utf-8").split(maxsplit=2)
        if host.strip() == socket.gethostname() and fcntl is not None:  # Windows has no signal 0
            os.kill(int(pid), 0)
    except PermissionError:  # the process or the file belongs to another user
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


# A forked child shares the flock of its parent, and would keep the run locked after the parent has ended.
_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        if lock._descriptor is not None:
            os.close(lock._descriptor)
            lock._descriptor = None
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` still names this open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _own_entry() -> str:
    return f"{os.getpid()} {datetime.now(UTC).isoformat(timespec='seconds')} {socket.gethostname()}\n"


def _holder(path: Path) -> str:
    """The holder that a lock file names. A file with other text gives "another process"."""
    try:
        pid, since, host = path.read_text(encoding="utf-8").split(maxsplit=2)
        where = "" if host.strip() == socket.gethostname() else f" on {host.strip()!r}"
        return f"process {int(pid)}{where} (since {datetime.fromisoformat(since):%Y-%m-%d %H:%M:%S %Z})"
    except (OSError, ValueError):
        return "another process"


def unwritable(run_dir: Path, why: str) -> RunDirError:
    return RunDirError(f"cannot write the run directory {run_dir}: {why}; choose another with run.dir=PATH")
