# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The tower: starts, hears, interrupts and lands the flights of the vLLM engine, and turns what they say into events.

`engine.py` owns one over all lives of vLLM. Its coroutines run in the loop of the present core and are the only ones to
touch a flight; the engine's thread waits on `changed` and takes events. What it keeps true: a flight is gone from
`flights` when the event that ends it can be taken, and a token is stamped with the version in force when vLLM's
core sampled it, since weights change only while the core is paused and all that it had sent is heard.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sortedrl.engine.base import EngineEvent, EngineStats, Failed, Finished, InFlight, Partial, Request, Verified
from sortedrl.engine.vllm.abort_flag import HaltFlag
from sortedrl.engine.vllm.adapter import ADAPTER_ID
from sortedrl.engine.vllm.request import Flight, Turn


class Tower:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.front: Any = None  # what talks to vLLM, while there is one
        self.flag: HaltFlag | None = None
        self.version = 0
        self.adapter: Path | None = None  # the folder of the adapters that requests name
        self.flights: dict[int, Flight] = {}  # by sample
        self.changed = threading.Condition()
        self.num_ends = 0  # attempts that ended and were not polled yet
        self.num_finished = 0
        self.loss: str | None = None  # what became of vLLM, if it was lost
        self.bug: AssertionError | None = None  # a promise that this code, or vLLM, did not keep
        self.stats = EngineStats()
        self.heard = clock()  # when vLLM last said something
        self._clock = clock
        self._ready: list[EngineEvent] = []
        self._busy_since = clock()
        self._num_halts = 0  # a broken step leaves KV that must not be found again

    # ---- in any thread ----------------------------------------------------------------------------------------------

    def enter(self, flights: Iterable[Flight]) -> None:
        with self.changed:
            self.count_busy()
            self.heard = self._clock()
            self.flights.update({flight.attempt.request.sample: flight for flight in flights})

    def clear(self) -> list[Flight]:
        """Take all flights out, as they are: vLLM is gone."""
        with self.changed:
            self.count_busy()
            flights, self.flights = list(self.flights.values()), {}
        return flights

    def deliver(self, flight: Flight) -> None:
        """What the caller does not have yet of an answer."""
        delta = flight.attempt.deliver(version=self.version, clock=self._clock(), decode_s=flight.clock)
        if delta is not None:
            with self.changed:
                self._ready.append(delta)

    def emit(self, kind: type[EngineEvent], request: Request, *, is_end: bool = False, **fields: Any) -> None:
        event = kind(sample=request.sample, attempt=request.attempt, clock=self._clock(), **fields)
        with self.changed:
            self._ready.append(event)
            if is_end:
                self.num_ends += 1
                self.changed.notify()

    def drain(self, samples: set[int] | None = None) -> list[EngineEvent]:
        """Take the events that are ready, of these samples or of all."""
        with self.changed:
            taken = [event for event in self._ready if samples is None or event.sample in samples]
            self._ready = [event for event in self._ready if not (samples is None or event.sample in samples)]
        return taken

    def count_busy(self) -> None:
        """The lock is held: slot time is counted up to now, before the number of running slots changes."""
        now = self._clock()
        self.stats.busy_slot_s += (now - self._busy_since) * len(self.flights)
        self._busy_since = now

    # ---- in the loop's thread ---------------------------------------------------------------------------------------

    async def launch(self, flights: list[Flight]) -> None:
        for flight in flights:
            await self._ask(flight)
        for flight in flights:
            flight.task = asyncio.create_task(self._fly(flight))

    async def stop(self, flights: list[Flight], *, is_all: bool) -> None:
        """Interrupt flights: all of them at once, in the midst of a step where it can be broken off."""
        for flight in flights:
            flight.is_stopped = True
        if is_all:
            with nullcontext() if self.flag is None else self.flag.raised():
                await self.front.pause_generation(mode="abort", clear_cache=False)
            self._num_halts += 1
        else:
            # vLLM's core can only abort all; who is aborted by the front end loses what is on its way, so that first.
            await self.front.pause_generation(mode="keep", clear_cache=False)
            await self._hear_out()
            await self._abort(flight for flight in flights if flight.is_open)
        await asyncio.gather(*(flight.task for flight in flights if flight.task is not None))
        await self.front.resume_generation()

    async def swap(self, version: int, weights: str, in_flight: InFlight) -> None:
        """Let the worker take up the weights of a file, or the adapters; what runs waits meanwhile."""
        is_running = bool(self.flights)
        if is_running:
            await self.front.pause_generation(mode="keep", clear_cache=in_flight is InFlight.REPREFILL)
            await self._hear_out()
            for flight in self.flights.values():
                self.deliver(flight)
        if self.adapter is None:
            await self.front.collective_rpc("sorted_take_weights", args=(weights,))
        else:
            await self.take_adapter()
        await self.front.update_weight_version(str(version))
        self.version = version
        if is_running:
            await self.front.resume_generation()

    async def take_adapter(self) -> None:
        """Let the worker load the adapters of the folder, in place of those that it has."""
        await self.front.add_lora(self._lora_request(load_inplace=True))

    def _lora_request(self, **changes: Any) -> Any:
        """The adapters by one name and number in all versions, so that what runs has the ones loaded last."""
        from vllm.lora.request import LoRARequest

        if self.adapter is None:
            return None
        return LoRARequest(lora_name="sortedrl", lora_int_id=ADAPTER_ID, lora_path=str(self.adapter), **changes)

    async def _ask(self, flight: Flight) -> None:
        """Give a flight's request to vLLM."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        request = flight.attempt.request
        flight.collector = await self.front.add_request(
            f"{request.sample}-{request.attempt}",
            tokens_input(flight.tokens(), cache_salt=f"version {self.version}, halt {self._num_halts}"),
            flight.params(SamplingParams, RequestOutputKind.DELTA),
            lora_request=self._lora_request(),
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
        except Exception as error:  # whatever vLLM raises here, it is of no more use
            with self.changed:
                self.bug = error if isinstance(error, AssertionError) else self.bug
                self.loss = f"vLLM's core was lost ({type(error).__name__})"
                self.changed.notify()
            return
        if turn is not Turn.STOPPED or not flight.is_parked:
            self._land(flight, turn)

    def _hear(self, flight: Flight, output: Any) -> Turn:
        is_first, check, request = not flight.is_started, flight.check, flight.attempt.request
        self.heard = self._clock()
        turn = flight.take(output, self.heard)
        with self.changed:
            self.stats.decoded_tokens += flight.num_decoded
            if is_first:
                num_prompt = len(request.prompt)
                self.stats.prompt_tokens += max(0, num_prompt - flight.num_hits)
                self.stats.recomputed_tokens += len(output.prompt_token_ids) - max(num_prompt, flight.num_hits)
        if flight.check is not None and flight.check is not check:
            num_cached = len(output.prompt_token_ids) - len(request.prompt)
            self.emit(Verified, request, cached=num_cached, accepted=flight.check.accepted)
            self.deliver(flight)
        spans = output.outputs[0].weight_versions
        assert not spans or spans[-1].version == str(self.version), f"vLLM is at {spans}, not at {self.version}"
        return turn

    def _land(self, flight: Flight, turn: Turn) -> None:
        attempt = flight.attempt
        with self.changed:  # whoever hears of its end finds its slot free
            self.count_busy()
            self.flights.pop(attempt.request.sample, None)
            self.deliver(flight)
            match turn:
                case Turn.FINISHED:
                    self.num_finished += 1
                    self.emit(Finished, attempt.request, is_end=True, reason=attempt.ending)
                case Turn.STOPPED:
                    self.emit(Partial, attempt.request, is_end=True)
                case Turn.BROKEN:
                    where = f"at answer position {len(attempt.tokens)} under version {self.version}"
                    error = f"non-finite logits {where}: the weights hold NaN or overflow"
                    self.emit(Failed, attempt.request, is_end=True, error=error)
                case _:
                    self.emit(Failed, attempt.request, is_end=True, error="vLLM failed on this request")

    async def _abort(self, flights: Iterable[Flight]) -> None:
        await self.front.abort([flight.collector.request_id for flight in flights], internal=True)

    async def _hear_out(self) -> None:
        """Return when everything that the paused core had sent is written into the attempts."""
        waiting = self.front.engine_core.outputs_queue
        while not waiting.empty() or any(flight.collector.output is not None for flight in self.flights.values()):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
