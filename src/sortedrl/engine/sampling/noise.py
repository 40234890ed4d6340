"""Sampling noise as a pure function of (seed, position, token): the scheme `gumbel-murmur3-v1`.

Every engine draws with this noise, so under given weights an answer does not depend on when, where or next to which
other samples it runs. Replay and the engines' conformance tests rely on that. It is the noise with which vLLM's V2
model runner draws for a request with a seed, so an unchanged vLLM gives the same answers. If any output changes, the
scheme needs a new name.

The words are 32 bits wide and wrap around. With mix(h, word) and finish(h) the steps of murmur3 (x86, 32 bits),
    row  = mix(mix(mix(0, seed mod 2**32), seed div 2**32), position)     which all tokens of a row share
    bits = finish(mix(row, token) ^ 16)                                   32 uniform bits; 16 bytes were hashed
    u    = (bits + 0.5) / 2**32, rounded to float32, at most 1 - 2**-24
    g    = -log(-log(1 - u))                                              in float64, then rounded to float32
`seed` is in [0, 2**63). `position` is the index of the predicted token in the whole sequence, prompt included, minus
one: the index of the last token that the model has read. The token with the largest logits / temperature + g is a draw
from softmax(logits / temperature).

vLLM computes logarithms in float32 and by a polynomial: its g minus this g is between -0.9e-6 and 2.1e-6. Two tokens
whose scores differ by less than `KERNEL_MARGIN` may be drawn differently there.

Shapes: b rows (one per sequence, or per sequence and position), v tokens.
"""

from __future__ import annotations

import functools
import math
import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

SCHEME = "gumbel-murmur3-v1"
NUM_SEEDS = 1 << 63
KERNEL_MARGIN = 3e-6  # tools/noise_vectors.py compares vLLM's kernel over every u

# Numbers per chunk: as many as fit in a processor's cache. Twenty passes over larger chunks take twice the time.
_CHUNK = 1 << 16

_FIRST, _SECOND = 0xCC9E2D51, 0x1B873593  # of mix
_ADDED = 0xE6546B64
_THIRD, _FOURTH = 0x85EBCA6B, 0xC2B2AE35  # of finish
_HASHED_BYTES = 16
_WORD = (1 << 32) - 1
_MAX_UNIFORM = 1 - 2.0**-24


def _rotate(x: int, count: int) -> int:
    return (x << count | x >> (32 - count)) & _WORD


def _scramble(word: int) -> int:
    """The part of mix that depends on the word alone."""
    return _rotate(word * _FIRST & _WORD, 15) * _SECOND & _WORD


def _mix(h: int, word: int) -> int:
    return (_rotate(h ^ _scramble(word), 13) * 5 + _ADDED) & _WORD


def _finish(h: int) -> int:
    h = (h ^ h >> 16) * _THIRD & _WORD
    h = (h ^ h >> 13) * _FOURTH & _WORD
    return h ^ h >> 16


def _round(value: float) -> float:
    """The nearest float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def noise_bits(seed: int, position: int, token: int) -> int:
    """`bits` of the definition above."""
    assert 0 <= seed < NUM_SEEDS, f"seed {seed} is not in [0, 2**63)"
    row = _mix(_mix(_mix(0, seed & _WORD), seed >> 32), position)
    return _finish(_mix(row, token) ^ _HASHED_BYTES)


def _uniform(bits: int) -> float:
    return min(_round((bits + 0.5) / 2.0**32), _MAX_UNIFORM)


def _gumbel(uniform: float) -> float:
    return _round(-math.log(-math.log1p(-uniform)))


def gumbel_scalar(seed: int, position: int, token: int) -> float:
    """The noise of one token, in plain Python: the reference for every other implementation."""
    return _gumbel(_uniform(noise_bits(seed, position, token)))


def _signed(word: int) -> int:
    """The signed int32 with the same 32 bits."""
    return word - (1 << 32) if word >> 31 else word


def _rotate_(x: torch.Tensor, count: int) -> torch.Tensor:
    """Rotate int32 numbers in place."""
    # torch shifts arithmetically: the mask removes the copies of the sign bit.
    low = (x >> (32 - count)).bitwise_and_((1 << count) - 1)
    return x.bitwise_left_shift_(count).bitwise_or_(low)


def _xor_shift_(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.bitwise_xor_((x >> count).bitwise_and_((1 << (32 - count)) - 1))


def _mix_(h: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """mix with scrambled words, in place."""
    return _rotate_(h.bitwise_xor_(words), 13).mul_(5).add_(_signed(_ADDED))


def _finish_(h: torch.Tensor) -> torch.Tensor:
    _xor_shift_(h, 16).mul_(_signed(_THIRD))
    _xor_shift_(h, 13).mul_(_signed(_FOURTH))
    return _xor_shift_(h, 16)


def _scrambled(words: torch.Tensor) -> torch.Tensor:
    """The scrambled low 32 bits of int64 numbers, as int32."""
    import torch

    return _rotate_(words.to(torch.int32).mul_(_signed(_FIRST)), 15).mul_(_signed(_SECOND))


@functools.lru_cache(maxsize=4)
def _vocabulary_words(vocab: int, device: torch.device) -> torch.Tensor:
    """The scrambled ids of a whole vocabulary: int32 [v], not to be written to."""
    import torch

    return _scrambled(torch.arange(vocab, device=device))


def int_tensor(values: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Integers as int64, seven times as fast as `torch.tensor`, which a verification of long answers would feel."""
    import torch

    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.frombuffer(array("q", values), dtype=torch.int64).to(device)


