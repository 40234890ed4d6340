"""The configuration of runs as a page shows it: every key, or for several runs the keys that differ first.

It reads `config.toml` of each run directory. Guarantees: secrets are replaced, strings are escaped and cut, and a file
that is missing or unreadable is no error, because a page must also show runs of other versions.
"""

from __future__ import annotations

import html
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sortedrl.redact import redact
from sortedrl.reward.worker import printable

FILE_NAME = "config.toml"
_MAX_BYTES = 1 << 20
_MAX_VALUE = 200  # characters
_LEFT_OUT = {"run.started_in"}  # a folder of the machine, which says nothing about the run
_NAMES = {"run.name", "run.dir"}  # they differ between any two runs


def read_configuration(run_dir: Path) -> dict[str, str]:
    """Return the values by dotted key, as text; empty if the run has no readable configuration."""
    path = run_dir / FILE_NAME
    try:
        if path.stat().st_size > _MAX_BYTES:
            return {}
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found: dict[str, str] = {}
    _flatten(redact(tree), "", found)
    return {key: value for key, value in found.items() if key not in _LEFT_OUT}


def _flatten(tree: Any, prefix: str, found: dict[str, str]) -> None:
    for key, value in tree.items():
        name = f"{prefix}{printable(str(key))}"
        if isinstance(value, dict):
            _flatten(value, f"{name}.", found)
        else:
            found[name] = _text(value)


def _text(value: Any) -> str:
    text = printable(value) if isinstance(value, str) else printable(json.dumps(value, default=str))
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…"


def configuration_html(runs: Sequence[tuple[str, dict[str, str]]]) -> str:
    """Return the tables for runs given as (name, configuration); an empty text if no run has a configuration."""
    if not any(config for _, config in runs):
        return ""
    keys = list(dict.fromkeys(key for _, config in runs for key in config))
    different = [key for key in keys if len({config.get(key) for _, config in runs}) > 1]
    if len(runs) == 1:
        return _details("All keys", _table(runs, keys), is_open=False)
    chosen = [key for key in different if key not in _NAMES]
    same = [key for key in keys if key not in different]
    first = f'<div class="scroll">{_table(runs, chosen)}</div>' if chosen else "<p>All keys are equal.</p>"
    return first + _details(f"{len(same)} keys that are equal", _table(runs[:1], same), is_open=False)


def _details(title: str, table: str, *, is_open: bool) -> str:
    opened = " open" if is_open else ""
    return f'<details{opened}><summary>{html.escape(title)}</summary><div class="scroll">{table}</div></details>'


def _table(runs: Sequence[tuple[str, dict[str, str]]], keys: Sequence[str]) -> str:
    head = ""
    if len(runs) > 1:
        names = "".join(f"<th>{html.escape(name)}</th>" for name, _ in runs)
        head = f"<thead><tr><th>key</th>{names}</tr></thead>"
    rows = "".join(
        f"<tr><th>{html.escape(key)}</th>"
        + "".join(f"<td>{html.escape(config.get(key, '–')) or '&quot;&quot;'}</td>" for _, config in runs)
        + "</tr>"
        for key in keys
    )
    return f'<table class="config">{head}<tbody>{rows}</tbody></table>'
