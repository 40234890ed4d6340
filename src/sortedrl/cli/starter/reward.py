"""The reward of this run. sortedrl imports this file in worker processes and calls `is_right` with batches of answers.

A reward function gets lists of equal length: the prompts, the answers that the model wrote (`completions`), and a list
for each column of the rows file that it names, such as `answer`. It returns one number per answer; more is better.
"""

from __future__ import annotations

from typing import Any


def is_right(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1.0 for each completion whose final answer is the row's `answer`, else 0.0."""
    return [float(final_answer(completion) == wanted) for completion, wanted in zip(completions, answer, strict=True)]


def final_answer(completion: str) -> str | None:
    """What the model wrote between the words `answer` and `done`; None if it did not finish its answer."""
    _, found, rest = completion.partition(" answer ")
    text, is_done, _ = rest.partition(" done")
    return text if found and is_done else None
