# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Weight transfer over gloo: a backend of vLLM's `weight_transfer` for machines without GPUs, as `nccl` is for GPUs.

Importing this module registers the backend `gloo` with vLLM, for workers and for trainers. `worker.py` imports it in
vLLM's workers, `sender.py` where the learner's weights are. Tensors are packed in buckets. Between machines, rank 0 of
the learner gathers a bucket and broadcasts it to all workers (`packing.py`). On one machine, all ranks write a bucket
into shared memory, and rank 0 broadcasts a signal when it is complete (`shared_buckets.py`). While one bucket travels,
the next is packed, and the workers load the one before.

Guarantees: workers get the bytes that the source yields, in its order; a transfer that breaks off raises on all sides
within the group's time limit, and the next transfer starts from the beginning on all ranks, because
`CastSource.exhaust` brings rank 0 to the end of this one; without a network address, sockets listen on loopback only.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

from sortedrl.engine.vllm.transfer.packing import NUM_BUFFERS, BucketPacker, Buffers
from sortedrl.engine.vllm.transfer.shared_buckets import SharedBuckets, SharedPacker
from sortedrl.engine.vllm.transfer.source import CastSource

BACKEND = "gloo"
BUCKET_BYTES = 32 << 20
_AT_ONCE = 2  # buckets that a worker receives at the same time
_KEPT_BYTES = 1 << 30  # of received weights, in a worker


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """What a worker needs to join: as of `nccl`, how long a side waits for another, and where shared memory is."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float = 300.0
    bucket_bytes: int = BUCKET_BYTES
    shared: str = ""  # address of memory for all buckets; empty: they travel over gloo


@dataclass(kw_only=True)
class GlooTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int
    world_size: int
    timeout_s: float = 300.0
    bucket_bytes: int = BUCKET_BYTES
    shared: str = ""  # address of memory for all buckets; empty: they travel over gloo
    listening: socket.socket | None = None  # the open port of the sender, if it has been opened before


class GlooGroup:
    """The learner's rank 0 and the workers of all engines. It shares nothing with torch's default process group."""

    def __init__(
        self, info: GlooInitInfo | GlooTrainerInitInfo, rank: int, listening: socket.socket | None = None
    ) -> None:
        timeout = timedelta(seconds=info.timeout_s)
        if rank == 0 and listening is None:  # a port that the store opens itself is open on all interfaces
            listening = socket.create_server((info.master_address, info.master_port))
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            info.master_address,
            info.master_port,
            info.world_size,
            is_master=rank == 0,
            timeout=timeout,
            master_listen_fd=None if listening is None else listening.detach(),
        )
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(info.master_address))]
        options._timeout = timeout
        self._group: Any = ProcessGroupGloo(self._store, rank, info.world_size, options)

    def broadcast(self, bucket: torch.Tensor) -> Any:
        """Send a bucket from rank 0 to all, or receive it; returns a handle to wait for."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._group.broadcast([bucket], options)

    def close(self) -> None:
        """Close the sockets, which ends the others' waits."""
        self._group.abort()
        self._group = self._store = None


