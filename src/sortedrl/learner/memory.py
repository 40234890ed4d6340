"""Recognises out-of-memory errors and returns free memory to the system.

`learner/torch.py` calls it: it retries with smaller micro-batches when memory runs out, frees memory before it
allocates the optimizer state, and makes malloc keep the small blocks that every pass of a small model uses again.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sortedrl.errors import first_line
from sortedrl.learner.pack import MicroBatch

# Messages of plain RuntimeErrors that CPU allocators, or libraries that could not allocate, raise. The last is that of
# oneDNN in bfloat16. It has other causes too, which remain when micro-batches get smaller, and are then reported.
_MESSAGES = (
    *("can't allocate memory", "Cannot allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED"),
    "can't start new thread",  # there is no memory for its stack
    "could not create a primitive",
)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_MAX_MMAP_THRESHOLD = 1 << 25  # the largest that glibc accepts


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):  # of a system call, such as one that maps a file
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


@dataclass(slots=True, kw_only=True, frozen=True)
class Shortage:
    """A micro-batch that did not fit in memory."""

    num_tokens: int
    num_samples: int
    reason: str


def try_pass(run: Callable[[MicroBatch], None], micro: MicroBatch) -> Shortage | None:
    """Run a pass. If memory runs out, say so; the failed pass is then no longer held by a traceback."""
    try:
        run(micro)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Shortage(num_tokens=micro.num_tokens, num_samples=micro.num_samples, reason=first_line(error))
    return None


def keep_freed_blocks() -> None:
    """Let glibc keep up to 64 MB of freed memory.

    By default it starts with less, so each pass would return its memory to the system and fault it in again.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        set_option(_M_TRIM_THRESHOLD, 2 * _MAX_MMAP_THRESHOLD)


def collect_and_release() -> None:
    """Collect garbage, since a failed pass may leave reference cycles, and release what is free."""
    gc.collect()
    release_free_memory()


def release_free_memory() -> None:
    """Return free memory to the system. After a pass, allocators keep as much as the pass has used."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)
