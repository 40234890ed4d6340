"""Mixed passes: prefills ride along with decode passes, a few tokens at a time.

A decode pass of a large model reads all weights from memory, and the processor waits for them: on a CPU up to about
sixteen rows cost hardly more than one. So the local engine does not stop its running slots for a prefill. Each pass has
one row for every decoding slot, and the next tokens of the slots that are still being prefilled. A replay verifies its
cached tokens as they come, and starts to decode at the first one that it rejects.
Tokens for which the first layers are known already (`unchanged_layers.py`) start late, and cost a part of a row.
Guarantees: tokens and log-probs are those of a prefill in one call, to the last bit, because the native decoder
computes a token alike in any batch. Other decoders do not, so they prefill in one call.

Shapes: r rows of the pass, w rows whose logits are wanted, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from sortedrl.engine.attempt import Attempt
from sortedrl.engine.local.native_decoder import KernelPlan
from sortedrl.engine.local.prefill import Prefill, PrefillOutcome, ReplayCheck
from sortedrl.engine.sampling.draw import Choice, Draw, ReplayVerdict, TokenSampler, shape_logits
from sortedrl.records import Mode

_ROWS_PER_SLOT = 8  # prefilled per pass for each slot that waits; also the rows of the kernel's tiles
_LATE_ROWS = 24  # the same for tokens that start late: their slot should decode again soon, and they cost less
_MAX_ROWS = 96  # of a pass: as many as the kernel computes together
# The weights of a smaller model are in the processor's cache: its passes cost in proportion to their rows.
_MIN_PARAMETERS = 10_000_000


def can_mix(model: nn.Module, decoder: str) -> bool:
    """Whether prefills of this model should share passes with decoding."""
    return decoder == "native" and sum(parameter.numel() for parameter in model.parameters()) >= _MIN_PARAMETERS


@dataclass(slots=True, kw_only=True)
class GradualPrefill:
    """A prefill and how far it is."""

    prefill: Prefill
    num_late: int = 0  # first tokens that start late
    num_done: int = 0  # tokens that the cache holds
    logprobs: list[float] = field(default_factory=list)  # of the cached tokens that a replay has kept so far

    @classmethod
    def after_kept(cls, attempt: Attempt, num_done: int) -> GradualPrefill:
        """The rest of an attempt whose slot holds the cache of an earlier turn."""
        prefill = Prefill(tokens=[*attempt.request.prompt, *attempt.tokens], attempts=[attempt])
        return cls(prefill=prefill, num_done=num_done)

    @property
    def first_wanted(self) -> int:
        """The first position at which logits are needed."""
        return len(self.prefill.tokens) - self.prefill.num_rows

    @property
    def is_replay(self) -> bool:
        return self.prefill.attempts[0].request.mode is Mode.REPLAY

    @property
    def is_late(self) -> bool:
        """Whether its next token starts late."""
        return self.num_done < self.num_late

    def drop(self, is_dropped: Sequence[Attempt]) -> bool:
        """Forget attempts that were interrupted; returns whether any is left."""
        first, gone = self.prefill.attempts[0], set(map(id, is_dropped))
        self.prefill.attempts = [attempt for attempt in self.prefill.attempts if id(attempt) not in gone]
        if id(first) in gone:  # its slot held the tokens
            self.num_done, self.num_late, self.logprobs = 0, 0, []
        return bool(self.prefill.attempts)


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """The tokens of one prefill in this pass, and where their wanted rows are among the judged rows of the pass."""

    gradual: GradualPrefill
    positions: range
    wanted: range  # positions
    judged: range


@dataclass(slots=True, kw_only=True)
class MixedPass:
    decoding: Sequence[Attempt]
    chunks: Sequence[_Chunk]
    tokens_r: torch.Tensor
    plan: KernelPlan
    wanted_w: torch.Tensor  # rows whose logits are needed
    copies: Sequence[int]  # for each judged row, its row among the wanted ones: siblings draw from the same logits
    draws: list[Draw]
    cached: list[int]  # for each judged row, the cached token that it verifies, or -1

    @classmethod
    def begin(
        cls, decoding: Sequence[Attempt], waiting: Sequence[GradualPrefill], slot_of: Mapping[int, int]
    ) -> MixedPass:
        """Rows for all decoding attempts, then for prefills in order, those that start late at the end.

        `slot_of`: slots by the attempt's id.
        """
        rows = _Rows()
        for attempt in decoding:
            rows.add(attempt.tokens[-1], slot_of[id(attempt)], attempt.length - 1)
            rows.want((attempt.next_draw,), (-1,))
        chunks: list[_Chunk] = []
        num_late = sum(gradual.is_late for gradual in waiting)
        num_waiting = sum(len(gradual.prefill.attempts) for gradual in waiting if not gradual.is_late)
        left = rows_for_prefills(len(decoding), num_waiting, num_late)
        num_early: int | None = None
        for gradual in sorted(waiting, key=lambda gradual: gradual.is_late):
            if not left:
                break
            if gradual.is_late and num_early is None:
                num_early = len(rows.tokens)
            chunks.append(_add_chunk(rows, gradual, slot_of[id(gradual.prefill.attempts[0])], left))
            left -= len(chunks[-1].positions)
        columns = torch.from_numpy(np.array((rows.tokens, rows.slots, rows.positions), dtype=np.int64))
        tokens_r, slots_r, positions_r = columns.unbind()
        return cls(
            decoding=decoding,
            chunks=chunks,
            tokens_r=tokens_r,
            plan=KernelPlan(
                slots_t=slots_r,
                positions_t=positions_r,
                num_early=len(rows.tokens) if num_early is None else num_early,
            ),
            wanted_w=torch.tensor(rows.wanted, dtype=torch.int64),
            copies=rows.copies,
            draws=rows.draws,
            cached=rows.cached,
        )

    def judge(self, logits_wv: torch.Tensor, sampler: TokenSampler) -> ReplayVerdict:
        """Draw at every judged row, and verify cached tokens."""
        if not self.draws:  # all rows are inside prompts
            nothing = Choice(tokens=[], tokens_r=torch.empty(0, dtype=torch.int64), logprobs=[])
            return ReplayVerdict(drawn=nothing, is_kept=[], cached_logprobs=[])
        if len(self.copies) != len(logits_wv):
            logits_wv = logits_wv[torch.tensor(self.copies)]
        tolerances = [0.0] * len(self.decoding)
        for chunk in self.chunks:
            tolerances += [chunk.gradual.prefill.attempts[0].request.replay_tolerance] * len(chunk.judged)
        scaled_wv = shape_logits(logits_wv, [draw.sampling for draw in self.draws])
        return sampler.verify(scaled_wv, self.draws, self.cached, tolerances)

    def outcomes(self, verdict: ReplayVerdict) -> list[PrefillOutcome]:
        """Move every prefill on; returns the results of those that are complete."""
        return [outcome for chunk in self.chunks for outcome in _advance(chunk, verdict)]


@dataclass(slots=True)
class _Rows:
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    def add(self, token: int, slot: int, position: int) -> None:
        self.tokens.append(token)
        self.slots.append(slot)
        self.positions.append(position)

    def want(self, draws: Sequence[Draw], cached: Sequence[int]) -> None:
        """The last row's logits are wanted, for one or several draws."""
        self.copies += [len(self.wanted)] * len(draws)
        self.wanted.append(len(self.tokens) - 1)
        self.draws += draws
        self.cached += cached


