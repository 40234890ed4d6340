"""Ranks in Ray actors, on this machine or on the machines of a cluster.

`run/builders/learner.py` connects to Ray, makes a `RayRanks` and gives it to a `ShardedLearner`. The arguments of a
call go into Ray's object store once, and all ranks of a machine read them there. Ranks communicate by gloo, or by nccl
if they have GPUs. Each machine of the cluster needs this package, but no copy of the model.

Guarantees: ranks that are all on one machine listen on loopback only; a call never waits for a dead rank, because Ray
reports a process that died, and a rank that hangs makes the others time out after `timeout_s`; a rank that waits for an
engine while it sends weights counts as lost after `send_s`; after a failure all ranks are ended, and later calls raise
the same error. Ranks are numbered machine by machine.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sortedrl.errors import LearnerError, RankLostError, SortedRLError, first_line

_LOOPBACK = "127.0.0.1"
_PLACEMENT_S = 120.0  # how long to wait for resources: a cluster may have to start machines
_GRACE_S = 10.0  # how long to wait after a failure for another rank's failure that may have caused it
_DIED = (RayActorError, WorkerCrashedError, NodeDiedError)
_SAVING = "saving"  # Ray runs methods of this group beside the others


class _RankActor:
    """Runs in a rank's process. The driver calls the same method on all ranks and waits for all of them."""

    def __init__(self, rank: int, size: int, threads: int, shares_device: bool = False) -> None:
        # Set here, before torch is imported; Ray's runtime_env would start a new process for it.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self._rank = rank
        self._size = size
        self._threads = threads
        self._shares_device = shares_device
        self._listening: socket.socket | None = None
        self._mesh: Any = None
        self._learner: Any = None
        self._writer: Any = None

    def take_rank(self, rank: int) -> None:
        """Change this rank's number, before it joins the others."""
        self._rank = rank

    def location(self) -> tuple[str, int]:
        """The address of the rank's machine, and its process id."""
        return ray.util.get_node_ip_address(), os.getpid()

    def gpu(self) -> tuple[str, int] | None:
        """Ray's id of the rank's machine, and the rank's GPU there; None without a GPU."""
        found = ray.get_gpu_ids()
        return (ray.get_runtime_context().get_node_id(), int(found[0])) if found else None

    def listen(self, host: str) -> int:
        """Open the port at which the ranks meet; only rank 0 does."""
        if self._rank != 0:
            return 0
        self._listening = socket.create_server((host, 0))
        return self._listening.getsockname()[1]

    def join(self, host: str, port: int, timeout_s: float, is_local: bool) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        torch.set_num_threads(self._threads)
        has_gpu = bool(ray.get_gpu_ids()) and torch.cuda.is_available()
        if host == _LOOPBACK:  # otherwise gloo would listen on the address of the machine's name
            names = [name for _, name in socket.if_nameindex()]
            loopback = "lo" if "lo" in names else "lo0"
            os.environ["GLOO_SOCKET_IFNAME"] = loopback
            if is_local:  # otherwise rank 0 sends weights to engines on other machines by NCCL
                os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host,
            port,
            self._size,
            is_master=self._rank == 0,
            timeout=timeout,
            master_listen_fd=None if self._listening is None else self._listening.detach(),
        )
        backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"  # gloo also for checkpoints and states in host memory
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._size, timeout=timeout)
        self._mesh = init_device_mesh("cuda" if has_gpu else "cpu", (self._size,))

    def build(self, skeleton: Any, weights: Mapping[str, Any], settings: Any, temperature: float) -> None:
        from sortedrl.learner.sharded.rank import RankLearner

        self._learner = RankLearner(
            skeleton,
            settings,
            temperature=temperature,
            mesh=self._mesh,
            weights=weights,
            shares_device=self._shares_device,
        )

    def update(self, batch: Any, inspect_dir: Any) -> Any:
        self._learner.inspect_dir = inspect_dir if self._rank == 0 else None
        result = self._learner.start(batch).result()
        return (result, self._learner.find_nonfinite()) if self._rank == 0 else self._learner.find_nonfinite()

    def trained_weights(self) -> Any:
        return self._learner.trained_weights()

    def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function where this rank's shard is (`ModuleWeights.apply`)."""
        from sortedrl.weights import WeightHolder

        return function(WeightHolder(rank=self._rank, module=self._learner.model), *arguments)

    def save_shards(self, folder: Path) -> Any:
        """Copy this rank's shards and start to write them; `wait_saved` waits for that.

        Rank 0 returns the learner's state without tensors, and the name of a weight that is not finite: then nothing is
        written.
        """
        from sortedrl.learner.sharded.rank_states import shard_tensors
        from sortedrl.learner.sharded.shard_files import ShardWriter

        if self._writer is None:
            self._writer = ShardWriter(self._new_group())
        broken = self._learner.find_nonfinite()
        tensors, state = shard_tensors(self._learner)
        if broken is None:
            self._writer.begin(folder, tensors)
        return (state, broken) if self._rank == 0 else None

    @ray.method(concurrency_group=_SAVING)
    def wait_saved(self) -> Any:
        return self._writer.wait()

    def load_shards(self, folder: Path, state: dict[str, Any]) -> None:
        import torch.distributed as dist

        from sortedrl.learner.sharded.rank_states import load_shard_tensors

        group = self._new_group()
        load_shard_tensors(self._learner, folder, state, group)
        dist.destroy_process_group(group)

    def _new_group(self) -> Any:
        """A group for checkpoints alone, on the CPU."""
        import torch.distributed as dist

        return dist.new_group(backend="gloo")

    def state(self) -> Any:
        from sortedrl.weights import array_of

        state = self._learner.state_dict()
        arrays = {name: array_of(tensor) for name, tensor in state["optimizer"].items()}
        return {**state, "optimizer": arrays} if self._rank == 0 else None

    def load(self, state: dict[str, Any]) -> None:
        from sortedrl.weights import tensor_of

        tensors = {name: tensor_of(array, is_floating=True) for name, array in state["optimizer"].items()}
        self._learner.load_state_dict({**state, "optimizer": tensors})


