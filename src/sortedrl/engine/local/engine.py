"""The local engine: continuous batching in process, on PyTorch, with shared noise and exact replay.

The controller drives it: `poll` runs prefills and decode steps in the caller's thread until an attempt ends. What it
keeps true, beyond the protocol: under given weights an answer depends on its prompt, seed and sampling alone (up to
rounding), not on slots, neighbours or interruptions; a replay gives token for token what a restart with the same seed
would; memory is bounded by slots x max_length.

Running attempts are compact: the attempt at index i of `_active` owns slot i of the cache, its last token is sampled
but not yet fed, and the last slot moves into the hole that an ending attempt leaves.

Shapes: b running slots, t packed tokens, r rows of logits, v vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

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
from sortedrl.engine.local.decoder_choice import EXACT, make_path
from sortedrl.engine.local.module_decoder import Geometry, check_supported, copy_weights
from sortedrl.engine.local.prefill import (
    Outcome,
    Prefill,
    checks_of,
    draw_first,
    pack_prefills,
    plan_prefills,
    wanted_rows,
)
from sortedrl.engine.local.steady_steps import Stretch
from sortedrl.engine.request_checks import find_fault
from sortedrl.engine.sampling.draw import Choice, Draw, make_noise
from sortedrl.errors import EngineError, ModelError
from sortedrl.records import Mode


class LocalEngine:
    """Samples from a transformers causal language model that is already loaded.

    `path` picks how it is run: its own modules, the lean decoder of the Llama family, compiled code for that family on
    a CPU (native), or the fastest that is possible (auto).
    `stream_every` delivers tokens every so many steps, not only when an attempt ends. `dtype` is that of the decoder's
    copy of the weights; left out, the model's own. `decode` turns tokens into text; without it requests with stop
    strings fail.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: int,
        max_length: int,
        stream_every: int = 0,
        path: Literal["auto", "native", "lean", "module"] = "auto",
        dtype: torch.dtype | None = None,
        decode: Callable[[list[int]], str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = check_supported(model)
        geometry = Geometry.of(self._model)
        if slots < 1:
            raise EngineError(f"slots = {slots}: an engine needs at least one")
        if max_length > geometry.max_length:
            raise ModelError(
                f"max_length {max_length} is more than the model's {geometry.max_length} positions: "
                "lower the token budget or take a model with a longer context"
            )
        self._slots, self._max_length, self._stream_every = slots, max_length, stream_every
        self._vocab = geometry.vocab
        parameter = next(self._model.parameters())
        self._device, self._dtype = parameter.device, dtype or parameter.dtype
        self._cache, self._decoder = make_path(self._model, path, slots=slots, max_length=max_length, dtype=self._dtype)
        self._noise = make_noise(slots, self._vocab, self._device)
        self._clock, self._decode = clock, decode
        self._version = 0
        self._active: list[Attempt] = []
        self._stretch: Stretch | None = None  # of the last step; holds until a slot gets another attempt
        self._written: list[Choice] = []  # what the steps of a poll have drawn and attempts have not got yet
        self._pending: list[Attempt] = []  # submitted, waiting for the next poll to prefill them together
        self._ready: list[EngineEvent] = []
        self._is_closed = False
        self._decode_s = self._prefill_s = self._refresh_s = 0.0
        self._num_refreshes = 0
        self._stats = EngineStats()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(slots=self._slots, exact_replay=self._dtype in EXACT, keep_kv=True, waits=True)

    @property
    def num_running(self) -> int:
        return len(self._active) + len(self._pending)

    def submit(self, requests: Iterable[Request]) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed: make another one")
        requests = list(requests)
        if len(requests) > self._slots - self.num_running:
            raise EngineError(
                f"{len(requests)} requests for {self._slots - self.num_running} free slots of {self._slots}: "
                "submit no more than are free"
            )
        running = {attempt.request.sample for attempt in (*self._active, *self._pending)}
        for request in requests:
            assert request.sample not in running, f"sample {request.sample} is running already"
            running.add(request.sample)
            error = find_fault(
                request, max_length=self._max_length, vocab=self._vocab, has_decode=self._decode is not None
            )
            if error is None:
                self._pending.append(Attempt.begin(request, self._decode))
            else:
                self._emit(Failed, request, error=error)

    @torch.inference_mode()
    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        deadline = math.inf if timeout is None else self._clock() + timeout
        num_ended = self._start_pending() + any(isinstance(event, Failed | Finished) for event in self._ready)
        try:
            while self._active and not num_ended:
                num_ended = self._step()
                if self._clock() >= deadline:
                    break
        finally:
            self._hand_out()
        return self._drain()

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        chosen = None if samples is None else set(samples)

        def is_chosen(attempt: Attempt) -> bool:
            return chosen is None or attempt.request.sample in chosen

        stopped = [slot for slot, attempt in enumerate(self._active) if is_chosen(attempt)]
        for slot in stopped:
            self._deliver(self._active[slot])
            self._emit(Partial, self._active[slot].request)
        for attempt in filter(is_chosen, self._pending):
            self._emit(Partial, attempt.request)  # the caller holds all there is
        self._release(stopped)
        self._pending = [attempt for attempt in self._pending if not is_chosen(attempt)]
        return self._drain(chosen)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> CompletedHandle:
        if in_flight is InFlight.ABORT:
            assert not self.num_running, "weights published with abort while samples run: interrupt them first"
        for attempt in self._active:
            self._deliver(attempt)
        start = self._clock()
        if source.module is not self._model:
            copy_weights(source.module, self._model)
        self._decoder.refresh(self._model)
        self._refresh_s += self._clock() - start
        self._num_refreshes += 1
        self._version = version
        if in_flight is InFlight.REPREFILL:
            self._begin_again()
        return CompletedHandle()

    def _begin_again(self) -> None:
        """Let all that runs go on as if it were resumed: the next poll prefills it, with what comes in meanwhile."""
        resumed = [replace(a.request, mode=Mode.RESUME, cached=a.tokens, spans=a.spans) for a in self._active]
        self._pending = [*(Attempt.begin(request, self._decode) for request in resumed), *self._pending]
        self._active = []

    def stats(self) -> EngineStats:
        stats = self._stats
        return EngineStats(
            running=self.num_running,
            decode_steps=stats.decode_steps,
            decoded_tokens=stats.decoded_tokens,
            prompt_tokens=stats.prompt_tokens,
            recomputed_tokens=stats.recomputed_tokens,
            busy_slot_s=stats.busy_slot_s,
            prefill_slot_s=stats.prefill_slot_s,
            extra={
                "path": self._decoder.name,
                "dtype": str(self._dtype).removeprefix("torch."),
                "refreshes": self._num_refreshes,
                "decode_s": self._decode_s,
                "prefill_s": self._prefill_s,
                "refresh_s": self._refresh_s,
                "cache_bytes": self._cache.num_bytes,
            },
        )

    def close(self) -> None:
        self._active, self._pending, self._ready = [], [], []
        self._is_closed = True

    # Prefill

    def _start_pending(self) -> int:
        """Prefill what was submitted and draw its first tokens; returns how many attempts ended with that."""
        pending, self._pending = self._pending, []
        starting: list[Attempt] = []
        for attempt in pending:
            attempt.slot_mark = self._decode_s
            has_checks = attempt.request.mode is Mode.REPLAY and attempt.tokens
            if attempt.ending is not None and not has_checks:
                self._finish(attempt)
            else:
                starting.append(attempt)
        num_ended = len(pending) - len(starting)
        if not starting:
            return num_ended
        start, first_slot = self._clock(), len(self._active)
        self._active.extend(starting)
        self._stretch = None
        broken: set[int] = set()
        for pack in pack_prefills(plan_prefills(starting, first_slot), self._vocab):
            outcomes = draw_first(checks_of(pack), self._run_prefill(pack), self._noise)
            broken |= {o.check.attempt.request.sample for o in outcomes if not self._apply(o)}
        self._noise.start(first_slot, [attempt.next_draw for attempt in starting])
        self._count_time(start, is_decode=False)
        return num_ended + self._settle(broken)

    def _run_prefill(self, pack: Sequence[Prefill]) -> torch.Tensor:
        plan = self._cache.plan_prefill([p.slots[0] for p in pack], [len(p.tokens) for p in pack])
        tokens_t = torch.tensor([token for p in pack for token in p.tokens], device=self._device)
        logits_rv = self._decoder.forward(tokens_t, plan.positions_t, wanted_rows(pack).to(self._device), plan)
        for prefill in pack:
            self._cache.copy(prefill.slots[0], prefill.slots[1:], len(prefill.tokens))
            num_prompt = len(prefill.attempts[0].request.prompt)
            self._stats.prompt_tokens += num_prompt
            self._stats.recomputed_tokens += len(prefill.tokens) - num_prompt
        return logits_rv

    def _apply(self, outcome: Outcome) -> bool:
        """Take over what a prefill found out; False when the attempt's logits are broken."""
        attempt, is_replay = outcome.check.attempt, outcome.check.attempt.request.mode is Mode.REPLAY
        if is_replay:
            if not attempt.keep(outcome.accepted, outcome.logprobs):
                return False
            num_cached = len(outcome.check.cached)
            self._emit(Verified, attempt.request, cached=num_cached, accepted=outcome.accepted)
        is_sound = True
        if attempt.ending is None:
            is_sound = attempt.add(outcome.token, outcome.logprob)
            self._stats.decoded_tokens += is_sound
        if is_replay:
            self._deliver(attempt)
        return is_sound

    # Decode

    def _step(self) -> int:
        """Feed every running attempt's last token and draw the next; returns how many attempts ended."""
        start = self._clock()
        stretch = self._stretch = self._stretch or Stretch.begin(self._active, self._cache)
        plan = stretch.next_plan(self._cache)
        logits_bv = self._decoder.forward(stretch.tokens_b, plan.positions_t, None, plan)
        choice = self._noise.choose(stretch.shape(logits_bv), self._next_draws)
        self._written.append(choice)
        is_sure = stretch.take(choice)
        self._stats.decode_steps += 1
        self._stats.decoded_tokens += len(self._active)
        self._count_time(start, is_decode=True)
        is_streamed = self._stream_every and self._stats.decode_steps % self._stream_every == 0
        if is_sure and not is_streamed:
            return 0
        broken = self._hand_out()
        self._stats.decoded_tokens -= len(broken)
        if is_streamed:
            for attempt in self._active:
                self._deliver(attempt)
        return self._settle(broken)

    def _next_draws(self) -> list[Draw]:
        self._hand_out()
        return [attempt.next_draw for attempt in self._active]

    def _hand_out(self) -> set[int]:
        """Give attempts what the last steps have drawn; returns the samples whose logits are broken."""
        if not self._written:
            return set()
        *sound, last = self._written  # a step that may have broken logits is followed by no other
        self._written = []
        if sound:
            tokens = zip(*(choice.tokens for choice in sound), strict=True)
            logprobs = zip(*(choice.logprobs for choice in sound), strict=True)
            for attempt, *column in zip(self._active, tokens, logprobs, strict=True):
                attempt.extend(*column)
        rows = zip(self._active, last.tokens, last.logprobs, strict=True)
        return {attempt.request.sample for attempt, token, logprob in rows if not attempt.add(token, logprob)}

    def _count_time(self, start: float, *, is_decode: bool) -> None:
        seconds = self._clock() - start
        self._stats.busy_slot_s += seconds * len(self._active)
        if is_decode:
            self._decode_s += seconds
        else:
            self._prefill_s += seconds
            self._stats.prefill_slot_s += seconds * len(self._active)

    # Endings

    def _settle(self, broken: set[int]) -> int:
        """End the attempts that are complete or broken."""
        ended = []
        for slot, attempt in enumerate(self._active):
            if attempt.request.sample in broken:
                self._fail(attempt)
                self._cache.clear(slot)
                ended.append(slot)
            elif attempt.ending is not None:
                self._finish(attempt)
                ended.append(slot)
        self._release(ended)
        return len(ended)

    def _finish(self, attempt: Attempt) -> None:
        self._deliver(attempt)
        self._emit(Finished, attempt.request, reason=attempt.ending)

    def _fail(self, attempt: Attempt) -> None:
        self._deliver(attempt)
        error = (
            f"non-finite logits at answer position {len(attempt.tokens)} under version {self._version}: "
            "the weights hold NaN or overflow"
        )
        self._emit(Failed, attempt.request, error=error)

    def _release(self, slots: Sequence[int]) -> None:
        """Free slots, moving the last running one into each hole."""
        if slots:
            self._stretch = None
        for slot in sorted(slots, reverse=True):
            last = len(self._active) - 1
            moved = self._active.pop()
            if slot != last:
                self._cache.copy(last, [slot], moved.length)
                self._noise.move(last, slot)
                self._active[slot] = moved

    def _deliver(self, attempt: Attempt) -> None:
        delta = attempt.deliver(version=self._version, clock=self._clock(), decode_s=self._decode_s)
        if delta is not None:
            self._ready.append(delta)

    def _drain(self, samples: set[int] | None = None) -> list[EngineEvent]:
        """Take the events that are ready, of these samples or of all."""
        taken = [event for event in self._ready if samples is None or event.sample in samples]
        self._ready = [event for event in self._ready if not (samples is None or event.sample in samples)]
        return taken

    def _emit(self, kind: type[EngineEvent], request: Request, **fields: Any) -> None:
        self._ready.append(kind(sample=request.sample, attempt=request.attempt, clock=self._clock(), **fields))
