# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The request loop: sends requests to vLLM, reads their outputs, interrupts them, and turns outputs into events.

`engine.py` owns one, which outlives a vLLM that dies; `http.py` has the variant for a server. The first half of the
methods may be called in any thread. The coroutines run in the event loop of the current vLLM process, and only they
change a running request. The engine's thread waits on `changed` and takes events.

Guarantees: a request has left `running` before the event that ends it can be taken; a token carries the version whose
weights sampled it, because weights change only while vLLM's core is paused and all its outputs have been read.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from sortedrl.engine.base import EngineEvent, EngineStats, Failed, Finished, InFlight, Partial, Request, Verified
from sortedrl.engine.vllm.abort_flag import AbortFlag
from sortedrl.engine.vllm.adapter import ADAPTER_ID
from sortedrl.engine.vllm.request import RequestState, VllmRequest
from sortedrl.errors import first_line

Load = Callable[[], Awaitable[None]]
_DISCARD, _KEEP_ON_HOST = 2, 1  # levels of vLLM's sleep, by what becomes of the weights


class RequestLoop:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.frontend: Any = None  # AsyncLLM or HttpFrontend of the current vLLM process; None without one
        self.flag: AbortFlag | None = None
        self.version = 0
        self.adapter: Path | None = None  # the folder of the adapters that requests name
        self.is_stock = False  # vLLM's own sampler draws: V2
        self.running: dict[int, VllmRequest] = {}  # by sample
        self.changed = threading.Condition()
        self.num_ends = 0  # attempts that ended since the last poll
        self.num_finished = 0
        self.loss: str | None = None  # how vLLM was lost, if it was
        self.broken_invariant: AssertionError | None = None
        self.stats = EngineStats()
        self.last_output_at = clock()
        self._clock = clock
        self._ready: list[EngineEvent] = []
        self._busy_since = clock()
        self._num_aborted_steps = 0  # part of the prefix cache's name: KV of an aborted step must not be found again

    # ---- in any thread ----------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[VllmRequest]) -> None:
        with self.changed:
            self.count_busy()
            self.last_output_at = self._clock()
            self.running.update({request.attempt.request.sample: request for request in requests})

    def clear(self) -> list[VllmRequest]:
        """Remove and return all running requests: vLLM is gone."""
        with self.changed:
            self.count_busy()
            requests, self.running = list(self.running.values()), {}
        return requests

    def deliver(self, request: VllmRequest) -> None:
        """Make an event of the tokens that no event has delivered yet."""
        delta = request.attempt.deliver(version=self.version, clock=self._clock(), decode_s=request.clock)
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

    def take_events(self, samples: set[int] | None = None) -> list[EngineEvent]:
        """Take the events of these samples, or of all."""
        with self.changed:
            taken = [event for event in self._ready if samples is None or event.sample in samples]
            self._ready = [event for event in self._ready if not (samples is None or event.sample in samples)]
        return taken

    def count_busy(self) -> None:
        """Count slot time up to now. Call it with the lock held, before the number of running requests changes."""
        now = self._clock()
        self.stats.busy_slot_s += (now - self._busy_since) * len(self.running)
        self._busy_since = now

    # ---- in the event loop's thread ---------------------------------------------------------------------------------

    async def start(self, requests: list[VllmRequest]) -> None:
        for request in requests:
            await self._send(request)
        for request in requests:
            request.task = asyncio.create_task(self._read_outputs(request))

    async def stop(self, requests: list[VllmRequest], *, is_all: bool) -> None:
        """Interrupt requests. If these are all, the current step is aborted where that is possible."""
        for request in requests:
            request.is_stopped = True
        if is_all:
            with nullcontext() if self.flag is None else self.flag.raised():
                await self.frontend.pause_generation(mode="abort", clear_cache=False)
            self._num_aborted_steps += 1
        else:
            # vLLM's core can only abort all. An abort by the front end loses outputs on their way: drain first.
            await self.frontend.pause_generation(mode="keep", clear_cache=False)
            await self._drain_outputs()
            await self._abort(request for request in requests if request.is_open)
        await asyncio.gather(*(request.task for request in requests if request.task is not None))
        await self.frontend.resume_generation()

    async def swap_weights(self, version: int, load: Load, in_flight: InFlight) -> None:
        """Call `load`, which gives the workers the weights of this version. Running requests pause meanwhile."""
        is_running = bool(self.running)
        if is_running:
            await self.frontend.pause_generation(mode="keep", clear_cache=in_flight is InFlight.REPREFILL)
            await self._drain_outputs()
            for request in self.running.values():
                self.deliver(request)
        await load()
        if not is_running:  # KV of running requests is kept on purpose, or was cleared by the pause
            await self.frontend.reset_prefix_cache()
        await self.frontend.update_weight_version(str(version))
        self.version = version
        if is_running:
            await self.frontend.resume_generation()

    async def load_file(self, path: str) -> None:
        """Let the workers load a weights file."""
        await self.frontend.collective_rpc("sorted_take_weights", args=(path,))

    async def deliver_all(self) -> None:
        """Make events of the tokens of running requests that no event has delivered yet."""
        for request in self.running.values():
            if not request.is_verifying:
                self.deliver(request)

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache; prefixes in the cache are forgotten with it.

        Published weights replace all that were discarded. Published adapters do not: their base is kept on the host.
        """
        await self.frontend.sleep(level=_DISCARD if self.adapter is None else _KEEP_ON_HOST, mode="abort")

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Make the memory of one of them again. vLLM serves requests when it has both."""
        await self.frontend.wake_up(tags=[what])

    async def load_adapter(self) -> None:
        """Let the worker load the adapters of the folder in place of the previous ones."""
        await self.frontend.add_lora(self._lora_request(load_inplace=True))

    def _lora_request(self, **changes: Any) -> Any:
        """Name and number of the adapters, the same for all versions: running requests use those loaded last."""
        from vllm.lora.request import LoRARequest

        if self.adapter is None:
            return None
        return LoRARequest(lora_name="sortedrl", lora_int_id=ADAPTER_ID, lora_path=str(self.adapter), **changes)

    async def _send(self, request: VllmRequest) -> None:
        """Give a request to vLLM."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        asked = request.attempt.request
        request.collector = await self.frontend.add_request(
            f"{asked.sample}-{asked.attempt}",
            tokens_input(request.tokens(), cache_salt=f"version {self.version}, abort {self._num_aborted_steps}"),
            request.sampling_params(SamplingParams, RequestOutputKind.DELTA, is_stock=self.is_stock),
            lora_request=self._lora_request(),
        )
        request.is_started, request.is_open = False, True

    async def _read_outputs(self, request: VllmRequest) -> None:
        """Read a request's outputs until it ends."""
        state = RequestState.RUNNING
        try:
            while state in (RequestState.RUNNING, RequestState.RESUBMIT):
                state = self._apply_output(request, await request.collector.get())
                if state is not RequestState.RUNNING and request.is_open:
                    await self._abort([request])
                if state is RequestState.RESUBMIT and request.is_stopped:
                    state = RequestState.STOPPED
                elif state is RequestState.RESUBMIT:
                    await self._send(request)
                    if request.is_stopped:  # it was interrupted during the await
                        await self._abort([request])
        except Exception as error:  # any error of vLLM here means that it can no longer be used
            with self.changed:
                self.broken_invariant = error if isinstance(error, AssertionError) else self.broken_invariant
                self.loss = f"vLLM's core was lost ({type(error).__name__}: {first_line(error)})"
                self.changed.notify()
            return
        if state is not RequestState.STOPPED or not request.is_parked:
            self._end(request, state)

    def _apply_output(self, request: VllmRequest, output: Any) -> RequestState:
        is_first, replay, asked = not request.is_started, request.replay, request.attempt.request
        self.last_output_at = self._clock()
        state = request.apply_output(output, self.last_output_at)
        with self.changed:
            self.stats.decoded_tokens += request.num_decoded
            if is_first:
                num_prompt = len(asked.prompt)
                self.stats.prompt_tokens += max(0, num_prompt - request.num_cache_hits)
                self.stats.recomputed_tokens += len(output.prompt_token_ids) - max(num_prompt, request.num_cache_hits)
        if request.replay is not None and request.replay is not replay:
            num_cached = len(output.prompt_token_ids) - len(asked.prompt)
            self.emit(Verified, asked, cached=num_cached, accepted=request.replay.accepted)
            self.deliver(request)
        spans = output.outputs[0].weight_versions
        assert not spans or spans[-1].version == str(self.version), f"vLLM is at {spans}, not at {self.version}"
        return state

    def _end(self, request: VllmRequest, state: RequestState) -> None:
        attempt = request.attempt
        with self.changed:  # a caller that takes the last event must find the slot free
            self.count_busy()
            self.running.pop(attempt.request.sample, None)
            self.deliver(request)
            match state:
                case RequestState.FINISHED:
                    self.num_finished += 1
                    self.emit(Finished, attempt.request, is_end=True, reason=attempt.ending)
                case RequestState.STOPPED:
                    self.emit(Partial, attempt.request, is_end=True)
                case RequestState.NON_FINITE:
                    where = f"at answer position {len(attempt.tokens)} under version {self.version}"
                    error = f"non-finite logits {where}: the weights hold NaN or overflow"
                    self.emit(Failed, attempt.request, is_end=True, error=error)
                case _:
                    self.emit(Failed, attempt.request, is_end=True, error="vLLM failed on this request")

    async def _abort(self, requests: Iterable[VllmRequest]) -> None:
        await self.frontend.abort([request.collector.request_id for request in requests], internal=True)

    async def _drain_outputs(self) -> None:
        """Return when every output that the paused core sent has been applied to its attempt."""
        waiting = self.frontend.engine_core.outputs_queue
        while not waiting.empty() or any(request.collector.output is not None for request in self.running.values()):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
