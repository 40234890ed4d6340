"""Removes secrets, and characters that control a terminal, from what is logged, shown or sent to trackers.

`redact` is for trees that are shown (the resolved configuration) and `redact_text` for lines. `SafeText` makes every
log record of a handler safe. What a run reads again is never redacted; `SortedConfig.check_startable` refuses secrets
in it with `find_secret`.

Guarantees: a string under a name that looks like a secret is replaced, and so is the value of an environment variable
with such a name wherever it occurs; numbers, booleans and all other text stay as they are.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from sortedrl.reward.process import looks_secret
from sortedrl.reward.worker import printable

REDACTED = "<redacted>"
MIN_SECRET = 6  # characters: shorter values, such as "1" or "true", occur everywhere and are no secrets
_MIN_CONTAINED = 16  # characters: a text that contains a secret of this length does so by no coincidence
_WORDS = r"key|token|secret|passw(?:or)?d|passphrase|credentials?"
# A name must end in one of the words: `max_new_tokens=512` and `KeyError: 'x'` are no secrets. Names in quotes are
# keys of JSON. The length of names is bounded, since a log line may quote text that would make the match slow.
_PAIR = re.compile(
    rf"""(\b[\w.-]{{0,64}}(?:{_WORDS})\s?=\s?|["'][\w.-]{{0,64}}(?:{_WORDS})["']:\s?)("[^"]*"|'[^']*'|[^\s"',;&)}}\]]+)""",
    re.IGNORECASE,
)
_HEADER = re.compile(r"(\bauthorization\W{1,4}(?:bearer|basic)\s)[\w.~+/=-]+", re.IGNORECASE)
_LOGIN = re.compile(r"(\w://[^\s/:@]*:)[^\s/@]+(?=@)")  # a password within an address
_PLAIN_VALUE = re.compile(r"[+-]?[\d._]+(?:e[+-]?\d+)?|true|false|none|null", re.IGNORECASE)


def redact(tree: Any) -> Any:
    """A copy of a tree of mappings, lists and plain values, with secrets replaced."""
    return _redact(tree, list(_secret_variables()), is_secret=False)


def redact_text(text: str) -> str:
    """The text with secrets replaced: values of the environment, `name=value` pairs, and passwords in addresses."""
    return _redact_text(text, list(_secret_variables()))


def find_secret(text: str) -> str | None:
    """The environment variable whose secret value this text is, or contains if the value is long; else None."""
    for value, name in _secret_variables().items():
        if text.strip() == value or (len(value) >= _MIN_CONTAINED and value in text):
            return name
    return None


class SafeText(logging.Filter):
    """A filter for log handlers: replaces secrets and escapes control characters.

    It changes the record, so that later handlers get the safe text too.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = printable(redact_text(record.getMessage()), keep="\n\t")
        record.args = None
        return True


def _redact(tree: Any, values: list[str], *, is_secret: bool) -> Any:
    match tree:
        case Mapping():
            return {
                key: _redact(value, values, is_secret=is_secret or looks_secret(str(key)))
                for key, value in tree.items()
            }
        case list() | tuple():
            return type(tree)(_redact(item, values, is_secret=is_secret) for item in tree)
        case str() | bytes() if is_secret:
            return REDACTED if tree else tree
        case str():
            return _redact_text(tree, values)
        case _:
            return tree


def _secret_variables() -> dict[str, str]:
    """Names of environment variables by their secret values, longest first because one may be part of another."""
    found = {value.strip(): name for name, value in os.environ.items() if looks_secret(name)}
    return {value: found[value] for value in sorted(found, key=len, reverse=True) if len(value) >= MIN_SECRET}


def _redact_text(text: str, values: list[str]) -> str:
    for value in values:
        text = text.replace(value, REDACTED)
    text = _PAIR.sub(_without_value, text)
    text = _HEADER.sub(rf"\1{REDACTED}", text)
    return _LOGIN.sub(rf"\1{REDACTED}", text)


def _without_value(found: re.Match[str]) -> str:
    name, value = found.groups()
    is_plain = not value.strip("\"'") or value == REDACTED or _PLAIN_VALUE.fullmatch(value)
    return found.group() if is_plain else f"{name}{REDACTED}"
