"""Sampling noise as a pure function of (seed, position, token): the scheme `gumbel-splitmix64-v1`.

Every engine draws with this noise, so under given weights an answer does not depend on when, where or next to which
other samples it runs. Replay and the engines' conformance tests rely on that. If any output changes, the scheme needs a
new name.

All integers are 64-bit and wrap around. With mix(x) the finaliser of splitmix64 and G its increment,
    row  = mix(mix(seed) + G * (position + 1))        position: index in the answer, from 0
    bits = mix(row + G * (token + 1)) >> 32           32 uniform bits
    u    = (bits + 0.5) / 2**32                       in [2**-33, 1 - 2**-33], exact in float64
    g    = -log(-log(u))                              in float64, then rounded to float32
The token with the largest logits / temperature + g is then a draw from softmax(logits / temperature).

Shapes: b rows (one per sequence, or per sequence and position), v tokens.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

SCHEME = "gumbel-splitmix64-v1"

# Numbers per chunk: as many as fit in a processor's cache. Twenty passes over larger chunks take twice the time.
_CHUNK = 1 << 16

_INCREMENT = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """The signed int64 with the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_scalar(x: int) -> int:
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def gumbel_scalar(seed: int, position: int, token: int) -> float:
    """The noise of one token, in plain Python: the reference for every other implementation."""
    row = _mix_scalar((_mix_scalar(seed & _MASK) + _INCREMENT * (position + 1)) & _MASK)
    bits = _mix_scalar((row + _INCREMENT * (token + 1)) & _MASK) >> 32
    uniform = (bits + 0.5) / 2.0**32
    return struct.unpack("f", struct.pack("f", -math.log(-math.log(uniform))))[0]


def _xor_shift_(x: torch.Tensor, shift: int) -> torch.Tensor:
    # torch shifts int64 arithmetically: the mask removes the copies of the sign bit.
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """Mix `x` in place."""
    _xor_shift_(x, 30).mul_(_signed(_FIRST))
    _xor_shift_(x, 27).mul_(_signed(_SECOND))
    return _xor_shift_(x, 31)


def seed_tensor(seeds: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Seeds of any sign and width as int64."""
    import torch

    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)


def row_keys(seeds_b: torch.Tensor, positions_b: torch.Tensor) -> torch.Tensor:
    """`row` of the definition above, which all tokens of a row share: int64 [b]."""
    return _mix_(_mix_(seeds_b.clone()) + (positions_b + 1) * _signed(_INCREMENT))


def gumbel(seeds_b: torch.Tensor, positions_b: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """Noise of each row at its position, float32 [b, v].

    `tokens` is the number of tokens (with ids 0..n-1), or a tensor of ids: [v] for all rows, or [b, v].
    """
    import torch

    tokens_v = torch.arange(tokens, device=seeds_b.device) if isinstance(tokens, int) else tokens
    rows_b1 = row_keys(seeds_b, positions_b).unsqueeze(1)
    steps_v = (tokens_v + 1) * _signed(_INCREMENT)
    noise_bv = torch.empty(len(seeds_b), tokens_v.shape[-1], dtype=torch.float32, device=seeds_b.device)
    count = max(1, _CHUNK // max(1, noise_bv.shape[1])) if seeds_b.is_cpu else max(1, len(seeds_b))
    for start in range(0, len(seeds_b), count):
        rows = slice(start, start + count)
        bits_bv = _mix_(rows_b1[rows] + (steps_v if steps_v.ndim == 1 else steps_v[rows]))
        bits_bv = bits_bv.bitwise_right_shift_(32).bitwise_and_((1 << 32) - 1)
        uniform_bv = bits_bv.to(torch.float64).add_(0.5).mul_(2.0**-32)
        noise_bv[rows] = uniform_bv.log_().neg_().log_().neg_()
    return noise_bv


class HighNoiseTokens:
    """Finds the tokens of a row whose 1 - u is below 2**-`shift`, without computing logarithms.

    The last step of the mix, x ^ (x >> 31), changes only the lowest of the upper 32 bits. A comparison with an even
    threshold does not depend on that bit, so the step is left out. Each thread needs its own object.
    """

    def __init__(self, vocab: int, shift: int) -> None:
        import numpy as np

        assert 0 < shift < 32, "the threshold must be even in 32 bits"
        with np.errstate(over="ignore"):
            self._steps_v = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(_INCREMENT)
        self._least = np.uint64((1 << 64) - (1 << (64 - shift)))
        self._first, self._second = np.uint64(_FIRST), np.uint64(_SECOND)
        self._x_v, self._shifted_v = np.empty_like(self._steps_v), np.empty_like(self._steps_v)

    def mask(self, key: np.uint64) -> np.ndarray:
        """Whether each token of the row with this key has high noise, bool [v]."""
        import numpy as np

        x_v, shifted_v = self._x_v, self._shifted_v
        np.add(self._steps_v, key, out=x_v)
        np.right_shift(x_v, 30, out=shifted_v)
        np.bitwise_xor(x_v, shifted_v, out=x_v)
        np.multiply(x_v, self._first, out=x_v)
        np.right_shift(x_v, 27, out=shifted_v)
        np.bitwise_xor(x_v, shifted_v, out=x_v)
        np.multiply(x_v, self._second, out=x_v)
        return x_v >= self._least
