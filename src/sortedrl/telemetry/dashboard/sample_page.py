"""One sample as the dashboard shows it: its prompt, its answer token by token with versions, and its life.

Reads the run's ledger. How to decode comes from outside, since tokenizers belong to learners. What it keeps true: text
is handed out as text, control characters shown as escapes, so that a browser never takes it for anything else; an
answer without end is cut, and says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.sample_history import SampleHistory, read_history
from sortedrl.reward.worker import printable

Decode = Callable[[list[int]], str]

MAX_TOKENS = 20_000
_CONTEXT = 6  # tokens before one that its spelling may depend on
_MAX_PROMPT = 20_000


def tell_sample(run_dir: Path, sample: int, find_decode: Callable[[], Decode | None]) -> dict[str, Any]:
    """All that a page shows about one sample, as plain JSON.

    `find_decode` is asked when the sample has been found: to import a tokenizer takes seconds.
    """
    with Ledger(run_dir) as ledger:
        life = read_history(ledger, sample)
        content = next(ledger.rows("SELECT content FROM prompts WHERE id = ?", life.prompt), ("",))[0]
    tokens = (life.tokens or [])[:MAX_TOKENS]
    decode = find_decode()
    texts = spell(tokens, decode) if decode is not None else [f"{token} " for token in tokens]
    return {
        "sample": life.sample,
        "cohort": life.cohort,
        "prompt": _visible(_prompt_text(content)),
        "state": str(life.state),
        "num_tokens": sum(count for _, count in life.runs),
        "is_spelled": decode is not None,
        "is_cut": life.tokens is not None and len(life.tokens) > MAX_TOKENS,
        "has_tokens": life.tokens is not None,
        "tokens": [[_visible(text), token, version] for text, token, version in _zip(texts, tokens, life)],
        "moments": [
            {
                "step": moment.step,
                "attempt": moment.attempt,
                "version": moment.version,
                "gained": moment.gained,
                "kept": moment.kept,
                "thrown": moment.thrown,
                "held": moment.held,
                "note": _visible(moment.note),
            }
            for moment in life.moments
        ],
    }


def _zip(texts: Sequence[str], tokens: Sequence[int], life: SampleHistory) -> list[tuple[str, int, int]]:
    versions = [version for version, count in life.runs for _ in range(count)]
    return list(zip(texts, tokens, versions, strict=False))


def spell(tokens: Sequence[int], decode: Decode) -> list[str]:
    """What each token adds to the text; one that ends within a character leaves it to the one that ends that."""
    texts: list[str] = []
    pending = 0  # tokens before this one that have not been spelled
    for position in range(len(tokens)):
        start = max(position - pending - _CONTEXT, 0)
        before = decode(list(tokens[start : position - pending]))
        after = decode(list(tokens[start : position + 1]))
        if after.endswith("\ufffd") and pending < 4 and position + 1 < len(tokens):
            pending += 1
            texts.append("")
            continue
        pending = 0
        texts.append(after[len(before) :] if after.startswith(before) else decode([tokens[position]]))
    return texts


def _prompt_text(content: str) -> str:
    """The prompt of a row: text, or the messages of a chat."""
    try:
        value = json.loads(content)
    except ValueError:
        return content
    if isinstance(value, list):
        lines = [f"{part.get('role')}: {part.get('content')}" for part in value if isinstance(part, dict)]
        return "\n".join(lines)
    return value if isinstance(value, str) else content


def _visible(text: str) -> str:
    """Line breaks and tabs stay; other control characters are shown as escapes."""
    return printable(text[:_MAX_PROMPT], keep="\n\t")
