"""Memory in huge pages: its content, and that the system really provides huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sortedrl.native.huge_pages import zeros_in_huge_pages

CPU = torch.device("cpu")
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_page_bytes() -> int:
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("shape", [(3, 5), (1024, 1025), (4, 2**20)])
def test_zeros_of_a_shape(shape: tuple[int, ...]) -> None:
    memory = zeros_in_huge_pages(*shape, dtype=torch.float32, device=CPU)
    assert memory.shape == shape
    assert not memory.any()
    memory[-1] = 1
    assert memory.sum() == memory[-1].numel()


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="the system has no transparent huge pages"
)
def test_the_system_provides_huge_pages() -> None:
    before = huge_page_bytes()
    memory = zeros_in_huge_pages(64 << 20, dtype=torch.uint8, device=CPU).fill_(1)
    assert huge_page_bytes() - before >= memory.numel() // 2  # a system short of memory may use some small pages
