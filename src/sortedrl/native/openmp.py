"""Run a function on the OpenMP threads that torch's own operations use.

`learner/native_layers.py` calls it between torch's matrix products. After an operation, OpenMP's threads stay busy
waiting for the next one for a while. Other threads would share the processors with them, and be slower than one thread.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _load_openmp() -> Any | None:
    """The OpenMP library that torch has loaded, or None if its functions cannot be found."""
    try:
        library = ctypes.CDLL(None)
        start, _, _ = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows there is no library of the whole process
        return None
    start.argtypes = [_FUNCTION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    start.restype = None
    return library


def run_in_parallel(call: Callable[[int], None], size: int) -> None:
    """Run `call(part)` for each part below `size`, on as many threads as torch uses.

    The threads run in parallel while they are in compiled code that ctypes has called, which releases the interpreter
    lock. Without OpenMP the parts run one after the other.
    """
    library = _load_openmp() if size > 1 and torch.get_num_threads() > 1 else None
    if library is None:
        for part in range(size):
            call(part)
        return
    errors: list[BaseException] = []

    def run_own_parts(_: object) -> None:
        try:
            for part in range(library.omp_get_thread_num(), size, library.omp_get_num_threads()):
                call(part)
        except BaseException as error:  # ctypes would print it and continue
            errors.append(error)

    library.GOMP_parallel(_FUNCTION(run_own_parts), None, min(size, torch.get_num_threads()), 0)
    if errors:
        raise errors[0]
