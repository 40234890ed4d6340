"""The length estimator: its estimates, worked out by hand, and its record of how good they were."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sortedrl.lengths import Calibration, LengthEstimator
from sortedrl.simulate.run import simulate
from sortedrl.simulate.tools import ToolTrace
from sortedrl.simulate.traces import Trace
from sortedrl.telemetry.events import AttemptStarted


def taught(**lengths: list[int]) -> LengthEstimator:
    estimator = LengthEstimator()
    for prompt, values in lengths.items():
        for value in values:
            estimator.learn([(-1, prompt, value)])
    return estimator


def test_nothing_is_known_at_first() -> None:
    assert LengthEstimator().expected("a") == 0.0
    assert LengthEstimator().expected("a", reached=7) == 7.0


def test_finished_siblings_are_averaged_before_anything_was_trained() -> None:
    assert LengthEstimator().expected("a", finished=[10, 30]) == 20.0


def test_an_unknown_prompt_is_guessed_at_the_mean_over_all() -> None:
    assert taught(a=[10, 20], b=[60]).expected("c") == 30.0


def test_own_answers_are_drawn_towards_the_mean_over_all() -> None:
    # Over all: (10 + 20 + 60) / 3 = 30, which counts as one answer. Own: 10, 20, and a finished sibling of 40.
    assert taught(a=[10, 20], b=[60]).expected("a", finished=[40]) == (30 + 10 + 20 + 40) / 4


def test_never_below_what_the_sample_has_reached() -> None:
    assert taught(a=[10, 20]).expected("a", reached=16) == 16.0
    assert taught(a=[10, 20]).expected("a", reached=14) == 15.0


def test_time_in_tools_counts_as_the_tokens_that_a_slot_decodes_in_it() -> None:
    estimator = taught(a=[10, 20], b=[60])
    assert estimator.expected_tool_tokens("a", reached_s=9.0) == 0.0  # the speed is not known yet
    estimator.learn_speed(30, 10.0)
    estimator.learn_speed(10, 10.0)  # together two tokens a second
    assert estimator.expected_tool_tokens("a") == 0.0
    estimator.learn_tool_time([("a", 4.0), ("b", 14.0)])  # over all 18 s in 3 answers; one of a's called no tool
    assert estimator.expected_tool_tokens("c") == 2 * 6
    assert estimator.expected_tool_tokens("a") == pytest.approx(2 * (6 + 4) / 3)
    assert estimator.expected_tool_tokens("a", finished_s=[8.0]) == 2 * (6 + 4 + 8) / 4
    assert estimator.expected_tool_tokens("a", reached_s=5.0) == 2 * 5.0
    again = LengthEstimator.from_state_dict(estimator.state_dict())
    again.learn_speed(2, 1.0)
    assert again.expected_tool_tokens("c") == 2 * 6


def test_long_tools_start_first() -> None:
    """Two epochs of three prompts on one slot: in the second the prompt with short answers and long tools is first."""
    turns = [[3, 3 + 1 + 3], [3, 3 + 1 + 3], [2, 2 + 1 + 2]]
    tools = ToolTrace(ends=turns * 2, seconds=[[1.0], [1.0], [9.0]] * 2, fed=1)
    trace = Trace(lengths=[6, 6, 4] * 2, prompts=[0, 1, 2] * 2, cap=6, source="test")
    order: list[int] = []

    def note(event: Any) -> None:
        if isinstance(event, AttemptStarted) and event.attempt == 1 and event.sample >= 3:
            order.append(event.sample)

    for admission in ("load-order", "longest-expected-first"):
        order.clear()
        simulate(trace, strategy="sync", slots=1, update_batch=3, tools=tools, admission=admission, emit=note)
        assert order == ([3, 4, 5] if admission == "load-order" else [5, 3, 4])


def test_guesses_are_compared_with_what_was_trained() -> None:
    estimator = taught(a=[8], b=[32])  # over all 20
    estimator.start(1, "a")  # (20 + 8) / 2 = 14
    estimator.start(2, "b")  # (20 + 32) / 2 = 26
    estimator.start(3, "c")  # no own answers yet, so it is not counted
    estimator.learn([(1, "a", 7), (2, "b", 52), (3, "c", 1)])
    calibration = estimator.calibration
    assert (calibration.num_guesses, calibration.num_pairs, calibration.num_in_order) == (2, 1, 1)
    assert calibration.log_error == pytest.approx(math.log(2))  # 14 for 7, 26 for 52


def test_pairs_in_the_wrong_order_count_against_it() -> None:
    def in_order(*pairs: tuple[float, int]) -> float | None:
        calibration = Calibration()
        for guess, length in pairs:
            calibration.add(guess, length)
        return calibration.in_order

    assert in_order((1.0, 10)) is None
    assert in_order((1.0, 10), (2.0, 20)) == 1.0
    assert in_order((1.0, 10), (2.0, 9)) == 0.0
    assert in_order((1.0, 10), (1.0, 20)) is None  # a tie is not counted


def test_the_share_in_order_does_not_hang_on_the_order_of_training() -> None:
    """Estimates are wrong by factors from 1/2 to 2; in any order of training, the share is that over all pairs."""
    pairs = [(length * 2 ** math.sin(7 * length), length) for length in range(10, 1010)]
    true = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for n, a in enumerate(pairs) for b in pairs[:n]]
    shuffled = sorted(pairs, key=lambda pair: math.sin(1e4 * pair[1]))
    by_batch = [sorted(shuffled[n : n + 50], key=lambda pair: pair[1]) for n in range(0, 1000, 50)]
    for order in (shuffled, [pair for batch in by_batch for pair in batch]):
        calibration = Calibration()
        for guess, length in order:
            calibration.add(guess, length)
        assert len(calibration.earlier) == 256
        assert calibration.in_order == pytest.approx(sum(true) / len(true), abs=0.04)


def test_state_survives() -> None:
    estimator = taught(a=[10, 20], b=[60])
    again = LengthEstimator.from_state_dict(estimator.state_dict())
    assert again.expected("a") == estimator.expected("a")
    assert again.expected("c") == 30.0


def test_a_simulation_tells_how_good_its_guesses_were() -> None:
    """Two epochs of prompts of different lengths: only the second has estimates, all in the right order."""
    lengths = [10, 50, 20, 40, 30, 60]
    trace = Trace(lengths=lengths * 2, prompts=[*range(6), *range(6)], cap=64, source="by hand")
    shape = {"strategy": "sync", "slots": 6, "update_batch": 6}
    summary = simulate(trace, **shape)
    # The mean over all is 35, so each guess is (35 + length) / 2.
    errors = [abs(math.log((35 + length) / 2 / length)) for length in lengths]
    assert summary.length_in_order == 1.0
    assert summary.length_log_error == pytest.approx(sum(errors) / 6)
    once = Trace(lengths=lengths, prompts=range(6), cap=64, source="by hand")
    assert simulate(once, **shape).length_in_order is None
