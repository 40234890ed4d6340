"""The compiled kernel, `kernel.c` with its headers: its structures, its functions, and that it is loaded once.

`local/native_decoder.py` and `sampling/draw.py` call it. Where it cannot be compiled there is none, and the engine runs
on torch as it would have anyway.
"""

from __future__ import annotations

import ctypes
import functools

from sortedrl.native.c_library import SOURCES, load_compiled

MAX_THREADS = 64  # as in the source
_SOURCE = SOURCES / "kernel.c"


class Layer(ctypes.Structure):
    """`struct layer` of the source; a null pointer where a model has no such thing."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("qkv", "qkv_bias", "q_gain", "k_gain", "out", "gate_up", "down")
    )


class Model(ctypes.Structure):
    """`struct model` of the source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_layers", "size", "inner", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, ctypes.c_int64) for name in ("slots", "positions", "is_fixed")),
        *((name, ctypes.c_float) for name in ("floor", "head_floor", "scale")),
        *((name, ctypes.c_void_p) for name in ("layers", "embedding", "head", "cosines", "sines", "cache")),
    )


class Team(ctypes.Structure):
    """`struct team` of the source: where threads of one call meet."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("arrived", "turn", "left")),
        ("taken", ctypes.c_int64 * (8 * MAX_THREADS)),
    )


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """The kernel, compiled if it has to be; None, and the reason in the log, where that cannot be done."""
    headers = sorted(SOURCES.glob("*.h"))
    library = load_compiled(_SOURCE, headers, without="the local engine runs on torch, small models at half the speed")
    return None if library is None else _declare(library)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.sortedrl_memory.restype = number
    library.sortedrl_memory.argtypes = [ctypes.POINTER(Model), number]
    library.sortedrl_panel_size.restype = number
    library.sortedrl_panel_size.argtypes = [number, number]
    library.sortedrl_panels.restype = None
    library.sortedrl_panels.argtypes = [pointer, pointer, number, number, number, pointer]
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
