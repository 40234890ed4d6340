"""The reward of this example, in a module that worker processes import: `task.reward = "rewards:ends_cleanly"`."""

from __future__ import annotations

from typing import Any


def ends_cleanly(prompts: list[str], completions: list[str], tier: list[str], **columns: Any) -> list[float]:
    """Up to 1 for short answers; answers to hard puzzles may be twice as long."""
    allowed = [200 if level == "hard" else 100 for level in tier]
    return [max(0.0, 1 - len(text.split()) / limit) for text, limit in zip(completions, allowed, strict=True)]
