# pyright: reportMissingImports=false
"""The vLLM engine: real vLLM behind the protocol of `base.py`, with shared noise and replay.

`build.py` makes it; the controller drives it like any other. vLLM decodes in processes of its own, and `poll`
only waits. Its outputs are read in the thread of an event loop (`vllm_core.py`), where all attempts live (`vllm_flight.py`), and
become events that `poll`, `interrupt` and `publish` hand over. What runs inside vLLM's worker is in `vllm_worker.py`.

What it keeps true, beyond the protocol:
- an interruption is done by vLLM's core, behind its last step: no token is lost, and nothing decodes after it;
- whatever KV was computed under other weights is never read: prefixes are cached under the version's name;
- a core that dies, or does not answer for `limit_s`, gives its samples back as interrupted, with every token that had
  arrived, and the next submission starts another core from the weights in force. `MAX_LOSSES` of them without an answer
  finished in between end the run instead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from sortedrl.engine.attempt import Attempt
from sortedrl.engine.base import (
    Capabilities,
    EngineStats,
    Event,
    Failed,
    Finished,
    InFlight,
    Partial,
    Request,
    Verified,
)
from sortedrl.engine.fault import find_fault
from sortedrl.engine.module import Geometry
from sortedrl.engine.vllm_core import Core, CoreLost, CoreSettings, StepCounts, check_installed
from sortedrl.engine.vllm_flight import Flight, Turn
from sortedrl.engine.vllm_weights import WeightFolder
from sortedrl.errors import EngineError, ModelError
from sortedrl.records import Mode

log = logging.getLogger(__name__)

MAX_LOSSES = 3
_BLOCK = 32  # tokens per KV block: the least that CPU kernels like, so that short prefixes are shared too
_LOST = "vLLM's core was lost"


class _Done:
    """A publication that is over when `publish` returns."""

    def wait(self) -> None:
        return None


class VllmEngine:
    """Samples from a transformers causal language model, which vLLM loads from a copy of its weights.

    `dtype`: of weights and KV in vLLM; None takes the model's. `kv_bytes`: memory for the KV cache; None is enough for
    all slots at full length. `limit_s`: how long vLLM may be silent.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_installed()
        geometry = Geometry.of(model)
        if slots < 1:
            raise EngineError(f"slots = {slots}: an engine needs at least one")
        if max_length > geometry.max_length:
            raise ModelError(
                f"max_length {max_length} is more than the model's {geometry.max_length} positions: "
                "lower the token budget or take a model with a longer context"
            )
        self._slots, self._max_length, self._vocab = slots, max_length, geometry.vocab
        self._dtype = dtype or next(model.parameters()).dtype
        self._limit_s, self._clock = limit_s, clock
        self._version = 0
        self._flights: dict[int, Flight] = {}  # by sample; the loop's thread takes them out
        self._ready: list[Event] = []
        self._changed = threading.Condition()
        self._num_ends = 0  # attempts that ended and were not polled yet
        self._loss: str | None = None
        self._num_losses = self._num_losses_in_row = 0
        self._is_closed = False
        self._stats, self._counts = EngineStats(), StepCounts()
        self._busy_since = self._heard = clock()
        self._weights = WeightFolder(model, self._dtype)
        self._settings = CoreSettings(
            folder=self._weights.path,
            slots=slots,
            max_length=max_length,
            dtype=str(self._dtype).removeprefix("torch."),
            kv_bytes=kv_bytes or needed_kv_bytes(geometry, slots, max_length, self._dtype),
            block_size=_BLOCK,
        )
        self._core: Core | None = None
        try:
            self._core = self._start()
        except BaseException:
            self._weights.close()
            raise

    # ---- the protocol -----------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        is_exact = self._dtype == torch.float32
        return Capabilities(slots=self._slots, exact_replay=is_exact, keep_kv=True, waits=False)

    @property
    def num_running(self) -> int:
        return len(self._flights)

    def submit(self, requests: Iterable[Request]) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed: make another one")
        requests = list(requests)
        if len(requests) > self._slots - self.num_running:
            raise EngineError(
                f"{len(requests)} requests for {self._slots - self.num_running} free slots of {self._slots}: "
                "submit no more than are free"
            )
        flights: list[Flight] = []
        for request in requests:
            assert request.sample not in self._flights, f"sample {request.sample} is running already"
            error = find_fault(request, max_length=self._max_length, vocab=self._vocab)
            if error is not None:
                self._emit(Failed, request, is_end=True, error=error)
                continue
            flight = Flight.begin(Attempt.begin(request))
            if request.mode is Mode.REPLAY and not flight.is_checking:
                self._emit(Verified, request, cached=0, accepted=0)
            if flight.is_complete:
                self._deliver(flight)
                self._emit(Finished, request, is_end=True, reason=flight.attempt.ending)
            else:
                flights.append(flight)
        if flights:
            self._launch_all(flights)

    def poll(self, timeout: float | None = None) -> list[Event]:
        deadline = math.inf if timeout is None else self._clock() + timeout
        with self._changed:
            while self._flights and not self._num_ends and self._loss is None:
                now = self._clock()
                if now - self._heard > self._limit_s:
                    self._loss = f"vLLM did not answer for {self._limit_s:g} s"
                if now >= deadline or self._loss is not None:
                    break
                self._changed.wait(min(deadline - now, self._limit_s))
        if self._loss is not None:
            self._give_back()
        elif self._num_ends and self._core is not None:
            self._core.let_run()  # all that ended in the same step comes together
        self._num_ends = 0
        return self._drain()

    def interrupt(self, samples: Iterable[int] | None = None) -> list[Event]:
        chosen = None if samples is None else set(samples)
        stopped = [f for sample, f in list(self._flights.items()) if chosen is None or sample in chosen]
        if stopped and self._core is not None:
            self._guarded(self._core, self._stop(stopped, is_all=len(stopped) == len(self._flights)))
        if self._loss is not None:
            self._give_back()
        return self._drain(chosen)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> _Done:
        if in_flight is InFlight.ABORT:
            assert not self.num_running, "weights published with abort while samples run: interrupt them first"
        self._weights.write(source.module)
        if self._core is not None:
            self._guarded(self._core, self._swap(version, in_flight))
        if self._loss is not None:
            self._give_back()  # under the version that wrote the tokens
        self._version = version
        return _Done()

    def stats(self) -> EngineStats:
        with self._changed:
            self._count_busy()
            counts = self._counts
            return replace(
                self._stats,
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
        core, self._core = self._core, None
        try:
            if core is not None:
                core.close()
        finally:
            self._flights, self._ready = {}, []
            self._weights.close()

    @property
    def pids(self) -> list[int]:
        """Of vLLM's processes, for who wants to watch them, or see what happens without them."""
        return [] if self._core is None else self._core.pids

    # ---- the core's life --------------------------------------------------------------------------------------------

    def _start(self) -> Core:
        log.info("starting vLLM, which takes from ten seconds to minutes")
        core = Core(self._settings, self._counts, limit_s=self._limit_s)
        try:
            core.call(core.llm.update_weight_version(str(self._version)))
        except BaseException:
            core.close(is_lost=True)
            raise
        return core

    def _guarded(self, core: Core, coroutine: Any) -> None:
        try:
            core.call(coroutine)
        except CoreLost as error:
            self._loss = str(error)

    def _launch_all(self, flights: list[Flight]) -> None:
        if self._core is None:
            try:
                self._core = self._start()
            except CoreLost as error:
                raise EngineError(f"{error} right after its start: see its own messages") from error
        with self._changed:
            self._count_busy()
            self._heard = self._clock()
            self._flights.update({flight.attempt.request.sample: flight for flight in flights})
        self._guarded(self._core, self._fly_all(flights))  # a loss here shows in the next poll

    def _give_back(self) -> None:
        """End a lost core, and return every sample with the tokens that had arrived."""
        loss, self._loss = self._loss, None
        core, self._core = self._core, None
        if core is not None:
            core.close(is_lost=True)
        with self._changed:
            self._count_busy()
            lost, self._flights = list(self._flights.values()), {}
        for flight in lost:
            self._deliver(flight)
            self._emit(Partial, flight.attempt.request)
        self._num_losses += 1
        self._num_losses_in_row += 1
        if self._num_losses_in_row >= MAX_LOSSES:
            raise EngineError(
                f"{loss}, {MAX_LOSSES} times without an answer finished in between: see its own messages and the "
                "system's (out of memory?), then resume the run"
            )
        log.warning("%s with %d samples running; they go on in another one", loss or _LOST, len(lost))

    # ---- in the loop's thread ---------------------------------------------------------------------------------------

    async def _fly_all(self, flights: list[Flight]) -> None:
        for flight in flights:
            await self._ask(flight)
        for flight in flights:
            flight.task = asyncio.create_task(self._fly(flight))

    async def _ask(self, flight: Flight) -> None:
        """Give a flight's request to vLLM."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        assert self._core is not None, "no core to ask"
        request = flight.attempt.request
        flight.collector = await self._core.llm.add_request(
            f"{request.sample}-{request.attempt}",
            tokens_input(flight.tokens(), cache_salt=f"version {self._version}"),
            flight.params(SamplingParams, RequestOutputKind.DELTA),
        )
        flight.is_started, flight.is_open = False, True

    async def _fly(self, flight: Flight) -> None:
        """Read a flight's outputs until it ends."""
        turn = Turn.ON
        try:
            while turn in (Turn.ON, Turn.AGAIN):
                turn = self._hear(flight, await flight.collector.get())
                if turn is not Turn.ON and flight.is_open:
                    await self._abort([flight])
                if turn is Turn.AGAIN and flight.is_stopped:
                    turn = Turn.STOPPED
                elif turn is Turn.AGAIN:
                    await self._ask(flight)
                    if flight.is_stopped:  # it was interrupted while vLLM took it in
                        await self._abort([flight])
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever vLLM raises here, the core is of no more use
            with self._changed:
                self._loss = f"{_LOST} ({type(error).__name__})"
                self._changed.notify()
            return
        self._land(flight, turn)

    def _hear(self, flight: Flight, output: Any) -> Turn:
        is_first, check = not flight.is_started, flight.check
        clock = self._clock()
        turn = flight.take(output, clock)
        self._heard = clock
        with self._changed:
            self._stats.decoded_tokens += flight.num_decoded
            if is_first and flight.num_hits is not None:
                num_prompt, hits = len(flight.attempt.request.prompt), flight.num_hits
                self._stats.prompt_tokens += max(0, num_prompt - hits)
                self._stats.recomputed_tokens += max(0, len(output.prompt_token_ids) - max(num_prompt, hits))
        if flight.check is not check and flight.check is not None:
            request = flight.attempt.request
            num_cached = len(output.prompt_token_ids) - len(request.prompt)
            self._emit(Verified, request, cached=num_cached, accepted=flight.check.accepted)
            self._deliver(flight)
        spans = output.outputs[0].weight_versions
        assert not spans or spans[-1].version == str(self._version), f"vLLM is at {spans}, not at {self._version}"
        return turn

    def _land(self, flight: Flight, turn: Turn) -> None:
        attempt = flight.attempt
        with self._changed:
            self._count_busy()
            self._flights.pop(attempt.request.sample, None)
        self._deliver(flight)
        match turn:
            case Turn.FINISHED:
                self._num_losses_in_row = 0
                self._emit(Finished, attempt.request, is_end=True, reason=attempt.ending)
            case Turn.STOPPED:
                self._emit(Partial, attempt.request, is_end=True)
            case Turn.BROKEN:
                position = len(attempt.tokens)
                error = f"non-finite logits at answer position {position} under version {self._version}: "
                self._emit(Failed, attempt.request, is_end=True, error=error + "the weights hold NaN or overflow")
            case _:
                self._emit(Failed, attempt.request, is_end=True, error="vLLM failed on this request")

    async def _abort(self, flights: list[Flight]) -> None:
        assert self._core is not None, "no core to ask"
        await self._core.llm.abort([flight.collector.request_id for flight in flights], internal=True)

    async def _stop(self, flights: list[Flight], *, is_all: bool) -> None:
        """Interrupt flights, behind the step that vLLM is in."""
        assert self._core is not None, "no core to ask"
        llm = self._core.llm
        for flight in flights:
            flight.is_stopped = True
        if is_all:
            await llm.pause_generation(mode="abort", clear_cache=False)
        else:
            await llm.pause_generation(mode="keep", clear_cache=False)
            await self._hear_out()
            await self._abort([flight for flight in flights if flight.is_open])
        await self._all_landed(flights)
        await llm.resume_generation()

    async def _all_landed(self, flights: list[Flight]) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        await asyncio.gather(*(flight.task for flight in flights if flight.task is not None))
        if self._loss is not None:
            raise EngineDeadError

    async def _hear_out(self) -> None:
        """Return when everything that the paused core had sent is written into the attempts."""
        assert self._core is not None, "no core to ask"
        waiting = self._core.llm.engine_core.outputs_queue
        while not waiting.empty() or any(f.collector.output is not None for f in self._flights.values()):
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _swap(self, version: int, in_flight: InFlight) -> None:
        """Let the worker take up the file's weights; what runs waits meanwhile."""
        assert self._core is not None, "no core to ask"
        llm, is_running = self._core.llm, bool(self._flights)
        if is_running:
            await llm.pause_generation(mode="keep", clear_cache=in_flight is InFlight.REPREFILL)
            await self._hear_out()
            for flight in self._flights.values():
                self._deliver(flight)
        await llm.collective_rpc("sorted_take_weights", args=(str(self._weights.weights),))
        await llm.update_weight_version(str(version))
        self._version = version
        if is_running:
            await llm.resume_generation()

    # ---- events and time --------------------------------------------------------------------------------------------

    def _deliver(self, flight: Flight) -> None:
        delta = flight.attempt.deliver(version=self._version, clock=self._clock(), decode_s=flight.clock)
        if delta is not None:
            with self._changed:
                self._ready.append(delta)

    def _emit(self, kind: type[Event], request: Request, *, is_end: bool = False, **fields: Any) -> None:
        event = kind(sample=request.sample, attempt=request.attempt, clock=self._clock(), **fields)
        with self._changed:
            self._ready.append(event)
            if is_end:
                self._num_ends += 1
                self._changed.notify()

    def _drain(self, samples: set[int] | None = None) -> list[Event]:
        """Take the events that are ready, of these samples or of all."""
        with self._changed:
            taken = [event for event in self._ready if samples is None or event.sample in samples]
            self._ready = [event for event in self._ready if not (samples is None or event.sample in samples)]
        return taken

    def _count_busy(self) -> None:
        """The lock is held: slots are counted up to now, before their number changes."""
        now = self._clock()
        self._stats.busy_slot_s += (now - self._busy_since) * len(self._flights)
        self._busy_since = now


def needed_kv_bytes(geometry: Geometry, slots: int, max_length: int, dtype: torch.dtype) -> int:
    """Memory for the KV of all slots at full length, in whole blocks, and one block that vLLM keeps for itself."""
    per_token = 2 * geometry.num_layers * geometry.kv_heads * geometry.head_dim * dtype.itemsize
    blocks = slots * math.ceil(max_length / _BLOCK) + 1
    return blocks * _BLOCK * per_token
