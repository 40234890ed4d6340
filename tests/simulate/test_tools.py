"""Simulated trajectories: where turns end, what tools cost, and that a free slot pays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sortedrl.errors import DataError
from sortedrl.simulate.run import simulate
from sortedrl.simulate.tools import FED_TOKENS, ToolTrace, draw_tools
from sortedrl.simulate.traces import Trace, load_trace


def test_turns_divide_the_tokens_of_an_answer_and_are_the_same_for_a_seed() -> None:
    lengths = [40, 1, 300]
    drawn = draw_tools("2 x 5", lengths, seed=3)
    assert draw_tools("2 x 5", lengths, seed=3) == drawn
    for length, ends, seconds in zip(lengths, drawn.ends, drawn.seconds, strict=True):
        assert ends[-1] == length + FED_TOKENS * len(seconds)
        assert len(ends) == len(seconds) + 1
    many = draw_tools("3 x 20", [500] * 4000, seed=0)
    seconds = [second for each in many.seconds for second in each]
    assert len(seconds) / 4000 == pytest.approx(3, rel=0.05)
    assert sum(seconds) / len(seconds) == pytest.approx(20, rel=0.1)


def test_a_trajectory_alone_takes_its_tokens_and_its_tools() -> None:
    """10 tokens, a tool of 7 s, 5 more tokens: 22 steps on the unit clock, and 7 of them the slot is idle."""
    trace = Trace(lengths=[15], prompts=[0], cap=15, source="test")
    tools = ToolTrace(ends=[[10, 10 + 3 + 5]], seconds=[[7.0]], fed=3)
    summary = simulate(trace, strategy="sync", slots=1, update_batch=1, tools=tools)
    assert summary.wall_s == pytest.approx(22.0)
    assert summary.trained_tokens == 18
    assert summary.tools is not None
    assert (summary.tools["turns"], summary.tools["fed_tokens"], summary.tools["seconds"]) == (1, 3, 7.0)
    assert summary.slot_time is not None
    assert summary.slot_time["tool"] == pytest.approx(7 / 22)


def test_a_slot_that_is_free_during_tools_pays() -> None:
    trace = load_trace("lognormal(100, 0.5, 400)", samples=128, seed=1)
    tools = draw_tools("3 x 60", trace.lengths, seed=1)
    held, free = (
        simulate(trace, strategy="april", slots=8, update_batch=8, tools=tools, open_trajectories=bound)
        for bound in (8, "none")
    )
    assert held.samples == free.samples == 128
    assert (free.wall_s or 0) < 0.65 * (held.wall_s or 0)


def test_a_form_that_is_not_understood_is_refused() -> None:
    with pytest.raises(DataError, match="write turns x seconds, as in '3 x 20'"):
        draw_tools("often", [3], 0)


def test_turns_of_a_run(tmp_path: Path) -> None:
    """Short answers get the turns of the run's short trajectories, long ones those of its long trajectories."""
    path = tmp_path / "events.jsonl"
    lost = {"sample": 100, "attempt": 0, "turn": 1, "seconds": 99.0, "outcome": "fed", "num_fed": 4}
    lines: list[dict[str, Any]] = [{"kind": "RunStarted", "t": 0.0}, {"kind": "ToolsReturned", "t": 0.5, **lost}]
    for sample in range(20):  # ten with one tool and 10 tokens, ten with three tools and 100 tokens
        for turn in range(1 if sample < 10 else 3):
            told = {"sample": 91 + sample, "attempt": 0, "turn": turn, "seconds": 1.0 + turn, "outcome": "fed"}
            lines.append({"kind": "ToolsReturned", "t": 1.0, **told, "num_fed": 4})
    batch = {"update": 1, "version": 0, "samples": list(range(91, 111)), "lengths": [10] * 10 + [100] * 10}
    batch |= dict.fromkeys(("rewards", "staleness", "staleness_token_sum"), [0] * 20)
    lines.append({"kind": "BatchTaken", "t": 2.0, **batch, "truncated": 0, "num_interrupted": 0, "slot_s": 0.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = draw_tools(str(tmp_path), [10, 100, 3, 120], seed=0)
    assert drawn.fed == 4
    assert drawn.seconds == [[1.0], [1.0, 2.0, 3.0], [], [1.0, 2.0, 3.0]]
    assert drawn.ends == [[3, 10], [22, 48, 74, 100], [3], [27, 58, 89, 120]]
    path.write_text(
        json.dumps({"kind": "BatchTaken", "t": 2.0, **batch, "truncated": 0, "num_interrupted": 0, "slot_s": 0.0})
        + "\n"
    )
    with pytest.raises(DataError, match="has no trained trajectory with tools"):
        draw_tools(str(path), [3], 0)