class RayRanks:
    """`size` ranks, started and connected. Call `ray_cluster.connect` first.

    `send_s`: how long ranks may take to send weights to engines. `is_local`: the engines are on this machine too.
    `shares_device`: as of `TorchLearner`.
    """

    def __init__(
        self,
        size: int,
        *,
        num_cpus: float,
        num_gpus: float,
        threads: int,
        timeout_s: float,
        send_s: float | None = None,
        is_local: bool = False,
        shares_device: bool = False,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.size = size
        self._send_s = send_s
        self._shares_device = shares_device
        self._on_close = on_close
        self._actors: list[Any] = []
        self._locations: list[tuple[str, int]] = []
        self._failure: LearnerError | None = None
        resources = {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})
        self._placement = placement_group([resources] * size, strategy="PACK")
        try:
            if not self._placement.wait(_PLACEMENT_S):
                raise LearnerError(
                    f"Ray has no resources for {size} ranks of {num_cpus:g} CPUs and {num_gpus:g} GPUs each: lower "
                    "learner.ranks, learner.rank_cpus or learner.rank_gpus, or add machines"
                )
            self._actors = [self._launch(rank, num_cpus, num_gpus, threads) for rank in range(size)]
            self._order_by_machine()
            self._locations = self.call("location")
            host = _LOOPBACK if len({node for node, _ in self._locations}) == 1 else self._locations[0][0]
            port = self.call("listen", host)[0]
            self.call("join", host, port, timeout_s, is_local)
        except BaseException:
            self.close()
            raise

    @property
    def locations(self) -> list[tuple[str, int]]:
        """The address of the machine and the process id of each rank."""
        return self._locations

    @property
    def gpus(self) -> list[tuple[str, int]]:
        """Ray's id of the machine, and the GPU there, of each rank that has one."""
        return [gpu for gpu in self.call("gpu") if gpu is not None]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        limit_s = self._send_s if method == "apply" else None
        results, failures, silent = self._collect(self._send(method, *arguments), limit_s)
        if failures:
            raise self._failed(failures, silent)
        if silent:
            raise self._stalled(silent, limit_s)
        return results

    def start(self, method: str) -> Callable[[], list[Any]]:
        """Call a method that runs beside others on every rank; returns a function that waits for the results.

        A failure of such a method does not end the ranks: a rank that has died makes the next call fail too.
        """
        pending = self._send(method)

        def wait() -> list[Any]:
            results, failures, silent = self._collect(pending)
            if failures:
                raise self._describe(failures, silent)
            return results

        return wait

    def _send(self, method: str, *arguments: Any) -> dict[Any, int]:
        if self._failure is not None:
            raise self._failure
        shared = [self._put(argument) for argument in arguments]
        return {getattr(actor, method).remote(*shared): rank for rank, actor in enumerate(self._actors)}

    def _collect(
        self, pending: dict[Any, int], limit_s: float | None = None
    ) -> tuple[list[Any], dict[int, Exception], list[int]]:
        """The results by rank, failures, and the ranks that did not answer because of those or within the limit."""
        results: list[Any] = [None] * self.size
        failures: dict[int, Exception] = {}
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=_GRACE_S if failures else left)
            if not ready:
                break  # the others are waiting for a rank that has failed, or time is up
            rank = pending.pop(ready[0])
            try:
                results[rank] = ray.get(ready[0])
            except Exception as error:  # after any error the ranks are out of step
                failures[rank] = error
                if _is_cause(error):
                    break
        return results, failures, list(pending.values())

    def close(self) -> None:
        """End the ranks. `on_close` ends the connection to Ray if it was opened for them."""
        self._end()
        self._failure = self._failure or LearnerError("the ranks of the learner have been closed")
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

    def _launch(self, rank: int, num_cpus: float, num_gpus: float, threads: int) -> Any:
        as_actor: Any = ray.remote(concurrency_groups={_SAVING: 1})  # pyright: ignore[reportCallIssue]
        actor_class = as_actor(_RankActor).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank),
        )
        return actor_class.remote(rank, self.size, threads, self._shares_device)

    def _put(self, value: Any) -> Any:
        try:
            return ray.put(value)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise LearnerError(
                "the weights do not fit into Ray's object store: start Ray with a larger --object-store-memory, or "
                "use a machine with more shared memory and disk"
            ) from error

    def _end(self) -> None:
        if not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        remove_placement_group(self._placement)

    def _order_by_machine(self) -> None:
        """Number the ranks so that those of a machine follow each other: neighbours exchange the most."""
        nodes = ray.get([actor.location.remote() for actor in self._actors])
        order = sorted(range(self.size), key=lambda rank: (nodes[rank][0] != nodes[0][0], nodes[rank][0], rank))
        self._actors = [self._actors[rank] for rank in order]
        ray.get([actor.take_rank.remote(rank) for rank, actor in enumerate(self._actors)])

    def _failed(self, failures: dict[int, Exception], silent: list[int]) -> LearnerError:
        """End all ranks and return the error that names the rank that failed first."""
        self._end()
        self._failure = self._describe(failures, silent)
        return self._failure

    def _stalled(self, silent: list[int], limit_s: float | None) -> LearnerError:
        """End all ranks and return the error that names those that are still sending weights."""
        self._end()
        names = ", ".join(map(self._name, silent))
        self._failure = RankLostError(
            f"weights were not sent within {limit_s:g} s by {names}",
            "an engine or the network between them hangs; fix that and resume, or raise engine.publish_s",
        )
        return self._failure

    def _describe(self, failures: dict[int, Exception], silent: list[int]) -> LearnerError:
        rank, error = next(((r, e) for r, e in failures.items() if _is_cause(e)), next(iter(failures.items())))
        name = self._name(rank)
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, SortedRLError):
            return LearnerError(f"{name}: {cause}")
        if isinstance(error, _DIED):
            return RankLostError(
                f"{name} has died ({first_line(error)})",
                "it was killed, its machine ran out of memory (lower learner.micro_tokens or raise learner.ranks), or "
                "its machine lacks this package; fix that and resume",
            )
        others = f"; {', '.join(self._name(other) for other in silent)} did not answer" if silent else ""
        return RankLostError(
            f"{name} failed ({type(cause).__name__}: {first_line(cause)}){others}",
            "fix that and resume; learner.rank_timeout_s is how long ranks wait for each other",
        )

    def _name(self, rank: int) -> str:
        if rank >= len(self._locations):
            return f"rank {rank} of {self.size}"
        node, process = self._locations[rank]
        return f"rank {rank} of {self.size} (process {process} on {node})"


def _is_cause(error: Exception) -> bool:
    """Whether no other rank caused this failure: a process died, or this package raised an error."""
    return isinstance(error, _DIED) or (isinstance(error, RayTaskError) and isinstance(error.cause, SortedRLError))
