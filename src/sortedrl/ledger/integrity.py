"""Whether the rows of a ledger file are what was written, and speak of what is there.

`verify.py` asks; what the rows mean is its own business. Nothing is kept of the tokens that are looked at.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from sortedrl.errors import LedgerError
from sortedrl.ledger.reader import Ledger

# (rule, words for the second column, query for a sample and what is wrong with it)
_FAULTS = (
    ("reference", "there is no prompt", "SELECT id, prompt FROM samples WHERE prompt NOT IN (SELECT id FROM prompts)"),
    ("reference", "there is no cohort", "SELECT id, cohort FROM samples WHERE cohort NOT IN (SELECT id FROM cohorts)"),
    (
        "reference",
        "there is no update",
        "SELECT sample, number FROM trained WHERE number NOT IN (SELECT number FROM updates)",
    ),
    (
        "exactly-once",
        "of its epoch, prompt and index there is also sample",
        "SELECT max(id), min(id) FROM samples GROUP BY epoch, prompt, idx HAVING count(*) > 1",
    ),
)

# The tokens that a sample was given before a row; all that it held was dropped where there are none.
_BEFORE = """
SELECT seq, start, tokens FROM segments WHERE sample = ?1 AND seq < ?2
UNION ALL SELECT seq, 0, x'' FROM steps
    WHERE sample = ?1 AND seq < ?2 AND (step = 'give-up' OR step = 'requeue' AND value = 'fresh')
ORDER BY seq
"""


def check_pages(ledger: Ledger) -> None:
    """Let SQLite look at every page; of a file that it finds damaged nothing can be proven."""
    found = [row[0] for row in ledger.rows("PRAGMA integrity_check(3)")]
    if found != ["ok"]:
        raise LedgerError(f"{ledger.path} is damaged: {'; '.join(found)}; go on from a checkpoint, which has a copy")


def faults(ledger: Ledger) -> Iterator[tuple[str, int, str]]:
    """Rows that speak of what is not there, or of what is there already: rule, sample, words."""
    for rule, words, query in _FAULTS:
        for sample, what in ledger.rows(query):
            yield rule, sample, f"{words} {what!r}"


def is_prompt_intact(tokens: bytes, content: str, columns: str, crc: int) -> bool:
    return zlib.crc32(columns.encode(), zlib.crc32(content.encode(), zlib.crc32(tokens))) == crc


def tokens_fault(num_tokens: int, tokens: bytes, logprobs: bytes, crc: int) -> str | None:
    """What is wrong with the tokens of a row, in words that follow its number."""
    if len(tokens) != 4 * num_tokens or len(logprobs) != 4 * num_tokens:
        return f"has {len(tokens)} and {len(logprobs)} bytes for {num_tokens} tokens and their log-probs"
    if zlib.crc32(logprobs, zlib.crc32(tokens)) != crc:
        return "has tokens or log-probs that are not those which were written"
    return None


def repeats(ledger: Ledger, sample: int, seq: int, start: int, tokens: bytes) -> bool:
    """Whether tokens of row `seq` are those that the sample held before, from `start` on."""
    held = bytearray()
    for _, at, given in ledger.rows(_BEFORE, sample, seq):
        if given is None:
            return True  # left out of this copy
        held[4 * at :] = given
    return held[4 * start : 4 * start + len(tokens)] == tokens
