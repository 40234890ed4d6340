"""Cost models: closed forms compared with sums over steps, figures worked out by hand, presets and mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.engine.sim.cost import UnitCost
from sortedrl.errors import ConfigError
from sortedrl.simulate.costs import Hardware, ModelShape, RooflineCost, _sum_of_larger, load_cost, preset_names

# 2 layers of 1 head of 1, one byte a value: KV 4 bytes and attention 8 FLOP per token; 100 weights of 1 byte.
TOY = ModelShape(params=100, layers=2, heads=1, kv_heads=1, head_dim=1, bytes_per_value=1)
PLAIN = Hardware(
    flops=1000,
    bandwidth=100,
    memory=1000,
    link_bandwidth=50,
    bandwidth_share=1,
    decode_flops_share=1,
    prefill_flops_share=0.5,
    train_flops_share=0.25,
    memory_share=0.5,
    step_overhead_s=0.25,
    reduce_s=0.01,
)


def test_a_step_that_memory_bounds() -> None:
    # 2 sequences, 10 tokens: (100 + 4 x 10) bytes / 100 = 1.4 s; (2 x 100 x 2 + 8 x 10) FLOP / 1000 = 0.48 s.
    cost = RooflineCost(hardware=PLAIN, model=TOY)
    assert cost.decode_s(2, 10, 1) == pytest.approx(1.4 + 0.25)
    # The second step has 12 tokens: 1.48 s.
    assert cost.decode_s(2, 10, 2) == pytest.approx(1.4 + 1.48 + 0.5)


def test_a_verified_token_costs_three_passes_over_its_logits() -> None:
    # 25 logits of 4 bytes, written once and read twice: 300 bytes a token, at 100 bytes/s, on one and on two devices.
    model = replace(TOY, vocab=25)
    assert RooflineCost(hardware=PLAIN, model=model).verify_s(7) == pytest.approx(21.0)
    assert RooflineCost(hardware=PLAIN, model=model, tensor_parallel=2).verify_s(7) == pytest.approx(10.5)
    assert RooflineCost(hardware=PLAIN, model=model, replicas=2).verify_s(7) == pytest.approx(10.5)


def test_a_step_that_arithmetic_bounds() -> None:
    # 20 sequences: (200 x 20 + 8 x 20) / 1000 = 4.16 s against (100 + 80) / 100 = 1.8 s.
    assert RooflineCost(hardware=PLAIN, model=TOY).decode_s(20, 20, 1) == pytest.approx(4.16 + 0.25)


def test_replicas_share_and_tensor_parallel_divides() -> None:
    # Two replicas with 1 of 2 sequences and 5 of 10 tokens: (100 + 20) / 100.
    assert RooflineCost(hardware=PLAIN, model=TOY, replicas=2).decode_s(2, 10, 1) == pytest.approx(1.2 + 0.25)
    # Two devices in parallel: half of 1.4 s, and two all-reduces in each of two layers.
    cost = RooflineCost(hardware=PLAIN, model=TOY, tensor_parallel=2)
    assert cost.decode_s(2, 10, 1) == pytest.approx(0.7 + 0.25 + 0.04)


def test_prefill_update_publication_and_memory() -> None:
    cost = RooflineCost(hardware=PLAIN, model=TOY)
    # 3 + 4 tokens, 6 + 10 pairs: (200 x 7 + 8 x 16) / 500 = 3.056 s, more than reading the weights in 1 s.
    assert cost.prefill_s([3, 4]) == pytest.approx(3.056 + 0.25)
    assert cost.prefill_s([1]) == pytest.approx(1.0 + 0.25)
    assert cost.prefill_s([]) == 0.0
    assert cost.update_s(10) == pytest.approx(6 * 100 * 10 / 250)
    assert cost.verify_s(7) == 0.0  # the toy has no vocabulary
    assert cost.publish_s() == pytest.approx(2.0)
    assert cost.kv_tokens == (500 - 100) // 4
    assert RooflineCost(hardware=PLAIN, model=TOY, replicas=3).kv_tokens == 300


@settings(max_examples=200, deadline=None)
@given(
    running=st.integers(1, 60),
    context=st.integers(0, 4000),
    steps=st.integers(0, 60),
    flops=st.sampled_from([50, 300, 2e3]),
)
def test_the_closed_form_is_the_sum_of_single_steps(running: int, context: int, steps: int, flops: float) -> None:
    hardware = Hardware(**{name: getattr(PLAIN, name) for name in Hardware.__slots__} | {"flops": flops})
    cost = RooflineCost(hardware=hardware, model=TOY)
    single = sum(cost.decode_s(running, context + i * running, 1) for i in range(steps))
    assert cost.decode_s(running, context, steps) == pytest.approx(single)


def test_the_bound_changes_sides_within_one_call() -> None:
    # max(1.0 + 0.04 i, 0.9 + 0.09 i) for i = 0 ... 3: 1.0, 1.04, 1.08 (equal there), then 1.17.
    cost = _sum_of_larger((1.0, 0.04), (0.9, 0.09), 4)
    assert cost == pytest.approx(1.0 + 1.04 + 1.08 + 1.17)
    assert _sum_of_larger((0.9, 0.09), (1.0, 0.04), 4) == pytest.approx(cost)


def test_drafts_are_used_where_they_are_faster() -> None:
    plain, drafted = RooflineCost(hardware=PLAIN, model=TOY), RooflineCost(hardware=PLAIN, model=TOY, draft_tokens=4.0)
    # One sequence, no context: 8 positions take 8 x 200 / 1000 = 1.6 s of arithmetic, more than reading the weights in
    # 1 s. Four tokens for 1.6 + .25 s are faster than one for 1.25 s.
    assert plain.decode_s(1, 0, 1) == pytest.approx(1.25)
    assert drafted.decode_s(1, 0, 1) == pytest.approx(1.85 / 4)
    # Five sequences: 8.25 s for 4 tokens each, and without drafts 1.25 s for one each.
    assert drafted.decode_s(5, 0, 1) == plain.decode_s(5, 0, 1) == pytest.approx(1.25)


def test_drafts_need_a_cost_of_positions_and_a_possible_number() -> None:
    with pytest.raises(ConfigError, match="add --cost roofline"):
        load_cost("unit", draft_tokens=2.0)
    with pytest.raises(ConfigError, match="1 to 8 tokens a pass, not 9"):
        load_cost("roofline", draft_tokens=9.0)


def test_llama_on_h100_is_in_the_right_range() -> None:
    cost = load_cost("roofline", hardware="H100", model="llama-3.1-8b", longest=8448)
    assert isinstance(cost, RooflineCost)
    assert cost.model.kv_bytes == 131_072
    # Weights alone: 16.06 GB at 0.8 x 3.35 TB/s = 5.99 ms, and 2 ms of overhead.
    assert cost.decode_s(1, 0, 1) == pytest.approx(7.99e-3, rel=1e-2)
    # (0.9 x 80 - 16.06) GB of 131,072 bytes each.
    assert cost.kv_tokens == pytest.approx(426_800, rel=1e-2)


def test_unit_costs_steps_only() -> None:
    cost = load_cost("unit")
    assert isinstance(cost, UnitCost)
    assert cost.decode_s(7, 1000, 5) == 5.0
    assert cost.prefill_s([100]) == cost.publish_s() == cost.update_s(1000) == 0.0


def test_every_preset_loads() -> None:
    assert preset_names("hardware") == ["a100", "cpu", "h100", "rtx4090"]
    for hardware in preset_names("hardware"):
        for model in preset_names("models"):
            load_cost("roofline", hardware=hardware, model=model, tensor_parallel=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "rofline"}, "unknown cost model 'rofline': did you mean roofline"),
        ({"hardware": "h10"}, "unknown hardware 'h10': did you mean h100"),
        ({"model": "llama-8b"}, "unknown model 'llama-8b': did you mean llama-3.1-8b"),
        ({"tensor_parallel": 0}, "tensor-parallel must be at least 1"),
        ({"replicas": -1}, "replicas must be at least 1"),
        ({"model": "qwen2.5-32b", "longest": 32_000}, "may need 32,000: raise --tensor-parallel"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_cost(**{"kind": "roofline", **options})
