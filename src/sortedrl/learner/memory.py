"""Telling that memory ran out from everything else that torch raises, and what becomes of memory that nobody holds.

`learner/torch.py` asks for all of it: it tries smaller pieces when memory ran out, makes room for what stays, and lets
the allocator keep the little that a small model's passes take again and again.
"""

from __future__ import annotations

import ctypes
import gc
import sys

import torch

# What allocators other than CUDA's say in a plain RuntimeError, or libraries under it when they could not allocate.
MEMORY_WORDS = ("can't allocate memory", "Cannot allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGE_BYTES = 1 << 25  # the most that glibc takes for a block to keep


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch means that memory ran out, on whichever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS)


def first_line(error: BaseException) -> str:
    """The first line of an error; allocators write many."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def keep_small_blocks() -> None:
    """Let glibc keep up to 64 MB that are free, as it comes to do by itself with a larger model.

    It begins with less, and every pass then gives its memory back and asks for it again, page by page.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, LARGE_BYTES)
        set_option(M_TRIM_THRESHOLD, 2 * LARGE_BYTES)


def free_unused() -> None:
    """Give back what nobody holds, cycles included: a pass that failed may have left some."""
    gc.collect()
    give_back()


def give_back() -> None:
    """Give back what is free: behind a pass, allocators keep as much as the pass has used."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
        if trim is not None:
            trim(0)
