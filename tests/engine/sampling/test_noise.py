"""The noise scheme: vLLM's own values, agreement of its implementations, and its statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sortedrl.engine.sampling import noise
from sortedrl.engine.sampling.noise import (
    KERNEL_MARGIN,
    gumbel,
    gumbel_scalar,
    int_tensor,
    noise_bits,
    row_keys,
    runs_of_numbers,
)
from sortedrl.records import restart_seed, sample_seed

# Written by tools/noise_vectors.py with vLLM's kernel. They must not change unless the scheme gets a new name.
VECTORS = json.loads((Path(__file__).parent / "vllm_noise_vectors.json").read_text(encoding="utf-8"))

MAX_NOISE = 22.873858  # 33 log 2, rounded up; draw.h relies on it
MIN_NOISE = -2.811541  # -log(24 log 2), rounded down


def uniforms(noise_bv: torch.Tensor) -> torch.Tensor:
    """The uniform numbers that the noise was computed from."""
    return -torch.expm1(-torch.exp(-noise_bv.double()))


def test_runs_of_numbers() -> None:
    assert runs_of_numbers([5, 0, 7], [2, 3, 1]).tolist() == [5, 6, 0, 1, 2, 7]
    assert runs_of_numbers([4], [3]).tolist() == [4, 5, 6]
    assert runs_of_numbers([], []).tolist() == []


def test_the_scheme_is_that_of_vllm() -> None:
    assert noise.SCHEME == VECTORS["scheme"] == "gumbel-murmur3-v1"
    apart = VECTORS["kernel_minus_exact"]  # over every u
    assert apart["highest"] - apart["lowest"] < KERNEL_MARGIN
    assert VECTORS["draws"]["near_ties"]["largest_gap"] < KERNEL_MARGIN
    assert len(VECTORS["vectors"]) >= 24
    for vector in VECTORS["vectors"]:
        seed, position, token = vector["seed"], vector["position"], vector["token"]
        assert noise_bits(seed, position, token) == vector["bits"]
        assert noise._uniform(vector["bits"]) == float.fromhex(vector["uniform"])
        assert gumbel_scalar(seed, position, token) == pytest.approx(vector["noise"], abs=KERNEL_MARGIN)
        drawn = gumbel(int_tensor([seed]), torch.tensor([position]), torch.tensor([token]))
        assert drawn.item() == pytest.approx(vector["noise"], abs=KERNEL_MARGIN)


def test_torch_equals_the_scalar_definition() -> None:
    seeds = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, sample_seed(3, 0, "puzzle", 5)]
    positions = [0, 1, 17, 511, 100_000, 3]
    tokens = torch.tensor([0, 1, 2, 49, 151_935])
    drawn_bv = gumbel(int_tensor(seeds), torch.tensor(positions), tokens)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column, token in enumerate(tokens.tolist()):
            # Logarithms of two libraries may differ in the last bit, and then round differently in float32.
            assert drawn_bv[row, column].item() == pytest.approx(gumbel_scalar(seed, position, token), rel=2.4e-7)


def test_seeds_have_63_bits() -> None:
    for seed in (-1, 2**63):
        with pytest.raises(AssertionError, match="not in"):
            noise_bits(seed, 0, 0)
    seeds = [sample_seed(run, epoch, f"p{run}", index) for run in range(50) for epoch in range(4) for index in range(8)]
    seeds += [restart_seed(seed, 1) for seed in seeds]
    assert 0 <= min(seeds) < 2**60 < 2**62 < max(seeds) < 2**63


def test_tokens_may_be_a_count_or_ids() -> None:
    seeds_b, positions_b = torch.tensor([5, 6]), torch.tensor([0, 9])
    all_bv = gumbel(seeds_b, positions_b, 40)
    ids_bv = torch.tensor([[3, 39, 0], [7, 7, 12]])
    assert all_bv.dtype == torch.float32
    assert torch.equal(gumbel(seeds_b, positions_b, ids_bv[0]), all_bv[:, ids_bv[0]])
    assert torch.equal(gumbel(seeds_b, positions_b, ids_bv), all_bv.gather(1, ids_bv))
    assert torch.equal(gumbel(seeds_b, positions_b, 40), all_bv), "a cached vocabulary must not be written to"
    assert torch.equal(seeds_b, torch.tensor([5, 6])), "arguments must not be written to"


def test_bounds_hold_at_the_extreme_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    largest, smallest = noise._gumbel(noise._uniform(0)), noise._gumbel(noise._uniform(2**32 - 1))
    assert MAX_NOISE - 3e-6 <= largest <= MAX_NOISE
    assert MIN_NOISE <= smallest <= MIN_NOISE + 1e-6
    for bits, expected in ((0, largest), (-1, smallest)):  # int32 with the same bits
        monkeypatch.setattr(noise, "_finish_", lambda h, bits=bits: h.fill_(bits))
        assert gumbel(torch.tensor([0]), torch.tensor([0]), 1).item() == pytest.approx(expected, rel=1e-7)


def test_argmax_with_noise_draws_from_softmax() -> None:
    logits_v = torch.tensor([2.0, 0.0, -1.0, 0.5, -3.0])
    count = 50_000
    drawn = (logits_v + gumbel(torch.arange(count), torch.zeros(count, dtype=torch.int64), 5)).argmax(-1)
    expected_v = logits_v.double().softmax(-1) * count
    chi_square = ((drawn.bincount(minlength=5) - expected_v) ** 2 / expected_v).sum().item()
    assert chi_square < 18.47  # 4 degrees of freedom at 0.1 %


# ---- statistics: a million numbers along every axis ------------------------------------------------------------------

COUNT = 1 << 20

# How the seeds and positions of a run are related: for each relation, COUNT pairs of (seeds, position, token).
RELATIONS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "neighbouring seeds": lambda: (torch.arange(COUNT + 1), _full(100), _full(7)),
    "seeds that differ in a high bit": lambda: (torch.arange(COUNT + 1) << 40, _full(100), _full(7)),
    "positions": lambda: (_full(12345), torch.arange(COUNT + 1), _full(7)),
    "tokens": lambda: (_full(12345), _full(100), torch.arange(COUNT + 1)),
    "siblings": lambda: (_seeds(lambda n: (0, 0, f"p{n // 8}", n % 8)), _full(100), _full(7)),
    "epochs": lambda: (_seeds(lambda n: (0, n % 8, f"p{n // 8}", 0)), _full(100), _full(7)),
    "runs": lambda: (_seeds(lambda n: (n, 0, "p", 0)), _full(100), _full(7)),
}


def _full(value: int) -> torch.Tensor:
    return torch.full((COUNT + 1,), value)


def _seeds(identity: Callable[[int], tuple[int, int, str, int]]) -> torch.Tensor:
    return int_tensor([sample_seed(*identity(number)) for number in range(COUNT + 1)])


@pytest.mark.slow
@pytest.mark.parametrize("relation", RELATIONS)
def test_uniform_and_independent_along_every_axis(relation: str) -> None:
    seeds, positions, tokens = RELATIONS[relation]()
    values = uniforms(gumbel(seeds, positions, tokens.unsqueeze(1)).flatten())
    check_uniform(values[:COUNT])
    check_independent(values[:-1], values[1:], lag="1")
    check_independent(values[:-8], values[8:], lag="8")


@pytest.mark.slow
def test_two_sequences_at_the_same_positions_share_nothing() -> None:
    # Rows of one relation against rows of the other, over positions and tokens: 1,024 x 1,024 pairs.
    rows, columns = 1024, 1024
    seeds, positions = _seeds(lambda n: (0, 0, f"p{n}", 0))[:rows], torch.arange(rows)
    base = uniforms(gumbel(seeds, positions, columns)).flatten()
    others = {
        "the sibling": gumbel(_seeds(lambda n: (0, 0, f"p{n}", 1))[:rows], positions, columns),
        "the next epoch": gumbel(_seeds(lambda n: (0, 1, f"p{n}", 0))[:rows], positions, columns),
        "the next seed": gumbel(seeds + 1, positions, columns),
        "the next position": gumbel(seeds, positions + 1, columns),
        "the next token": gumbel(seeds, positions, columns).roll(1, 1),
        "the next position of the next token": gumbel(seeds, positions + 1, columns).roll(1, 1),
        "a fresh restart": gumbel(int_tensor([restart_seed(s, 1) for s in seeds.tolist()]), positions, columns),
    }
    check_uniform(base)
    for name, other_bv in others.items():
        check_independent(base, uniforms(other_bv).flatten(), lag=name)


@pytest.mark.slow
def test_no_two_rows_of_a_run_share_their_key() -> None:
    # Rows with one key have the same noise at every token. A million of 2**32 keys: 128 pairs are expected by chance.
    seeds = _seeds(lambda n: (0, 0, f"p{n // 8}", n % 8))[:COUNT]
    positions = torch.arange(COUNT) % 4096
    num_equal = COUNT - len(row_keys(seeds, positions).unique())
    assert 128 - 5 * math.sqrt(128) < num_equal < 128 + 5 * math.sqrt(128)


def check_uniform(values: torch.Tensor) -> None:
    count = len(values)
    observed = torch.histc(values.float(), bins=100, min=0, max=1).double()
    chi_square = ((observed - count / 100) ** 2 / (count / 100)).sum().item()
    assert 56.0 < chi_square < 161.0  # 99 degrees of freedom: one in 10,000 on either side
    sorted_values, grid = values.sort().values, torch.arange(1, count + 1).double() / count
    distance = max((grid - sorted_values).max().item(), (sorted_values - grid + 1 / count).max().item())
    assert distance * math.sqrt(count) < 2.23  # Kolmogorov-Smirnov, one in 10,000


def check_independent(first: torch.Tensor, second: torch.Tensor, *, lag: str) -> None:
    """No correlation, and all cells of a 16 x 16 table of the two equally full."""
    count = len(first)
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].item()
    assert abs(correlation) < 4.5 / math.sqrt(count), lag
    cells = (first * 16).long().clamp(max=15) * 16 + (second * 16).long().clamp(max=15)
    observed = cells.bincount(minlength=256).double()
    chi_square = ((observed - count / 256) ** 2 / (count / 256)).sum().item()
    assert 178.0 < chi_square < 348.0, lag  # 255 degrees of freedom: one in 10,000 on either side
