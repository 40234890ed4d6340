"""Draw tokens from logits and noise, with their log-probs, when decoding, after a prefill and in a replay.

The local engine calls a sampler once per step and once per prefill; vLLM's worker calls it too. Let x be the logits,
divided by the temperature and filtered. A token is argmax(x + noise) in float32, or argmax(x) for temperature 0. Its
log-prob is that of softmax(x), where greedy requests use temperature 1.
There are three samplers. `KernelSampler` is compiled code, for a CPU with a C compiler. `DenseSampler` computes noise
for the whole vocabulary. `CandidateSampler` computes noise only for tokens that can win, for large vocabularies on a
CPU. All of them draw the same tokens.

Shapes: b slots, r rows of logits (any positions of any sequences), v vocabulary, k positions drawn ahead.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

import numpy as np
import torch

from sortedrl.engine.base import Sampling
from sortedrl.engine.sampling.candidates import CandidateSearch
from sortedrl.engine.sampling.filters import filter_logits, is_filtered
from sortedrl.engine.sampling.noise import gumbel, int_tensor, runs_of_numbers
from sortedrl.native.kernel import load_kernel
from sortedrl.native.threads import KernelThreads

# Noise computed ahead per slot: enough to hide the cost of a call, and few enough numbers to throw away.
_AHEAD_ELEMENTS = 1024
_AHEAD_POSITIONS = 16
_MIN_THREADED_LOGITS = 1 << 20  # a smaller call takes less time than waking threads
_MIN_CANDIDATE_VOCAB = 4096  # for a smaller vocabulary, noise for every token is cheaper than the search


class Draw(NamedTuple):
    """Everything that determines the draw at one position of one sequence, except the logits.

    `position` is the index of the last token that the model has read: the logits are its output there.
    """

    seed: int
    position: int
    sampling: Sampling


class DrawRuns(Sequence[Draw]):
    """Draws at consecutive positions of several sequences. Much faster to make than a list of draws.

    Each run is the draw at its first position, and the number of positions.
    """

    def __init__(self, runs: Sequence[tuple[Draw, int]]) -> None:
        self._runs = runs
        self._lengths = [num for _, num in runs]

    def __len__(self) -> int:
        return sum(self._lengths)

    @overload
    def __getitem__(self, index: int) -> Draw: ...
    @overload
    def __getitem__(self, index: slice) -> list[Draw]: ...
    def __getitem__(self, index: int | slice) -> Draw | list[Draw]:
        return self._expanded[index]

    @functools.cached_property
    def _expanded(self) -> list[Draw]:
        return [draw._replace(position=draw.position + step) for draw, num in self._runs for step in range(num)]

    @property
    def samplings(self) -> list[Sampling]:
        return [draw.sampling for draw, num in self._runs for _ in range(num)]

    @property
    def is_plain(self) -> bool:
        """Whether no draw changes its logits."""
        return are_plain(draw.sampling for draw, _ in self._runs)

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Seeds, positions, and whether the draw is random, as one tensor each."""
        draws = [draw for draw, _ in self._runs]
        seeds = np.array([draw.seed for draw in draws], dtype=np.int64).repeat(self._lengths)
        positions = runs_of_numbers([draw.position for draw in draws], self._lengths)
        is_random = np.array([draw.sampling.temperature > 0 for draw in draws], dtype=np.uint8).repeat(self._lengths)
        return torch.from_numpy(seeds), torch.from_numpy(positions), torch.from_numpy(is_random)


@dataclass(slots=True, kw_only=True, frozen=True)
class Choice:
    """Drawn tokens, as a list and as a tensor, with their log-probs (not finite where the logits are not)."""

    tokens: list[int]
    tokens_r: torch.Tensor
    logprobs: list[float]


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplayVerdict:
    """For each row, the drawn token, and whether the cached token equals it or is within the tolerance."""

    drawn: Choice
    is_kept: list[bool]
    cached_logprobs: list[float]


