# pyright: reportMissingImports=false
"""The vLLM engine: real vLLM behind the protocol of `base.py`, with shared noise and replay.

`run/build/engine.py` makes it; the controller drives it like any other. vLLM decodes in processes of its own, and
`poll` waits. Its outputs are read in the thread of an event loop (`process.py`: `core.py`, or over HTTP `server.py`),
where the tower (`request_loop.py`, `http.py`) has all attempts (`request.py`) and makes events of what they say.
What runs in vLLM's worker is in `worker.py`.

What it keeps true, beyond the protocol:
- an interruption is done by vLLM's core: no token is lost, and nothing decodes after it;
- whatever KV was computed under other weights is never read: prefixes are cached under the version's name;
- a core that dies, or does not answer for `limit_s`, gives its samples back as interrupted, with every token that had
  arrived, and the next submission starts another core from the weights in force. `MAX_LOSSES` of them without an answer
  finished in between end the run instead.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

import torch

from sortedrl.engine.base import (
    Capabilities,
    CompletedHandle,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    InFlight,
    Partial,
    Request,
    Verified,
)
from sortedrl.engine.local.attempt import Attempt
from sortedrl.engine.local.module_decoder import Geometry
from sortedrl.engine.request_checks import check_limits, check_submit, find_fault
from sortedrl.engine.vllm.adapter import AdapterFolder
from sortedrl.engine.vllm.core import Core, check_installed
from sortedrl.engine.vllm.http import ServerTower
from sortedrl.engine.vllm.process import CoreLost, CoreSettings, Life, StepCounts
from sortedrl.engine.vllm.request import Flight
from sortedrl.engine.vllm.request_loop import Tower
from sortedrl.engine.vllm.server import Server
from sortedrl.engine.vllm.weights import WeightFolder
from sortedrl.errors import EngineError
from sortedrl.records import Mode
from sortedrl.weights import base_copy, is_adapted

log = logging.getLogger(__name__)

MAX_LOSSES = 3
_BLOCK = 32  # tokens per KV block: the least that CPU kernels like, so that short prefixes are shared too


class VllmEngine:
    """Samples from a transformers causal language model, which vLLM loads from a copy of its weights.

    `dtype`: of weights and KV in vLLM; None takes the model's. `kv_bytes`: memory for the KV cache; None is enough for
    all slots at full length. `limit_s`: how long vLLM may be silent. `decode`: turns tokens into the text in which stop
    strings are looked for. `address` names a vLLM server to use, `port` is where one is started; without either, vLLM's
    front end runs in this process, and takes the adapters of a model that has some (peft's) as they are.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_length: int,
        dtype: torch.dtype | None = None,
        kv_bytes: int | None = None,
        limit_s: float = 300.0,
        decode: Callable[[list[int]], str] | None = None,
        address: str = "",
        port: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not address:
            check_installed()
        adapted, model = model, base_copy(model) if is_adapted(model) else model
        geometry = Geometry.of(model)
        check_limits(slots=slots, max_length=max_length, model_length=geometry.max_length)
        self._slots, self._max_length, self._vocab = slots, max_length, geometry.vocab
        self._dtype = dtype or next(model.parameters()).dtype
        self._limit_s, self._clock, self._decode = limit_s, clock, decode
        self._address, self._port = address, port
        self._tower = ServerTower(clock) if self._is_server else Tower(clock)
        self._counts = StepCounts()
        self._num_losses = self._num_losses_in_row = 0
        self._is_closed = False
        self._weights = WeightFolder(model, self._dtype)
        self._adapter = self._take_apart(adapted)
        self._settings = CoreSettings(
            folder=self._weights.path,
            slots=slots,
            max_length=max_length,
            dtype=str(self._dtype).removeprefix("torch."),
            kv_bytes=kv_bytes or needed_kv_bytes(geometry, slots, max_length, self._dtype),
            block_size=_BLOCK,
            adapter=None if self._adapter is None else self._adapter.terms,
        )
        self._life: Life | None = None
        try:
            self._life = self._start()
        except BaseException:
            self._weights.close()
            raise

    # ---- the protocol -----------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        is_exact = self._dtype == torch.float32 and self._has_noise
        return Capabilities(slots=self._slots, exact_replay=is_exact, keep_kv=not self._is_server, waits=False)

    @property
    def _is_server(self) -> bool:
        return bool(self._address or self._port)

    @property
    def num_running(self) -> int:
        return len(self._tower.flights)

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        check_submit(len(requests), running=self.num_running, slots=self._slots, is_closed=self._is_closed)
        flights = [flight for request in requests if (flight := self._prepare(request)) is not None]
        if flights:
            self._launch(flights)

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        tower, deadline = self._tower, math.inf if timeout is None else self._clock() + timeout
        with tower.changed:
            while tower.flights and not tower.num_ends and tower.loss is None:
                now = self._clock()
                if now - tower.heard > self._limit_s:
                    tower.loss = f"vLLM did not answer for {self._limit_s:g} s"
                elif now >= deadline:
                    break
                else:
                    tower.changed.wait(min(deadline - now, self._limit_s))
        if tower.loss is not None:
            self._give_back()
        elif tower.num_ends and self._life is not None:
            self._life.let_run()  # all that ended in the same step comes together
        tower.num_ends = 0
        return tower.drain()

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        tower, chosen = self._tower, None if samples is None else set(samples)
        stopped = [f for sample, f in list(tower.flights.items()) if chosen is None or sample in chosen]
        if stopped:
            self._call(tower.stop(stopped, is_all=len(stopped) == self.num_running))
            self._count()
        if tower.loss is not None:
            self._give_back()
        return tower.drain(chosen)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> CompletedHandle:
        if in_flight is InFlight.ABORT:
            assert not self.num_running, "weights published with abort while samples run: interrupt them first"
        if self._adapter is None:
            self._weights.write(source.module)
        else:
            self._adapter.write(source.adapter)
        self._call(self._tower.swap(version, str(self._weights.weights), in_flight))
        self._count()
        if self._tower.loss is not None:
            self._give_back()  # under the version that wrote the tokens
        self._tower.version = version
        return CompletedHandle()

    def stats(self) -> EngineStats:
        tower, counts = self._tower, self._counts
        with tower.changed:
            tower.count_busy()
            return replace(
                tower.stats,
                running=self.num_running,
                decode_steps=counts.steps,
                extra={
                    "preemptions": counts.preemptions,
                    "kv_usage": counts.kv_usage,
                    "kv_usage_peak": counts.kv_usage_peak,
                    "kv_bytes": self._settings.kv_bytes,
                    "losses": self._num_losses,
                },
            )

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        life, self._life = self._life, None
        try:
            if life is not None:
                life.close()
        finally:
            self._tower.clear()
            self._tower.front = None
            self._weights.close()

    @property
    def pids(self) -> list[int]:
        """Of vLLM's processes, for who wants to watch them, or see what happens without them."""
        return [] if self._life is None else self._life.pids

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _prepare(self, request: Request) -> Flight | None:
        """A flight for the request, or None when there is nothing to ask vLLM."""
        tower = self._tower
        assert request.sample not in tower.flights, f"sample {request.sample} is running already"
        error = find_fault(request, max_length=self._max_length, vocab=self._vocab, has_decode=self._decode is not None)
        if error is not None:
            tower.emit(Failed, request, is_end=True, error=error)
            return None
        flight = Flight.begin(Attempt.begin(request, self._decode))
        if request.mode is Mode.REPLAY and not flight.is_checking:
            tower.emit(Verified, request, cached=0, accepted=0)
        if flight.is_complete:
            tower.deliver(flight)
            tower.emit(Finished, request, is_end=True, reason=flight.attempt.ending)
            return None
        return flight

    def _take_apart(self, model: Any) -> AdapterFolder | None:
        """The adapters of a model that has some, where requests will name them."""
        if not is_adapted(model):
            return None
        assert not self._is_server, "a server is given merged weights"
        try:
            folder = AdapterFolder(self._weights.path / "adapter", model)
        except BaseException:
            self._weights.close()
            raise
        self._tower.adapter = folder.path
        return folder

    def _start(self) -> Life:
        if not self._address:
            log.info("starting vLLM, which takes from ten seconds to minutes")
        life: Life
        if self._is_server:
            place = {"address": self._address, "port": self._port}
            life = Server(self._settings, self._counts, limit_s=self._limit_s, **place)
        else:
            life = Core(self._settings, self._counts, limit_s=self._limit_s)
        self._tower.front, self._tower.flag, self._has_noise = life.front, life.flag, life.has_noise
        try:
            if self._tower.adapter is not None:
                life.call(self._tower.take_adapter())
            life.call(life.front.update_weight_version(str(self._tower.version)))
        except CoreLost as error:
            life.close(is_lost=True)
            raise EngineError(f"{error} right after its start: see its messages above") from error
        except Exception as error:
            life.close()
            if self._adapter is None:
                raise
            raise EngineError(f"vLLM does not take the adapters ({error}): set lora.merge = true") from error
        return life

    def _launch(self, flights: list[Flight]) -> None:
        if self._life is None:
            self._life = self._start()
        self._tower.enter(flights)
        self._call(self._tower.launch(flights))  # a loss shows in the next poll

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """In the loop of the present core; nothing happens without one."""
        if self._life is None:
            coroutine.close()
            return
        try:
            self._life.call(coroutine)
        except CoreLost as error:
            self._tower.loss = str(error)

    def _count(self) -> None:
        if self._life is not None and self._tower.loss is None:
            self._call(self._life.count())

    def _give_back(self) -> None:
        """End a lost core, and return every sample with the tokens that had arrived."""
        tower, life = self._tower, self._life
        loss, tower.loss, self._life, tower.front = tower.loss, None, None, None
        if life is not None:
            life.close(is_lost=True)
            tower.loss = None  # which each flight tells for itself
        if tower.bug is not None:
            raise tower.bug
        lost = tower.clear()
        for flight in lost:
            tower.deliver(flight)
            tower.emit(Partial, flight.attempt.request)
        self._num_losses += 1
        self._num_losses_in_row = 1 if tower.num_finished else self._num_losses_in_row + 1
        tower.num_finished = 0
        if self._num_losses_in_row >= MAX_LOSSES:
            raise EngineError(
                f"{loss}, {MAX_LOSSES} times without an answer finished in between: see its messages above and the "
                "system's (out of memory?), then resume the run"
            )
        log.warning("%s with %d samples running; they go on in another one", loss, len(lost))


def needed_kv_bytes(geometry: Geometry, slots: int, max_length: int, dtype: torch.dtype) -> int:
    """Memory for the KV of all slots at full length, in whole blocks, and one block that vLLM keeps for itself."""
    per_token = 2 * geometry.num_layers * geometry.kv_heads * geometry.head_dim * dtype.itemsize
    blocks = slots * math.ceil(max_length / _BLOCK) + 1
    return blocks * _BLOCK * per_token
