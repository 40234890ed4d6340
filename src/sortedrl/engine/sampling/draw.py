"""From logits and noise to tokens and their log-probs, for decoding, for the first token and for replay alike.

The local engine calls it once per step and once per prefill. With x the logits, divided by temperature and filtered, a
token is argmax(x + noise) in float32, the greedy one for temperature 0; its log-prob is that of softmax(x), with
temperature 1 for greedy ones. On a CPU with a compiler compiled code does all of it (`KernelNoise`). Otherwise a small
vocabulary gets its noise in full, for several positions at once (`DenseNoise`); of a large one on a CPU, only the
tokens that can win do (`SparseNoise`).

Shapes: b slots, r rows of logits (any positions of any sequences), v vocabulary, k positions drawn ahead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from sortedrl.engine.base import Sampling
from sortedrl.engine.sampling.candidates import CandidateSearch
from sortedrl.engine.sampling.filters import filter_logits
from sortedrl.engine.sampling.noise import gumbel, seed_tensor
from sortedrl.native.kernel import load_kernel
from sortedrl.native.threads import Threads

_AHEAD_ELEMENTS = 1024  # noise drawn ahead per slot: enough to hide the cost of a call, little enough to throw away
_AHEAD_POSITIONS = 16
_THREADED = 1 << 20  # logits from which on a call is worth the time it takes to wake threads
_SPARSE_VOCAB = 4096  # from here on looking for candidates is cheaper than noise in full


class Draw(NamedTuple):
    """What is drawn at one position of one sequence."""

    seed: int
    position: int
    sampling: Sampling


@dataclass(slots=True, kw_only=True, frozen=True)
class Choice:
    tokens: list[int]
    tokens_r: torch.Tensor  # the same
    logprobs: list[float]  # not finite where the logits are not


@dataclass(slots=True, kw_only=True, frozen=True)
class Verdict:
    """Per row: the token drawn, and whether the cached one is what was drawn."""

    drawn: Choice
    is_kept: list[bool]
    cached_logprobs: list[float]


class Noise(Protocol):
    """Draws for the running slots. Slots are compact, so one that ends is overwritten by `move`."""

    def start(self, first_slot: int, draws: Sequence[Draw]) -> None:
        """Slots from `first_slot` on begin at these draws."""
        ...

    def move(self, source: int, target: int) -> None: ...

    def choose(self, scaled_bv: torch.Tensor, draws: Callable[[], list[Draw]]) -> Choice:
        """The running slots' next tokens."""
        ...

    def verify(
        self, scaled_rv: torch.Tensor, draws: Sequence[Draw], cached: Sequence[int], tolerances: Sequence[float]
    ) -> Verdict:
        """Draw at every row and compare with the cached token there (-1 where there is none, which is never kept).

        With a tolerance, a cached token whose perturbed score is within it of the best is kept as well.
        """
        ...


def make_noise(slots: int, vocab: int, device: torch.device) -> Noise:
    if device.type == "cpu" and (kernel := load_kernel()) is not None:
        return KernelNoise(kernel, slots, vocab)
    if vocab >= _SPARSE_VOCAB and device.type == "cpu":
        return SparseNoise(vocab)
    return DenseNoise(slots, vocab, device)