class TokenSampler(Protocol):
    """Draws tokens for the running slots, which are numbered without gaps."""

    def start(self, first_slot: int, draws: Sequence[Draw]) -> None:
        """Begin new sequences: `draws[i]` is the next draw of slot `first_slot + i`."""
        ...

    def move(self, source: int, target: int) -> None:
        """Slot `target` has ended; the sequence of slot `source` moves there."""
        ...

    def choose(self, scaled_bv: torch.Tensor, draws: Callable[[], list[Draw]]) -> Choice:
        """Draw the next token of every running slot. `draws` returns their draws, for samplers that keep none."""
        ...

    def verify(
        self, scaled_rv: torch.Tensor, draws: Sequence[Draw], cached: Sequence[int], tolerances: Sequence[float]
    ) -> ReplayVerdict:
        """Draw at every row and compare with the cached token there; -1 means no token, and is never kept.

        A cached token is also kept if its score (logit + noise) is below the best score by at most the tolerance.
        """
        ...


def make_sampler(slots: int, vocab: int, device: torch.device) -> TokenSampler:
    """The fastest sampler for this vocabulary on this device."""
    if device.type == "cpu" and (kernel := load_kernel()) is not None:
        return KernelSampler(kernel, slots, vocab)
    if vocab >= _MIN_CANDIDATE_VOCAB and device.type == "cpu":
        return CandidateSampler(vocab)
    return DenseSampler(slots, vocab, device)


def are_plain(samplings: Iterable[Sampling]) -> bool:
    """Whether none of these changes its logits."""
    kinds = {id(sampling): sampling for sampling in samplings}.values()  # most requests share one
    return all(sampling.temperature in (0.0, 1.0) and not is_filtered(sampling) for sampling in kinds)


