"""Packed buckets from the shards of several ranks: the bytes of the full tensors, in buffers or in shared memory."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from sortedrl.engine.vllm.transfer.packing import (
    NUM_BUFFERS,
    BucketPacker,
    Buffers,
    WireTensor,
    is_host_shard,
    split_into_buckets,
)
from sortedrl.engine.vllm.transfer.shared_buckets import MAX_BYTES, SharedBuckets, SharedPacker

RANKS = 3
SHAPES = [(7, 4), (4, 3), (1, 5), (64, 8), (2,), (33, 2)]  # of 4 rows the third rank has none, of 1 only the first has
LIMIT = 100  # bytes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)


def wire(tensors: Sequence[Tensor]) -> list[WireTensor]:
    return [WireTensor(tensor, torch.bfloat16) for tensor in tensors]


def packed_bytes(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().to(torch.bfloat16).reshape(-1).view(torch.uint8) for tensor in tensors])


def read(buckets: Iterator[Tensor]) -> Tensor:
    """What a sender has sent that waits for a bucket only when its buffer is needed again."""
    waiting, sent = list[Tensor](), list[Tensor]()
    for bucket in buckets:
        waiting.append(bucket)
        if len(waiting) >= NUM_BUFFERS:
            sent.append(waiting.pop(0).clone())
    return torch.cat([*sent, *(bucket.clone() for bucket in waiting)])


def run_rank(rank: int, port: int, folder: str, address: str) -> None:
    try:
        _pack_as_rank(rank, port, Path(folder), address)
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)
    os._exit(0)  # leaves the handlers of the test process alone


def _pack_as_rank(rank: int, port: int, folder: Path, address: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    model = Model()
    whole = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    plain = torch.arange(4.0)
    expected = [*(parameter.detach().clone() for parameter in model.parameters()), torch.arange(6.0), plain]
    fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    assert all(map(is_host_shard, parameters))
    assert not is_host_shard(whole)
    memory = SharedBuckets.open(address) if address else None
    packer = BucketPacker(rank) if memory is None else SharedPacker(rank, memory)
    with torch.no_grad():
        for step in range(3):
            buckets = packer.pack(wire([*parameters, whole, plain]), LIMIT)
            if rank == 0 and step == 1:
                next(buckets)  # the workers are lost: the rest is packed, and not sent
                for _ in buckets:
                    pass
            elif rank == 0:
                sent = read(buckets)
                if memory is not None:
                    assert sent.tolist() == [1] * len(split_into_buckets(wire(expected), LIMIT))
                    (sent,) = memory.split([packed_bytes(expected).numel()])
                torch.save((sent.clone(), packed_bytes(expected)), folder / f"step{step}.pt")
            else:
                assert list(buckets) == []
            dist.barrier()  # as the end of a publication: all have read what is shared
            for parameter in parameters:
                parameter.to_local().mul_(2)  # type: ignore[attr-defined]
            expected[: len(SHAPES)] = [tensor * 2 for tensor in expected[: len(SHAPES)]]
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


NUM_BYTES = 2 * (sum(torch.Size(shape).numel() for shape in SHAPES) + 6 + 4)


@pytest.mark.parametrize("is_shared", [False, True], ids=["messages", "shared"])
def test_shards_of_three_ranks_make_the_bytes_of_the_full_tensors(tmp_path: Path, is_shared: bool) -> None:
    """Also after a transfer that broke off: no rank is left behind in it."""
    memory = SharedBuckets.create(NUM_BYTES) if is_shared else None
    address = "" if memory is None else memory.address
    context: Any = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [context.Process(target=run_rank, args=(rank, port, str(tmp_path), address)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    errors = [path.read_text(encoding="utf-8") for path in sorted(tmp_path.glob("error*"))]
    assert not errors, errors[0]
    assert [process.exitcode for process in ranks] == [0] * RANKS
    for step in (0, 2):
        sent, expected = torch.load(tmp_path / f"step{step}.pt")
        assert torch.equal(sent, expected), step
    if memory is not None:
        assert torch.equal(memory.split([NUM_BYTES])[0], expected)  # another process reads the same


def test_tensors_of_one_process_are_cast_and_packed() -> None:
    tensors = list(Model().parameters())
    packer = BucketPacker(0)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(read(packer.pack(wire(tensors), LIMIT)), packed_bytes(tensors))
            tensors = [tensor * 2 for tensor in tensors]


def test_a_bucket_ends_with_the_tensor_that_exceeds_the_limit() -> None:
    tensors = wire([torch.zeros(count) for count in (10, 40, 1, 100, 50)])  # of 2 bytes each
    sizes = [[tensor.shape[0] for tensor in bucket.tensors] for bucket in split_into_buckets(tensors, 100)]
    assert sizes == [[10, 40, 1], [100], [50]]
    assert [bucket.num_bytes for bucket in split_into_buckets(tensors, 100)] == [102, 200, 100]


@pytest.mark.parametrize("count", [2, 3])
def test_memory_is_used_again(count: int) -> None:
    buffers = Buffers(count)
    places = [buffers.take(number, 64).data_ptr() for number in range(2 * count)]
    assert places[:count] == places[count:]
    assert len(set(places)) == count
    assert buffers.take(0, 128).numel() == 128
    assert buffers.take(count, 32).numel() == 32


def test_memory_is_shared_by_its_address_until_it_is_closed() -> None:
    memory = SharedBuckets.create(10)
    assert memory is not None
    other = SharedBuckets.open(memory.address)
    first, second = other.split([4, 6])
    memory.split([10])[0].copy_(torch.arange(10))
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9])
    with pytest.raises(AssertionError, match="made for other weights"):
        other.split([4, 5])
    address = memory.address
    memory.close()
    other.close()
    assert first.tolist() == [0, 1, 2, 3]
    with pytest.raises(OSError, match=r"the learner's memory at /proc/\d+/fd/\d+: No such file"):
        SharedBuckets.open(address)


def test_weights_that_cannot_be_shared_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack_memory(descriptor: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    assert SharedBuckets.create(MAX_BYTES + 1) is None
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lack_memory)
        assert SharedBuckets.create(10) is None
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.delattr(os, "memfd_create")
    assert SharedBuckets.create(10) is None
