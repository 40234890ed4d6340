"""Find the token that wins a draw without computing noise for the whole vocabulary.

`draw.py` uses it for large vocabularies on a CPU without the compiled kernel.
Guarantees: the result is argmax(x + g) over all tokens, bit for bit as with noise for every token.

Why this works: let x be the scaled logits of a row, z their logsumexp, p = exp(x - z), and u the uniform number from
which a token's noise g = -log(-log(1 - u)) is computed. Since -log(1 - u) >= u, g <= -log u. Call a token likely when
p > LIKELY, and high-noise when u < HIGH_NOISE. A token that is neither scores at most
    x + g  <=  z + log p - log u  <=  z + log(LIKELY / HIGH_NOISE)
So when the best likely or high-noise token scores more than that, it is the best of all tokens. The best score minus z
is a standard Gumbel number, so it is below log(LIKELY / HIGH_NOISE) with probability exp(-HIGH_NOISE / LIKELY), one in
nine million. Noise is computed for every token of such a row, and of a row that holds NaN. Finding the high-noise
tokens takes integer arithmetic only, and there are few of them.

Shapes: r rows of logits, v vocabulary, c candidates of all rows, one row after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from sortedrl.engine.sampling.noise import HighNoiseTokens, gumbel, row_keys

_HIGH_NOISE_SHIFT = 8
HIGH_NOISE = 2.0**-_HIGH_NOISE_SHIFT
LIKELY = HIGH_NOISE / 16
_ROUNDING_MARGIN = 1e-3  # far more than the float32 rounding errors of p, x + g and z


class CandidateSearch:
    """Draws tokens for rows of one vocabulary, with one thread per torch thread."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._high_noise: list[HighNoiseTokens] = []  # one per thread
        self._pool: ThreadPoolExecutor | None = None

    def draw(
        self, scaled_rv: torch.Tensor, seeds_r: torch.Tensor, positions_r: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The winning token of each row, and z."""
        probs_rv = torch.softmax(scaled_rv, -1)
        normalizer_r = scaled_rv.amax(-1) - probs_rv.amax(-1).log()
        ids = self._candidates(probs_rv.numpy(), row_keys(seeds_r, positions_r).numpy().view(np.uint32))
        counts_r = np.array([len(row) for row in ids])
        rows_c = torch.from_numpy(np.repeat(np.arange(len(ids)), counts_r))
        ids_c = torch.from_numpy(np.concatenate(ids))
        noise_c = gumbel(seeds_r[rows_c], positions_r[rows_c], ids_c.unsqueeze(1)).squeeze(1)
        scores_c = (scaled_rv[rows_c, ids_c] + noise_c).numpy()
        starts_r = np.cumsum(counts_r) - counts_r
        best_r = np.maximum.reduceat(scores_c, starts_r)
        # Of equal scores the smallest id wins, as with argmax, because candidates are sorted by id.
        is_best_c = scores_c == np.repeat(best_r, counts_r)
        winners_r = [
            start + int(is_best_c[start : start + n].argmax()) for start, n in zip(starts_r, counts_r, strict=True)
        ]
        tokens_r = ids_c[torch.tensor(winners_r)]
        is_certain_r = best_r > normalizer_r.numpy() + (math.log(LIKELY / HIGH_NOISE) + _ROUNDING_MARGIN)
        for row in np.flatnonzero(~is_certain_r).tolist():  # a NaN compares as not certain
            noise_v = gumbel(seeds_r[row : row + 1], positions_r[row : row + 1], self._vocab).squeeze(0)
            tokens_r[row] = (scaled_rv[row] + noise_v).argmax()
        return tokens_r, normalizer_r

    def _candidates(self, probs_rv: np.ndarray, keys_r: np.ndarray) -> list[np.ndarray]:
        """Sorted ids of each row's likely and high-noise tokens, and of token 0, so that no row is empty."""

        def search(thread: int) -> list[np.ndarray]:
            found = []
            for row in range(thread * len(keys_r) // num_threads, (thread + 1) * len(keys_r) // num_threads):
                mask_v = self._high_noise[thread].mask(keys_r[row])
                mask_v |= probs_rv[row] > LIKELY
                mask_v[0] = True
                found.append(np.flatnonzero(mask_v))
            return found

        num_threads = min(torch.get_num_threads(), len(keys_r))
        while len(self._high_noise) < num_threads:
            self._high_noise.append(HighNoiseTokens(self._vocab, _HIGH_NOISE_SHIFT))
        return [row for part in self._map(search, num_threads) for row in part]

    def _map(self, search: Callable[[int], list[np.ndarray]], num_threads: int) -> list[list[np.ndarray]]:
        if num_threads == 1:
            return [search(0)]
        if self._pool is None:  # threads help because numpy releases the interpreter lock in each pass
            self._pool = ThreadPoolExecutor(thread_name_prefix="candidates")
        return list(self._pool.map(search, range(num_threads)))