def runs_of_numbers(starts: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    """Consecutive integers from each start on, as many as its length, one run after the other: int64."""
    import numpy as np

    if len(starts) == 1:  # most prefills are of one prompt
        return np.arange(starts[0], starts[0] + lengths[0])
    counts = np.array(lengths, dtype=np.int64)
    total = counts.cumsum()
    firsts = np.array(starts, dtype=np.int64) - total + counts  # what to add to the index of a run's numbers
    return np.arange(total[-1] if lengths else 0) + firsts.repeat(counts)


def row_keys(seeds_b: torch.Tensor, positions_b: torch.Tensor) -> torch.Tensor:
    """`row` of the definition above: int32 [b]."""
    import torch

    words_wb = _scrambled(torch.stack([seeds_b, seeds_b >> 32, positions_b]))
    h_b = torch.zeros_like(words_wb[0])
    for words_b in words_wb.unbind():
        _mix_(h_b, words_b)
    return h_b


def gumbel(seeds_b: torch.Tensor, positions_b: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """Noise of each row at its position, float32 [b, v].

    `tokens` is the number of tokens (with ids 0..n-1), or a tensor of ids: [v] for all rows, or [b, v].
    """
    import torch

    words_v = _vocabulary_words(tokens, seeds_b.device) if isinstance(tokens, int) else _scrambled(tokens)
    rows_b1 = row_keys(seeds_b, positions_b).unsqueeze(1)
    noise_bv = torch.empty(len(seeds_b), words_v.shape[-1], dtype=torch.float32, device=seeds_b.device)
    count = max(1, _CHUNK // max(1, noise_bv.shape[1])) if seeds_b.is_cpu else max(1, len(seeds_b))
    for start in range(0, len(seeds_b), count):
        rows = slice(start, start + count)
        bits_bv = rows_b1[rows] ^ (words_v if words_v.ndim == 1 else words_v[rows])
        _rotate_(bits_bv, 13).mul_(5).add_(_signed(_ADDED)).bitwise_xor_(_HASHED_BYTES)
        _finish_(bits_bv).bitwise_xor_(-(1 << 31))  # as signed numbers these are bits - 2**31
        uniform_bv = bits_bv.to(torch.float64).add_(2.0**31 + 0.5).mul_(-(2.0**-32))  # -u: one pass less
        uniform_bv = uniform_bv.to(torch.float32).clamp_(min=-_MAX_UNIFORM).to(torch.float64)
        noise_bv[rows] = uniform_bv.log1p_().neg_().log_().neg_()
    return noise_bv


class HighNoiseTokens:
    """Finds the tokens of a row whose bits are below 2**(32 - `shift`), without computing logarithms.

    The last step of the hash, h ^ (h >> 16), does not change the upper 16 bits, so it is left out. Each thread needs
    its own object.
    """

    def __init__(self, vocab: int, shift: int) -> None:
        import numpy as np
        import torch

        assert 0 < shift <= 16, "only the upper 16 bits are known"
        self._words_v = _vocabulary_words(vocab, torch.device("cpu")).numpy().view(np.uint32)
        self._limit = np.uint32(1 << (32 - shift))
        self._h_v, self._shifted_v = np.empty_like(self._words_v), np.empty_like(self._words_v)

    def mask(self, key: np.uint32) -> np.ndarray:
        """Whether each token of the row with this key has high noise, bool [v]."""
        import numpy as np

        h_v, shifted_v = self._h_v, self._shifted_v
        np.bitwise_xor(self._words_v, key, out=h_v)
        np.right_shift(h_v, 19, out=shifted_v)
        np.left_shift(h_v, 13, out=h_v)
        np.bitwise_or(h_v, shifted_v, out=h_v)
        np.multiply(h_v, np.uint32(5), out=h_v)
        np.add(h_v, np.uint32(_ADDED), out=h_v)
        np.bitwise_xor(h_v, np.uint32(_HASHED_BYTES), out=h_v)
        for count, factor in ((16, _THIRD), (13, _FOURTH)):
            np.right_shift(h_v, count, out=shifted_v)
            np.bitwise_xor(h_v, shifted_v, out=h_v)
            np.multiply(h_v, np.uint32(factor), out=h_v)
        return h_v < self._limit
