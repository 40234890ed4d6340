"""The compiled kernel, `kernel.c` with its headers: loads it once and declares its structures and functions.

`engine/local/native_decoder.py` and `engine/sampling/draw.py` call it. If it cannot be compiled, they use torch.
"""

from __future__ import annotations

import ctypes
import functools

from sortedrl.native.c_library import SOURCES, load_library

MAX_THREADS = 64  # the same number as in kernel.c
_SOURCE = SOURCES / "kernel.c"


class KernelLayer(ctypes.Structure):
    """`struct layer` of kernel.c; biases and gains that a model does not have are null."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("qkv", "qkv_bias", "q_gain", "k_gain", "out", "gate_up", "down")
    )


class KernelModel(ctypes.Structure):
    """`struct model` of kernel.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_layers", "size", "inner", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, ctypes.c_int64) for name in ("slots", "positions", "is_fixed")),
        *((name, ctypes.c_float) for name in ("floor", "head_floor", "scale")),
        *((name, ctypes.c_void_p) for name in ("layers", "embedding", "head", "cosines", "sines", "cache", "hidden")),
        ("first_late", ctypes.c_int64),
    )


class ThreadGroup(ctypes.Structure):
    """`struct thread_group` of kernel.c: how the threads of one call wait for each other and share work."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("arrived", "phase", "is_abandoned")),
        ("taken", ctypes.c_int64 * (8 * MAX_THREADS)),
    )


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """Load the kernel, after compiling it if necessary. Returns None, and logs why, if that fails."""
    headers = sorted(SOURCES.glob("*.h"))
    fallback = "the local engine runs on torch instead, which halves the speed of small models"
    library = load_library(_SOURCE, headers, fallback=fallback)
    return None if library is None else _declare(library)


def has_wide_kernel() -> bool:
    """Whether the kernel computes products with AVX-512 and VNNI, which it decides at run time."""
    library = load_kernel()
    return library is not None and bool(library.sortedrl_has_wide_vectors())


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.sortedrl_has_wide_vectors.restype = number
    library.sortedrl_has_wide_vectors.argtypes = []
    library.sortedrl_memory.restype = number
    library.sortedrl_memory.argtypes = [ctypes.POINTER(KernelModel), number]
    library.sortedrl_panel_size.restype = number
    library.sortedrl_panel_size.argtypes = [number, number]
    library.sortedrl_panels.restype = number
    library.sortedrl_panels.argtypes = [pointer, pointer, number, number, number, pointer]
    library.sortedrl_forward.restype = None
    library.sortedrl_forward.argtypes = [
        *(ctypes.POINTER(KernelModel), pointer),
        *(ctypes.POINTER(ThreadGroup), number, number),  # the thread's rank, number of threads
        *(number, number, pointer, pointer, pointer),  # tokens, how many start early, their slots and positions
        *(number, pointer, pointer),  # rows at which logits are needed, logits
    ]
    library.sortedrl_draw.restype = None
    library.sortedrl_draw.argtypes = [
        *(number, number),  # the thread's rank, number of threads
        *(number, number, pointer),  # rows, vocabulary, logits
        *(pointer, pointer, pointer),  # seeds, positions, whether the row is drawn at random
        *(pointer, pointer),  # tokens, normalizers
    ]
    return library
