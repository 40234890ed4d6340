# pyright: reportMissingImports=false
"""The learner's side of a weight transfer: functions that run in each process that holds trained weights.

`link.py` passes them to `WeightsSource.apply` (`weights.py`), which calls them in the learner's process, or in every
rank of a sharded learner at the same time. A session is a group of the learner's rank 0 and the workers of all engines;
it lives in the process until the next one is opened.

Guarantees: one session per process; after a failure the session is gone, and its sockets are closed.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from sortedrl.engine.vllm.transfer.gloo import GlooTrainerInitInfo
from sortedrl.engine.vllm.transfer.shared_buckets import SharedBuckets
from sortedrl.engine.vllm.transfer.source import CastSource
from sortedrl.weights import WeightHolder

LOOPBACK = "127.0.0.1"


@dataclass(slots=True, kw_only=True, frozen=True)
class SendPlan:
    """A transfer as the learner's ranks see it."""

    session: str
    backend: str
    dtype: torch.dtype
    host: str
    port: int
    world_size: int  # rank 0 of the learner and all workers
    timeout_s: float
    shared: str = ""  # address of the memory that carries the weights; empty: they travel
    client: Any = None  # carries rank 0's calls to the engines; None: `link.py` calls them itself


class _DrivenElsewhere:
    """The client of a session whose engines are called by `link.py`, at the same time as `send` runs."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


_sessions: dict[str, Any] = {}  # of this process: one at most
_memories: list[SharedBuckets] = []  # that rank 0 has made for the session: one at most


@dataclass(slots=True, kw_only=True, frozen=True)
class SenderFacts:
    """What the workers must know before tensors arrive, and where rank 0 will listen."""

    update_info: dict[str, Any]
    host: str
    port: int
    shared: str = ""


def describe(holder: WeightHolder, dtype: torch.dtype, is_local: bool, shares_memory: bool) -> SenderFacts:
    """Prepare a session. `is_local`: all processes are on this machine. `shares_memory`: weights need not travel."""
    source = CastSource(holder.module, dtype)
    metadata = source.metadata()
    update_info = {
        "names": [entry.name for entry in metadata],
        "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in metadata],
        "shapes": [list(entry.shape) for entry in metadata],
    }
    host = LOOPBACK if is_local else _network_address()
    shared = _make_memory(source) if shares_memory and holder.rank == 0 else ""
    with socket.create_server((host, 0)) as probe:
        return SenderFacts(update_info=update_info, host=host, port=probe.getsockname()[1], shared=shared)


def _make_memory(source: CastSource) -> str:
    """Make memory for the weights in place of the previous one; returns its address, or "" if there is none."""
    _close_memories()
    memory = SharedBuckets.create(sum(tensor.num_bytes for tensor in source.wire_tensors()))
    if memory is None:
        return ""
    _memories.append(memory)
    return memory.address


def send(holder: WeightHolder, plan: SendPlan) -> None:
    """Send the weights to all workers of the session. Every rank must call it."""
    source = CastSource(holder.module, plan.dtype)
    try:
        if plan.session not in _sessions:
            _close_sessions()
            client = plan.client or _DrivenElsewhere()
            _sessions[plan.session] = WeightTransferTrainerFactory.trainer_init(
                _init_info(plan, holder.rank), client=client, source=source
            )
        trainer = _sessions[plan.session]
        trainer.source = source
        trainer.send_weights()
    except BaseException:
        close(holder)
        raise


def close(holder: WeightHolder) -> None:
    """End the session of this process."""
    _close_sessions()
    _close_memories()


def _close_sessions() -> None:
    while _sessions:
        _sessions.popitem()[1].shutdown()


def _close_memories() -> None:
    while _memories:
        _memories.pop().close()


def _init_info(plan: SendPlan, rank: int) -> Any:
    place = {"master_address": plan.host, "master_port": plan.port, "world_size": plan.world_size}
    match plan.backend:
        case "gloo":
            return GlooTrainerInitInfo(**place, timeout_s=plan.timeout_s, shared=plan.shared, rank=rank)
        case "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            return NCCLTrainerInitInfo(**place, packed=True, rank=rank)
        case "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(packed=True, rank=rank)
        case _:
            raise AssertionError(f"no transfer over {plan.backend}")


def _network_address() -> str:
    import ray

    return ray.util.get_node_ip_address()
