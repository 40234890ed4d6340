"""Weights in memory that two processes share: the run writes them, the engine in its child process reads them.

The memory is an open file without a name (`memfd` on Linux, a deleted temporary file elsewhere), so it is gone with the
processes that hold it, however they end. The pool publishes one version at a time and waits for it, so one region is
enough. It grows to the size of the weights at the first publication.

Guarantees: nothing is pickled; a reader gets arrays of the types and shapes that were written.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_ALIGN = 64  # bytes


class Place(NamedTuple):
    """Where one array lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SharedWeights:
    """The region behind an open file. The process that made it writes, others get the descriptor and read."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _open_region() if fd is None else fd
        self._map: mmap.mmap | None = None

    def write(self, arrays: Mapping[str, Any]) -> list[Place]:
        """Store the arrays; returns where they lie, for `read` in another process."""
        places: list[Place] = []
        end = 0
        for name, array in arrays.items():
            places.append(Place(name, array.dtype.str, array.shape, end))
            end += -(-array.nbytes // _ALIGN) * _ALIGN
        if os.fstat(self.fd).st_size < end:
            self._map = None
            os.ftruncate(self.fd, end)
        stored = self.read(places)
        for name, array in arrays.items():
            np.copyto(stored[name], array)
        return places

    def read(self, places: list[Place]) -> dict[str, Any]:
        """The arrays at these places, not copied."""
        size = os.fstat(self.fd).st_size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self.fd, size)
        return {
            name: np.ndarray(shape, dtype=dtype, buffer=self._map, offset=offset)
            for name, dtype, shape, offset in places
        }

    def close(self) -> None:
        self._map = None
        os.close(self.fd)


def _open_region() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sortedrl-weights")
    fd, path = tempfile.mkstemp(prefix="sortedrl-weights-")
    os.unlink(path)
    return fd
