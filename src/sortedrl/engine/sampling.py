"""From logits and noise to tokens and their log-probs, for decoding, for the first token and for replay alike.

The local engine calls it once per step and once per prefill. A token is argmax(logits / T + noise) in float32, the
greedy one for T = 0; its log-prob is that of softmax(logits / T), with T = 1 for greedy ones.

Shapes: b slots, r rows of logits (any positions of any sequences), v vocabulary, k positions drawn ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sortedrl.engine.noise import gumbel, seed_tensor

_AHEAD_ELEMENTS = 1024  # noise drawn ahead per slot: enough to hide the cost of a call, little enough to throw away
_AHEAD_POSITIONS = 16


class Draw(NamedTuple):
    """What is drawn at one position of one sequence."""

    seed: int
    position: int
    temperature: float


@dataclass(slots=True, kw_only=True, frozen=True)
class Choice:
    tokens: list[int]
    logprobs: list[float]  # not finite where the logits are not


@dataclass(slots=True, kw_only=True, frozen=True)
class Verdict:
    """Per row: the token drawn, and whether the cached one is what was drawn."""

    drawn: Choice
    is_kept: list[bool]
    cached_logprobs: list[float]


def draw_noise(draws: Sequence[Draw], vocab: int, device: torch.device, num_positions: int = 1) -> torch.Tensor:
    """Noise of each draw at its position and the following ones [r, k, v]; zero where the temperature is."""
    rows = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if not rows:
        return torch.zeros(len(draws), num_positions, vocab, device=device)
    seeds_r = seed_tensor([draws[row].seed for row in rows], device)
    positions_rk = torch.tensor([[draws[row].position] for row in rows], device=device)
    positions_rk = positions_rk + torch.arange(num_positions, device=device)
    drawn_rkv = gumbel(seeds_r.repeat_interleave(num_positions), positions_rk.flatten(), vocab)
    drawn_rkv = drawn_rkv.view(len(rows), num_positions, vocab)
    if len(rows) == len(draws):
        return drawn_rkv
    noise_rkv = torch.zeros(len(draws), num_positions, vocab, device=device)
    noise_rkv[torch.tensor(rows, device=device)] = drawn_rkv
    return noise_rkv


def scale_logits(logits_rv: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    divisors = [temperature or 1.0 for temperature in temperatures]
    if all(divisor == 1.0 for divisor in divisors):
        return logits_rv
    return logits_rv / torch.tensor(divisors, device=logits_rv.device).unsqueeze(1)


def choose(scaled_rv: torch.Tensor, noise_rv: torch.Tensor) -> Choice:
    tokens_r1 = (scaled_rv + noise_rv).argmax(-1, keepdim=True)
    logprobs_r1 = torch.log_softmax(scaled_rv, -1).gather(1, tokens_r1)
    return Choice(tokens=tokens_r1.flatten().tolist(), logprobs=logprobs_r1.flatten().tolist())


def verify(
    scaled_rv: torch.Tensor, noise_rv: torch.Tensor, cached: Sequence[int], tolerances: Sequence[float]
) -> Verdict:
    """Draw at every row and compare with the cached token there (-1 where there is none, which is never kept).

    With a tolerance, a cached token whose perturbed score is within it of the best is kept as well.
    """
    device = scaled_rv.device
    cached_r = torch.tensor(cached, device=device)
    scores_rv = scaled_rv + noise_rv
    best_r, tokens_r = scores_rv.max(-1)
    logprobs_rv = torch.log_softmax(scaled_rv, -1)
    index_r1 = cached_r.clamp(min=0).unsqueeze(1)
    is_kept_r = tokens_r == cached_r
    if any(tolerances):
        gap_r = best_r - scores_rv.gather(1, index_r1).squeeze(1)
        is_kept_r |= (gap_r <= torch.tensor(tolerances, device=device)) & (cached_r >= 0)
    return Verdict(
        drawn=Choice(
            tokens=tokens_r.tolist(), logprobs=logprobs_rv.gather(1, tokens_r.unsqueeze(1)).squeeze(1).tolist()
        ),
        is_kept=is_kept_r.tolist(),
        cached_logprobs=logprobs_rv.gather(1, index_r1).squeeze(1).tolist(),
    )


class NoiseAhead:
    """Noise for the next positions of every running slot, drawn in blocks, since a call costs more than its numbers.

    All slots share a phase: `noise_bkv[slot, phase]` belongs to the slot's next position. Slots are compact, so a slot
    that ends is overwritten by `move`, and one that starts fills its own row from the current phase on.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._block = max(1, min(_AHEAD_POSITIONS, _AHEAD_ELEMENTS // vocab))
        self._vocab = vocab
        self._device = device
        self._noise_bkv = torch.zeros(slots, self._block, vocab, device=device)
        self._phase = 0

    @property
    def is_spent(self) -> bool:
        return self._phase == self._block

    def start(self, first_slot: int, draws: Sequence[Draw]) -> None:
        """Slots from `first_slot` on begin at these draws."""
        if not self.is_spent:
            noise_bkv = draw_noise(draws, self._vocab, self._device, self._block - self._phase)
            self._noise_bkv[first_slot : first_slot + len(draws), self._phase :].copy_(noise_bkv)

    def renew(self, draws: Sequence[Draw]) -> None:
        """Draw the next block for all running slots."""
        self._phase = 0
        self.start(0, draws)

    def take(self, num_slots: int) -> torch.Tensor:
        """Noise of the running slots' next position [b, v]; the position after it is next."""
        assert not self.is_spent, "noise must be renewed before more is taken"
        self._phase += 1
        return self._noise_bkv[:num_slots, self._phase - 1]

    def move(self, source: int, target: int) -> None:
        self._noise_bkv[target].copy_(self._noise_bkv[source])
