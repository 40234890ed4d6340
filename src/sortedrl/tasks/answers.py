r"""Where in a response its answer is: the last `\boxed{...}`, or between `<answer>` and `</answer>`.

The verifiers of math.py, logic.py and gym.py use it on text that a model wrote, so that every function here takes time
linear in the text, whatever is in it. Standard library only.
"""

from __future__ import annotations

OPEN, CLOSE = "<answer>", "</answer>"
BOXED = "\\boxed"
THOUGHT_END = "</think>"


def after_thought(text: str) -> str:
    """What follows the model's thinking, or all of it when there is no end of that."""
    return text.rpartition(THOUGHT_END)[2]


def tagged(text: str) -> str | None:
    """What the last pair of answer tags encloses."""
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, end) if end >= 0 else -1
    return text[start + len(OPEN) : end].strip() if start >= 0 else None


def only_tagged(text: str) -> str | None:
    """What the one pair of answer tags encloses; None when there is another tag, or text behind it."""
    if text.count(OPEN) != 1 or text.count(CLOSE) != 1:
        return None
    rest = text.partition(OPEN)[2]
    content, closing, behind = rest.partition(CLOSE)
    return content.strip() if closing and not behind.strip() else None


def boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` encloses, braces counted; `\boxed 5` gives its word."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    rest = text[start + len(BOXED) :].lstrip()
    if not rest.startswith("{"):
        words = rest.split(None, 1)
        return words[0].rstrip("$.,") or None if words else None
    depth = 0
    for place, char in enumerate(rest):
        if char in "{}" and (place == 0 or rest[place - 1] != "\\"):
            depth += 1 if char == "{" else -1
            if depth == 0:
                return rest[1:place].strip()
    return None  # cut off by the token budget
