"""Buckets in memory that the learner's ranks and vLLM's workers share, where all of them are on one machine.

`sender.py` makes the memory in the learner's rank 0, and `gloo.py` opens it by its address in every process. Every rank
casts its shards into their place, and workers load from there. So each number is written once, and only signals travel:
from a rank to rank 0 when its part of a bucket is written, and from rank 0 to the workers when a bucket is complete.

Guarantees: the bytes of a bucket are those that `packing.py` would send; all ranks must iterate in lockstep; the memory
is reserved when it is made, and it ends with the processes that hold it, also if they are killed. Linux only.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from sortedrl.engine.vllm.transfer.packing import WireTensor, full_tensor, parts, split_into_buckets

MAX_BYTES = 1 << 30  # of one model; a larger one is sent in buckets that are used again


class SharedBuckets:
    """One region for all buckets of a model, one after another. It has no name in a file system."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    @classmethod
    def create(cls, num_bytes: int) -> Self | None:
        """New memory; None if the system cannot share it or has too little."""
        if not hasattr(os, "memfd_create") or not 0 < num_bytes <= MAX_BYTES:
            return None
        try:
            descriptor = os.memfd_create("sortedrl-weights")
        except OSError:
            return None
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(descriptor, num_bytes)
        except OSError:
            os.close(descriptor)
            return None

    @classmethod
    def open(cls, address: str) -> Self:
        """The memory that another process of this machine has made and still holds."""
        try:
            descriptor = os.open(address, os.O_RDWR)
        except OSError as error:
            raise OSError(f"cannot open the learner's memory at {address}: {error.strerror}") from error
        return cls(descriptor, os.fstat(descriptor).st_size)

    @property
    def address(self) -> str:
        """Where other processes of this machine and this user find the memory."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def split(self, sizes: Sequence[int]) -> list[Tensor]:
        """The buckets of these sizes, in bytes."""
        assert sum(sizes) == self._bytes.numel(), "the memory was made for other weights"
        return list(self._bytes.split(list(sizes)))

    def close(self) -> None:
        """Let go of the memory. Tensors that are views of it keep it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._bytes = torch.empty(0, dtype=torch.uint8)


class SharedPacker:
    """One process's part in packing. `rank`: of this process among those that hold shards."""

    def __init__(self, rank: int, memory: SharedBuckets) -> None:
        self._rank, self._memory = rank, memory

    def pack(self, tensors: Sequence[WireTensor], limit: int) -> Iterator[Tensor]:
        """On rank 0 a signal to broadcast for each complete bucket; the other ranks yield nothing."""
        buckets = split_into_buckets(tensors, limit)
        mesh = next((wire.mesh for wire in tensors if wire.mesh is not None), None)
        places = self._memory.split([bucket.num_bytes for bucket in buckets])
        signal = torch.ones(1, dtype=torch.uint8)
        for number, (bucket, place) in enumerate(zip(buckets, places, strict=True)):
            for wire, part in parts(bucket, place):
                if wire.is_shard:
                    part[slice(*wire.rows(self._rank))].copy_(wire.tensor.to_local())  # type: ignore[union-attr]
                else:
                    whole = full_tensor(wire.tensor)
                    if self._rank == 0:
                        part.copy_(whole)
            if self._rank != 0 and mesh is not None:
                dist.send(signal, group=mesh.get_group(), group_dst=0, tag=number)
            elif self._rank == 0:
                for peer in range(1, 1 if mesh is None else mesh.size()):
                    dist.recv(signal, group=mesh.get_group(), group_src=peer, tag=number)  # type: ignore[union-attr]
                yield signal