def rows_for_prefills(num_decoding: int, num_waiting: int, num_late: int = 0) -> int:
    """How many rows of a pass prefills get: some for each waiting slot, so that the pass has whole tiles.

    `num_late` slots wait for tokens that start late, `num_waiting` for others.
    """
    num_rows = num_decoding + _ROWS_PER_SLOT * num_waiting + _LATE_ROWS * num_late
    whole = -(-num_rows // _ROWS_PER_SLOT) * _ROWS_PER_SLOT
    return max(min(whole, _MAX_ROWS) - num_decoding, _ROWS_PER_SLOT)


def _add_chunk(rows: _Rows, gradual: GradualPrefill, slot: int, most: int) -> _Chunk:
    """Add the next tokens of a prefill, at most so many."""
    tokens, attempts = gradual.prefill.tokens, gradual.prefill.attempts
    end = gradual.num_late if gradual.is_late else len(tokens)
    positions = range(gradual.num_done, min(gradual.num_done + most, end))
    first_judged = len(rows.draws)
    for position in positions:
        rows.add(tokens[position], slot, position)
        if position >= gradual.first_wanted:
            draws = [Draw(attempt.request.seed, position, attempt.request.sampling) for attempt in attempts]
            is_last = position + 1 == len(tokens)
            rows.want(draws, [-1 if is_last else tokens[position + 1]] * len(draws))
    return _Chunk(
        gradual=gradual,
        positions=positions,
        wanted=range(max(positions.start, gradual.first_wanted), positions.stop),
        judged=range(first_judged, len(rows.draws)),
    )


def _advance(chunk: _Chunk, verdict: ReplayVerdict) -> list[PrefillOutcome]:
    gradual = chunk.gradual
    tokens, attempts = gradual.prefill.tokens, gradual.prefill.attempts
    gradual.num_done = chunk.positions.stop
    if gradual.is_replay:
        return _advance_replay(chunk, verdict)
    if gradual.num_done < len(tokens):
        return []
    return [
        _outcome(ReplayCheck(attempt=attempt, cached=[], is_masked=[], rows=range(0)), [], verdict, row)
        for attempt, row in zip(attempts, chunk.judged, strict=True)
    ]


def _advance_replay(chunk: _Chunk, verdict: ReplayVerdict) -> list[PrefillOutcome]:
    """Keep cached tokens up to the first one that the weights would not draw."""
    gradual = chunk.gradual
    (attempt,) = gradual.prefill.attempts
    is_masked = attempt.is_masked
    for position, row in zip(chunk.wanted, chunk.judged, strict=True):
        index = position - gradual.first_wanted  # of the cached token that this row verifies
        is_cached = index < len(attempt.tokens)
        if is_cached and is_masked[index]:
            gradual.logprobs.append(0.0)
        elif is_cached and verdict.is_kept[row]:
            gradual.logprobs.append(verdict.cached_logprobs[row])
        else:
            check = ReplayCheck(attempt=attempt, cached=attempt.tokens[:], is_masked=is_masked, rows=range(0))
            return [_outcome(check, gradual.logprobs, verdict, row)]
    return []


def _outcome(check: ReplayCheck, logprobs: list[float], verdict: ReplayVerdict, row: int) -> PrefillOutcome:
    drawn = verdict.drawn
    return PrefillOutcome(
        check=check,
        accepted=len(logprobs),
        logprobs=logprobs,
        token=drawn.tokens[row],
        logprob=drawn.logprobs[row],
    )
