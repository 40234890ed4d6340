"""Top-k, top-p and min-p: tokens that may not be drawn get a logit of minus infinity.

`draw.py` calls it after dividing by the temperature. Filters apply in this order, each to the tokens that the previous
one left. Of equal logits at the limit, tokens with smaller ids stay. The most likely token always stays.

Shapes: r rows, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sortedrl.engine.base import Sampling


def is_filtered(sampling: Sampling) -> bool:
    return bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0


def filter_logits(scaled_rv: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """A filtered copy of the logits; the logits themselves if no row has a filter."""
    kinds = {id(sampling): sampling for sampling in samplings}  # most requests share one
    if not any(map(is_filtered, kinds.values())):
        return scaled_rv
    filtered_rv = scaled_rv.clone()
    for row, sampling in enumerate(samplings):
        if is_filtered(sampling):
            filtered_rv[row] = _filter_row(scaled_rv[row], sampling)
    return filtered_rv


def _filter_row(scaled_v: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    values_v, order_v = scaled_v.sort(descending=True, stable=True)
    num_kept = len(values_v)
    if sampling.top_k:
        num_kept = min(num_kept, sampling.top_k)
    probs = torch.softmax(values_v[:num_kept], -1)
    if sampling.top_p < 1:
        before = probs.cumsum(-1) - probs  # sum of the probabilities of all likelier tokens
        num_kept = max(1, int((before < sampling.top_p).sum()))
        probs = probs[:num_kept]
    if sampling.min_p > 0:
        num_kept = max(1, int((probs >= sampling.min_p * probs[0]).sum()))
    filtered_v = torch.full_like(scaled_v, float("-inf"))
    kept = order_v[:num_kept]
    filtered_v[kept] = scaled_v[kept]
    return filtered_v
