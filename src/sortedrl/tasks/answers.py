r"""Finds the answer in a response: the last `\boxed{...}`, or the text between `<answer>` and `</answer>`.

The verifiers in math.py, logic.py, gym.py and suites.py use it on text that a model wrote. Guarantees: every function
takes time linear in the length of the text.
"""

from __future__ import annotations

from typing import Any

_OPEN, _CLOSE = "<answer>", "</answer>"
_BOXED = "\\boxed"
_THOUGHT_END = "</think>"


def completion_text(completion: Any) -> str:
    """The text of a completion, which is a list of messages in chats."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def after_thought(text: str) -> str:
    """The text after the last `</think>`, or the whole text without one."""
    return text.rpartition(_THOUGHT_END)[2]


def tagged(text: str) -> str | None:
    """The text between the last pair of answer tags, if there is one."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end].strip() if start >= 0 else None


def only_tagged(text: str) -> str | None:
    """The text between the only pair of answer tags; None if there are more tags, or text after them."""
    if text.count(_OPEN) != 1 or text.count(_CLOSE) != 1:
        return None
    rest = text.partition(_OPEN)[2]
    content, closing, behind = rest.partition(_CLOSE)
    return content.strip() if closing and not behind.strip() else None


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, nested braces included; `\boxed 5` gives the next word."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    rest = text[start + len(_BOXED) :].lstrip()
    if not rest.startswith("{"):
        words = rest.split(None, 1)
        return words[0].rstrip("$.,") or None if words else None
    depth = 0
    for place, char in enumerate(rest):
        if char in "{}" and (place == 0 or rest[place - 1] != "\\"):
            depth += 1 if char == "{" else -1
            if depth == 0:
                return rest[1:place].strip()
    return None  # cut off by the token limit
