"""Prefills: which sequences run in one call, at which positions logits are needed, and what follows from the logits.

The local engine makes one `Prefill` per distinct sequence, packs them without padding and runs each pack in one call.
Siblings share a prompt and therefore a prefill; the cache is then copied to their slots. Every attempt draws one token
from its prefill. A replay first verifies all its cached tokens at once, and draws after the last one that it keeps.

Shapes: r rows of logits, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from sortedrl.engine.attempt import Attempt
from sortedrl.engine.sampling.draw import Draw, DrawRuns, TokenSampler, shape_logits
from sortedrl.engine.sampling.noise import runs_of_numbers
from sortedrl.records import Mode

# Limits of one call. A single sequence beyond them still runs in one call.
_PACK_TOKENS = 8192
_PACK_LOGITS = 1 << 24


@dataclass(slots=True, kw_only=True)
class Prefill:
    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    num_rows: int = 1  # logits are needed at this many of the last positions


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplayCheck:
    """An attempt, and which rows of the pack's logits belong to it.

    A replay has one row for each cached token, to verify it, and one row to draw the token after them. Any other
    attempt has only the last row.
    """

    attempt: Attempt
    cached: list[int]
    is_masked: list[bool]  # per cached token: kept without verification; empty if none is
    rows: range

    @property
    def draws(self) -> tuple[Draw, int]:
        """The draw at the first row, and the number of rows, whose positions follow each other."""
        last = self.attempt.next_draw
        return last._replace(position=last.position - len(self.cached)), len(self.rows)


def plan_prefills(attempts: Sequence[Attempt], first_slot: int) -> list[Prefill]:
    """One prefill per replay, and one for all other attempts that continue the same tokens."""
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
    """Sort by length, because sequences of one length attend together, and split into packs of limited size."""
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


def logit_rows(pack: Sequence[Prefill]) -> torch.Tensor:
    """Indices of the packed tokens at which logits are needed."""
    counts = [prefill.num_rows for prefill in pack]
    ends = accumulate(len(prefill.tokens) for prefill in pack)
    starts = [end - count for end, count in zip(ends, counts, strict=True)]
    return torch.from_numpy(runs_of_numbers(starts, counts))


def make_checks(pack: Sequence[Prefill]) -> list[ReplayCheck]:
    """Assign rows of the pack's logits to attempts."""
    checks: list[ReplayCheck] = []
    start = 0
    for prefill in pack:
        rows = range(start, start + prefill.num_rows)
        for attempt in prefill.attempts:
            is_replay = attempt.request.mode is Mode.REPLAY
            cached = attempt.tokens[:] if is_replay else []
            is_masked = attempt.is_masked if is_replay and attempt.has_masked else []
            checks.append(ReplayCheck(attempt=attempt, cached=cached, is_masked=is_masked, rows=rows))
        start = rows.stop
    return checks


@dataclass(slots=True, kw_only=True, frozen=True)
class PrefillOutcome:
    """The result for one attempt: how many cached tokens it keeps, their log-probs, and the token drawn after them."""

    check: ReplayCheck
    accepted: int
    logprobs: list[float]
    token: int
    logprob: float


def verify_and_draw(
    checks: Sequence[ReplayCheck], logits_rv: torch.Tensor, sampler: TokenSampler
) -> list[PrefillOutcome]:
    """Verify cached tokens and draw new ones at all rows of a pack, in one call."""
    draws = DrawRuns([check.draws for check in checks])
    cached: list[int] = []
    tolerances: list[float] = []
    for check in checks:
        cached += (*check.cached, -1)
        tolerances += [check.attempt.request.replay_tolerance] * len(check.rows)
    if len(cached) > len(logits_rv):  # siblings read the same rows
        rows = [row for check in checks for row in check.rows]
        logits_rv = logits_rv[torch.tensor(rows, device=logits_rv.device)]
    scaled_rv = logits_rv if draws.is_plain else shape_logits(logits_rv, draws.samplings)
    verdict = sampler.verify(scaled_rv, draws, cached, tolerances)
    is_kept, cached_logprobs = verdict.is_kept, verdict.cached_logprobs
    if any(check.is_masked for check in checks):
        is_masked = [flag for check in checks for flag in (*(check.is_masked or [False] * len(check.cached)), False)]
        is_kept = [kept or masked for kept, masked in zip(is_kept, is_masked, strict=True)]
        cached_logprobs = [0.0 if masked else lp for lp, masked in zip(cached_logprobs, is_masked, strict=True)]
    outcomes: list[PrefillOutcome] = []
    start = 0
    for check in checks:
        end = is_kept.index(False, start)  # the row after the cached tokens is never kept
        outcomes.append(
            PrefillOutcome(
                check=check,
                accepted=end - start,
                logprobs=cached_logprobs[start:end],
                token=verdict.drawn.tokens[end],
                logprob=verdict.drawn.logprobs[end],
            )
        )
        start += len(check.rows)
    return outcomes
