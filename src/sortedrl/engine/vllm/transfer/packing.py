"""Packed buckets of full tensors in host memory, on the learner's rank 0, from the shards of all ranks.

`gloo.py` uses it to send to other machines, and for models that are too large for `shared_buckets.py`. Every rank casts
its shards while it copies them: rank 0 into the bucket itself, the others into one message per bucket, which rank 0
copies into place. So each number is written once or twice, and there is one message per bucket and rank. The next
bucket's messages travel while this bucket is broadcast.

Buffers are used again for the next buckets and publications, because on a CPU fresh memory costs several times the copy
into it.

Guarantees: the bytes of a bucket are those that vLLM's `pack_tensors` would make of the full tensors; all ranks must
iterate in lockstep; a bucket's bytes stay until the `NUM_BUFFERS - 1` buckets after it have been yielded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from sortedrl.native.huge_pages import zeros_in_huge_pages

NUM_BUFFERS = 3


class WireTensor:
    """A parameter, or this rank's shard of it, as it is sent: a number format and a full shape."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self.tensor, self.dtype, self.shape = tensor, dtype, tensor.shape
        self.num_bytes = tensor.shape.numel() * dtype.itemsize
        self.mesh = tensor.device_mesh if is_host_shard(tensor) else None  # type: ignore[union-attr]
        self._num_ranks = 1 if self.mesh is None else self.mesh.size()

    @property
    def is_shard(self) -> bool:
        return self.mesh is not None

    def rows(self, rank: int) -> tuple[int, int]:
        """The first row that a rank holds and the row after its last: torch divides them as `chunk` does."""
        num_rows = self.shape[0]
        share = -(-num_rows // self._num_ranks)
        return min(rank * share, num_rows), min((rank + 1) * share, num_rows)

    def shard_shape(self, rank: int) -> torch.Size:
        start, stop = self.rows(rank)
        return torch.Size((stop - start, *self.shape[1:]))


@dataclass(slots=True, kw_only=True)
class Bucket:
    tensors: list[WireTensor] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, tensor: WireTensor) -> None:
        self.tensors.append(tensor)
        self.num_bytes += tensor.num_bytes


def split_into_buckets(tensors: Sequence[WireTensor], limit: int) -> list[Bucket]:
    """As `pack_tensors` splits them: each bucket ends with the tensor that exceeds the limit."""
    buckets, bucket = list[Bucket](), Bucket()
    for tensor in tensors:
        bucket.add(tensor)
        if bucket.num_bytes > limit:
            buckets.append(bucket)
            bucket = Bucket()
    return [*buckets, bucket] if bucket.tensors else buckets


class Buffers:
    """Memory that is used in turns. It grows to the largest size that was asked for."""

    def __init__(self, count: int) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8)] * count

    def __len__(self) -> int:
        return len(self._memory)

    def take(self, number: int, num_bytes: int) -> Tensor:
        """The buffer for the use of this number; the use `count` numbers before must be over."""
        index = number % len(self._memory)
        if self._memory[index].numel() < num_bytes:
            self._memory[index] = zeros_in_huge_pages(num_bytes, dtype=torch.uint8, device=torch.device("cpu"))
        return self._memory[index][:num_bytes]


