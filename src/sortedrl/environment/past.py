"""What past turns of a trajectory left behind, and the turn that follows from it.

`environment/loop.py` keeps past turns for training, where the ledger gives them back after a resume, and
`environment/answers.py` for evaluation. Both make the turns that they submit here.

Guarantees: a call that was not made, or did not return, is not among those that are made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sortedrl.environment.base import ToolCall, Turn, TurnResult
from sortedrl.records import Sample

_DEADLY = ("timeout", "died", "malformed result", "not called")  # errors after which there is no object
_UNHEARD = (*_DEADLY, "malformed")  # errors of calls that changed no state, or hang


@dataclass(slots=True, kw_only=True, frozen=True)
class PastTurn:
    """What is needed to bring the state after a turn back: its snapshot, and the calls that must not be made again."""

    state: Any = None
    unheard: frozenset[int] = frozenset()
    is_over: bool = False  # no object was left after it
    is_last: bool = False  # no token was written after it: the answer ended with it, or has started over


def past_turn(result: TurnResult) -> PastTurn:
    """What the result of a turn leaves behind."""
    unheard = frozenset(place for place, made in enumerate(result.results) if made.error in _UNHEARD)
    return PastTurn(state=result.state, unheard=unheard, is_over=result.is_over)


def past_turns(rows: Iterable[tuple[int, int, int, str, str | None, int]]) -> dict[int, dict[int, PastTurn]]:
    """What the ledger's rows of calls (sample, turn, index, error, state, is last) tell, by sample and turn."""
    past: dict[int, dict[int, PastTurn]] = {}
    for sample, turn, index, error, state, is_last in rows:
        turns = past.setdefault(sample, {})
        before = turns[turn] if index and turn in turns else PastTurn()
        turns[turn] = PastTurn(
            state=None if state is None else json.loads(state),
            unheard=before.unheard | {index} if error in _UNHEARD else before.unheard,
            is_over=before.is_over or error in _DEADLY,
            is_last=bool(is_last),
        )
    return past


def following_turn(
    sample: Sample,
    serial: int,
    number: int,
    made: Sequence[Sequence[ToolCall]],
    past: Mapping[int, PastTurn],
    **asked: Any,
) -> Turn:
    """The turn after the `number` turns that the object has been through, which `made` these calls."""
    history: list[list[ToolCall]] = []
    for place, calls in enumerate(made):
        unheard = past[place].unheard if place in past else frozenset()
        history.append([call for i, call in enumerate(calls) if not call.error and i not in unheard])
    return Turn(
        sample=sample.id,
        serial=serial,
        number=number,
        row={**sample.prompt.columns, "prompt": sample.prompt.content},
        history=history,
        state=past[number - 1].state if number - 1 in past else None,
        **asked,
    )
