"""Verification of cached tokens on logits, without Triton: against the dense sampler of the local engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sortedrl.engine.base import Sampling
from sortedrl.engine.sampling.draw import DenseSampler, Draw, shape_logits
from sortedrl.engine.vllm.verify_rows import CachedRows, verify_rows_with_torch

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(temperature=0.6),
    Sampling(temperature=2.0),
]


def make_rows(num_rows: int, vocab: int, *, seed: int = 0, tolerance: float = 0.0) -> tuple[CachedRows, list[Draw]]:
    """Random logits. Every third cached token is the drawn one or close to it, the others are random."""
    generator = torch.Generator().manual_seed(seed)
    logits_rv = torch.randn(num_rows, vocab, generator=generator) * 3
    seeds = torch.randint(0, 1 << 62, (num_rows,), generator=generator)
    positions = torch.randint(0, 1 << 15, (num_rows,), generator=generator)
    draws = [
        Draw(int(seed), int(position), SAMPLINGS[index % len(SAMPLINGS)])
        for index, (seed, position) in enumerate(zip(seeds, positions, strict=True))
    ]
    rows = CachedRows(
        logits_rv=logits_rv,
        temperatures_r=torch.tensor([draw.sampling.temperature for draw in draws]),
        seeds_r=seeds,
        positions_r=positions,
        cached_r=torch.randint(0, vocab, (num_rows,), generator=generator),
        tolerances_r=torch.full((num_rows,), tolerance),
    )
    drawn_r = verify_rows_with_torch(replace(rows, tolerances_r=torch.zeros(num_rows))).tokens_r2[:, 1].to(torch.int64)
    is_drawn_r = torch.arange(num_rows) % 3 == 0
    return replace(rows, cached_r=torch.where(is_drawn_r, drawn_r, rows.cached_r)), draws


@pytest.mark.parametrize("tolerance", [0.0, 3.0])
def test_verdicts_are_those_of_the_local_sampler(tolerance: float) -> None:
    rows, draws = make_rows(48, 37, tolerance=tolerance)
    found = verify_rows_with_torch(rows)
    sampler = DenseSampler(1, 37, torch.device("cpu"))
    scaled_rv = shape_logits(rows.logits_rv, [draw.sampling for draw in draws])
    expected = sampler.verify(scaled_rv, draws, rows.cached_r.tolist(), [tolerance] * 48)
    cached = rows.cached_r.tolist()
    final = [
        token if is_kept else drawn
        for token, is_kept, drawn in zip(cached, expected.is_kept, expected.drawn.tokens, strict=True)
    ]
    num_kept = sum(expected.is_kept)
    assert 16 <= num_kept < 48
    assert (num_kept > 20) == (tolerance > 0)
    assert found.tokens_r2.tolist() == [list(pair) for pair in zip(cached, final, strict=True)]
    assert found.logprobs_r2[:, 0].tolist() == pytest.approx(expected.cached_logprobs, abs=1e-5)
    drawn_logprobs = [
        before if is_kept else drawn
        for before, is_kept, drawn in zip(
            expected.cached_logprobs, expected.is_kept, expected.drawn.logprobs, strict=True
        )
    ]
    assert found.logprobs_r2[:, 1].tolist() == pytest.approx(drawn_logprobs, abs=1e-5)


def test_shaped_logits_are_not_divided_again() -> None:
    rows, draws = make_rows(12, 37)
    shaped_rv = shape_logits(rows.logits_rv, [draw.sampling for draw in draws])
    found = verify_rows_with_torch(replace(rows, logits_rv=shaped_rv, is_shaped=True))
    expected = verify_rows_with_torch(rows)
    assert torch.equal(found.tokens_r2, expected.tokens_r2)
    assert torch.equal(found.logprobs_r2, expected.logprobs_r2)


def test_a_filtered_token_is_not_kept() -> None:
    rows, _ = make_rows(2, 5)
    filtered_rv = rows.logits_rv.clone()
    filtered_rv[:, 3] = -torch.inf
    found = verify_rows_with_torch(
        replace(rows, logits_rv=filtered_rv, cached_r=torch.tensor([3, 3]), tolerances_r=torch.full((2,), 9.0))
    )
    assert found.tokens_r2[:, 0].tolist() == [3, 3]
    assert 3 not in found.tokens_r2[:, 1].tolist()
    assert found.logprobs_r2[:, 0].tolist() == [-torch.inf, -torch.inf]