def _own_address(master: str) -> str:
    """The address of this machine that the learner's rank 0 can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        return probe.getsockname()[0]


class GlooTransferEngine(WeightTransferEngine[GlooInitInfo, NCCLWeightTransferUpdateInfo]):
    """The worker's side. Weights are loaded as by `nccl`: in the checkpoint's format, layer by layer."""

    init_info_cls = GlooInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._group: GlooGroup | None = None
        self._shared: SharedBuckets | None = None
        self._buffers = Buffers(0)
        self._bucket_bytes = BUCKET_BYTES
        self._is_broken = False  # an update broke off, and some layers have not been completed

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        self._bucket_bytes = init_info.bucket_bytes
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = GlooGroup(init_info, worker + init_info.rank_offset)
        self._shared = SharedBuckets.open(init_info.shared) if init_info.shared else None

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self._is_broken:  # otherwise the layers would count what they had received as part of this update
            finalize_layerwise_reload(self.model, self.model_config)
            self._is_broken = False
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("no group to receive weights in: call init_weight_transfer_engine first")
        self._is_broken = True
        waiting: list[tuple[_Bucket, torch.Tensor, Any]] = []
        buckets = list(_buckets(update_info, self._bucket_bytes))
        for bucket, packed in zip(buckets, self._memory_for(buckets), strict=True):
            message = packed if self._shared is None else torch.empty(1, dtype=torch.uint8)  # the bytes, or a signal
            waiting.append((bucket, packed, self._group.broadcast(message)))
            if len(waiting) >= _AT_ONCE:
                self._load(*waiting.pop(0))
        for arrival in waiting:
            self._load(*arrival)
        self._is_broken = False

    def _memory_for(self, buckets: Sequence[_Bucket]) -> Iterator[torch.Tensor]:
        """Memory for each bucket apart, because a layer keeps its tensors until its last one has come.

        It is kept for the next publication if the model is small. Of a large one, a bucket's memory is made when the
        bucket comes, and is free when the layers of its tensors are loaded.
        """
        sizes = [sum(bucket.sizes) for bucket in buckets]
        if self._shared is not None:
            yield from self._shared.split(sizes)
            return
        if sum(sizes) > _KEPT_BYTES:
            self._buffers = Buffers(0)
            for size in sizes:
                yield Buffers(1).take(0, size)
            return
        if len(self._buffers) != len(buckets):
            self._buffers = Buffers(len(buckets))
        for number, size in enumerate(sizes):
            yield self._buffers.take(number, size)

    def _load(self, bucket: _Bucket, packed: torch.Tensor, handle: Any) -> None:
        handle.wait()
        self.model.load_weights(unpack_tensor(packed, bucket.names, bucket.shapes, bucket.dtypes, bucket.sizes))

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None


@dataclass(slots=True, kw_only=True, frozen=True)
class _Bucket:
    names: list[str]
    shapes: list[list[int]]
    dtypes: list[torch.dtype]
    sizes: list[int]  # in bytes


def _buckets(info: NCCLWeightTransferUpdateInfo, limit: int) -> Iterator[_Bucket]:
    """The buckets that `pack_tensors` makes of these tensors: each ends with the tensor that exceeds the limit."""
    bucket = _Bucket(names=[], shapes=[], dtypes=[], sizes=[])
    for name, dtype_name, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        bucket.names.append(name)
        bucket.shapes.append(shape)
        bucket.dtypes.append(dtype)
        bucket.sizes.append(torch.Size(shape).numel() * dtype.itemsize)
        if sum(bucket.sizes) > limit:
            yield bucket
            bucket = _Bucket(names=[], shapes=[], dtypes=[], sizes=[])
    if bucket.names:
        yield bucket


class GlooTrainerEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The learner's side. Ranks other than 0 only take part in gathering the tensors."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._bucket_bytes = info.bucket_bytes
        self._shared = SharedBuckets.open(info.shared) if info.shared else None
        self._packer = BucketPacker(info.rank) if self._shared is None else SharedPacker(info.rank, self._shared)
        self._info = info
        self._group: GlooGroup | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if source is None:
            raise ValueError("a transfer over gloo needs a WeightSource")
        return cls(init_info, client=client, source=source)

    def _join(self) -> GlooGroup:
        """Form the group with the workers. `send_weights` calls it, so that a failure leaves a source to exhaust."""
        info = self._info
        workers = GlooInitInfo(
            master_address=info.master_address,
            master_port=info.master_port,
            rank_offset=1,
            world_size=info.world_size,
            timeout_s=info.timeout_s,
            bucket_bytes=info.bucket_bytes,
            shared=info.shared,
        )
        with ThreadPoolExecutor(1) as executor:  # both sides wait for each other
            joining = executor.submit(self.client.init_weight_transfer_engine, asdict(workers))
            group = GlooGroup(info, 0, info.listening)
            joining.result()
        return group

    def send_weights(self) -> None:
        source = self.source
        assert isinstance(source, CastSource), "the sender has a source"
        with torch.no_grad():
            buckets = source.watched(self._packer.pack(source.wire_tensors(), self._bucket_bytes))
            if self.is_sender:
                self._group = self._group or self._join()
                self._send_buckets(buckets, source.metadata())
            else:
                source.exhaust()

    def _send_buckets(self, buckets: Iterator[torch.Tensor], metadata: Sequence[ParamMeta]) -> None:
        update = NCCLWeightTransferUpdateInfo(
            names=[entry.name for entry in metadata],
            dtype_names=[str(entry.dtype).removeprefix("torch.") for entry in metadata],
            shapes=[list(entry.shape) for entry in metadata],
        )
        executor = ThreadPoolExecutor(1)
        try:
            self.client.start_weight_update()
            receiving = executor.submit(self.client.update_weights, asdict(update))
            self._broadcast(buckets)
            receiving.result()
        finally:
            executor.shutdown(wait=False)  # after an error the workers may never answer
        self.client.finish_weight_update()

    def _broadcast(self, buckets: Iterator[torch.Tensor]) -> None:
        assert self._group is not None, "the sender has joined the group"
        waiting: list[Any] = []
        for packed in buckets:
            waiting.append(self._group.broadcast(packed))
            if len(waiting) >= NUM_BUFFERS:  # the next bucket is packed into the memory of the oldest
                waiting.pop(0).wait()
        for handle in waiting:
            handle.wait()

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def register() -> None:
    """Make the backend known to vLLM in this process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooTransferEngine)
        WeightTransferTrainerFactory.register_engine(BACKEND, GlooTrainerEngine)


register()
