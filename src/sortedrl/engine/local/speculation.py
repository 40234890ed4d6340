"""Speculation: decode passes that check drafts, so that an answer grows by several tokens in one pass.

The local engine asks `Speculation` before every decode pass. In a pass with drafts a slot has one row for its last
token and one for each draft token. Every row draws with the noise of its position, so the row's token is the one that
decoding would draw, as long as the draft tokens before it are right. The slot keeps the right ones and the token drawn
after them; the cache entries of the others are overwritten by later passes.
Guarantees: answers and their log-probs are the same with and without drafts, to the last bit, because the native
decoder computes a token alike in any batch. Other decoders do not, so they run without drafts.

Shapes: b running slots, r rows (each slot's last token and its draft), v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from sortedrl.engine.attempt import Attempt
from sortedrl.engine.local.draft_gate import DraftGate, OpenGate
from sortedrl.engine.local.drafts import Draft, DraftSources
from sortedrl.engine.local.native_decoder import KernelPlan
from sortedrl.engine.sampling.draw import Choice, are_plain, shape_logits

DraftMode = Literal["auto", "always", "off"]
# A pass of a smaller model costs in proportion to its rows, so drafts save nothing there. Without the gate, which reads
# the clock, runs of a small model can be repeated digit for digit.
_MIN_PARAMETERS = 10_000_000


@dataclass(slots=True, kw_only=True)
class DraftPass:
    """The rows of one pass, slot by slot."""

    attempts: Sequence[Attempt]
    drafts: Sequence[Draft]
    tokens_r: torch.Tensor
    plan: KernelPlan  # slots and positions of the rows
    is_first: bool  # the first pass with drafts for some attempt

    @classmethod
    def begin(cls, attempts: Sequence[Attempt], drafts: Sequence[Draft], *, is_first: bool) -> DraftPass:
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        for slot, (attempt, (draft, _)) in enumerate(zip(attempts, drafts, strict=True)):
            first = attempt.length - 1
            tokens += (attempt.tokens[-1], *draft)
            slots += [slot] * (1 + len(draft))
            positions += range(first, first + 1 + len(draft))
        columns = np.array((tokens, slots, positions), dtype=np.int64)  # three times as fast as torch.tensor
        tokens_r, slots_r, positions_r = torch.from_numpy(columns).unbind()
        plan = KernelPlan(slots_t=slots_r, positions_t=positions_r)
        return cls(attempts=attempts, drafts=drafts, tokens_r=tokens_r, plan=plan, is_first=is_first)

    def shape(self, logits_rv: torch.Tensor) -> torch.Tensor:
        """Apply temperatures and filters."""
        samplings = [attempt.request.sampling for attempt in self.attempts]
        if are_plain(samplings):
            return logits_rv
        runs = zip(samplings, self.drafts, strict=True)
        return shape_logits(logits_rv, [sampling for sampling, (draft, _) in runs for _ in range(1 + len(draft))])

    def apply(self, choice: Choice) -> tuple[list[int], int, set[int]]:
        """Append the right tokens and the one after them to their attempts.

        Returns how many draft tokens of each attempt were right, the number of appended tokens, and the samples whose
        logits are not finite.
        """
        accepted: list[int] = []
        broken: set[int] = set()
        row = num_tokens = 0
        for attempt, (draft, _) in zip(self.attempts, self.drafts, strict=True):
            num_right = 0
            while num_right < len(draft) and draft[num_right] == choice.tokens[row + num_right]:
                num_right += 1
            rows = slice(row, row + num_right + 1)
            before = len(attempt.tokens)
            if not _append(attempt, choice.tokens[rows], choice.logprobs[rows]):
                broken.add(attempt.request.sample)
            num_new = len(attempt.tokens) - before  # an answer may end inside its draft
            accepted.append(min(num_right, num_new))
            num_tokens += num_new
            row += 1 + len(draft)
        return accepted, num_tokens, broken


def _append(attempt: Attempt, tokens: list[int], logprobs: list[float]) -> bool:
    """Append tokens up to the one that ends the answer. Returns False if a log-prob before that is not finite."""
    if attempt.decode is None and attempt.stops.isdisjoint(tokens) and math.isfinite(sum(logprobs)):
        attempt.extend(tokens, logprobs)
        return True
    for token, logprob in zip(tokens, logprobs, strict=True):
        if not attempt.add(token, logprob):
            return False
        if attempt.ending is not None:
            break
    return True


def make_speculation(mode: DraftMode, model: nn.Module, decoder: str, slots: int) -> Speculation | None:
    """Speculation for this model, or None where drafts are off, cannot work or cannot pay."""
    is_large = sum(parameter.numel() for parameter in model.parameters()) >= _MIN_PARAMETERS
    if mode == "off" or decoder != "native" or (mode == "auto" and not is_large):
        return None
    return Speculation(mode, slots)


class Speculation:
    """Sources of drafts, the gate in front of them, and what came of them."""

    def __init__(self, mode: DraftMode, slots: int) -> None:
        self.gate = OpenGate() if mode == "always" else DraftGate(slots=slots)
        self._sources = DraftSources()
        self._num_passes = self._num_drafted = self._num_accepted = 0

    @property
    def stats(self) -> dict[str, Any]:
        return {
            "draft_passes": self._num_passes,
            "drafted_tokens": self._num_drafted,
            "accepted_tokens": self._num_accepted,
        }

    def begin_pass(self, attempts: Sequence[Attempt], least: float) -> DraftPass:
        before = self._sources.num_indexed_answers
        drafts = [self._sources.propose(attempt, self.gate.rates, least) for attempt in attempts]
        return DraftPass.begin(attempts, drafts, is_first=self._sources.num_indexed_answers > before)

    def count(self, done: DraftPass, accepted: Sequence[int], num_tokens: int, seconds: float) -> None:
        """Count a pass with drafts, which appended so many tokens."""
        num_drafted = len(done.tokens_r) - len(done.attempts)
        self._num_passes += num_drafted > 0
        self._num_drafted += num_drafted
        self._num_accepted += sum(accepted)
        for draft, num_right in zip(done.drafts, accepted, strict=True):
            if draft.tokens:
                self.gate.count_guesses(draft.kinds, num_right)
        num_running, num_rows = len(done.attempts), len(done.tokens_r)
        self.gate.count_drafted(num_running, num_rows, num_tokens, seconds, is_first=done.is_first)

    def keep_discarded(self, attempt: Attempt, cached: list[int]) -> None:
        """A replay has rejected the end of its cached answer: a draft for what comes instead."""
        self._sources.keep(attempt, cached)

    def end(self, attempt: Attempt) -> None:
        """The attempt is finished or interrupted."""
        self._sources.end(attempt)
