"""Memory in huge pages, for data that every step reads from end to end: the KV cache and the kernel's weights.

With pages of 4 KiB the processor looks up thousands of addresses in a step, and does not prefetch past a page's end.
If the system has no huge pages available, this is ordinary memory.
"""

from __future__ import annotations

import math
import mmap

import torch

_PAGE_BYTES = 2 * 2**20


def zeros_in_huge_pages(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like `torch.zeros`, but on a CPU a tensor of at least one huge page is stored in huge pages."""
    count = math.prod(shape)
    num_bytes = count * dtype.itemsize
    if device.type != "cpu" or num_bytes < _PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no huge pages
    memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=flags)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
