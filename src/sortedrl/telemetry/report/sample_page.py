"""One sample as report and dashboard show it: prompt, answer token by token with versions and log-probs, and history.

It reads the run's ledger. The caller supplies the function that decodes tokens, because tokenizers belong to learners.
Guarantees: control characters are shown as escapes, so that a browser takes text only as text. A very long answer is
cut, and the result says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.sample_history import SampleHistory, read_history
from sortedrl.reward.worker import printable

Decode = Callable[[list[int]], str]

_MAX_TOKENS = 20_000
_CONTEXT = 6  # preceding tokens that the text of a token may depend on
_MAX_PROMPT = 20_000
_MAX_TOKEN_TEXT = 400  # characters; a token of a hostile tokenizer may be longer


def describe_sample(run_dir: Path, sample: int, find_decode: Callable[[], Decode | None]) -> dict[str, Any]:
    """Return all that a page shows about one sample, as plain JSON.

    `find_decode` is called only once the sample has been found, because importing a tokenizer takes seconds.
    """
    with Ledger(run_dir) as ledger:
        history = read_history(ledger, sample)
        content = next(ledger.rows("SELECT content FROM prompts WHERE id = ?", history.prompt), ("",))[0]
    decode = find_decode()
    return {
        "sample": history.sample,
        "cohort": history.cohort,
        "prompt": visible(prompt_text(content)),
        "state": str(history.state),
        "num_tokens": sum(count for _, count in history.runs),
        "is_spelled": decode is not None,
        "is_cut": history.tokens is not None and len(history.tokens) > _MAX_TOKENS,
        "has_tokens": history.tokens is not None,
        "tokens": _tokens(history, decode),
        "moments": [
            {
                "step": moment.step,
                "attempt": moment.attempt,
                "version": moment.version,
                "gained": moment.gained,
                "kept": moment.kept,
                "thrown": moment.thrown,
                "held": moment.held,
                "note": visible(moment.note),
            }
            for moment in history.moments
        ],
    }


def _tokens(history: SampleHistory, decode: Decode | None) -> list[list[Any]]:
    """Return [text, number, version, log-prob] for each token; without log-prob if it was not sampled."""
    tokens = (history.tokens or [])[:_MAX_TOKENS]
    texts = spell(tokens, decode) if decode is not None else [f"{token} " for token in tokens]
    versions = [version for version, count in history.runs for _ in range(count)]
    logprobs = history.logprobs if history.logprobs is not None else [math.nan] * len(tokens)
    return [
        [visible(text, _MAX_TOKEN_TEXT), token, version, None if is_fed else _logprob(logprob)]
        for text, token, version, logprob, is_fed in zip(
            texts, tokens, versions, logprobs, history.is_fed, strict=False
        )
    ]


def _logprob(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def spell(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds.

    A token that ends in the middle of a character adds "". The token that completes the character adds all of it.
    """
    texts: list[str] = []
    pending = 0  # preceding tokens whose text is not complete
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


def prompt_text(content: str) -> str:
    """Return a prompt as text; the ledger stores text, or the messages of a chat."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if isinstance(value, list):
        lines = [f"{part.get('role')}: {part.get('content')}" for part in value if isinstance(part, dict)]
        return "\n".join(lines)
    return value if isinstance(value, str) else content


def visible(text: str, limit: int = _MAX_PROMPT) -> str:
    """Replace control characters by escapes, except line breaks and tabs, and cut the text to `limit` characters."""
    shown = printable(text[:limit], keep="\n\t")
    return shown if len(text) <= limit else shown + "…"
