"""Telling that memory ran out from everything else that torch raises, and giving back what nobody holds.

`learner/torch.py` asks for both: it tries smaller pieces after the one, and makes room for what stays with the other.
"""

from __future__ import annotations

import ctypes
import gc
import sys

import torch

# What allocators other than CUDA's say in a plain RuntimeError, or libraries under it when they could not allocate.
MEMORY_WORDS = ("can't allocate memory", "Cannot allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch means that memory ran out, on whichever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS)


def first_line(error: BaseException) -> str:
    """The first line of an error; allocators write many."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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
