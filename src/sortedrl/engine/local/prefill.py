"""What a prefill computes: sequences, packed without padding, which of their positions need logits, and what these say.

The local engine makes one `Prefill` per distinct sequence, packs them and runs each pack in one call. Siblings share a
prompt and so a prefill; the cache is then copied to their slots. Every attempt draws one token from its prefill; a
replay first verifies its cached tokens, all at once, and draws behind the last that it keeps.

Shapes: r rows of logits, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from sortedrl.engine.local.attempt import Attempt
from sortedrl.engine.sampling.draw import Draw, Noise, shape_logits
from sortedrl.records import Mode

# Bounds on what one call holds at once; a single longer sequence is still one call.
_PACK_TOKENS = 8192
_PACK_LOGITS = 1 << 24


@dataclass(slots=True, kw_only=True)
class Prefill:
    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    num_rows: int = 1  # logits wanted, counted from the end


@dataclass(slots=True, kw_only=True, frozen=True)
class Check:
    """An attempt's rows of the pack's logits: one per cached token to be verified, and one for the token behind."""

    attempt: Attempt
    cached: list[int]
    is_masked: list[bool]  # of each of these, whether it stands unverified
    rows: range

    @property
    def draws(self) -> list[Draw]:
        last = self.attempt.next_draw
        first = last.position - len(self.cached)
        return [last._replace(position=first + offset) for offset in range(len(self.rows))]


def plan_prefills(attempts: Sequence[Attempt], first_slot: int) -> list[Prefill]:
    """One prefill per attempt, or for all attempts that continue the same tokens."""
    prefills: list[Prefill] = []
    shared: dict[tuple[int, ...], Prefill] = {}
    for slot, attempt in enumerate(attempts, start=first_slot):
        tokens = [*attempt.request.prompt, *attempt.tokens]
        if attempt.request.mode is Mode.REPLAY:
            prefill = Prefill(tokens=tokens, num_rows=len(attempt.tokens) + 1)
            prefills.append(prefill)
        else:
            key = tuple(tokens)
            if key not in shared:
                shared[key] = Prefill(tokens=tokens)
                prefills.append(shared[key])
            prefill = shared[key]
        prefill.slots.append(slot)
        prefill.attempts.append(attempt)
    return prefills


def pack_prefills(prefills: Iterable[Prefill], vocab: int) -> list[list[Prefill]]:
    """By length, since equal ones attend together, in packs of bounded size."""
    packs: list[list[Prefill]] = []
    num_tokens = num_logits = 0
    for prefill in sorted(prefills, key=lambda prefill: len(prefill.tokens)):
        num_tokens += len(prefill.tokens)
        num_logits += prefill.num_rows * vocab
        if not packs or num_tokens > _PACK_TOKENS or num_logits > _PACK_LOGITS:
            packs.append([])
            num_tokens, num_logits = len(prefill.tokens), prefill.num_rows * vocab
        packs[-1].append(prefill)
    return packs


def wanted_rows(pack: Sequence[Prefill]) -> torch.Tensor:
    """Indices into the packed tokens of the positions whose logits are wanted."""
    rows: list[int] = []
    end = 0
    for prefill in pack:
        end += len(prefill.tokens)
        rows.extend(range(end - prefill.num_rows, end))
    return torch.tensor(rows, dtype=torch.int64)


def checks_of(pack: Sequence[Prefill]) -> list[Check]:
    """Which of the wanted rows belong to which attempt."""
    checks: list[Check] = []
    start = 0
    for prefill in pack:
        rows = range(start, start + prefill.num_rows)
        for attempt in prefill.attempts:
            is_replay = attempt.request.mode is Mode.REPLAY
            cached, is_masked = (attempt.tokens[:], attempt.is_masked) if is_replay else ([], [])
            checks.append(Check(attempt=attempt, cached=cached, is_masked=is_masked, rows=rows))
        start = rows.stop
    return checks


@dataclass(slots=True, kw_only=True, frozen=True)
class Outcome:
    """What an attempt's rows say: how many cached tokens stand, their log-probs, and what was drawn behind them."""

    check: Check
    accepted: int
    logprobs: list[float]
    token: int
    logprob: float


def draw_first(checks: Sequence[Check], logits_rv: torch.Tensor, noise: Noise) -> list[Outcome]:
    """Verify and draw at all rows of a pack in one call each."""
    rows = [row for check in checks for row in check.rows]
    draws = [draw for check in checks for draw in check.draws]
    cached = [token for check in checks for token in (*check.cached, -1)]
    tolerances = [check.attempt.request.replay_tolerance for check in checks for _ in check.rows]
    if rows != list(range(len(logits_rv))):  # siblings read the same rows
        logits_rv = logits_rv[torch.tensor(rows, device=logits_rv.device)]
    scaled_rv = shape_logits(logits_rv, [draw.sampling for draw in draws])
    verdict = noise.verify(scaled_rv, draws, cached, tolerances)
    is_kept, cached_logprobs = verdict.is_kept, verdict.cached_logprobs
    is_masked = [flag for check in checks for flag in (*check.is_masked, False)]
    if any(is_masked):
        is_kept = [kept or masked for kept, masked in zip(is_kept, is_masked, strict=True)]
        cached_logprobs = [0.0 if masked else lp for lp, masked in zip(cached_logprobs, is_masked, strict=True)]
    outcomes: list[Outcome] = []
    start = 0
    for check in checks:
        end = is_kept.index(False, start)  # the row behind the cached ones is never kept
        outcomes.append(
            Outcome(
                check=check,
                accepted=end - start,
                logprobs=cached_logprobs[start:end],
                token=verdict.drawn.tokens[end],
                logprob=verdict.drawn.logprobs[end],
            )
        )
        start += len(check.rows)
    return outcomes
