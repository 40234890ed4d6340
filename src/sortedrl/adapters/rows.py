"""Samples from plain rows: what the controller loads when another trainer owns the data.

A `RowStream` turns rows into prompts, and `tasks/loader.py` makes samples of them. A row is a dict with `prompt` and
further columns. Guarantees: the n-th prompt depends on n only, so the position in the data is one number, which a
ledger has too; a row keeps its id in every epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sortedrl.errors import DataError
from sortedrl.records import Prompt
from sortedrl.tasks.base import RowSequence, check_row

Encode = Callable[[Any], Sequence[int]]
"""Turns the `prompt` of a row, text or chat messages, into tokens."""
Order = Callable[[int], tuple[int, int]]
"""The epoch and the row's number at a position of the stream."""


@dataclass(slots=True, kw_only=True)
class RowStream:
    """The prompts of `rows` in the order of `order`, without end."""

    rows: RowSequence
    encode: Encode
    order: Order
    max_prompt_tokens: int
    cursor: int = 0  # prompts taken so far

    def take(self, num_prompts: int) -> list[tuple[int, Prompt]]:
        """Return the next prompts, each with its epoch."""
        taken = [self._at(position) for position in range(self.cursor, self.cursor + num_prompts)]
        self.cursor += num_prompts
        return taken

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.cursor = state["cursor"]

    def _at(self, position: int) -> tuple[int, Prompt]:
        epoch, number = self.order(position)
        row = dict(self.rows[number])
        where = f"row/{number}"
        check_row(row, where)
        tokens = tuple(int(token) for token in self.encode(row["prompt"]))
        if not 0 < len(tokens) <= self.max_prompt_tokens:
            raise DataError(
                f"the prompt of row {number} has {len(tokens)} tokens, and between 1 and {self.max_prompt_tokens} are "
                "allowed: leave out that row, or raise max_prompt_tokens"
            )
        columns = {name: value for name, value in row.items() if name != "prompt"}
        return epoch, Prompt(id=where, tokens=tokens, content=row["prompt"], columns=columns)


def shuffled(num_rows: int, seed: int) -> Order:
    """Every row once per epoch, in an order that depends on seed and epoch."""
    if num_rows < 1:
        raise DataError("the dataset is empty: give it at least one row")
    kept: dict[int, list[int]] = {}  # the order of the last epoch that was asked for

    def at(position: int) -> tuple[int, int]:
        epoch, offset = divmod(position, num_rows)
        if epoch not in kept:
            kept.clear()
            kept[epoch] = list(range(num_rows))
            random.Random(f"{seed}/{epoch}").shuffle(kept[epoch])
        return epoch, kept[epoch][offset]

    return at


def sampled(epochs: Callable[[], Sequence[int]]) -> Order:
    """The order of a host's own sampler: each call of `epochs` returns the row numbers of its next epoch.

    A resumed run asks for the earlier epochs again, so the sampler must begin with the first one.
    """
    known: list[tuple[int, int]] = []
    num_epochs = 0

    def at(position: int) -> tuple[int, int]:
        nonlocal num_epochs
        while position >= len(known):
            numbers = epochs()
            if not numbers:
                raise DataError("the trainer's sampler gives no rows: the dataset is smaller than one batch")
            known.extend((num_epochs, int(number)) for number in numbers)
            num_epochs += 1
        return known[position]

    return at
