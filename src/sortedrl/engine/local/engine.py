"""The local engine: continuous batching in this process, on PyTorch, with shared sampling noise and exact replay.

The controller drives it: `poll` runs prefills and decode steps in the caller's thread until an attempt ends.
Guarantees, beyond those of the protocol:
- under given weights an answer depends only on its prompt, seed and sampling (up to rounding), not on slots, neighbours
  or interruptions;
- a replay writes token for token what a restart with the same seed would write;
- memory is bounded by slots x max_length.

The attempt at index i of `_active` owns slot i of the cache. Its last token is sampled, but the model has not read it
yet. When an attempt ends, the last running attempt moves into its slot. With a large model, attempts are prefilled in
their slots while the others decode (`mixed_pass.py`); a few new prompts that meet an idle engine are prefilled in one
call.

Shapes: b running slots, t packed tokens, r rows of logits, v vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from sortedrl.engine.attempt import Attempt
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
from sortedrl.engine.local.decoder_choice import EXACT_DTYPES, make_decoder
from sortedrl.engine.local.kept_prefixes import KeptPrefixes, SuffixPrefill
from sortedrl.engine.local.mixed_pass import GradualPrefill, MixedPass, can_mix
from sortedrl.engine.local.module_decoder import Geometry, check_supported, copy_weights
from sortedrl.engine.local.prefill import (
    Prefill,
    PrefillOutcome,
    logit_rows,
    make_checks,
    pack_prefills,
    plan_prefills,
    verify_and_draw,
)
from sortedrl.engine.local.speculation import DraftMode, make_speculation
from sortedrl.engine.local.steady_steps import SteadySteps
from sortedrl.engine.local.unchanged_layers import make_unchanged_layers
from sortedrl.engine.request_checks import check_limits, check_submit, find_fault
from sortedrl.engine.sampling.draw import Choice, Draw, KernelSampler, make_sampler
from sortedrl.engine.sampling.noise import SCHEME, int_tensor
from sortedrl.records import FinishReason, Mode

# With a large model, an idle engine prefills at most so many tokens of new prompts in one call: a call takes seconds
# then, and meanwhile `poll` does not return.
_MAX_IDLE_TOKENS = 2048


class LocalEngine:
    """Samples from a transformers causal language model that is already loaded.

    `path` selects the decoder: "module" is the model's own modules, "lean" a decoder for the Llama family with fewer
    torch calls, "native" compiled code for that family on a CPU, "auto" the fastest one that can run the model.
    `stream_every`: deliver tokens every so many steps, and not only when an attempt ends. `dtype`: of the decoder's
    copy of the weights; None is the model's own. `decode` turns tokens into text; without it, requests with stop
    strings fail. `drafts`: whether a pass also checks guesses at the tokens after the next one (`speculation.py`); only
    the native decoder does. `kept_prefixes`: how many trajectories in tools keep their cache (`kept_prefixes.py`).
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
        drafts: DraftMode = "off",
        kept_prefixes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = check_supported(model)
        geometry = Geometry.of(self._model)
        check_limits(slots=slots, max_length=max_length, model_length=geometry.max_length)
        self._slots, self._max_length, self._stream_every = slots, max_length, stream_every
        self._vocab = geometry.vocab
        parameter = next(self._model.parameters())
        self._device, self._dtype = parameter.device, dtype or parameter.dtype
        self._cache, self._decoder = make_decoder(
            self._model, path, slots=slots, spare=kept_prefixes, max_length=max_length, dtype=self._dtype
        )
        self._kept = KeptPrefixes(self._cache, slots)
        self._sampler = make_sampler(slots, self._vocab, self._device)
        self._speculation = make_speculation(drafts, self._model, self._decoder.name, slots)
        self._gate = self._speculation.gate if self._speculation is not None else None
        self._is_mixing = can_mix(self._model, self._decoder.name)
        self._unchanged = make_unchanged_layers(self._decoder, self._cache) if self._is_mixing else None
        self._clock, self._decode = clock, decode
        self._version = 0
        self._active: list[Attempt] = []
        self._steady: SteadySteps | None = None  # valid until the set of running slots changes, or a pass has drafts
        self._is_sampler_behind = False  # since a pass with drafts, the sampler does not know the next positions
        self._drawn: list[Choice] = []  # tokens of the last steps that are not yet appended to their attempts
        self._pending: list[Attempt] = []  # submitted; the next poll prefills them together
        self._prefilling: list[GradualPrefill] = []  # of active attempts that are prefilled in mixed passes
        self._events: list[EngineEvent] = []
        self._is_closed = False
        self._decode_s = self._prefill_s = self._refresh_s = 0.0
        self._num_refreshes = 0
        self._stats = EngineStats()

    @property
    def capabilities(self) -> Capabilities:
        is_exact = self._dtype in EXACT_DTYPES
        return Capabilities(slots=self._slots, exact_replay=is_exact, keep_kv=True, waits=True, noise=SCHEME)

    @property
    def num_running(self) -> int:
        return len(self._active) + len(self._pending)

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        check_submit(len(requests), running=self.num_running, slots=self._slots, is_closed=self._is_closed)
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
        num_ended = self._start_pending() + any(isinstance(event, Failed | Finished) for event in self._events)
        try:
            while self._active and not num_ended:
                num_ended = self._step()
                if self._clock() >= deadline:
                    break
        finally:
            self._append_drawn()
        return self._take_events()

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        chosen = None if samples is None else set(samples)

        def is_chosen(attempt: Attempt) -> bool:
            return chosen is None or attempt.request.sample in chosen

        self._pending = [*self._stop_prefills(is_chosen), *self._pending]
        stopped = [slot for slot, attempt in enumerate(self._active) if is_chosen(attempt)]
        for slot in stopped:
            self._deliver(self._active[slot])
            self._emit(Partial, self._active[slot].request)
            self._keep_answer(self._active[slot])
            self._keep_layers(self._active[slot], slot)
        for attempt in filter(is_chosen, self._pending):
            self._emit(Partial, attempt.request)  # it wrote nothing that the caller does not have
            self._keep_answer(attempt)
        self._release(stopped)
        self._pending = [attempt for attempt in self._pending if not is_chosen(attempt)]
        return self._take_events(chosen)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> CompletedHandle:
        if in_flight is InFlight.ABORT:
            assert not self.num_running, "weights published with abort while samples run: interrupt them first"
        self._pending = [*self._stop_prefills(), *self._pending]  # what the old weights have prefilled is not used
        for attempt in self._active:
            self._deliver(attempt)
        start = self._clock()
        if source.module is not self._model:
            copy_weights(source.module, self._model)
        num_unchanged = self._decoder.refresh(self._model)
        if self._unchanged is not None:
            self._unchanged.publish(num_unchanged, self._active)
        self._refresh_s += self._clock() - start
        self._num_refreshes += 1
        self._version = version
        self._kept.clear(self._active if in_flight is InFlight.KEEP else ())
        if in_flight is InFlight.REPREFILL:
            self._requeue_active()
        return CompletedHandle()

    def _requeue_active(self) -> None:
        """Turn running attempts into resumed ones, which the next poll prefills under the new weights."""
        for slot, attempt in enumerate(self._active):
            self._keep_layers(attempt, slot)
        resumed = [replace(a.request, mode=Mode.RESUME, cached=a.tokens, spans=a.spans) for a in self._active]
        self._pending = [*(Attempt.begin(request, self._decode) for request in resumed), *self._pending]
        self._active = []

    def stats(self) -> EngineStats:
        extra = {
            "path": self._decoder.name,
            "dtype": str(self._dtype).removeprefix("torch."),
            "refreshes": self._num_refreshes,
            "decode_s": self._decode_s,
            "prefill_s": self._prefill_s,
            "refresh_s": self._refresh_s,
            "cache_bytes": self._cache.num_bytes,
            **self._kept.stats,
            **({} if self._unchanged is None else self._unchanged.stats),
            **({} if self._speculation is None else self._speculation.stats),
        }
        return replace(self._stats, running=self.num_running, extra=extra)

    def close(self) -> None:
        self._active, self._pending, self._prefilling, self._events = [], [], [], []
        self._is_closed = True

    # Prefill

    def _start_pending(self) -> int:
        """Prefill the submitted attempts and draw their first tokens; returns how many attempts ended."""
        pending, self._pending = self._pending, []
        starting: list[Attempt] = []
        for attempt in pending:
            attempt.last_delivery_s = self._decode_s
            has_checks = attempt.request.mode is Mode.REPLAY and attempt.tokens
            if attempt.ending is not None and not has_checks:
                self._finish(attempt)
            else:
                starting.append(attempt)
        num_ended = len(pending) - len(starting)
        if not starting:
            return num_ended
        start, first_slot = self._clock(), len(self._active)
        returning, others = self._kept.split(starting)
        starting = [*returning, *others]
        self._active.extend(starting)
        self._steady = None
        lengths = self._kept.restore(returning, first_slot)
        prefills = plan_prefills(others, first_slot + len(returning))
        outcomes: list[PrefillOutcome] = []
        late = [self._restore_layers(prefill) for prefill in prefills]
        is_busy = bool(first_slot or returning or any(attempt.tokens for attempt in others))
        if self._is_mixing and (is_busy or any(late) or sum(len(p.tokens) for p in prefills) > _MAX_IDLE_TOKENS):
            self._prefilling += [GradualPrefill.after_kept(a, n) for a, n in zip(returning, lengths, strict=True)]
            self._prefilling += [
                GradualPrefill(prefill=prefill, num_late=n) for prefill, n in zip(prefills, late, strict=True)
            ]
        else:
            if returning:
                outcomes += self._run_suffixes(SuffixPrefill.begin(returning, lengths, first_slot))
            for pack in pack_prefills(prefills, self._vocab):
                outcomes += verify_and_draw(make_checks(pack), self._run_prefill(pack), self._sampler)
        broken = {o.check.attempt.request.sample for o in outcomes if not self._apply(o)}
        self._sampler.start(first_slot, [attempt.next_draw for attempt in starting])
        self._count_time(start, is_decode=False)
        return num_ended + self._end_attempts(broken, first_slot)

    def _restore_layers(self, prefill: Prefill) -> int:
        """For how many first tokens of a prefill the unchanged layers need not be computed."""
        if self._unchanged is None:
            return 0
        return self._unchanged.restore(prefill.attempts, prefill.tokens, prefill.slots[0])

    def _run_prefill(self, pack: Sequence[Prefill]) -> torch.Tensor:
        plan = self._cache.plan_prefill([p.slots[0] for p in pack], [len(p.tokens) for p in pack])
        tokens_t = int_tensor([token for p in pack for token in p.tokens], self._device)
        logits_rv = self._decoder.forward(tokens_t, plan.positions_t, logit_rows(pack).to(self._device), plan)
        for prefill in pack:
            self._cache.copy(prefill.slots[0], prefill.slots[1:], len(prefill.tokens))
            num_prompt = len(prefill.attempts[0].request.prompt)
            self._stats.prompt_tokens += num_prompt
            self._stats.recomputed_tokens += len(prefill.tokens) - num_prompt
        return logits_rv

    def _mixed_step(self, start: float) -> int:
        """Run one pass for the decoding attempts and the next tokens of prefills; returns how many attempts ended."""
        self._append_drawn()
        self._steady, self._is_sampler_behind = None, True
        waiting = self._find_waiting()
        decoding = [attempt for attempt in self._active if id(attempt) not in waiting]
        slot_of = {id(attempt): slot for slot, attempt in enumerate(self._active)}
        mixed = MixedPass.begin(decoding, self._prefilling, slot_of)
        logits_wv = self._decoder.forward(mixed.tokens_r, mixed.plan.positions_t, mixed.wanted_w, mixed.plan)
        verdict = mixed.judge(logits_wv, self._sampler)
        rows = zip(decoding, verdict.drawn.tokens, verdict.drawn.logprobs, strict=False)
        broken = {attempt.request.sample for attempt, token, logprob in rows if not attempt.add(token, logprob)}
        outcomes = mixed.outcomes(verdict)
        self._count_prefills(mixed)
        self._stats.decode_steps += bool(decoding)
        self._stats.decoded_tokens += len(decoding) - len(broken)
        seconds = self._count_time(start, is_decode=bool(decoding))
        if decoding:
            self._stats.prefill_slot_s += seconds * len(waiting)
        self._begin_decoding(outcomes, slot_of)
        broken |= {outcome.check.attempt.request.sample for outcome in outcomes if not self._apply(outcome)}
        self._stream()
        return self._end_attempts(broken)

    def _begin_decoding(self, outcomes: Sequence[PrefillOutcome], slot_of: Mapping[int, int]) -> None:
        """The prefills of these attempts are complete; siblings get a copy of their keys and values."""
        ended = {id(outcome.check.attempt) for outcome in outcomes}
        for gradual in self._prefilling:
            first, *others = gradual.prefill.attempts
            if id(first) in ended and others:
                targets = [slot_of[id(other)] for other in others]
                self._cache.copy(slot_of[id(first)], targets, len(gradual.prefill.tokens))
        self._prefilling = [waiting for waiting in self._prefilling if id(waiting.prefill.attempts[0]) not in ended]
        for outcome in outcomes:
            outcome.check.attempt.last_delivery_s = self._decode_s  # the time until now was prefill

    def _count_prefills(self, mixed: MixedPass) -> None:
        for chunk in mixed.chunks:
            num_prompt = len(chunk.gradual.prefill.attempts[0].request.prompt)
            prompt_tokens = max(min(num_prompt, chunk.positions.stop) - chunk.positions.start, 0)
            self._stats.prompt_tokens += prompt_tokens
            self._stats.recomputed_tokens += len(chunk.positions) - prompt_tokens

    def _find_waiting(self) -> set[int]:
        """The ids of active attempts that are being prefilled."""
        return {id(attempt) for gradual in self._prefilling for attempt in gradual.prefill.attempts}

    def _stop_prefills(self, is_chosen: Callable[[Attempt], bool] = lambda attempt: True) -> list[Attempt]:
        """Take attempts that are being prefilled out of their slots and return them. They have nothing to deliver."""
        if not self._prefilling:
            return []
        waiting = self._find_waiting()
        slots = [slot for slot, a in enumerate(self._active) if id(a) in waiting and is_chosen(a)]
        stopped = [self._active[slot] for slot in slots]
        self._prefilling = [gradual for gradual in self._prefilling if gradual.drop(stopped)]
        self._release(slots)
        return stopped

    def _run_suffixes(self, suffix: SuffixPrefill) -> list[PrefillOutcome]:
        """Prefill what follows the kept prefixes of attempts, and draw their next tokens."""
        self._stats.recomputed_tokens += len(suffix.tokens_t)
        logits_rv = self._decoder.forward(suffix.tokens_t, suffix.plan.positions_t, suffix.rows_r, suffix.plan)
        return verify_and_draw(suffix.checks, logits_rv, self._sampler)

    def _apply(self, outcome: PrefillOutcome) -> bool:
        """Write the result of a prefill into its attempt; returns False if the logits are not finite."""
        attempt, is_replay = outcome.check.attempt, outcome.check.attempt.request.mode is Mode.REPLAY
        if is_replay:
            if not attempt.keep(outcome.accepted, outcome.logprobs):
                return False
            cached = outcome.check.cached
            self._emit(Verified, attempt.request, cached=len(cached), accepted=outcome.accepted)
            if self._speculation is not None and outcome.accepted < len(cached):
                self._speculation.keep_discarded(attempt, cached)
        is_finite = True
        if attempt.ending is None:
            is_finite = attempt.add(outcome.token, outcome.logprob)
            self._stats.decoded_tokens += is_finite
        if is_replay:
            self._deliver(attempt)
        return is_finite

    # Decode

    def _step(self) -> int:
        """Run one pass: a token for every running attempt, or several with drafts; returns how many attempts ended."""
        start = self._clock()
        if self._prefilling:
            return self._mixed_step(start)
        if self._gate is not None and (least := self._gate.least(len(self._active))) is not None:
            return self._draft_step(least, start)
        is_first = self._steady is None
        steady = self._steady = self._steady or self._begin_steady()
        plan = steady.next_plan(self._cache)
        logits_bv = self._decoder.forward(steady.tokens_b, plan.positions_t, None, plan)
        choice = self._sampler.choose(steady.shape(logits_bv), self._next_draws)
        self._drawn.append(choice)
        all_continue = steady.record(choice)
        self._stats.decode_steps += 1
        self._stats.decoded_tokens += len(self._active)
        seconds = self._count_time(start, is_decode=True)
        if self._gate is not None and self._gate.is_measuring and not is_first:  # the first step also makes the plan
            self._gate.count_plain(len(self._active), seconds)
        if all_continue and not self._is_streamed:
            return 0
        broken = self._append_drawn()
        self._stats.decoded_tokens -= len(broken)
        self._stream()
        return self._end_attempts(broken)

    def _begin_steady(self) -> SteadySteps:
        if self._is_sampler_behind:
            self._sampler.start(0, self._next_draws())
            self._is_sampler_behind = False
        return SteadySteps.begin(self._active, self._cache)

    def _draft_step(self, least: float, start: float) -> int:
        """Run one pass with drafts whose tokens are likely enough; returns how many attempts ended."""
        assert self._speculation is not None, "only speculation asks for a pass with drafts"
        assert isinstance(self._sampler, KernelSampler), "drafts need the native decoder, and its kernel draws too"
        self._append_drawn()
        self._steady, self._is_sampler_behind = None, True
        draft_pass = self._speculation.begin_pass(self._active, least)
        plan = draft_pass.plan
        logits_rv = self._decoder.forward(draft_pass.tokens_r, plan.positions_t, None, plan)
        scaled_rv = draft_pass.shape(logits_rv)
        choice = self._sampler.choose_at(scaled_rv, plan.slots_t, plan.positions_t)
        accepted, num_tokens, broken = draft_pass.apply(choice)
        self._stats.decode_steps += 1
        self._stats.decoded_tokens += num_tokens
        self._speculation.count(draft_pass, accepted, num_tokens, self._count_time(start, is_decode=True))
        self._stream()
        return self._end_attempts(broken)

    @property
    def _is_streamed(self) -> bool:
        return self._stream_every > 0 and self._stats.decode_steps % self._stream_every == 0

    def _stream(self) -> None:
        if not self._is_streamed:
            return
        waiting = self._find_waiting()
        for attempt in self._active:
            if id(attempt) not in waiting:
                self._deliver(attempt)

    def _next_draws(self) -> list[Draw]:
        self._append_drawn()
        return [attempt.next_draw for attempt in self._active]

    def _append_drawn(self) -> set[int]:
        """Append the tokens of the last steps to their attempts; returns the samples whose logits are not finite."""
        if not self._drawn:
            return set()
        *finite, last = self._drawn  # no step follows one whose log-probs may be non-finite
        self._drawn = []
        if finite:
            tokens = zip(*(choice.tokens for choice in finite), strict=True)
            logprobs = zip(*(choice.logprobs for choice in finite), strict=True)
            for attempt, *column in zip(self._active, tokens, logprobs, strict=True):
                attempt.extend(*column)
        rows = zip(self._active, last.tokens, last.logprobs, strict=True)
        return {attempt.request.sample for attempt, token, logprob in rows if not attempt.add(token, logprob)}

    def _count_time(self, start: float, *, is_decode: bool) -> float:
        seconds = self._clock() - start
        self._stats.busy_slot_s += seconds * len(self._active)
        if is_decode:
            self._decode_s += seconds
            self._stats.slot_steps += self._slots
            self._stats.busy_slot_steps += len(self._active)
        else:
            self._prefill_s += seconds
            self._stats.prefill_slot_s += seconds * len(self._active)
        return seconds

    # Endings

    def _end_attempts(self, broken: set[int], first_slot: int = 0) -> int:
        """End the attempts from a slot on that are complete or of `broken` samples; returns how many ended.

        Those of `broken` samples have failed.
        """
        ended, waiting = [], self._find_waiting()
        for slot, attempt in enumerate(self._active[first_slot:], start=first_slot):
            if id(attempt) in waiting:
                continue  # a replay of a complete answer ends when it is verified
            if attempt.request.sample in broken:
                self._deliver(attempt)
                error = (
                    f"non-finite logits at answer position {len(attempt.tokens)} under version {self._version}: the "
                    "weights hold NaN or overflow; lower the learning rate, or go back to an earlier checkpoint"
                )
                self._emit(Failed, attempt.request, error=error)
                self._keep_answer(attempt)
                self._cache.clear(slot)
                ended.append(slot)
            elif (ending := attempt.ending) is not None:
                if ending is FinishReason.STOP:  # the turn may call tools, and come back
                    self._kept.keep(attempt, slot)
                self._keep_layers(attempt, slot)
                self._finish(attempt)
                ended.append(slot)
        self._release(ended)
        return len(ended)

    def _finish(self, attempt: Attempt) -> None:
        self._deliver(attempt)
        self._emit(Finished, attempt.request, reason=attempt.ending)
        self._keep_answer(attempt)

    def _keep_answer(self, attempt: Attempt) -> None:
        """Keep the answer of an attempt that ends, for drafts."""
        if self._speculation is not None:
            self._speculation.end(attempt)

    def _keep_layers(self, attempt: Attempt, slot: int) -> None:
        """Keep what the unchanged layers computed for an attempt that ends, in case that its sample starts again."""
        if self._unchanged is not None:
            self._unchanged.keep(attempt, slot)

    def _release(self, slots: Sequence[int]) -> None:
        """Free slots; the last running attempt moves into each freed slot."""
        if slots:
            self._steady = None
        for slot in sorted(slots, reverse=True):
            last = len(self._active) - 1
            moved = self._active.pop()
            if slot != last:
                self._cache.copy(last, [slot], moved.length)
                self._sampler.move(last, slot)
                self._active[slot] = moved

    def _deliver(self, attempt: Attempt) -> None:
        delta = attempt.deliver(version=self._version, clock=self._clock(), decode_s=self._decode_s)
        if delta is not None:
            self._events.append(delta)

    def _take_events(self, samples: set[int] | None = None) -> list[EngineEvent]:
        """Remove and return the events of these samples, or all events."""
        taken = [event for event in self._events if samples is None or event.sample in samples]
        self._events = [event for event in self._events if not (samples is None or event.sample in samples)]
        return taken

    def _emit(self, kind: type[EngineEvent], request: Request, **fields: Any) -> None:
        self._events.append(kind(sample=request.sample, attempt=request.attempt, clock=self._clock(), **fields))
