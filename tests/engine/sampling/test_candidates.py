"""Samplers that compute noise for few tokens draw the same tokens as with noise for every token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sortedrl.engine.base import Sampling
from sortedrl.engine.sampling import draw
from sortedrl.engine.sampling.candidates import HIGH_NOISE, LIKELY, CandidateSearch
from sortedrl.engine.sampling.draw import (
    CandidateSampler,
    DenseSampler,
    Draw,
    DrawRuns,
    KernelSampler,
    TokenSampler,
    make_sampler,
)
from sortedrl.engine.sampling.noise import HighNoiseTokens, gumbel, noise_bits, row_keys
from sortedrl.native.kernel import load_kernel
from tests.support.tiny_models import needs_compiler

VOCAB = 5000


def random_rows(count: int, scale: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_rv = torch.randn(count, VOCAB, generator=generator) * scale
    return logits_rv, torch.randint(-(2**62), 2**62, (count,), generator=generator), torch.arange(count) * 3


def draw_with_all_noise(logits_rv: torch.Tensor, seeds_r: torch.Tensor, positions_r: torch.Tensor) -> torch.Tensor:
    return (logits_rv + gumbel(seeds_r, positions_r, logits_rv.shape[1])).argmax(-1)


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 3.0, 10.0])
def test_the_search_draws_the_same_as_noise_for_every_token(scale: float) -> None:
    logits_rv, seeds_r, positions_r = random_rows(150, scale)
    tokens_r, normalizer_r = CandidateSearch(VOCAB).draw(logits_rv, seeds_r, positions_r)
    assert torch.equal(tokens_r, draw_with_all_noise(logits_rv, seeds_r, positions_r))
    torch.testing.assert_close(normalizer_r, logits_rv.logsumexp(-1), atol=1e-5, rtol=0)


def test_one_thread_and_two_draw_the_same() -> None:
    logits_rv, seeds_r, positions_r = random_rows(7, 2.0)
    search = CandidateSearch(VOCAB)
    alone_r, _ = search.draw(logits_rv, seeds_r, positions_r)
    torch.set_num_threads(2)
    try:
        together_r, _ = search.draw(logits_rv, seeds_r, positions_r)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone_r, together_r)


def test_filtered_tokens_never_win() -> None:
    logits_rv, seeds_r, positions_r = random_rows(40, 1.0)
    logits_rv[:, 3:] = -math.inf
    tokens_r, _ = CandidateSearch(VOCAB).draw(logits_rv, seeds_r, positions_r)
    assert torch.equal(tokens_r, draw_with_all_noise(logits_rv, seeds_r, positions_r))
    assert tokens_r.unique().tolist() == [0, 1, 2]


def test_an_uncertain_row_gets_noise_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_rv, seeds_r, positions_r = random_rows(20, 1.0)
    expected_r = draw_with_all_noise(logits_rv, seeds_r, positions_r)
    # With token 0 as the only candidate, no row is certain.
    monkeypatch.setattr(CandidateSearch, "_candidates", lambda *_: [np.array([0])] * 20)
    tokens_r, _ = CandidateSearch(VOCAB).draw(logits_rv, seeds_r, positions_r)
    assert torch.equal(tokens_r, expected_r)


def test_nan_does_not_spread_to_other_rows() -> None:
    logits_rv, seeds_r, positions_r = random_rows(6, 1.0)
    expected_r = draw_with_all_noise(logits_rv, seeds_r, positions_r)
    logits_rv[2, 77] = math.nan
    tokens_r, normalizer_r = CandidateSearch(VOCAB).draw(logits_rv, seeds_r, positions_r)
    is_finite = torch.arange(6) != 2
    assert torch.equal(tokens_r[is_finite], expected_r[is_finite])
    assert not (logits_rv[2, tokens_r[2]] - normalizer_r[2]).isfinite()
    assert normalizer_r[is_finite].isfinite().all()


@pytest.mark.parametrize("shift", [1, 8, 10, 16])
def test_high_noise_tokens_have_the_smallest_bits(shift: int) -> None:
    seed, position = 12345, 6
    key = row_keys(torch.tensor([seed]), torch.tensor([position])).numpy().view(np.uint32)
    expected = [noise_bits(seed, position, token) < 2 ** (32 - shift) for token in range(4000)]
    assert HighNoiseTokens(4000, shift).mask(key[0]).tolist() == expected
    assert sum(expected) == pytest.approx(4000 / 2**shift, abs=5 * math.sqrt(4000 / 2**shift) + 1)


def test_all_other_tokens_have_less_noise_than_the_bound() -> None:
    # g <= -log u and u >= HIGH_NOISE, so the noise of such a token is at most -log(HIGH_NOISE).
    noise_rv = gumbel(torch.arange(50), torch.arange(50), VOCAB)
    high_noise = HighNoiseTokens(VOCAB, 8)
    keys = row_keys(torch.arange(50), torch.arange(50)).numpy().view(np.uint32)
    is_high_rv = torch.from_numpy(np.stack([high_noise.mask(key).copy() for key in keys]))
    assert noise_rv[~is_high_rv].max() <= -math.log(HIGH_NOISE) + 1e-6
    assert noise_rv[is_high_rv].min() > -math.log(HIGH_NOISE) - 0.01
    assert math.exp(-HIGH_NOISE / LIKELY) == pytest.approx(1.1e-7, rel=0.03)


# The three samplers

SPARSE_KINDS = ["sparse", pytest.param("kernel", marks=needs_compiler)]


def make_kind(kind: str, slots: int, vocab: int) -> TokenSampler:
    if kind == "dense":
        return DenseSampler(slots, vocab, torch.device("cpu"))
    if kind == "sparse":
        return CandidateSampler(vocab)
    kernel = load_kernel()
    assert kernel is not None
    return KernelSampler(kernel, slots, vocab)


def chi_square(tokens: list[int], probs: list[float]) -> float:
    counts = np.bincount(tokens, minlength=len(probs))
    expected = np.array(probs) * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("kind", ["dense", *SPARSE_KINDS])
def test_100_000_draws_follow_the_softmax(kind: str) -> None:
    probs = [0.4, 0.3, 0.15, 0.1, 0.04, 0.01]
    logits_rv = torch.tensor(probs).log().expand(2000, -1).contiguous()
    drawn: list[int] = []
    for part in range(50):
        draws = [Draw(part * 2000 + row, 5, Sampling()) for row in range(2000)]
        sampler = make_kind(kind, 2000, 6)
        sampler.start(0, draws)
        choice = sampler.choose(logits_rv, lambda draws=draws: draws)
        drawn += choice.tokens
        assert choice.logprobs[:20] == pytest.approx([math.log(probs[token]) for token in choice.tokens[:20]], abs=1e-6)
    assert len(drawn) == 100_000
    assert chi_square(drawn, probs) < 20.52  # 5 degrees of freedom at 0.1 %


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_sparse_samplers_equal_the_dense_one(kind: str) -> None:
    logits_rv, seeds_r, _ = random_rows(24, 2.0)
    samplings = [Sampling(temperature=0.0 if row % 5 == 0 else 1.0) for row in range(24)]
    draws = [Draw(int(seed), 9, sampling) for seed, sampling in zip(seeds_r, samplings, strict=True)]
    dense, sparse = make_kind("dense", 24, VOCAB), make_kind(kind, 24, VOCAB)
    for sampler in (dense, sparse):
        sampler.start(0, draws)
    expected, found = (sampler.choose(logits_rv, lambda: draws) for sampler in (dense, sparse))
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    cached = [token if row % 2 else -1 if row % 3 else 17 for row, token in enumerate(expected.tokens)]
    for tolerance in (0.0, 12.0):
        verdicts = [sampler.verify(logits_rv, draws, cached, [tolerance] * 24) for sampler in (dense, sparse)]
        assert verdicts[0].is_kept == verdicts[1].is_kept
        assert verdicts[0].drawn.tokens == verdicts[1].drawn.tokens == expected.tokens
        assert verdicts[1].cached_logprobs == pytest.approx(verdicts[0].cached_logprobs, abs=1e-5)
        assert sum(verdicts[0].is_kept) >= 12
    assert sum(verdicts[0].is_kept) > 12, "the tolerance must let some pass"


@pytest.mark.parametrize("kind", ["dense", *SPARSE_KINDS])
def test_runs_of_draws_equal_their_draws_one_by_one(kind: str) -> None:
    greedy, plain = Sampling(temperature=0.0), Sampling()
    runs = DrawRuns([(Draw(71, 3, plain), 4), (Draw(72, 0, greedy), 1), (Draw(2**62, 9, plain), 7)])
    one_by_one = [Draw(71, position, plain) for position in (3, 4, 5, 6)]
    one_by_one += [Draw(72, 0, greedy), *(Draw(2**62, position, plain) for position in range(9, 16))]
    assert list(runs) == one_by_one
    assert runs.samplings == [draw.sampling for draw in one_by_one]
    logits_rv, _, _ = random_rows(12, 2.0)
    sampler, cached = make_kind(kind, 12, VOCAB), [*range(11), -1]
    expected = sampler.verify(logits_rv, one_by_one, cached, [0.0] * 12)
    found = sampler.verify(logits_rv, runs, cached, [0.0] * 12)
    assert (found.drawn.tokens, found.drawn.logprobs) == (expected.drawn.tokens, expected.drawn.logprobs)
    assert (found.is_kept, found.cached_logprobs) == (expected.is_kept, expected.cached_logprobs)


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("vocab", [3, 31, 32, 5000])
def test_compiled_draws_equal_noise_for_every_token(scale: float, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps, in slots that start at different positions, with two threads and then with one."""
    generator = torch.Generator().manual_seed(0)
    seeds_b = torch.randint(-(2**62), 2**62, (40,), generator=generator)
    draws = [Draw(seed, row, Sampling()) for row, seed in enumerate(seeds_b.tolist())]
    monkeypatch.setattr(draw, "_MIN_THREADED_LOGITS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sampler = make_kind("kernel", 40, vocab)
    sampler.start(0, draws)
    for step in range(3):
        logits_bv = torch.randn(40, vocab, generator=generator) * scale
        choice = sampler.choose(logits_bv, lambda: draws)
        assert torch.equal(choice.tokens_r, draw_with_all_noise(logits_bv, seeds_b, torch.arange(40) + step))
        expected_b = logits_bv.log_softmax(-1).gather(1, choice.tokens_r[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(choice.logprobs), expected_b, atol=1e-5, rtol=0)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@needs_compiler
def test_compiled_draws_move_with_their_slots() -> None:
    logits_rv, seeds_r, _ = random_rows(3, 2.0)
    sampler = make_kind("kernel", 3, VOCAB)
    sampler.start(0, [Draw(seed, 4, Sampling()) for seed in seeds_r.tolist()])
    sampler.move(2, 0)
    found = sampler.choose(logits_rv[:2], list)
    assert torch.equal(found.tokens_r, draw_with_all_noise(logits_rv[:2], seeds_r[[2, 1]], torch.tensor([4, 4])))


@needs_compiler
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_compiled_draws_from_non_finite_logits_have_no_logprob(value: float) -> None:
    logits_rv, seeds_r, _ = random_rows(2, 1.0)
    logits_rv[1, 77] = value
    sampler = make_kind("kernel", 2, VOCAB)
    sampler.start(0, [Draw(seed, 0, Sampling()) for seed in seeds_r.tolist()])
    logprobs = sampler.choose(logits_rv, list).logprobs
    assert [math.isfinite(logprob) for logprob in logprobs] == [True, False]


def test_which_sampler_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_sampler(4, 49_152, torch.device("meta")), DenseSampler)
    assert isinstance(make_sampler(4, 50, torch.device("cpu")), KernelSampler if load_kernel() else DenseSampler)
    monkeypatch.setattr(draw, "load_kernel", lambda: None)
    assert type(make_sampler(4, 49_152, torch.device("cpu"))) is CandidateSampler
    assert isinstance(make_sampler(4, 50, torch.device("cpu")), DenseSampler)
