"""The compiled kernel: built from `kernel.c` and its headers at its first use, kept in the user's cache, and loaded.

`native.py` calls it. Where no C compiler is found, or it fails, there is no kernel, and the engine runs on torch as it
would have anyway. Nothing is loaded that others could have written: the folder and the file are this user's alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("kernel.c")
_SOURCES = (_SOURCE, *sorted(_SOURCE.parent.glob("kernel_*.h")))
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi")
_LIMIT_S = 60.0

log = logging.getLogger(__name__)


class Layer(ctypes.Structure):
    """`struct layer` of the source; a null pointer where a model has no such thing."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("qkv", "qkv_bias", "q_gain", "k_gain", "out", "gate_up", "down")
    )


class Model(ctypes.Structure):
    """`struct model` of the source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_layers", "size", "inner", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, ctypes.c_int64) for name in ("slots", "positions")),
        *((name, ctypes.c_float) for name in ("floor", "head_floor", "scale")),
        *((name, ctypes.c_void_p) for name in ("layers", "embedding", "head", "cosines", "sines", "cache")),
    )


class Team(ctypes.Structure):
    """`struct team` of the source: where threads of one call meet."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("arrived", "turn", "left"))


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """The kernel, compiled if it has to be; None, and the reason in the log, where that cannot be done."""
    compiler = _find_compiler()
    if compiler is None:
        log.info("no C compiler found: the local engine runs on torch, small models at half the speed or less")
        return None
    flags = (*_FLAGS, *_processor_flags())
    try:
        return _declare(_load_kept(compiler, flags))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the engine's kernel could not be compiled (%s): models run on torch", _reason(error))
        return None


def _find_compiler() -> str | None:
    wanted = os.environ.get("CC")
    return next((path for name in ((wanted,) if wanted else _COMPILERS) if (path := shutil.which(name))), None)


def _processor_flags() -> tuple[str, ...]:
    """Of the processor at hand, so that a cache that several machines share serves each of them."""
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return ("-mavx2", "-mfma") if has_vectors else ()


def _load_kept(compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    sources = [path.read_text(encoding="utf-8") for path in _SOURCES]
    text = "\n".join((*sources, platform.system(), platform.machine(), *flags))
    name = f"kernel-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sortedrl"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_own(folder):
            if not (folder / name).is_file():
                _compile(compiler, flags, folder / name)
            if _is_own(folder / name):
                return ctypes.CDLL(str(folder / name))
    except (OSError, RuntimeError) as error:  # no home, a file system that cannot be written or not run from
        log.info("the engine's kernel cannot be kept (%s): it is compiled for this process alone", error)
    with tempfile.TemporaryDirectory(prefix="sortedrl-") as scratch:
        _compile(compiler, flags, Path(scratch) / name)
        return ctypes.CDLL(str(Path(scratch) / name))  # stays loaded when the file is gone


def _is_own(path: Path) -> bool:
    """Whether nobody but this user could have written it."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    """Beside the target first: processes that start together must not load each other's halves."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        command = [compiler, *flags, "-o", str(built), str(_SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S)
        built.chmod(0o700)
        built.replace(target)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.sortedrl_memory.restype = number
    library.sortedrl_memory.argtypes = [ctypes.POINTER(Model), number]
    library.sortedrl_panels.restype = None
    library.sortedrl_panels.argtypes = [pointer, pointer, number, number, pointer]
    library.sortedrl_forward.restype = None
    library.sortedrl_forward.argtypes = [
        *(ctypes.POINTER(Model), pointer),
        *(ctypes.POINTER(Team), number, number),  # the thread's rank, and how many there are
        *(number, pointer, pointer, pointer),  # tokens, their slots and positions
        *(number, pointer, pointer),  # wanted rows, logits
    ]
    library.sortedrl_draw.restype = None
    library.sortedrl_draw.argtypes = [
        *(number, number),  # the thread's rank, and how many there are
        *(number, number, pointer),  # rows, vocabulary, logits
        *(pointer, pointer, pointer),  # seeds, positions, whether anything is drawn at all
        *(pointer, pointer),  # tokens, normalizers
    ]
    return library


def _reason(error: Exception) -> str:
    said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return said[0] if said else type(error).__name__
