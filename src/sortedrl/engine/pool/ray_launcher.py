"""Engines in Ray actors, on this machine or in a cluster: the remote engines of a pool.

`run/builders/engine.py` makes a `RayEngineLauncher` and gives it to the pool, after `ray_cluster.connect`. An actor
holds an `ActorLoop`; calls to it are Ray tasks, whose references turn into futures. The driver puts weights into Ray's
object store once, whatever the number of engines, and every actor of a machine reads them there without a copy.

An actor first imports what its engine needs, and makes the engine when it is told to. One such actor can be kept as a
spare: replacing a dead engine then takes only the making of a model, without starting Python and importing torch. The
spare's imports take seconds of CPU time, so they run at a lower priority, unless the pool waits for them: otherwise a
run that has just lost an engine would be slowed down once more.

Guarantees: an actor that ends takes its engine with it; Ray never restarts an actor, because the pool has to know.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from importlib import import_module
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from sortedrl.engine.base import Engine, EngineStats, InFlight, Request
from sortedrl.engine.pool.actor_loop import ActorLoop, Report
from sortedrl.engine.pool.actor_place import ActorPlace
from sortedrl.engine.pool.ray_placement import EngineBundles
from sortedrl.errors import EngineError
from sortedrl.weights import AdapterArrays, arrays_of, load_arrays

CALLS_AT_ONCE = 8  # a `take` that waits must not keep the others out
FREE_S = 5.0  # how long to wait for Ray to free unreferenced objects, which takes it about a second
ANSWER_S = 2.0  # a spare actor that does not answer within this time is dropped
SPARE_NICENESS = 3  # of its imports: about a third of a busy core, all of an idle one


class _Imports(threading.Thread):
    """Imports modules, each in a new thread: on Linux every thread has its own priority, which can only be lowered."""

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
        """Import the remaining modules at normal priority, and wait for the end."""
        self._niceness = 0
        self.join()


def _import_nicely(name: str, niceness: int) -> None:
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    import_module(name)


class _EngineActor:
    """Runs in the actor's process. `niceness` applies to the imports.

    `visible_devices`: the GPUs of an actor for which Ray reserves none, because it shares them.
    """

    def __init__(self, threads: int, imports: Sequence[str], niceness: int = 0, visible_devices: str = "") -> None:
        # Set before the imports. Ray's runtime_env would start a new process instead of one that Ray keeps ready.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if visible_devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        self._threads = threads
        self._model: Any = None
        self._imports = _Imports(imports, niceness)
        self._imports.start()

    def devices(self) -> list[int]:
        """The numbers of the GPUs that Ray has given to this actor."""
        return [int(number) for number in ray.get_gpu_ids()]

    def ready(self) -> None:
        """Returns when the imports are done."""
        self._imports.join()

    def hurry(self) -> None:
        """The same at normal priority: the pool is waiting for this actor."""
        self._imports.hurry()

    def open(self, make_engine: Callable[[], tuple[Engine, Any]], hurried: None) -> int:
        """Make the engine, and return its number of slots.

        `hurried` is the result of `hurry`: Ray waits for it before it unpickles `make_engine`, which imports too.
        """
        import torch

        torch.set_num_threads(self._threads)

        def make() -> Engine:
            engine, self._model = make_engine()
            return engine

        self._loop = ActorLoop(make, self._load_weights)
        return self._loop.slots()

    def _load_weights(self, engine: Engine, version: int, weights: Any, in_flight: InFlight) -> None:
        """Publish arrays from Ray's object store, or let the engine receive weights by a route of its own."""
        source = weights
        if isinstance(weights, AdapterArrays):
            source = weights.source()
        elif isinstance(weights, Mapping):
            source = load_arrays(weights, self._model)
        engine.publish(version, source, in_flight).wait()

    def submit(self, requests: list[Request]) -> None:
        self._loop.submit(requests)

    def take(self, wait_s: float, pause_id: int) -> Report:
        return self._loop.take(wait_s, pause_id)

    def interrupt(self, samples: list[int] | None, pause_id: int) -> Report:
        return self._loop.interrupt(samples, pause_id)

    def publish(self, version: int, weights: Any, in_flight: InFlight) -> None:
        self._loop.publish(version, weights, in_flight)

    def sleep(self) -> None:
        self._loop.sleep()

    def wake(self) -> None:
        self._loop.wake()

    def apply(self, function: Callable[[Engine], Any]) -> Any:
        """Call a function with the engine, in its thread. Benchmarks look into engines with it."""
        return self._loop.apply(function)

    def stats(self) -> EngineStats:
        stats = self._loop.stats()
        stats.extra["pid"] = os.getpid()
        return stats


