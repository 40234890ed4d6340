"""Reward functions that misbehave, for the fuzzer. Which answers they do it for follows from the answer alone."""

from __future__ import annotations

import os
import time
import zlib
from typing import Any

from fuzz import hits

_FAULT = "reward chaos"


def _number(completion: Any) -> int:
    return zlib.crc32(str(completion).encode()) % 100


def chaos_mild(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Raises for one answer in twenty."""
    numbers = [_number(completion) for completion in completions]
    if any(number < 5 for number in numbers):
        hits.note(_FAULT)
        raise ValueError("an answer that this reward cannot judge\x1b[31m\n" + "x" * 10_000)
    return [number / 100 for number in numbers]


def chaos_wild(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Dies, prints megabytes, sleeps a little, or returns what is not a number, for one answer in ten."""
    rewards = []
    for number in map(_number, completions):
        if number <= 4:
            hits.note(_FAULT)
        if number == 0:
            os._exit(7)
        if number == 1:
            print("y" * 1_000_000)
        if number == 2:
            time.sleep(0.2)
        rewards.append(float("nan") if number in (3, 4) else number / 100)
    return rewards


def length(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """The length of an answer: a reward for rows of any kind."""
    return [len(completion) / 100 for completion in completions]