def shape_logits(logits_rv: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Logits of the distributions that are really drawn from."""
    divisors = [sampling.temperature or 1.0 for sampling in samplings]
    if any(divisor != 1.0 for divisor in divisors):
        logits_rv = logits_rv / torch.tensor(divisors, device=logits_rv.device).unsqueeze(1)
    return filter_logits(logits_rv, samplings)


def draw_noise(draws: Sequence[Draw], vocab: int, device: torch.device, num_positions: int = 1) -> torch.Tensor:
    """Noise of each draw at its position and the following ones [r, k, v]; zero where the temperature is."""
    rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
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


class DenseNoise:
    """Noise for the next positions of every running slot, drawn in blocks, since a call costs more than its numbers.

    All slots share a phase: `noise_bkv[slot, phase]` belongs to the slot's next position. A slot that starts fills its
    own row from the current phase on.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._block = max(1, min(_AHEAD_POSITIONS, _AHEAD_ELEMENTS // vocab))
        self._vocab = vocab
        self._device = device
        self._noise_bkv = torch.zeros(slots, self._block, vocab, device=device)
        self._phase = 0

    def start(self, first_slot: int, draws: Sequence[Draw]) -> None:
        if self._phase < self._block:
            noise_bkv = draw_noise(draws, self._vocab, self._device, self._block - self._phase)
            self._noise_bkv[first_slot : first_slot + len(draws), self._phase :].copy_(noise_bkv)

    def move(self, source: int, target: int) -> None:
        self._noise_bkv[target].copy_(self._noise_bkv[source])

    def choose(self, scaled_bv: torch.Tensor, draws: Callable[[], list[Draw]]) -> Choice:
        if self._phase == self._block:
            self._phase = 0
            self.start(0, draws())
        noise_bv = self._noise_bkv[: scaled_bv.shape[0], self._phase]
        self._phase += 1
        tokens_b1 = (scaled_bv + noise_bv).argmax(-1, keepdim=True)
        logprobs_b1 = torch.log_softmax(scaled_bv, -1).gather(1, tokens_b1)
        return _choice(tokens_b1.flatten(), logprobs_b1.flatten())

    def verify(
        self, scaled_rv: torch.Tensor, draws: Sequence[Draw], cached: Sequence[int], tolerances: Sequence[float]
    ) -> Verdict:
        scores_rv = scaled_rv + draw_noise(draws, self._vocab, self._device).squeeze(1)
        best_r, tokens_r = scores_rv.max(-1)
        logprobs_rv = torch.log_softmax(scaled_rv, -1)
        cached_r = torch.tensor(cached, device=self._device)
        index_r1 = cached_r.clamp(min=0).unsqueeze(1)
        return _judge(
            tokens_r,
            logprobs_rv.gather(1, tokens_r.unsqueeze(1)).squeeze(1),
            cached_r,
            logprobs_rv.gather(1, index_r1).squeeze(1),
            best_r - scores_rv.gather(1, index_r1).squeeze(1),
            tolerances,
        )


class SparseNoise:
    """Draws among the tokens that can win; nothing is kept from one step to the next."""

    def __init__(self, vocab: int) -> None:
        self._search = CandidateSearch(vocab)

    def start(self, first_slot: int, draws: Sequence[Draw]) -> None:
        pass

    def move(self, source: int, target: int) -> None:
        pass

    def choose(self, scaled_bv: torch.Tensor, draws: Callable[[], list[Draw]]) -> Choice:
        tokens_b, logprobs_b = self._draw(scaled_bv, draws())
        return _choice(tokens_b, _at(scaled_bv, tokens_b) - logprobs_b)

    def verify(
        self, scaled_rv: torch.Tensor, draws: Sequence[Draw], cached: Sequence[int], tolerances: Sequence[float]
    ) -> Verdict:
        tokens_r, normalizer_r = self._draw(scaled_rv, draws)
        cached_r = torch.tensor(cached)
        index_r = cached_r.clamp(min=0)
        gap_r = self._scores(scaled_rv, draws, tokens_r) - self._scores(scaled_rv, draws, index_r)
        return _judge(
            tokens_r,
            _at(scaled_rv, tokens_r) - normalizer_r,
            cached_r,
            _at(scaled_rv, index_r) - normalizer_r,
            gap_r,
            tolerances,
        )

    def _draw(self, scaled_rv: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and the logarithm of what their distributions are normalised by."""
        seeds_r = seed_tensor([draw.seed for draw in draws])
        tokens_r, normalizer_r = self._search.best(scaled_rv, seeds_r, torch.tensor([draw.position for draw in draws]))
        for row, draw in enumerate(draws):
            if draw.sampling.temperature == 0:
                tokens_r[row] = int(scaled_rv[row].numpy().argmax())  # several times as fast as torch's
        return tokens_r, normalizer_r

    def _scores(self, scaled_rv: torch.Tensor, draws: Sequence[Draw], tokens_r: torch.Tensor) -> torch.Tensor:
        seeds_r = seed_tensor([draw.seed for draw in draws])
        noise_r = gumbel(seeds_r, torch.tensor([draw.position for draw in draws]), tokens_r.unsqueeze(1)).squeeze(1)
        is_random_r = torch.tensor([draw.sampling.temperature > 0 for draw in draws])
        return _at(scaled_rv, tokens_r) + noise_r * is_random_r


class KernelNoise(SparseNoise):
    """Draws by compiled code. What is drawn next in a slot is kept, so that a step is one call."""

    def __init__(self, kernel: ctypes.CDLL, slots: int, vocab: int) -> None:
        super().__init__(vocab)
        self._kernel, self._vocab, self._threads = kernel, vocab, Threads()
        self._seeds_b, self._positions_b = (torch.zeros(slots, dtype=torch.int64) for _ in range(2))
        self._is_random_b = torch.zeros(slots, dtype=torch.uint8)

    def start(self, first_slot: int, draws: Sequence[Draw]) -> None:
        slots = slice(first_slot, first_slot + len(draws))
        self._seeds_b[slots], self._positions_b[slots], self._is_random_b[slots] = _columns(draws)

    def move(self, source: int, target: int) -> None:
        for kept_b in (self._seeds_b, self._positions_b, self._is_random_b):
            kept_b[target] = kept_b[source]

    def choose(self, scaled_bv: torch.Tensor, draws: Callable[[], list[Draw]]) -> Choice:
        tokens_b, normalizer_b = self._call(scaled_bv, self._seeds_b, self._positions_b, self._is_random_b)
        self._positions_b += 1
        return _choice(tokens_b, _at(scaled_bv, tokens_b) - normalizer_b)

    def _draw(self, scaled_rv: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._call(scaled_rv, *_columns(draws))

    def _call(
        self, scaled_rv: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, is_random: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and normalizers; of seeds and the rest, as many as there are rows count."""
        num_rows = len(scaled_rv)
        scaled_rv = scaled_rv.float().contiguous()
        tokens_r, normalizer_r = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
        size = self._threads.size(is_large=scaled_rv.numel() >= _THREADED)

        def run(rank: int) -> None:
            self._kernel.sortedrl_draw(
                *(rank, size, num_rows, self._vocab, scaled_rv.data_ptr()),
                *(seeds.data_ptr(), positions.data_ptr(), is_random.data_ptr()),
                *(tokens_r.data_ptr(), normalizer_r.data_ptr()),
            )

        self._threads.run(run, size)
        return tokens_r, normalizer_r


def _columns(draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds, positions, and whether there is any noise."""
    return (
        seed_tensor([draw.seed for draw in draws]),
        torch.tensor([draw.position for draw in draws], dtype=torch.int64),
        torch.tensor([draw.sampling.temperature > 0 for draw in draws], dtype=torch.uint8),
    )


def _choice(tokens_r: torch.Tensor, logprobs_r: torch.Tensor) -> Choice:
    return Choice(tokens=tokens_r.tolist(), tokens_r=tokens_r, logprobs=logprobs_r.tolist())


def _at(scaled_rv: torch.Tensor, tokens_r: torch.Tensor) -> torch.Tensor:
    return scaled_rv.gather(1, tokens_r.unsqueeze(1)).squeeze(1)


def _judge(
    tokens_r: torch.Tensor,
    logprobs_r: torch.Tensor,
    cached_r: torch.Tensor,
    cached_logprobs_r: torch.Tensor,
    gap_r: torch.Tensor,
    tolerances: Sequence[float],
) -> Verdict:
    """`gap_r`: how much the cached token's perturbed score is below the best."""
    is_kept_r = tokens_r == cached_r
    if any(tolerances):
        is_kept_r |= (gap_r <= torch.tensor(tolerances, device=gap_r.device)) & (cached_r >= 0)
    return Verdict(
        drawn=_choice(tokens_r, logprobs_r),
        is_kept=is_kept_r.tolist(),
        cached_logprobs=cached_logprobs_r.tolist(),
    )
