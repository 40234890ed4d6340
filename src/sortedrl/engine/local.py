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
from typing import Any, Literal

import torch
from torch import nn

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
from sortedrl.engine.cache import DecodePlan, PrefillPlan, SlotCache
from sortedrl.engine.decoder import Decoder, LeanDecoder, supports_lean
from sortedrl.engine.module import Geometry, ModuleDecoder, check_supported
from sortedrl.engine.prefill import Check, Prefill, checks_of, pack_prefills, plan_prefills, wanted_rows
from sortedrl.engine.sampling import NoiseAhead, choose, draw_noise, scale_logits, verify
from sortedrl.errors import EngineError, ModelError
from sortedrl.records import Mode


class _Done:
    """A publication that is over when `publish` returns."""

    def wait(self) -> None:
        return None


class LocalEngine:
    """Samples from a transformers causal language model that is already loaded.

    `path` picks how it is run: its own modules, the lean decoder of the Llama family, or lean where possible (auto).
    `stream_every` delivers tokens every so many steps, not only when an attempt ends.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: int,
        max_length: int,
        stream_every: int = 0,
        path: Literal["auto", "lean", "module"] = "auto",
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
        self._device, self._dtype = parameter.device, parameter.dtype
        self._cache = SlotCache(
            num_layers=geometry.num_layers,
            slots=slots,
            kv_heads=geometry.kv_heads,
            max_length=max_length,
            head_dim=geometry.head_dim,
            dtype=self._dtype,
            device=self._device,
        )
        self._decoder = self._make_decoder(path)
        self._noise = NoiseAhead(slots, self._vocab, self._device)
        self._clock = clock
        self._version = 0
        self._active: list[Attempt] = []
        self._pending: list[Attempt] = []  # submitted, waiting for the next poll to prefill them together
        self._ready: list[Event] = []
        self._is_closed = False
        self._decode_s = self._prefill_s = self._refresh_s = 0.0
        self._stats = EngineStats()

    def _make_decoder(self, path: str) -> Decoder:
        has_lean = supports_lean(self._model)
        if path == "lean" and not has_lean:
            raise ModelError(
                f"{type(self._model).__name__} has no lean path (float32 Llama, Mistral, Qwen2, Qwen3): "
                "use path='module'"
            )
        if has_lean and path != "module":
            return LeanDecoder(self._model, self._max_length)
        return ModuleDecoder(self._model, self._cache)

    @property
    def capabilities(self) -> Capabilities:
        is_exact = self._dtype == torch.float32
        return Capabilities(slots=self._slots, exact_replay=is_exact, keep_kv=True, deterministic=True)

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
            error = self._find_fault(request)
            if error is None:
                self._pending.append(Attempt.begin(request))
            else:
                self._ready.append(self._event(Failed, request, error=error))

    def _find_fault(self, request: Request) -> str | None:
        """Why this request cannot be served, whatever the others are."""
        length = len(request.prompt) + request.budget
        if length > self._max_length:
            return (
                f"prompt of {len(request.prompt)} tokens plus budget of {request.budget} is {length}, more than the "
                f"engine's max_length of {self._max_length}: lower the budget or raise max_length"
            )
        if not request.prompt:
            return "the prompt is empty: give it at least one token"
        tokens = (*request.prompt, *request.cached)
        if min(tokens) < 0 or max(tokens) >= self._vocab:
            return f"a token lies outside the model's vocabulary of {self._vocab}: tokenizer and model do not match"
        return None

    @torch.inference_mode()
    def poll(self, timeout: float | None = None) -> list[Event]:
        deadline = math.inf if timeout is None else self._clock() + timeout
        num_ended = self._start_pending() + any(isinstance(event, Failed | Finished) for event in self._ready)
        while self._active and not num_ended:
            num_ended = self._step()
            if self._clock() >= deadline:
                break
        return self._drain()

    def interrupt(self, samples: Iterable[int] | None = None) -> list[Event]:
        chosen = None if samples is None else set(samples)
        events = self._drain(chosen)
        stopped = [a for a in (*self._active, *self._pending) if chosen is None or a.request.sample in chosen]
        waiting = {id(attempt) for attempt in self._pending}
        self._pending = [attempt for attempt in self._pending if attempt not in stopped]
        for attempt in stopped:
            if id(attempt) not in waiting:
                self._deliver(attempt)
            self._ready.append(self._event(Partial, attempt.request))
        self._release([slot for slot, attempt in enumerate(self._active) if attempt in stopped])
        return events + self._drain(chosen)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> _Done:
        if in_flight is InFlight.ABORT:
            assert not self.num_running, "weights published with abort while samples run: interrupt them first"
        for attempt in self._active:
            self._deliver(attempt)
        start = self._clock()
        if source.module is not self._model:
            copy_parameters(source.module, self._model)
        self._decoder.refresh(self._model)
        self._refresh_s += self._clock() - start
        self._version = version
        if in_flight is InFlight.REPREFILL:
            self._reprefill()
        return _Done()

    def stats(self) -> EngineStats:
        stats = self._stats
        return EngineStats(
            running=self.num_running,
            decode_steps=stats.decode_steps,
            decoded_tokens=stats.decoded_tokens,
            prompt_tokens=stats.prompt_tokens,
            recomputed_tokens=stats.recomputed_tokens,
            busy_slot_s=stats.busy_slot_s,
            extra={
                "path": self._decoder.name,
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
        num_ended = 0
        starting: list[Attempt] = []
        for attempt in pending:
            has_checks = attempt.request.mode is Mode.REPLAY and attempt.tokens
            if attempt.ending is not None and not has_checks:
                num_ended += self._finish(attempt)
            else:
                starting.append(attempt)
        if not starting:
            return num_ended
        first_slot = len(self._active)
        self._active.extend(starting)
        start = self._clock()
        broken: set[int] = set()
        for pack in pack_prefills(plan_prefills(starting, first_slot), self._vocab):
            self._count_prefill(pack)
            logits_rv = self._run_prefill(pack)
            broken |= self._draw_first(checks_of(pack), logits_rv)
        self._count_time(start, is_decode=False)
        for attempt in starting:
            attempt.slot_mark = self._decode_s
        self._noise.start(first_slot, [attempt.next_draw for attempt in starting])
        return num_ended + self._settle(broken)

    def _run_prefill(self, pack: Sequence[Prefill]) -> torch.Tensor:
        plan = PrefillPlan(self._cache, [p.slots[0] for p in pack], [len(p.tokens) for p in pack])
        tokens_t = torch.tensor([token for p in pack for token in p.tokens], device=self._device)
        logits_rv = self._decoder.forward(tokens_t, plan.positions_t, wanted_rows(pack).to(self._device), plan)
        for prefill in pack:
            self._cache.copy(prefill.slots[0], prefill.slots[1:], len(prefill.tokens))
        return logits_rv

    def _draw_first(self, checks: Sequence[Check], logits_rv: torch.Tensor) -> set[int]:
        """Verify cached tokens, then draw the next one; returns the samples whose logits are broken."""
        rows = [row for check in checks for row in check.rows]
        draws = [draw for check in checks for draw in check.draws]
        cached = [token for check in checks for token in (*check.cached, -1)]
        tolerances = [check.attempt.request.replay_tolerance for check in checks for _ in check.rows]
        if rows != list(range(len(logits_rv))):  # siblings read the same rows
            logits_rv = logits_rv[torch.tensor(rows, device=self._device)]
        noise_rv = draw_noise(draws, self._vocab, self._device).squeeze(1)
        verdict = verify(scale_logits(logits_rv, [draw.temperature for draw in draws]), noise_rv, cached, tolerances)
        broken: set[int] = set()
        row = 0
        for check in checks:
            attempt, num_cached = check.attempt, len(check.cached)
            accepted = verdict.is_kept.index(False, row) - row  # the row behind the cached ones is never kept
            if attempt.request.mode is Mode.REPLAY:
                logprobs = verdict.cached_logprobs[row : row + accepted]
                if not all(map(math.isfinite, logprobs)):
                    broken.add(attempt.request.sample)
                else:
                    self._ready.append(self._event(Verified, attempt.request, cached=num_cached, accepted=accepted))
                    attempt.restart_from(accepted, logprobs)
            if attempt.request.sample not in broken and attempt.ending is None:
                at = row + accepted
                if not attempt.add(verdict.drawn.tokens[at], verdict.drawn.logprobs[at]):
                    broken.add(attempt.request.sample)
                else:
                    self._stats.decoded_tokens += 1
            if attempt.request.mode is Mode.REPLAY:
                self._deliver(attempt)
            row += len(check.rows)
        return broken

    @torch.inference_mode()
    def _reprefill(self) -> None:
        """Recompute the cache of what runs; the last token of each is not part of it."""
        if not self._active:
            return
        start = self._clock()
        prefills = [
            Prefill(tokens=[*a.request.prompt, *a.tokens[:-1]], slots=[slot], attempts=[a], num_rows=0)
            for slot, a in enumerate(self._active)
        ]
        for pack in pack_prefills(prefills, self._vocab):
            self._count_prefill(pack)
            self._run_prefill(pack)
        self._count_time(start, is_decode=False)

    def _count_prefill(self, pack: Sequence[Prefill]) -> None:
        for prefill in pack:
            num_prompt = len(prefill.attempts[0].request.prompt)
            self._stats.prompt_tokens += num_prompt
            self._stats.recomputed_tokens += len(prefill.tokens) - num_prompt

    # Decode

    def _step(self) -> int:
        """Feed every running attempt's last token and draw the next; returns how many attempts ended."""
        active, start = self._active, self._clock()
        plan = DecodePlan(self._cache, [attempt.length for attempt in active])
        tokens_b = torch.tensor([attempt.tokens[-1] for attempt in active], device=self._device)
        logits_bv = self._decoder.forward(tokens_b, plan.positions_b, None, plan)
        scaled_bv = scale_logits(logits_bv, [attempt.request.sampling.temperature for attempt in active])
        choice = choose(scaled_bv, self._noise.current(len(active)))
        broken = {
            attempt.request.sample
            for attempt, token, logprob in zip(active, choice.tokens, choice.logprobs, strict=True)
            if not attempt.add(token, logprob)
        }
        self._stats.decode_steps += 1
        self._stats.decoded_tokens += len(active) - len(broken)
        self._count_time(start, is_decode=True)
        if self._stream_every and self._stats.decode_steps % self._stream_every == 0:
            for attempt in active:
                self._deliver(attempt)
        num_ended = self._settle(broken)
        if self._noise.advance() and self._active:
            self._noise.start(0, [attempt.next_draw for attempt in self._active])
        return num_ended

    def _count_time(self, start: float, *, is_decode: bool) -> None:
        seconds = self._clock() - start
        self._stats.busy_slot_s += seconds * len(self._active)
        if is_decode:
            self._decode_s += seconds
        else:
            self._prefill_s += seconds

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

    def _finish(self, attempt: Attempt) -> int:
        reason = attempt.ending
        assert reason is not None, f"sample {attempt.request.sample} is not complete"
        self._deliver(attempt)
        self._ready.append(self._event(Finished, attempt.request, reason=reason))
        return 1

    def _fail(self, attempt: Attempt) -> None:
        self._deliver(attempt)
        error = (
            f"non-finite logits at answer position {len(attempt.tokens)} under version {self._version}: "
            "the weights hold NaN or overflow"
        )
        self._ready.append(self._event(Failed, attempt.request, error=error))

    def _release(self, slots: Sequence[int]) -> None:
        """Free slots, moving the last running one into each hole."""
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

    def _drain(self, samples: set[int] | None = None) -> list[Event]:
        """Take the events that are ready, of these samples or of all."""
        taken = [event for event in self._ready if samples is None or event.sample in samples]
        self._ready = [event for event in self._ready if not (samples is None or event.sample in samples)]
        return taken

    def _event(self, kind: type[Any], request: Request, **fields: Any) -> Any:
        return kind(sample=request.sample, attempt=request.attempt, clock=self._clock(), **fields)


@torch.no_grad()
def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Parameters and saved buffers by name; tied ones have one name in the target and are copied once."""
    state = source.state_dict(keep_vars=True)
    saved = target.state_dict(keep_vars=True)
    for name, tensor in saved.items():
        if name not in state or state[name].shape != tensor.shape:
            raise ModelError(f"the published weights do not fit the engine's model at {name}: publish the same model")
        tensor.copy_(state[name])
