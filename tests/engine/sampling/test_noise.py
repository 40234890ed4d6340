"""The noise scheme: fixed expected values, agreement of its implementations, and its statistics."""

from __future__ import annotations

import math

import pytest
import torch

from sortedrl.engine.sampling import noise
from sortedrl.engine.sampling.noise import gumbel, gumbel_scalar, seed_tensor
from sortedrl.records import sample_seed

# (seed, position, token, noise). These values must not change unless the scheme gets a new name.
VECTORS: list[tuple[int, int, int, float]] = [
    (0, 0, 0, 0.8509171605),
    (0, 0, 1, 1.0357928276),
    (0, 1, 0, -0.2519319355),
    (1, 0, 0, -0.0893814638),
    (42, 7, 13, 0.3286590576),
    (2**63 - 1, 511, 49, -0.7880635858),
    (-1, 0, 0, 0.6332308054),
    (0x0123456789ABCDEF, 4095, 151_935, 0.0211684313),
]


MAX_NOISE = 22.873858  # 33 log 2, rounded up; draw.h relies on it
MIN_NOISE = -3.129995  # -log(33 log 2), rounded down


def uniforms(noise_bv: torch.Tensor) -> torch.Tensor:
    """The uniform numbers that the noise was computed from."""
    return torch.exp(-torch.exp(-noise_bv.double()))


def test_the_finaliser_is_that_of_splitmix64() -> None:
    # The generator's published first outputs for seed 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    states = [(1234567 + (index + 1) * 0x9E3779B97F4A7C15) % 2**64 for index in range(4)]
    assert [noise._mix_scalar(state) for state in states] == expected


def test_the_scheme_has_not_changed() -> None:
    assert noise.SCHEME == "gumbel-splitmix64-v1"
    for seed, position, token, expected in VECTORS:
        assert gumbel_scalar(seed, position, token) == pytest.approx(expected, rel=1e-6)
        drawn = gumbel(seed_tensor([seed]), torch.tensor([position]), torch.tensor([token]))
        assert drawn.item() == pytest.approx(expected, rel=1e-6)


def test_torch_equals_the_scalar_definition() -> None:
    seeds = [0, 1, -1, 2**63 - 1, 2**64 - 1, sample_seed(3, 0, "puzzle", 5)]
    positions = [0, 1, 17, 511, 100_000, 3]
    tokens = torch.tensor([0, 1, 2, 49, 151_935])
    drawn_bv = gumbel(seed_tensor(seeds), torch.tensor(positions), tokens)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column, token in enumerate(tokens.tolist()):
            # Logarithms of two libraries may differ in the last bit, and then round differently in float32.
            assert drawn_bv[row, column].item() == pytest.approx(gumbel_scalar(seed, position, token), rel=2.4e-7)


def test_tokens_may_be_a_count_or_ids() -> None:
    seeds_b, positions_b = torch.tensor([5, 6]), torch.tensor([0, 9])
    all_bv = gumbel(seeds_b, positions_b, 40)
    ids_bv = torch.tensor([[3, 39, 0], [7, 7, 12]])
    assert all_bv.dtype == torch.float32
    assert torch.equal(gumbel(seeds_b, positions_b, ids_bv[0]), all_bv[:, ids_bv[0]])
    assert torch.equal(gumbel(seeds_b, positions_b, ids_bv), all_bv.gather(1, ids_bv))
    assert torch.equal(seeds_b, torch.tensor([5, 6])), "arguments must not be written to"


def test_bounds_hold_at_the_extreme_bits() -> None:
    smallest = -math.log(-math.log(2.0**-33))
    largest = -math.log(-math.log1p(-(2.0**-33)))
    assert MIN_NOISE <= torch.tensor(smallest, dtype=torch.float32).item() <= MIN_NOISE + 1e-6
    assert MAX_NOISE - 3e-6 <= torch.tensor(largest, dtype=torch.float32).item() <= MAX_NOISE
    drawn_bv = gumbel(torch.arange(200), torch.arange(200), 5000)
    assert drawn_bv.min() >= MIN_NOISE
    assert drawn_bv.max() <= MAX_NOISE


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_uniform_along_every_axis(axis: str) -> None:
    count = 100_000
    steps, zeros = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    if axis == "token":
        drawn = gumbel(torch.tensor([11]), torch.tensor([4]), count).flatten()
    else:
        seeds, positions = (steps, zeros + 4) if axis == "seed" else (zeros + 11, steps)
        drawn = gumbel(seeds, positions, torch.tensor([2])).flatten()
    values = uniforms(drawn).sort().values
    observed = torch.histc(values.float(), bins=100, min=0, max=1).double()
    chi_square = ((observed - count / 100) ** 2 / (count / 100)).sum().item()
    assert 60.0 < chi_square < 148.2  # 99 degrees of freedom: 0.1 % on either side
    grid = torch.arange(1, count + 1).double() / count
    distance = max((grid - values).max().item(), (values - grid + 1 / count).max().item())
    assert distance * math.sqrt(count) < 1.95  # Kolmogorov-Smirnov at 0.1 %


def test_neighbours_are_uncorrelated() -> None:
    rows, columns = 300, 400
    base_bv = uniforms(gumbel(torch.arange(rows), torch.arange(rows), columns))
    others = {
        "seed": gumbel(torch.arange(rows) + 1, torch.arange(rows), columns),
        "position": gumbel(torch.arange(rows), torch.arange(rows) + 1, columns),
        "seed and position": gumbel(torch.arange(rows) + 1, torch.arange(rows) + 1, columns),
        "position against token": gumbel(torch.arange(rows), torch.arange(rows) + 1, columns).roll(1, 1),
        "token": gumbel(torch.arange(rows), torch.arange(rows), columns).roll(1, 1),
    }
    for name, other_bv in others.items():
        correlation = torch.corrcoef(torch.stack([base_bv.flatten(), uniforms(other_bv).flatten()]))[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(rows * columns), name


def test_argmax_with_noise_draws_from_softmax() -> None:
    logits_v = torch.tensor([2.0, 0.0, -1.0, 0.5, -3.0])
    count = 50_000
    drawn = (logits_v + gumbel(torch.arange(count), torch.zeros(count, dtype=torch.int64), 5)).argmax(-1)
    expected_v = logits_v.double().softmax(-1) * count
    chi_square = ((drawn.bincount(minlength=5) - expected_v) ** 2 / expected_v).sum().item()
    assert chi_square < 18.47  # 4 degrees of freedom at 0.1 %
