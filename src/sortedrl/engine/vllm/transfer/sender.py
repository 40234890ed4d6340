# pyright: reportMissingImports=false
"""The learner's side of a weight transfer: functions that run in each process that holds trained weights.

`link.py` passes them to `WeightsSource.apply` (`weights.py`), which calls them in the learner's process, or in every
rank of a sharded learner at the same time. A session is a group of the learner's rank 0 and the workers of all engines;
it lives in the process until the next one is opened.

Guarantees: one session per process; after a failure the session is gone, and its sockets are closed; one that fails
late leaves its successor alone. If the workers are the reason, all ranks of the learner have gone through all weights,
so they stay in step. A transfer over NCCL, which waits for a silent peer for ever, is broken off after `timeout_s`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from sortedrl.engine.vllm.transfer.gloo import GlooTrainerInitInfo
from sortedrl.engine.vllm.transfer.shared_buckets import SharedBuckets
from sortedrl.engine.vllm.transfer.source import CastSource
from sortedrl.errors import first_line
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
_listening: list[socket.socket] = []  # the port of rank 0 from `describe` to `send`: one at most
_latest: list[str] = []  # the session that these belong to, from `send` on: one at most


@dataclass(slots=True, kw_only=True, frozen=True)
class SenderFacts:
    """What the workers must know before tensors arrive, and where rank 0 will listen."""

    update_info: dict[str, Any]
    host: str
    port: int
    shared: str = ""


def describe(holder: WeightHolder, dtype: torch.dtype, is_local: bool, shares_memory: bool) -> SenderFacts:
    """Prepare a session. `is_local`: all processes are on this machine. `shares_memory`: weights need not travel."""
    _latest.clear()  # a session before this one closes nothing from here on
    source = CastSource(holder.module, dtype)
    metadata = source.metadata()
    update_info = {
        "names": [entry.name for entry in metadata],
        "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in metadata],
        "shapes": [list(entry.shape) for entry in metadata],
    }
    host = LOOPBACK if is_local else _network_address()
    shared = _make_memory(source) if shares_memory and holder.rank == 0 else ""
    _close_port()
    if holder.rank != 0:
        return SenderFacts(update_info=update_info, host=host, port=0)
    _listening.append(socket.create_server((host, 0)))
    return SenderFacts(update_info=update_info, host=host, port=_listening[0].getsockname()[1], shared=shared)


def _make_memory(source: CastSource) -> str:
    """Make memory for the weights in place of the previous one; returns its address, or "" if there is none."""
    _close_memories()
    memory = SharedBuckets.create(sum(tensor.num_bytes for tensor in source.wire_tensors()))
    if memory is None:
        return ""
    _memories.append(memory)
    return memory.address


def send(holder: WeightHolder, plan: SendPlan) -> str | None:
    """Send the weights to all workers of the session; returns why rank 0 could not, or None. Every rank must call it.

    A failure of the workers is a result and no error, because an error would mean that this rank has failed. With a
    client it is raised, since the caller knows the client's errors.
    """
    with _own_device(holder.module):
        return _send(holder, plan)


def _own_device(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """Make the GPU of the weights the current one: a new thread begins at the first."""
    device = next(module.parameters()).device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _send(holder: WeightHolder, plan: SendPlan) -> str | None:
    source = CastSource(holder.module, plan.dtype, _device_for(plan))
    _latest[:] = [plan.session]
    try:
        if plan.session not in _sessions:
            _close_sessions()
            client = plan.client or _DrivenElsewhere()
            _sessions[plan.session] = WeightTransferTrainerFactory.trainer_init(
                _init_info(plan, holder.rank, source), client=client, source=source
            )
        trainer = _sessions[plan.session]
        trainer.source = source
        with _time_limit(trainer, plan.timeout_s):
            trainer.send_weights()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # buffers, and gathered tensors: an engine may need the memory for its KV cache
    except Exception as error:
        # Over gloo a source that has not begun would gather in another way than the ranks that pack.
        is_out_of_step = source.is_broken or (plan.backend == "gloo" and not source.has_begun)
        try:
            if holder.rank != 0 or is_out_of_step or plan.client is not None:
                raise
            source.exhaust()
        finally:
            close(plan.session)
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def close(session: str | None = None) -> None:
    """End this session if it is the process's latest one; None: whichever is."""
    if session is None or session in _latest:
        _latest.clear()
        _close_sessions()
        _close_port()
        _close_memories()


@contextmanager
def _time_limit(trainer: Any, seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` after a transfer that has taken too long. Gloo has a limit of its own, and NCCL has none."""
    if getattr(trainer, "model_update_group", None) is None:
        yield
        return
    is_over = threading.Event()

    def abort() -> None:
        is_over.set()
        _abort(trainer)  # ends the waits of the thread that sends

    timer = threading.Timer(seconds, abort)
    timer.daemon = True
    timer.start()
    late = TimeoutError(f"the engines did not take the weights within {seconds:g} s")
    try:
        yield
    except Exception as error:
        if is_over.is_set():
            raise late from error
        raise
    finally:
        timer.cancel()
        timer.join()
    if is_over.is_set():
        raise late


def _abort(trainer: Any) -> None:
    """Free NCCL's communicator, once, and broadcast nothing more. vLLM forbids both only after it has been freed."""
    group: Any = getattr(trainer, "model_update_group", None)
    if group is not None:
        destroy, group.destroy, group.broadcast = group.destroy, _do_nothing, _do_nothing
        destroy()


def _do_nothing(*_: Any, **__: Any) -> None: ...


def _device_for(plan: SendPlan) -> torch.device | None:
    """Where a backend needs the tensors, which may be in host memory; None: it takes them from anywhere."""
    return None if plan.backend == "gloo" else torch.device("cuda", torch.cuda.current_device())


def _close_sessions() -> None:
    while _sessions:
        trainer = _sessions.popitem()[1]
        _abort(trainer)  # a thread that is not waited for may still be sending
        trainer.shutdown()


def _close_memories() -> None:
    while _memories:
        _memories.pop().close()


def _close_port() -> None:
    while _listening:
        _listening.pop().close()


def _init_info(plan: SendPlan, rank: int, source: CastSource) -> Any:
    place = {"master_address": plan.host, "master_port": plan.port, "world_size": plan.world_size}
    match plan.backend:
        case "gloo":
            listening = _listening.pop() if rank == 0 and _listening else None
            return GlooTrainerInitInfo(
                **place, timeout_s=plan.timeout_s, shared=plan.shared, listening=listening, rank=rank
            )
        case "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            _close_port()  # vLLM opens it again
            return NCCLTrainerInitInfo(**place, packed=True, rank=rank)
        case "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            size = max(IPCTrainerInitInfo.packed_buffer_size_bytes, source.largest_bytes)
            return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=rank)
        case _:
            raise AssertionError(f"no transfer over {plan.backend}")


def _network_address() -> str:
    import ray

    return ray.util.get_node_ip_address()
