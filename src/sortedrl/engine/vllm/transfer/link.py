# pyright: reportMissingImports=false
"""The connection from a learner to vLLM engines: who sends, who receives under which rank, and whether it arrived.

The engine in this process (`engine.py`) and the launcher of a pool (`ray_launcher.py`) each own one `WeightLink`. For
every publication it starts the learner's side (`sender.py`) in a thread and makes a `Ticket` per engine. Each engine
redeems its ticket itself (`receive`), all at the same time, because a broadcast needs all of them.

vLLM's clients tell every engine that its workers begin at rank 1, so two engines would claim the same ranks. Here each
engine is told where its own ranks begin.

Guarantees: the same engines and the same place of the weights keep one group; after any change, or a failure, a new
group is made; `finish` returns only when the learner's side has ended, so weights never change while they are sent; an
engine that does not take weights is no failure of the learner's processes.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import torch

from sortedrl.errors import ConfigError, SortedRLError, first_line
from sortedrl.weights import HERE, ModuleWeights

_RANKS_SHARE = 0.8  # of the time that the learner's ranks wait for each other: rank 0 may wait so long for an engine
_numbers = itertools.count()


@dataclass(slots=True, kw_only=True, frozen=True)
class Ticket:
    """What one engine needs to receive the weights of one publication."""

    session: str
    init_info: dict[str, Any]  # to join the group; an engine that has joined this session already leaves it out
    update_info: dict[str, Any]


class WeightLink:
    """`dtype`: the engines' number format, in which weights travel. `is_local`: all processes are on this machine.

    `shares_memory`: whether gloo may use shared memory on one machine. `rank_timeout_s`: how long the learner's ranks
    wait for each other.
    """

    def __init__(
        self,
        *,
        backend: str,
        dtype: torch.dtype,
        num_workers: int,
        limit_s: float,
        is_local: bool,
        shares_memory: bool = True,
        rank_timeout_s: float = math.inf,
    ) -> None:
        self.backend = backend
        self._dtype = dtype
        self._num_workers = num_workers  # of each engine
        self._limit_s = limit_s
        self._rank_timeout_s = rank_timeout_s
        self._is_local = is_local
        self._shares_memory = shares_memory and is_local and backend == "gloo"
        self._session: _Session | None = None
        self._own: str | None = None  # the last session in this process, also if it broke off
        self._sending: Future[list[str | None]] | None = None

    def begin(self, source: Any, engines: Sequence[Hashable]) -> list[Ticket]:
        """Start to send the weights of `source` (`weights.py`) to these engines; returns their tickets in order."""
        assert self._sending is None, "the weights before these are still being sent"
        from sortedrl.engine.vllm.transfer.sender import send

        source = _with_place(source)
        session = self._join(source, tuple(engines))
        self._note_own(source, session.plan)
        self._sending = _in_thread(lambda: source.apply(send, session.plan))
        offsets = range(1, session.plan.world_size, self._num_workers)
        return [
            Ticket(
                session=session.plan.session,
                init_info=_init_info(session.plan, rank_offset=offset),
                update_info=session.update_info,
            )
            for offset in offsets
        ]

    def send_by(self, source: Any, client: Any, engine: Hashable) -> None:
        """Send the weights through vLLM's handshake, whose calls `client` carries to the one engine (CUDA IPC)."""
        from sortedrl.engine.vllm.transfer.sender import SendPlan, send

        plan = SendPlan(
            session=f"{os.getpid()}-client-{engine}",
            backend=self.backend,
            dtype=self._dtype,
            host="",
            port=0,
            world_size=0,
            timeout_s=self._limit_s,
            client=client,
        )
        source = _with_place(source)
        self._note_own(source, plan)
        source.apply(send, plan)

    def finish(self) -> str | None:
        """Wait until the learner's side has ended; returns why it failed, or None. Errors of the learner are raised."""
        sending, self._sending = self._sending, None
        if sending is None:
            return None
        try:
            why = sending.result(self._limit_s)[0]  # of the learner's rank 0, which sends
        except FutureTimeout:
            self._session = None
            return f"the weights were not sent within {self._limit_s:g} s"
        except Exception as error:
            self._session = None
            if isinstance(error, SortedRLError):
                raise
            return f"{type(error).__name__}: {first_line(error)}"
        if why is not None:
            self._session = None
        return why

    def abandon(self) -> None:
        """Do not wait for the learner's side: the engines are gone, and it ends by itself."""
        self._session = self._sending = None

    def close(self) -> None:
        """End the session if it is in this process. Those of the learner's ranks end with them."""
        own, self._own, self._session, self._sending = self._own, None, None, None
        if own is not None:
            from sortedrl.engine.vllm.transfer.sender import close

            close(own)

    def _note_own(self, source: Any, plan: Any) -> None:
        if source.place == HERE:
            self._own = plan.session

    def _join(self, source: Any, engines: tuple[Hashable, ...]) -> _Session:
        """The session with these engines. If the learner's processes are started again meanwhile, one with the new."""
        for is_last in (False, True):
            key = (source.place, engines)
            if self._session is not None and self._session.key == key:
                break
            try:
                self._session = self._open(source, key, len(engines))
            except ConnectionError:
                if is_last:
                    raise
        assert self._session is not None, "a session was opened, or an error raised"
        return self._session

    def _open(self, source: Any, key: Hashable, num_engines: int) -> _Session:
        from sortedrl.engine.vllm.transfer.sender import SendPlan, describe

        may_wait_s = math.inf if source.place == HERE else _RANKS_SHARE * self._rank_timeout_s
        facts = source.apply(describe, self._dtype, self._is_local, self._shares_memory)[0]
        plan = SendPlan(
            session=f"{os.getpid()}-{next(_numbers)}",
            backend=self.backend,
            dtype=self._dtype,
            host=facts.host,
            port=facts.port,
            shared=facts.shared,
            world_size=1 + num_engines * self._num_workers,
            timeout_s=min(self._limit_s / 2, may_wait_s),
        )
        return _Session(key=key, plan=plan, update_info=facts.update_info)


