"""Engines in Ray actors: the members of a pool, on this machine or on those of a cluster.

`build/parts.py` makes a `RayMembers` and gives it to the pool. An actor holds an `EngineHost`; calls to it are Ray
tasks, whose references turn into futures. Weights go into the object store once and are read there by every actor of a
machine without a copy: the driver serialises them once, whatever the number of engines.

An actor first imports what its engine needs, and makes the engine when it is told to. One such actor can be kept in
reserve: to replace an engine that died is then to make a model, and not to start Python and import torch. Its imports
take seconds of a processor, and where engines have all of them, they stand back, unless an engine is waiting for them:
a run that has just lost one must not lose speed once more to what is meant to help it.

`ray_cluster.connect` comes first. What this keeps true: an actor that ends takes its engine along; Ray never restarts
an actor by itself, since the pool has to know.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

from sortedrl.engine.base import Engine, EngineStats, InFlight, Request
from sortedrl.engine.pool.actor_loop import EngineHost, Report
from sortedrl.errors import EngineError
from sortedrl.weights import arrays_of, load_arrays

CALLS_AT_ONCE = 8  # a `take` that waits must not keep the others out
FREE_S = 5.0  # Ray takes its time, a second or so, to free what nobody refers to any more
ANSWER_S = 2.0  # an actor in reserve that does not answer in this time is of no use
SPARE_NICENESS = 3  # of its imports: a third of a processor that an engine wants too, all of one that is idle


class _Imports(threading.Thread):
    """Imports modules, each in a thread of its own: on Linux a thread has its own priority, which only ever falls."""

    def __init__(self, names: Sequence[str], niceness: int) -> None:
        super().__init__(name="imports", daemon=True)
        self._names = names
        self._niceness = niceness

    def run(self) -> None:
        for name in self._names:
            step = threading.Thread(target=_import_nicely, args=(name, self._niceness), daemon=True)
            step.start()
            step.join()

    def hurry(self) -> None:
        """Wait for the end; what is not begun yet stands back no more."""
        self._niceness = 0
        self.join()


def _import_nicely(name: str, niceness: int) -> None:
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    import_module(name)


class _EngineActor:
    """What runs in the actor's process. `niceness` is that of the imports."""

    def __init__(self, threads: int, imports: Sequence[str], niceness: int = 0) -> None:
        # Here, ahead of the imports, and not by Ray's runtime_env: for that it starts a process anew, and those that it
        # keeps ready are of no use.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self._threads = threads
        self._model: Any = None
        self._imports = _Imports(imports, niceness)
        self._imports.start()

    def ready(self) -> None:
        """Answers when the actor is up."""
        self._imports.join()

    def hurry(self) -> None:
        """The same, for one that is waited for."""
        self._imports.hurry()

    def open(self, make_engine: Callable[[], tuple[Engine, Any]], hurried: None) -> int:
        """Make the engine, and say how many slots it has.

        `hurried` is what `hurry` returned: Ray does not read `make_engine`, which imports too, before it is there.
        """
        import torch

        torch.set_num_threads(self._threads)

        def make() -> Engine:
            engine, self._model = make_engine()
            return engine

        self._host = EngineHost(make, self._take_up)
        return self._host.slots()

    def _take_up(self, engine: Engine, version: int, weights: Mapping[str, Any], in_flight: InFlight) -> None:
        engine.publish(version, load_arrays(weights, self._model), in_flight).wait()

    def submit(self, requests: list[Request]) -> None:
        self._host.submit(requests)

    def take(self, wait_s: float, turn: int) -> Report:
        return self._host.take(wait_s, turn)

    def interrupt(self, samples: list[int] | None, turn: int) -> Report:
        return self._host.interrupt(samples, turn)

    def publish(self, version: int, weights: Mapping[str, Any], in_flight: InFlight) -> None:
        self._host.publish(version, weights, in_flight)

    def stats(self) -> EngineStats:
        stats = self._host.stats()
        stats.extra["pid"] = os.getpid()
        return stats


class RayMember:
    """The driver's end of one actor."""

    def __init__(self, actor: Any, opening: Future[int]) -> None:
        self._actor = actor
        self._opening = opening

    def slots(self) -> Future[int]:
        return self._opening

    def submit(self, requests: list[Request]) -> Future[None]:
        return self._actor.submit.remote(requests).future()

    def take(self, wait_s: float, turn: int) -> Future[Report]:
        return self._actor.take.remote(wait_s, turn).future()

    def interrupt(self, samples: list[int] | None, turn: int) -> Future[Report]:
        return self._actor.interrupt.remote(samples, turn).future()

    def publish(self, version: int, weights: Any, in_flight: InFlight) -> Future[None]:
        return self._actor.publish.remote(version, weights, in_flight).future()

    def stats(self) -> Future[EngineStats]:
        return self._actor.stats.remote().future()

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)


class RayMembers:
    """`make_engine` is called in each actor and returns an engine with the module that holds its weights.

    `imports`: modules that making an engine takes, imported as soon as an actor starts.
    `has_spare`: keep an actor in reserve. It claims no processor while it waits, nor when it has taken a place, and it
    stands wherever Ray put it: right on one machine without accelerators, wrong on a cluster.
    """

    def __init__(
        self,
        make_engine: Callable[[], tuple[Engine, Any]],
        *,
        num_cpus: float,
        num_gpus: float,
        threads: int,
        imports: Sequence[str] = (),
        has_spare: bool = False,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._threads = threads
        self._imports = imports
        self._has_spare = has_spare
        self._on_close = on_close
        self._spare: Any = None
        self._spare_ready: Future[None] | None = None
        shape: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": CALLS_AT_ONCE}
        self._actor_class = ray.remote(_EngineActor).options(num_cpus=num_cpus, num_gpus=num_gpus, **shape)
        self._spare_class = ray.remote(_EngineActor).options(num_cpus=0, **shape)

    def launch(self, index: int) -> RayMember:
        actor: Any = self._take_spare() or self._actor_class.remote(self._threads, self._imports)
        return RayMember(actor, actor.open.remote(self._make_engine, actor.hurry.remote()).future())

    def stock_up(self) -> None:
        if self._has_spare and self._spare is None:
            spare: Any = self._spare_class.remote(self._threads, self._imports, SPARE_NICENESS)
            self._spare, self._spare_ready = spare, spare.ready.remote().future()

    def put(self, source: Any) -> Any:
        arrays = arrays_of(source.module)
        deadline = time.monotonic() + FREE_S
        while True:
            try:
                return ray.put(arrays)
            except (ObjectStoreFullError, OutOfDiskError) as error:
                if time.monotonic() > deadline:
                    raise EngineError(
                        "the weights do not fit into Ray's object store: start Ray with a larger "
                        "--object-store-memory, or give its machine more shared memory and disk, then resume the run"
                    ) from error
            time.sleep(0.1)

    def close(self) -> None:
        """The pool has killed the actors one by one; the connection goes with whoever opened it."""
        if self._spare is not None:
            ray.kill(self._spare, no_restart=True)
        self._spare = self._spare_ready = None
        if self._on_close is not None:
            self._on_close()

    def _take_spare(self) -> Any:
        """The actor in reserve, if it lives; one that is still importing is further than one that would start now."""
        if self._spare is None or self._spare_ready is None:
            return None
        (spare, ready), self._spare, self._spare_ready = (self._spare, self._spare_ready), None, None
        if not ready.done():
            return spare
        try:
            ray.get(spare.ready.remote(), timeout=ANSWER_S)
        except RayError:
            ray.kill(spare, no_restart=True)
            return None
        return spare
