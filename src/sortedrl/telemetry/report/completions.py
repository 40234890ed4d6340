"""The completions that a page lists: the samples trained last, with prompt, answer, reward, length and staleness.

The report embeds them with their tokens, as far as they fit; the dashboard asks for the list and for single samples.
Both read the run's ledger. Guarantees: only samples of the updates that the page shows are listed. Text is cut to a
limit and free of control characters. A run without a ledger has no list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sortedrl.errors import LedgerError
from sortedrl.ledger.reader import FILE_NAME, Ledger
from sortedrl.ledger.sample_history import read_history
from sortedrl.telemetry.report.sample_page import (
    Decode,
    describe_sample,
    prompt_text,
    visible,
)

MAX_LISTED = 200
_MAX_EMBEDDED = 64  # completions of a report that have their tokens
_MAX_EMBEDDED_TOKENS = 24_000  # of all runs of a report together; a token takes about 25 bytes
_MAX_TEXT = 2_000  # characters of a prompt or an answer in the list

# The inner query chooses, so that the outer one looks up steps of those samples only.
_ROWS = """
SELECT t.sample, t.number, t.version, t.length, t.reward, t.staleness, s.cohort, s.prompt,
    (SELECT count(*) FROM steps WHERE sample = t.sample AND step = 'feed'),
    (SELECT value FROM steps WHERE sample = t.sample AND step = 'finish' ORDER BY seq DESC LIMIT 1)
FROM (SELECT * FROM trained WHERE number < ?1 ORDER BY number DESC, seq DESC LIMIT ?2) AS t
JOIN samples AS s ON s.id = t.sample
ORDER BY t.number DESC, t.seq DESC
"""


def list_completions(
    run_dir: Path, *, before_update: int, decode: Decode | None = None, limit: int = MAX_LISTED
) -> list[dict[str, Any]]:
    """Return the last samples trained before an update, newest first, as plain JSON.

    Without `decode` they have no answers. Returns an empty list if the run has no ledger.
    """
    if not (run_dir / FILE_NAME).is_file():
        return []
    with Ledger(run_dir) as ledger:
        found = list(ledger.rows(_ROWS, before_update, limit))
        return [_row(ledger, row, decode) for row in found]


def _row(ledger: Ledger, row: Sequence[Any], decode: Decode | None) -> dict[str, Any]:
    sample, update, version, length, reward, staleness, cohort, prompt, num_fed, ending = row
    content = next(ledger.rows("SELECT content FROM prompts WHERE id = ?", prompt), ("",))[0]
    answer = None
    if decode is not None:
        tokens = read_history(ledger, sample).tokens
        answer = None if tokens is None else visible(decode(tokens[:_MAX_TEXT]), _MAX_TEXT)
    return {
        "sample": sample,
        "update": update,
        "version": version,
        "cohort": cohort,
        "prompt": visible(prompt_text(content), _MAX_TEXT),
        "answer": answer,
        "reward": reward if isinstance(reward, int | float) and math.isfinite(reward) else None,
        "length": length,
        "staleness": staleness,
        "turns": num_fed + 1,
        "ending": visible(str(ending or ""), 40),
    }


def embedded_completions(
    runs: Sequence[tuple[str, Path, int]], find_decode: Callable[[Path], Decode | None] | None
) -> list[dict[str, Any]]:
    """Return for each run, given as (name, directory, updates), its list and the tokens of its last samples."""
    budget = _MAX_EMBEDDED_TOKENS // max(len(runs), 1)
    return [_embedded(name, run_dir, updates, budget, find_decode) for name, run_dir, updates in runs]


def _embedded(
    name: str, run_dir: Path, updates: int, budget: int, find_decode: Callable[[Path], Decode | None] | None
) -> dict[str, Any]:
    samples: dict[str, Any] = {}
    try:
        decode = find_decode(run_dir) if find_decode is not None and (run_dir / FILE_NAME).is_file() else None
        rows = list_completions(run_dir, before_update=updates, decode=decode, limit=_MAX_EMBEDDED)
        for row in rows:
            if row["length"] > budget:
                break
            budget -= row["length"]
            samples[str(row["sample"])] = describe_sample(run_dir, row["sample"], lambda: decode)
    except LedgerError as error:
        return {"name": visible(name, 200), "rows": [], "samples": {}, "problem": visible(str(error), _MAX_TEXT)}
    return {"name": visible(name, 200), "rows": rows, "samples": samples, "problem": ""}
