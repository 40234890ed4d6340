"""Trajectories in a simulation: where the turns of an answer end, and how long its tools take.

`simulate/run.py` uses it with the same controller and turn loop as a run. `--tools "3 x 20"` draws trajectories with
three turns in tools on average, of 20 seconds on average; on the unit clock a second is a decode step. `--tools RUN`
takes turns and seconds from a run's own trajectories of about the same length. The answer's tokens of the trace are
divided evenly over its turns. Guarantees: turns and times depend on the sample and the seed only, so that every
strategy gets the same.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sortedrl.engine.base import Request
from sortedrl.environment.base import ToolCall, ToolResult, Turn, TurnResult
from sortedrl.errors import DataError
from sortedrl.records import Sample
from sortedrl.simulate.answers import TraceAnswers
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import BatchTaken, ToolsReturned

FED_TOKENS = 8  # what a tool returns
_SPREAD = 1.0  # of the lognormal distribution of tool seconds
_NEIGHBOURS = 8  # trajectories of a run from which an answer's turns are drawn
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*x\s*(\d+(?:\.\d+)?)\s*", re.ASCII)


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolTrace:
    """`ends[i]` are the lengths at which the turns of answer i end, the last one being the whole answer.

    `seconds[i]` is the time that each of its tools takes; after each of them `fed` tokens are fed.
    """

    ends: Sequence[Sequence[int]]
    seconds: Sequence[Sequence[float]]
    fed: int = FED_TOKENS

    @property
    def longest(self) -> int:
        return max(ends[-1] for ends in self.ends)


def draw_tools(text: str, lengths: Sequence[int], seed: int) -> ToolTrace:
    """Draw the turns of a trace's answers as `--tools` says: mean number of turns in tools x mean seconds, or a run."""
    match = _FORM.fullmatch(text)
    rng = np.random.default_rng((seed, 2))
    if match is None:
        path = Path(text)
        if not path.exists():
            raise DataError(
                f"--tools {text!r:.40} is not understood: write turns x seconds, as in '3 x 20', or name the directory "
                "of a run with tools"
            )
        return _as_in_run(path / "events.jsonl" if path.is_dir() else path, lengths, rng)
    mean_turns, mean_s = float(match[1]), float(match[2])
    turns = rng.poisson(mean_turns, size=len(lengths)).tolist()
    ends: list[list[int]] = []
    seconds: list[list[float]] = []
    for length, drawn in zip(lengths, turns, strict=True):
        count = min(drawn, max(length - 1, 0))
        ends.append(_ends(length, count, FED_TOKENS))
        drawn_s = rng.lognormal(0.0, _SPREAD, size=count) * (mean_s / np.exp(_SPREAD**2 / 2))
        seconds.append(drawn_s.tolist())
    return ToolTrace(ends=ends, seconds=seconds)


def _ends(length: int, count: int, fed: int) -> list[int]:
    """Where the turns of an answer end whose own `length` tokens are divided evenly by `count` tools."""
    parts = [(place + 1) * length // (count + 1) for place in range(count + 1)]
    return [part + place * fed for place, part in enumerate(parts)]


def _as_in_run(path: Path, lengths: Sequence[int], rng: np.random.Generator) -> ToolTrace:
    """Every answer gets the turns of one of the run's trajectories whose lengths are closest to its own.

    Lengths of a run include what its tools returned, so the model's own tokens are what is left.
    """
    known, fed = _run_trajectories(path)
    sizes = [size for size, _ in known]
    ends: list[list[int]] = []
    seconds: list[list[float]] = []
    for length in lengths:
        place = (bisect_left(sizes, length) + bisect_right(sizes, length)) // 2
        first = min(max(place - _NEIGHBOURS // 2, 0), max(len(known) - _NEIGHBOURS, 0))
        drawn = known[first + int(rng.integers(min(_NEIGHBOURS, len(known))))][1]
        count = min(len(drawn), max((length - 1) // (fed + 1), 0))
        ends.append(_ends(length - count * fed, count, fed))
        seconds.append(drawn[:count])
    return ToolTrace(ends=ends, seconds=seconds, fed=fed)


def _run_trajectories(path: Path) -> tuple[list[tuple[int, list[float]]], int]:
    """Length and tool seconds of each trained trajectory, by length, and the mean number of fed tokens."""
    turns: dict[int, dict[int, float]] = {}
    lengths: dict[int, int] = {}
    fed: list[int] = []
    for event in read_events(path):
        if isinstance(event, BatchTaken):
            lengths.update(zip(event.samples, event.lengths, strict=True))
        elif isinstance(event, ToolsReturned) and event.outcome in ("fed", "complete"):
            kept = {turn: s for turn, s in turns.get(event.sample, {}).items() if turn < event.turn}
            turns[event.sample] = {**kept, event.turn: event.seconds}  # a replay may have lost later turns
            fed += [event.num_fed] if event.num_fed else []
    if not lengths or not fed:
        raise DataError(f"{path} has no trained trajectory with tools: name a run with tools, or write '3 x 20'")
    found = [(length, list(turns.get(sample, {}).values())) for sample, length in lengths.items()]
    return sorted(found), max(round(sum(fed) / len(fed)), 1)


class TurnAnswers(TraceAnswers):
    """The answers of a trace whose turns end where a `ToolTrace` says."""

    def __init__(self, tools: ToolTrace, seeds: Sequence[int], **settings: Any) -> None:
        super().__init__([ends[-1] for ends in tools.ends], seeds, **settings)
        self.tools = tools

    def is_complete(self, request: Request, length: int, version: int) -> bool:
        ends = self.tools.ends[request.sample]
        place = bisect_right(ends, length)
        return place > 0 and ends[place - 1] == length

    def end(self, request: Request, length: int, version: int) -> int:
        ends = self.tools.ends[request.sample]
        place = bisect_right(ends, length)
        return ends[place] if place < len(ends) else length + 1


@dataclass(slots=True, kw_only=True, frozen=True)
class TraceTools:
    """The dialect and the work of simulated tools."""

    tools: ToolTrace

    def calls(self, sample: Sample) -> list[ToolCall]:
        is_last = sample.num_tokens >= self.tools.ends[sample.id][-1]
        return [] if is_last else [ToolCall(name="tool")]

    def history(self, sample: Sample) -> list[list[ToolCall]]:
        return []

    def fed(self, calls: Sequence[ToolCall], texts: Sequence[str]) -> bytes:
        return bytes(self.tools.fed)

    def work(self, turn: Turn) -> tuple[TurnResult, float]:
        seconds = self.tools.seconds[turn.sample][turn.number]
        result = TurnResult(
            sample=turn.sample,
            serial=turn.serial,
            number=turn.number,
            results=[ToolResult(text="", seconds=seconds) for _ in turn.calls],  # a turn has one
        )
        return result, seconds
