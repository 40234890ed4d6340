"""Memory in large pages, for what is read from end to end at every step: the cache of slots, the kernel's weights.

With pages of 4 KiB a processor looks up an address thousands of times in a step, and reads ahead no further than a
page's end. Where the system has no large pages to give, this is memory like any other.
"""

from __future__ import annotations

import math
import mmap

import torch

_LARGE = 2 * 2**20


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `torch.zeros`; on a CPU in large pages if it fills some."""
    count = math.prod(shape)
    num_bytes = count * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has none
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
