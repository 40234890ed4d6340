"""What a slot costs, worked out by hand, and the sentences that a plan says about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sortedrl.cli import app
from sortedrl.engine.sim.cost import UnitCost
from sortedrl.simulate.explanation import ConstantSteps, Explanation, StepCost
from sortedrl.simulate.fit import FittedCost
from sortedrl.simulate.plan import Workload, explain, search
from sortedrl.simulate.traces import load_trace


def fitted(**changes: float) -> FittedCost:
    zeros = dict.fromkeys(FittedCost.__dataclass_fields__, 0.0) | {"prompt_tokens": 0, "apart": None, "kv_tokens": None}
    return FittedCost(**{**zeros, **changes})  # pyright: ignore[reportArgumentType]


def explanation(fixed: float, slope: float, speedup: float, update_share: float = 0.0) -> str:
    step = StepCost(fixed_s=fixed, per_sequence_s=slope, slots=16)
    found = Explanation(step=step, settings="sorted", speedup=speedup, constant_speedup=1.6, update_share=update_share)
    return " ".join(found.sentences())


def test_a_step_is_a_line_over_the_running_sequences() -> None:
    # 3 ms, 1 ms more for several sequences, 2 ms per sequence, and 1 us for each of its 100 or 101 positions.
    cost = fitted(base_s=3e-3, several_s=1e-3, slot_s=2e-3, window_s=1e-6, poll_s=5.0)
    step = StepCost.of(cost, slots=10, context=100)
    per_sequence = 2e-3 + 1e-6 * (100 + 1)
    assert step.per_sequence_s == pytest.approx(per_sequence)
    assert step.fixed_s == pytest.approx(4e-3)
    assert step.fixed_share == pytest.approx(4e-3 / (4e-3 + 10 * per_sequence))


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_a_constant_step_is_paid_for_idle_slots_too(slots: int) -> None:
    step = StepCost.of(UnitCost(step_s=2.0), slots=slots, context=50)
    assert (step.fixed_s, step.per_sequence_s, step.fixed_share) == (2.0, 0.0, 1.0)
    cost = ConstantSteps(cost=fitted(slot_s=1.0, update_base_s=7.0, publication_s=3.0, call_s=5.0), step_s=2.0)
    assert [cost.decode_s(running, 100, 4) for running in (1, slots)] == [8.0, 8.0]
    assert (cost.update_s(10), cost.publish_s(), cost.prefill_s([4, 9]), cost.prefill_s([])) == (7.0, 3.0, 2.0, 0.0)
    assert cost.kv_tokens is None


def test_the_sentences_say_what_an_idle_slot_costs() -> None:
    cheap = explanation(1e-3, 1e-3, 0.99)
    assert "a decode step grows with the sequences that it runs (1 ms + 1 ms per running sequence)" in cheap
    assert "an idle slot costs 6% of a busy one, so idle slots cost little" in cheap
    assert "sorted runs at 0.99x the speed of sync, which is the same within 5 %." in cheap
    assert "however many sequences they decode or prefill, it would run at 1.60x." in cheap
    dear = explanation(1.0, 1e-3, 1.5, update_share=0.5)
    assert "hardly grows" in dear
    assert "costs 98% of a busy one, nearly as much: sorted runs at 1.50x the speed of sync." in dear
    assert "would run at" not in dear
    assert "Updates take 50% of the time of sync" in dear
    assert "0.80x the speed of sync, because prefilling interrupted answers again" in explanation(1.0, 1.0, 0.8)


def test_sorting_wins_where_idle_slots_cost_and_not_where_they_are_free() -> None:
    trace = load_trace("lognormal(60, 1.1, 500)", samples=256)
    by_cost = {}
    for name, cost in {"constant": fitted(base_s=1e-3), "growing": fitted(slot_s=1e-3)}.items():
        workload = Workload(trace=trace, slots=16, update_batch=16, cost=cost, prompt_tokens=0, divergence=0.0)
        by_cost[name] = explain(search(workload, num_candidates=1))
    assert by_cost["constant"].speedup > by_cost["constant"].constant_speedup > 1.5  # prefills are free, or a step
    assert by_cost["growing"].speedup == pytest.approx(1.0, abs=0.01)  # each token costs the same, whatever the order
    assert by_cost["growing"].constant_speedup == pytest.approx(by_cost["constant"].constant_speedup)


def test_the_command_explains_its_advice(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.json"
    trace.write_text(json.dumps([5, 9, 40, 7] * 16))
    options = ["plan", "--trace", str(trace), "--slots", "8", "--candidates", "2"]
    said = CliRunner().invoke(app, options)
    assert "On this engine the time of a decode step" in said.stderr
    record = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert record["explanation"]["text"] in said.stderr.replace("\n", " ")
    assert 0 < record["explanation"]["step"]["fixed_share"] <= 1
