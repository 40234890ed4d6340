"""The token that wins a draw, found without making noise for a whole vocabulary.

`sampling/draw.py` calls it for large vocabularies on a CPU where there is no compiled kernel. The result is that of the
full scheme, argmax(x + g) over all tokens, bit for bit.

Why: let x be the scaled logits of a row, z their logsumexp, p = exp(x - z), and u the uniform number behind the noise
g = -log(-log u) of a token. Since -log u >= 1 - u, g <= -log(1 - u). Call a token likely when p > LIKELY and lucky when
1 - u < LUCKY. One that is neither scores at most
    x + g  <=  z + log p - log(1 - u)  <=  z + log(LIKELY / LUCKY)
so when the best of the likely and the lucky ones scores more, it is the best of all. The best score less z is a
standard Gumbel number, hence below log(LIKELY / LUCKY) with probability exp(-LUCKY / LIKELY), one in nine million; such
a row, or one that holds NaN, gets its noise in full. Which tokens are lucky takes integers only, and they are few.

Shapes: r rows of logits, v vocabulary, c candidates of all rows, one row behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from sortedrl.engine.sampling.noise import LuckyTokens, gumbel, row_keys

_LUCKY_SHIFT = 8
LUCKY = 2.0**-_LUCKY_SHIFT
LIKELY = LUCKY / 16
_SLACK = 1e-3  # far more than float32 rounds p, x + g and z by


class CandidateSearch:
    """Keeps what a search over rows of one vocabulary needs; one thread per torch thread."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._lucky: list[LuckyTokens] = []
        self._pool: ThreadPoolExecutor | None = None

    def best(
        self, scaled_rv: torch.Tensor, seeds_r: torch.Tensor, positions_r: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The winning token of each row, and z."""
        probs_rv = torch.softmax(scaled_rv, -1)
        normalizer_r = scaled_rv.amax(-1) - probs_rv.amax(-1).log()
        ids = self._candidates(probs_rv.numpy(), row_keys(seeds_r, positions_r).numpy().view(np.uint64))
        counts_r = np.array([len(row) for row in ids])
        rows_c = torch.from_numpy(np.repeat(np.arange(len(ids)), counts_r))
        ids_c = torch.from_numpy(np.concatenate(ids))
        noise_c = gumbel(seeds_r[rows_c], positions_r[rows_c], ids_c.unsqueeze(1)).squeeze(1)
        scores_c = (scaled_rv[rows_c, ids_c] + noise_c).numpy()
        starts_r = np.cumsum(counts_r) - counts_r
        best_r = np.maximum.reduceat(scores_c, starts_r)
        # Of equal scores the first token wins, as argmax has it: candidates come in the order of their ids.
        is_best_c = scores_c == np.repeat(best_r, counts_r)
        winners_r = [
            start + int(is_best_c[start : start + n].argmax()) for start, n in zip(starts_r, counts_r, strict=True)
        ]
        tokens_r = ids_c[torch.tensor(winners_r)]
        is_sure_r = best_r > normalizer_r.numpy() + (math.log(LIKELY / LUCKY) + _SLACK)
        for row in np.flatnonzero(~is_sure_r).tolist():  # NaN is not sure either
            tokens_r[row] = full_draw(scaled_rv[row], seeds_r[row : row + 1], positions_r[row : row + 1])
        return tokens_r, normalizer_r

    def _candidates(self, probs_rv: np.ndarray, keys_r: np.ndarray) -> list[np.ndarray]:
        """Ids of each row's likely and lucky tokens, ascending. Token 0 is always among them: no row may be empty."""

        def search(number: int) -> list[np.ndarray]:
            found = []
            for row in range(number * len(keys_r) // num_threads, (number + 1) * len(keys_r) // num_threads):
                mask_v = self._lucky[number].mask(keys_r[row])
                mask_v |= probs_rv[row] > LIKELY
                mask_v[0] = True
                found.append(np.flatnonzero(mask_v))
            return found

        num_threads = min(torch.get_num_threads(), len(keys_r))
        while len(self._lucky) < num_threads:
            self._lucky.append(LuckyTokens(self._vocab, _LUCKY_SHIFT))
        return [row for part in self._map(search, num_threads) for row in part]

    def _map(self, search: Callable[[int], list[np.ndarray]], num_threads: int) -> list[list[np.ndarray]]:
        if num_threads == 1:
            return [search(0)]
        if self._pool is None:  # numpy lets go of the interpreter in each pass
            self._pool = ThreadPoolExecutor(thread_name_prefix="candidates")
        return list(self._pool.map(search, range(num_threads)))


def full_draw(scaled_v: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The definition: noise for every token, and the best of all."""
    return (scaled_v + gumbel(seed, position, len(scaled_v)).squeeze(0)).argmax()
