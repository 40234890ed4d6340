"""TOML text and `section.key=value` overrides: parsed, with one line for what cannot be read.

`SortedConfig.load` calls these before a configuration exists. They know nothing of the keys there are, except which key
an override means that names only a section.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from sortedrl.config.foreign_names import foreign_hint
from sortedrl.errors import ConfigError

# The key that an override means when it names only the section: `engine=local` is short for `engine.kind=local`.
_MAIN_KEYS = {"engine": "kind", "task": "name", "model": "path", "schedule": "strategy", "learner": "algorithm"}

_MAX_PARTS = 3  # of a dotted key, as in `task.columns.prompt`
# A dotted key of a thousand parts or more: the parser takes minutes for fifty thousand.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:[\w-]++["']?\s*+\.\s*+["']?){1000}""")
_SHOWN = 200  # characters of a value or an override in a message


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML; raises TOMLDecodeError for other text, and ConfigError for TOML that Python cannot hold."""
    too_deep = f"{where} is nested too deeply: a configuration has sections, keys and flat values"
    if _LONG_KEY.search(text):
        raise ConfigError(too_deep)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ConfigError(too_deep) from None
    except ValueError:  # Python converts at most 4,300 digits
        raise ConfigError(f"{where} has a number of more digits than any key takes: write a smaller one") from None


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split `section.key=value` into its keys and its value; a value that is not TOML is taken as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"cannot read the override {shown(text)}: write section.name=value")
    keys = name.strip().split(".")
    if len(keys) > _MAX_PARTS:
        if (hint := foreign_hint(name[:_SHOWN])) is not None:
            raise ConfigError(hint)
        raise ConfigError(
            f"cannot set {name.strip()[:_SHOWN]}: a key has at most {_MAX_PARTS} parts, as in task.columns.prompt"
        )
    if len(keys) == 1 and keys[0] in _MAIN_KEYS:
        keys.append(_MAIN_KEYS[keys[0]])
    try:
        return keys, parse_toml(f"value = {value}", f"the override {name.strip()[:_SHOWN]}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    *path, last = keys
    for key in path:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"cannot set {'.'.join(keys)}: {key} is a value, not a section")
    tree[last] = value


def shown(value: Any) -> str:
    """The value as it is written in Python, cut short."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of more than 4,300 digits, and deep lists
        return "a value that is too large to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