class BucketPacker:
    """One process's part in packing; it keeps its buffers. `rank`: of this process among those that hold shards."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._packed = Buffers(NUM_BUFFERS)
        self._messages: dict[int, Buffers] = {}  # by the rank that sends them

    def pack(self, tensors: Sequence[WireTensor], limit: int) -> Iterator[Tensor]:
        """On rank 0 the packed buckets one after another; the other ranks send their shards and yield nothing."""
        buckets = split_into_buckets(tensors, limit)
        mesh = next((wire.mesh for wire in tensors if wire.mesh is not None), None)
        peers = [] if mesh is None else range(1, mesh.size())
        if self._rank == 0:
            yield from self._gather(buckets, [] if mesh is None else [(peer, mesh.get_group()) for peer in peers])
        else:
            self._send(buckets, None if mesh is None else mesh.get_group())

    def _gather(self, buckets: Sequence[Bucket], peers: Sequence[tuple[int, Any]]) -> Iterator[Tensor]:
        arriving: dict[int, list[tuple[int, Tensor, Any]]] = {}

        def expect(number: int) -> None:
            """Post the receipt of the others' messages for this bucket."""
            if number < len(buckets):
                arriving[number] = [(peer, *self._receive(number, buckets[number], peer, g)) for peer, g in peers]

        expect(0)
        for number, bucket in enumerate(buckets):
            expect(number + 1)
            packed = self._packed.take(number, bucket.num_bytes)
            for wire, part in parts(bucket, packed):
                if wire.is_shard:
                    part[slice(*wire.rows(0))].copy_(wire.tensor.to_local())  # type: ignore[union-attr]
                else:
                    part.copy_(full_tensor(wire.tensor))
            for peer, message, handle in arriving.pop(number):
                if handle is not None:
                    handle.wait()
                for place, shard in zip(
                    _shard_places(bucket, packed, peer), _message_parts(bucket, message, peer), strict=True
                ):
                    place.copy_(shard)
            yield packed

    def _receive(self, number: int, bucket: Bucket, peer: int, group: Any) -> tuple[Tensor, Any]:
        size = _message_bytes(bucket, peer)
        message = self._messages.setdefault(peer, Buffers(2)).take(number, size)
        handle = dist.irecv(message, group=group, group_src=peer, tag=number) if size else None
        return message, handle

    def _send(self, buckets: Sequence[Bucket], group: Any) -> None:
        sending: list[Any] = []
        buffers = self._messages.setdefault(self._rank, Buffers(2))
        for number, bucket in enumerate(buckets):
            if len(sending) > 1:
                sending.pop(0).wait()
            message = buffers.take(number, _message_bytes(bucket, self._rank))
            places = iter(_message_parts(bucket, message, self._rank))
            for wire in bucket.tensors:
                if wire.is_shard:
                    next(places).copy_(wire.tensor.to_local())  # type: ignore[union-attr]
                else:
                    full_tensor(wire.tensor)
            if message.numel():
                sending.append(dist.isend(message, group=group, group_dst=0, tag=number))
        for handle in sending:
            handle.wait()


def is_host_shard(tensor: Tensor) -> bool:
    """Whether a tensor is divided by rows over ranks that exchange messages in host memory, as FSDP2 does on CPUs."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim != 1 or tensor.device.type != "cpu":
        return False
    (placement,) = tensor.placements
    return type(placement) is Shard and placement.dim == 0


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that is divided in another way; all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parts(bucket: Bucket, packed: Tensor) -> Iterator[tuple[WireTensor, Tensor]]:
    """Each tensor of a bucket with its part of the bucket, in its number format and shape."""
    parts = packed.split([wire.num_bytes for wire in bucket.tensors])
    for wire, part in zip(bucket.tensors, parts, strict=True):
        yield wire, part.view(wire.dtype).view(wire.shape)


def _shard_places(bucket: Bucket, packed: Tensor, rank: int) -> Iterator[Tensor]:
    """Where the shards of a rank belong in a packed bucket."""
    for wire, part in parts(bucket, packed):
        if wire.is_shard:
            yield part[slice(*wire.rows(rank))]


def _shard_shapes(bucket: Bucket, rank: int) -> list[tuple[WireTensor, torch.Size]]:
    return [(wire, wire.shard_shape(rank)) for wire in bucket.tensors if wire.is_shard]


def _message_bytes(bucket: Bucket, rank: int) -> int:
    return sum(shape.numel() * wire.dtype.itemsize for wire, shape in _shard_shapes(bucket, rank))


def _message_parts(bucket: Bucket, message: Tensor, rank: int) -> Iterator[Tensor]:
    """The shards in a rank's message, one after another."""
    start = 0
    for wire, shape in _shard_shapes(bucket, rank):
        stop = start + shape.numel() * wire.dtype.itemsize
        yield message[start:stop].view(wire.dtype).view(shape)
        start = stop