class RayEngine:
    """The driver's side of one actor, and of the placement group that is reserved for it, if there is one."""

    def __init__(self, actor: Any, opening: Future[int], group: Any = None) -> None:
        self._actor = actor
        self._opening = opening
        self._group = group

    def slots(self) -> Future[int]:
        return self._opening

    def submit(self, requests: list[Request]) -> Future[None]:
        return self._actor.submit.remote(requests).future()

    def take(self, wait_s: float, pause_id: int) -> Future[Report]:
        return self._actor.take.remote(wait_s, pause_id).future()

    def interrupt(self, samples: list[int] | None, pause_id: int) -> Future[Report]:
        return self._actor.interrupt.remote(samples, pause_id).future()

    def publish(self, version: int, weights: Any, in_flight: InFlight) -> Future[None]:
        return self._actor.publish.remote(version, weights, in_flight).future()

    def sleep(self) -> Future[None]:
        return self._actor.sleep.remote().future()

    def wake(self) -> Future[None]:
        return self._actor.wake.remote().future()

    def stats(self) -> Future[EngineStats]:
        return self._actor.stats.remote().future()

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)


class RayEngineLauncher:
    """`make_engine` runs in each actor and returns an engine and the module that holds its weights.

    `imports`: modules that `make_engine` needs; an actor imports them as soon as it starts.
    `place`: the placement group that each engine gets, in place of `num_cpus` and `num_gpus`.
    `has_adapters`: engines have the base model, and publications bring adapters alone.
    `has_spare`: keep a spare actor. It reserves no CPU, neither while it waits nor as an engine, and Ray places it
    anywhere: use it on one machine without accelerators, not on a cluster.
    `places`: machine and GPUs of each engine; empty: Ray chooses them by `num_gpus`.
    """

    def __init__(
        self,
        make_engine: Callable[[], tuple[Engine, Any]],
        *,
        num_cpus: float,
        num_gpus: float,
        threads: int,
        imports: Sequence[str] = (),
        place: EngineBundles | None = None,
        has_adapters: bool = False,
        has_spare: bool = False,
        places: Sequence[ActorPlace] = (),
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._places = places
        self._threads = threads
        self._imports = imports
        self._place = place
        self._has_adapters = has_adapters
        self._has_spare = has_spare
        self._on_close = on_close
        self._spare: Any = None
        self._spare_ready: Future[None] | None = None
        shape: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": CALLS_AT_ONCE}
        self._shape = shape
        self._options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, **shape}
        self._actor_class = ray.remote(_EngineActor).options(**self._options)
        self._spare_class = ray.remote(_EngineActor).options(num_cpus=0, **shape)

    def launch(self, index: int) -> RayEngine:
        group = None if self._place is None else placement_group(list(self._place.bundles), strategy="PACK")
        actor: Any = self._take_spare() or self._start(index, group)
        return RayEngine(actor, actor.open.remote(self._make_engine, actor.hurry.remote()).future(), group)

    def _placed_class(self, group: Any) -> Any:
        """The class of actors, or of those in the first bundle of a placement group."""
        if self._place is None or group is None:
            return self._actor_class
        own = self._place.bundles[0]
        return ray.remote(_EngineActor).options(
            **self._shape,
            num_cpus=own["CPU"] - (1.0 if self._place.is_spread else 0.0),
            num_gpus=0.0 if self._place.is_spread else own["GPU"],  # spread: vLLM's own actors take them
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
            ),
        )

    def _start(self, index: int, group: Any) -> Any:
        if not self._places:
            return self._placed_class(group).remote(self._threads, self._imports)
        place = self._places[index]
        there = NodeAffinitySchedulingStrategy(place.node, soft=False)
        actor_class: Any = ray.remote(_EngineActor).options(**self._options, scheduling_strategy=there)
        return actor_class.remote(self._threads, self._imports, visible_devices=place.visible_devices)

    def prepare_spare(self) -> None:
        if self._has_spare and self._spare is None:
            spare: Any = self._spare_class.remote(self._threads, self._imports, SPARE_NICENESS)
            self._spare, self._spare_ready = spare, spare.ready.remote().future()

    def put(self, source: Any) -> Any:
        arrays = AdapterArrays(source.adapter) if self._has_adapters else arrays_of(source.module)
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

    def wait_any(self, futures: Sequence[Future[Any]], seconds: float) -> None:
        wait(futures, timeout=seconds, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """End the spare; the pool has killed the other actors. `on_close` closes a connection to Ray that is ours."""
        if self._spare is not None:
            ray.kill(self._spare, no_restart=True)
        self._spare = self._spare_ready = None
        if self._on_close is not None:
            self._on_close()

    def _take_spare(self) -> Any:
        """The spare actor, if it is alive. One that is still importing is ready sooner than a new one."""
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
