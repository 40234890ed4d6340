"""Compile C sources into libraries at first use, keep them in the user's cache folder, and load them.

`native/kernel.py` and `learner/native_layers.py` call `load_library`. Without a working C compiler there is no library,
and the callers use torch instead.
Guarantees: a library is loaded only if no other user could have written it. Folder and file belong to this user.
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
    """Flags for this processor. They are part of the file name, so that different machines can share a cache."""
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return ("-mavx2", "-mfma") if has_vectors else ()


def _load_cached(compiler: str, flags: tuple[str, ...], source: Path, headers: Sequence[Path]) -> ctypes.CDLL:
    texts = [path.read_text(encoding="utf-8") for path in (source, *headers)]
    text = "\n".join((*texts, platform.system(), platform.machine(), *flags))
    name = f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sortedrl"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder):
            if not (folder / name).is_file():
                _compile(compiler, flags, source, folder / name)
            if _is_private(folder / name):
                return ctypes.CDLL(str(folder / name))
    except (OSError, RuntimeError) as error:  # no home folder, or its file system is read-only or noexec
        log.info("%s cannot be cached (%s): it is compiled for this process only", name, error)
    with tempfile.TemporaryDirectory(prefix="sortedrl-") as scratch:
        _compile(compiler, flags, source, Path(scratch) / name)
        return ctypes.CDLL(str(Path(scratch) / name))  # stays loaded after the file is deleted


def _is_private(path: Path) -> bool:
    """Whether only this user can write to the path."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: str, flags: tuple[str, ...], source: Path, target: Path) -> None:
    """Compile to a temporary file and rename it, so that another process never loads an incomplete library."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        command = [compiler, *flags, "-o", str(built), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
        built.chmod(0o700)
        built.replace(target)


def _reason(error: Exception) -> str:
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__
