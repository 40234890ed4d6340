"""Compile C sources into libraries at first use, keep them in the user's cache folder, and load them.

`native/kernel.py` and `learner/native_layers.py` call `load_library`. Without a working C compiler there is no library,
and the callers use torch instead.
Guarantees: a library is loaded only if it is whole (its name carries its SHA-256) and no other user could have written
or replaced it. A library that is not is compiled again.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

SOURCES = Path(__file__).parent  # folder of the C files and headers
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi")
_COMPILE_TIMEOUT_S = 60.0
_DESCRIPTORS = Path("/proc/self/fd")  # Linux: names of open files
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SYSTEM_USERS = (0, 65534)  # root, and how a container without rights shows the root of its host

log = logging.getLogger(__name__)


def load_library(source: Path, headers: Sequence[Path], *, fallback: str) -> ctypes.CDLL | None:
    """Load the library of a source that includes these headers, after compiling it if necessary.

    Returns None if that fails, and logs the reason and the `fallback`.
    """
    compiler = _find_compiler()
    if compiler is None:
        log.info("no C compiler found: %s", fallback)
        return None
    try:
        return _load_cached(compiler, (*_FLAGS, *_processor_flags()), source, headers)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s could not be compiled (%s): %s", source.name, _reason(error), fallback)
        return None


def _find_compiler() -> str | None:
    wanted = os.environ.get("CC")
    return next((path for name in ((wanted,) if wanted else _COMPILERS) if (path := shutil.which(name))), None)


def _processor_flags() -> tuple[str, ...]:
    """Flags for this processor. They are part of the file name, so that different machines can share a cache.

    `-mprfchw`: lines that will be written are fetched for writing, not for reading first. Old processors ignore that.
    """
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return ("-mavx2", "-mfma", "-mprfchw") if has_vectors else ()


def _load_cached(compiler: str, flags: tuple[str, ...], source: Path, headers: Sequence[Path]) -> ctypes.CDLL:
    texts = [path.read_text(encoding="utf-8") for path in (source, *headers)]
    text = "\n".join((*texts, platform.system(), platform.machine(), *flags))
    name = f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        folder = _cache_folder()
        for path in folder.glob(f"{name}-*.so"):
            if (library := _load_checked(path)) is not None:
                return library
            log.info("%s is damaged, or other users can write to it: it is compiled again", path)
            path.unlink(missing_ok=True)
        library = _load_checked(_compile(compiler, flags, source, folder, name))
        if library is not None:
            return library
    except (OSError, RuntimeError) as error:  # no home folder, or its file system is read-only or noexec
        log.info("%s cannot be cached (%s): it is compiled for this process only", name, error)
    with tempfile.TemporaryDirectory(prefix="sortedrl-") as scratch:
        folder = Path(scratch).resolve()
        _check_private(folder)
        return ctypes.CDLL(str(_compile(compiler, flags, source, folder, name)))  # stays loaded after it is deleted


def _cache_folder() -> Path:
    """The folder of the user's libraries, made if necessary. Raises PermissionError if others can replace its files."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sortedrl"
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    folder = folder.resolve()
    _check_private(folder)
    return folder


def _check_private(folder: Path) -> None:
    """Raise PermissionError if another user can write to the folder, or can replace it or one of its parents."""
    for path in (folder, *folder.parents):
        status = path.stat()
        is_trusted = status.st_uid == os.getuid() or (path != folder and status.st_uid in _SYSTEM_USERS)
        is_sticky = path != folder and status.st_mode & stat.S_ISVTX  # others cannot rename what is not theirs
        if not is_trusted or (status.st_mode & _OTHERS_WRITE and not is_sticky):
            raise PermissionError(f"other users can replace files in {path}: run chmod go-w on it")


def _load_checked(path: Path) -> ctypes.CDLL | None:
    """Load a library of the cache. Returns None if it is damaged, a link, or writable by other users.

    Check and load use one descriptor, so that the file cannot be swapped in between.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        content = _read_private(descriptor)
        if content is None or not path.stem.endswith("-" + hashlib.sha256(content).hexdigest()):
            return None
        if _DESCRIPTORS.is_dir():
            library = ctypes.CDLL(str(_DESCRIPTORS / str(descriptor)))
            # Keep it open: under the same number, the loader would take a later library for this one.
            descriptor = None
            return library
        with tempfile.TemporaryDirectory(prefix="sortedrl-") as scratch:
            copy = Path(scratch) / path.name
            copy.write_bytes(content)
            return ctypes.CDLL(str(copy))
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _read_private(descriptor: int) -> bytes | None:
    """The content of an open file, or None if it is not a file that only this user can write to."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & _OTHERS_WRITE:
        return None
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def _compile(compiler: str, flags: tuple[str, ...], source: Path, folder: Path, name: str) -> Path:
    """Compile to a temporary file and rename it to NAME-DIGEST.so. The digest shows later whether the file is whole."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        built = Path(scratch) / f"{name}.so"
        command = [compiler, *flags, "-o", str(built), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
        built.chmod(0o700)
        with built.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        return built.replace(folder / f"{name}-{digest}.so")


def _reason(error: Exception) -> str:
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__