def shape_logits(logits_rv: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Apply temperatures and filters: the logits of the distributions that tokens are drawn from."""
    kinds = {id(sampling): sampling for sampling in samplings}.values()  # most requests share one
    if any(sampling.temperature not in (0.0, 1.0) for sampling in kinds):
        divisors = [sampling.temperature or 1.0 for sampling in samplings]
        logits_rv = logits_rv / torch.tensor(divisors, device=logits_rv.device).unsqueeze(1)
    return filter_logits(logits_rv, samplings)


def _draw_noise(draws: Sequence[Draw], vocab: int, device: torch.device, num_positions: int = 1) -> torch.Tensor:
    """Noise [r, k, v] of each draw at its position and the following ones; zero for temperature 0."""
    rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if not rows:
        return torch.zeros(len(draws), num_positions, vocab, device=device)
    seeds_r = int_tensor([draws[row].seed for row in rows], device)
    positions_r = int_tensor([draws[row].position for row in rows], device)
    if num_positions > 1:
        seeds_r = seeds_r.repeat_interleave(num_positions)
        positions_r = (positions_r.unsqueeze(1) + torch.arange(num_positions, device=device)).flatten()
    drawn_rkv = gumbel(seeds_r, positions_r, vocab).view(len(rows), num_positions, vocab)
    if len(rows) == len(draws):
        return drawn_rkv
    noise_rkv = torch.zeros(len(draws), num_positions, vocab, device=device)
    noise_rkv[torch.tensor(rows, device=device)] = drawn_rkv
    return noise_rkv


class DenseSampler:
    """Computes the noise of every token of the vocabulary.

    One call computes the noise of each slot's next positions, because a call per position would be slower. All slots
    use the same phase: `_noise_bkv[slot, phase]` is the noise for the slot's next position. When a slot starts, its
    noise is written from the current phase on.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._block = max(1, min(_AHEAD_POSITIONS, _AHEAD_ELEMENTS // vocab))
        self._vocab = vocab
        self._device = device
        self._noise_bkv = torch.zeros(slots, self._block, vocab, device=device)
        self._phase = 0

    def start(self, first_slot: int, draws: Sequence[Draw]) -> None:
        if self._phase < self._block:
            noise_bkv = _draw_noise(draws, self._vocab, self._device, self._block - self._phase)
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
    ) -> ReplayVerdict:
        scores_rv = scaled_rv + _draw_noise(draws, self._vocab, self._device).squeeze(1)
        best_r, tokens_r = scores_rv.max(-1)
        logprobs_rv = torch.log_softmax(scaled_rv, -1)
        cached_r = int_tensor(cached, self._device)
        index_r1 = cached_r.clamp(min=0).unsqueeze(1)
        return _judge(
            tokens_r,
            logprobs_rv.gather(1, tokens_r.unsqueeze(1)).squeeze(1),
            cached_r,
            logprobs_rv.gather(1, index_r1).squeeze(1),
            lambda: best_r - scores_rv.gather(1, index_r1).squeeze(1),
            tolerances,
        )


class CandidateSampler:
    """Computes noise only for the tokens that can win; keeps no state from one step to the next."""

    def __init__(self, vocab: int) -> None:
        self._search = CandidateSearch(vocab)

    def start(self, first_slot: int, draws: Sequence[Draw]) -> None:
        pass

    def move(self, source: int, target: int) -> None:
        pass

    def choose(self, scaled_bv: torch.Tensor, draws: Callable[[], list[Draw]]) -> Choice:
        tokens_b, normalizer_b = self._draw(scaled_bv, draws())
        return _choice(tokens_b, _at(scaled_bv, tokens_b) - normalizer_b)

    def verify(
        self, scaled_rv: torch.Tensor, draws: Sequence[Draw], cached: Sequence[int], tolerances: Sequence[float]
    ) -> ReplayVerdict:
        tokens_r, normalizer_r = self._draw(scaled_rv, draws)
        cached_r = int_tensor(cached)
        index_r = cached_r.clamp(min=0)
        return _judge(
            tokens_r,
            _at(scaled_rv, tokens_r) - normalizer_r,
            cached_r,
            _at(scaled_rv, index_r) - normalizer_r,
            lambda: self._scores(scaled_rv, draws, tokens_r) - self._scores(scaled_rv, draws, index_r),
            tolerances,
        )

    def _draw(self, scaled_rv: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
        """Drawn tokens, and the logsumexp of their rows."""
        seeds_r, positions_r, is_random_r = _columns(draws)
        tokens_r, normalizer_r = self._search.draw(scaled_rv, seeds_r, positions_r)
        for row in (is_random_r == 0).nonzero().flatten().tolist():
            tokens_r[row] = int(scaled_rv[row].numpy().argmax())  # numpy is several times as fast as torch here
        return tokens_r, normalizer_r

    def _scores(self, scaled_rv: torch.Tensor, draws: Sequence[Draw], tokens_r: torch.Tensor) -> torch.Tensor:
        seeds_r, positions_r, is_random_r = _columns(draws)
        noise_r = gumbel(seeds_r, positions_r, tokens_r.unsqueeze(1)).squeeze(1)
        return _at(scaled_rv, tokens_r) + noise_r * is_random_r


class KernelSampler(CandidateSampler):
    """Draws in compiled code. Keeps the next draw of every slot, so that a step is one call."""

    def __init__(self, kernel: ctypes.CDLL, slots: int, vocab: int) -> None:
        super().__init__(vocab)
        self._kernel, self._vocab, self._threads = kernel, vocab, KernelThreads()
        self._seeds_b, self._positions_b = (torch.zeros(slots, dtype=torch.int64) for _ in range(2))
        self._is_random_b = torch.zeros(slots, dtype=torch.uint8)
        # The same memory for numpy, which writes a few numbers several times as fast as torch.
        self._states = [values_b.numpy() for values_b in (self._seeds_b, self._positions_b, self._is_random_b)]

    def start(self, first_slot: int, draws: Sequence[Draw]) -> None:
        for slot, (seed, position, sampling) in enumerate(draws, start=first_slot):
            for values, value in zip(self._states, (seed, position, sampling.temperature > 0), strict=True):
                values[slot] = value

    def move(self, source: int, target: int) -> None:
        for values in self._states:
            values[target] = values[source]

    def choose(self, scaled_bv: torch.Tensor, draws: Callable[[], list[Draw]]) -> Choice:
        tokens_b, normalizer_b = self._call(scaled_bv, self._seeds_b, self._positions_b, self._is_random_b)
        self._positions_b += 1
        return _choice(tokens_b, _at(scaled_bv, tokens_b) - normalizer_b)

    def choose_at(self, scaled_rv: torch.Tensor, slots_r: torch.Tensor, positions_r: torch.Tensor) -> Choice:
        """Draw at any positions of running slots; the next `choose` must be preceded by `start` of all slots."""
        columns = (self._seeds_b.index_select(0, slots_r), positions_r, self._is_random_b.index_select(0, slots_r))
        tokens_r, normalizer_r = self._call(scaled_rv, *columns)
        return _choice(tokens_r, _at(scaled_rv, tokens_r) - normalizer_r)

    def verify(
        self, scaled_rv: torch.Tensor, draws: Sequence[Draw], cached: Sequence[int], tolerances: Sequence[float]
    ) -> ReplayVerdict:
        if any(tolerances):
            return super().verify(scaled_rv, draws, cached, tolerances)
        tokens_r, normalizer_r = self._draw(scaled_rv, draws)
        # In numpy, because a prefill of one prompt is a short call, and torch takes as long for these steps.
        tokens, normalizer, cached_tokens = tokens_r.numpy(), normalizer_r.numpy(), np.array(cached, dtype=np.int64)
        logits, rows = scaled_rv.float().numpy(), np.arange(len(cached))
        drawn_logprobs = logits[rows, tokens] - normalizer
        cached_logprobs = logits[rows, np.maximum(cached_tokens, 0)] - normalizer
        return ReplayVerdict(
            drawn=Choice(tokens=tokens.tolist(), tokens_r=tokens_r, logprobs=drawn_logprobs.tolist()),
            is_kept=(tokens == cached_tokens).tolist(),
            cached_logprobs=cached_logprobs.tolist(),
        )

    def _draw(self, scaled_rv: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._call(scaled_rv, *_columns(draws))

    def _call(
        self, scaled_rv: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, is_random: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drawn tokens and logsumexp of the rows; `seeds` and the others may be longer than there are rows."""
        num_rows = len(scaled_rv)
        scaled_rv = scaled_rv.float().contiguous()
        tokens_r, normalizer_r = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
        size = self._threads.size(is_large=scaled_rv.numel() >= _MIN_THREADED_LOGITS)

        def run(rank: int) -> None:
            self._kernel.sortedrl_draw(
                *(rank, size, num_rows, self._vocab, scaled_rv.data_ptr()),
                *(seeds.data_ptr(), positions.data_ptr(), is_random.data_ptr()),
                *(tokens_r.data_ptr(), normalizer_r.data_ptr()),
            )

        self._threads.run(run, size)
        return tokens_r, normalizer_r


def _columns(draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds, positions, and whether the draw is random, as one tensor each."""
    if isinstance(draws, DrawRuns):
        return draws.columns()
    seeds, positions, samplings = zip(*draws, strict=True) if draws else ((), (), ())
    is_random = [sampling.temperature > 0 for sampling in samplings]
    return int_tensor(seeds), int_tensor(positions), int_tensor(is_random).to(torch.uint8)


def _choice(tokens_r: torch.Tensor, logprobs_r: torch.Tensor) -> Choice:
    return Choice(tokens=tokens_r.tolist(), tokens_r=tokens_r, logprobs=logprobs_r.tolist())


def _at(scaled_rv: torch.Tensor, tokens_r: torch.Tensor) -> torch.Tensor:
    return scaled_rv.gather(1, tokens_r.unsqueeze(1)).squeeze(1)


def _judge(
    tokens_r: torch.Tensor,
    logprobs_r: torch.Tensor,
    cached_r: torch.Tensor,
    cached_logprobs_r: torch.Tensor,
    gap: Callable[[], torch.Tensor],
    tolerances: Sequence[float],
) -> ReplayVerdict:
    """`gap` returns by how much each cached token's score (logit + noise) is below the best score."""
    is_kept_r = tokens_r == cached_r
    if any(tolerances):
        is_kept_r |= (gap() <= torch.tensor(tolerances, device=cached_r.device)) & (cached_r >= 0)
    return ReplayVerdict(
        drawn=_choice(tokens_r, logprobs_r),
        is_kept=is_kept_r.tolist(),
        cached_logprobs=cached_logprobs_r.tolist(),
    )
