"""C sources as libraries: compiled at their first use, kept in the user's cache, and loaded.

`engine/kernel.py` and `learner/native_layers.py` call `load_compiled`. Where no C compiler is found, or it fails, there
is no library, and whoever asked does without it. Nothing is loaded that others could have written: the folder and the
file are this user's alone.
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

SOURCES = Path(__file__).parent  # the C files and headers that the engine and the learner compile
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi")
_LIMIT_S = 60.0

log = logging.getLogger(__name__)


def load_compiled(source: Path, headers: Sequence[Path], *, without: str) -> ctypes.CDLL | None:
    """The library of a source and the headers of ours that it includes, compiled if it has to be.

    None where that cannot be done; the log then says why, and what is done `without` it.
    """
    compiler = _find_compiler()
    if compiler is None:
        log.info("no C compiler found: %s", without)
        return None
    try:
        return _load_kept(compiler, (*_FLAGS, *_processor_flags()), source, headers)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s could not be compiled (%s): %s", source.name, _reason(error), without)
        return None


def _find_compiler() -> str | None:
    wanted = os.environ.get("CC")
    return next((path for name in ((wanted,) if wanted else _COMPILERS) if (path := shutil.which(name))), None)


def _processor_flags() -> tuple[str, ...]:
    """Of the processor at hand, so that a cache that several machines share serves each of them."""
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return ("-mavx2", "-mfma") if has_vectors else ()


def _load_kept(compiler: str, flags: tuple[str, ...], source: Path, headers: Sequence[Path]) -> ctypes.CDLL:
    texts = [path.read_text(encoding="utf-8") for path in (source, *headers)]
    text = "\n".join((*texts, platform.system(), platform.machine(), *flags))
    name = f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sortedrl"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_own(folder):
            if not (folder / name).is_file():
                _compile(compiler, flags, source, folder / name)
            if _is_own(folder / name):
                return ctypes.CDLL(str(folder / name))
    except (OSError, RuntimeError) as error:  # no home, a file system that cannot be written or not run from
        log.info("%s cannot be kept (%s): it is compiled for this process alone", name, error)
    with tempfile.TemporaryDirectory(prefix="sortedrl-") as scratch:
        _compile(compiler, flags, source, Path(scratch) / name)
        return ctypes.CDLL(str(Path(scratch) / name))  # stays loaded when the file is gone


def _is_own(path: Path) -> bool:
    """Whether nobody but this user could have written it."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: str, flags: tuple[str, ...], source: Path, target: Path) -> None:
    """Beside the target first: processes that start together must not load each other's halves."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        command = [compiler, *flags, "-o", str(built), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S)
        built.chmod(0o700)
        built.replace(target)


def _reason(error: Exception) -> str:
    said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return said[0] if said else type(error).__name__
