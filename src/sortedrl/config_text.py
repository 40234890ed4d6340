"""The text forms of a configuration: `section.name=value` overrides, and TOML as it is written."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from sortedrl.errors import ConfigError

# `engine=local` is short for `engine.kind=local`, and so on: the key that a section is mostly about.
MAIN_KEYS = {"engine": "kind", "task": "name", "model": "path", "schedule": "strategy", "learner": "algorithm"}


def parse_override(text: str) -> tuple[list[str], Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"cannot read the override {text!r}: write section.name=value")
    keys = name.strip().split(".")
    if len(keys) == 1 and keys[0] in MAIN_KEYS:
        keys.append(MAIN_KEYS[keys[0]])
    try:
        return keys, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    *path, last = keys
    for key in path:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{'.'.join(keys)}: {key} is a value, not a section")
    tree[last] = value


def section_toml(name: str, section: Mapping[str, Any]) -> str:
    lines = [f"{key} = {toml_value(value)}" for key, value in section.items() if value is not None]
    return "\n".join([f"[{name}]", *lines, ""])


def toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case dict():
            return "{ " + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items()) + " }"
        case _:
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's escapes are JSON's