def _with_place(source: Any) -> Any:
    """The source itself, or for one that has only a `module`, that module in this process."""
    return source if hasattr(source, "apply") else ModuleWeights(source.module)


@dataclass(slots=True, kw_only=True, frozen=True)
class _Session:
    key: Hashable
    plan: Any
    update_info: dict[str, Any]


def _init_info(plan: Any, *, rank_offset: int) -> dict[str, Any]:
    """The worker's side of the handshake, as each backend wants it."""
    place = {"master_address": plan.host, "master_port": plan.port, "world_size": plan.world_size}
    extra = {"timeout_s": plan.timeout_s, "shared": plan.shared} if plan.backend == "gloo" else {"packed": True}
    return {**place, "rank_offset": rank_offset, **extra}


def _in_thread(function: Any) -> Future[Any]:
    """Run a function in a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="sortedrl-weights", daemon=True).start()
    return future


async def receive(frontend: Any, ticket: Ticket, joined: str | None) -> None:
    """The engine's side: join the session unless it is `joined`, and load the weights into vLLM's workers."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    if ticket.session != joined:
        await frontend.collective_rpc("sorted_leave_transfer")
        await frontend.init_weight_transfer_engine(WeightTransferInitRequest(init_info=ticket.init_info))
    await frontend.start_weight_update()
    await frontend.update_weights(WeightTransferUpdateRequest(update_info=ticket.update_info))
    await frontend.finish_weight_update()


def is_meta(model: Any) -> bool:
    """Whether a model has no weights yet."""
    return next(model.parameters()).device.type == "meta"


def choose_transfer(transfer: str, model: Any, *, is_server: bool = False, tensor_parallel: int = 1) -> str:
    """The backend for an engine of this process: as asked; for `auto`, CUDA IPC where it works, otherwise gloo.

    A model on `meta` is a pool's, which has chosen already.
    """
    if is_meta(model):
        return transfer
    device = next(model.parameters()).device
    fault = _find_ipc_fault(device, is_server, tensor_parallel)
    if transfer == "auto":
        return "gloo" if fault else "ipc"
    if transfer == "nccl":
        fault = _find_nccl_fault(device, tensor_parallel)
    if transfer in ("ipc", "nccl") and fault:
        raise ConfigError(f"engine.transfer = {transfer} does not work here, because {fault}: remove engine.transfer")
    return transfer


def _find_ipc_fault(device: torch.device, is_server: bool, tensor_parallel: int) -> str | None:
    """Why handles of the learner's GPU memory are of no use to vLLM's workers; None if they are."""
    if device.type != "cuda":
        return "the learner's weights are not on a GPU"
    if is_server:
        return "a server takes no handles of another process's memory"
    if tensor_parallel > 1 or device.index:  # the first worker is on the first GPU
        return "a worker of the engine is on another GPU than the learner"
    return None


def _find_nccl_fault(device: torch.device, tensor_parallel: int) -> str | None:
    """Why the learner and vLLM's workers cannot form one group; None if they can."""
    if device.type != "cuda":
        return (
            "the weights in this process are not on a GPU (to get them from a learner's ranks by NCCL, set "
            "placement.mode = separate)"
        )
    if (device.index or 0) < tensor_parallel:
        return "a worker of the engine is on the learner's GPU"
    return None
