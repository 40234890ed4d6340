"""The commands `configs` and `init`: the shipped configurations, and files to start a run of your own."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from sortedrl.cli.app import AsJson, app, err, stdout_console
from sortedrl.config.needs import describe
from sortedrl.config.shipped import shipped_names, shipped_path
from sortedrl.errors import ConfigError, RunDirError

STARTER = Path(__file__).parent / "starter"
STARTER_FILES = {"run.toml": "{}.toml", "rows.jsonl": "{}_rows.jsonl", "reward.py": "{}_reward.py"}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)


@app.command()
def configs(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Print this configuration as TOML.", autocompletion=shipped_names),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the configurations that ship with sortedrl, or print one.

    `sortedrl train NAME` trains as one of them says. To change one, save it: sortedrl configs NAME > my.toml
    """
    if name is not None:
        text = shipped_path(name).read_text(encoding="utf-8")
        print(json.dumps({"name": name, "toml": text}) if as_json else text, end="\n" if as_json else "")
        return
    found = [describe(each) for each in shipped_names()]
    if as_json:
        print(json.dumps({"configs": [asdict(each) for each in found]}))
        return
    table = Table("name", "what it trains", "needs", box=None)
    for each in found:
        table.add_row(escape(each.name), escape(each.description), escape(each.needs))
    table.columns[0].no_wrap = True
    stdout_console().print(table)


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the run: letters, digits and _.")],
    as_json: AsJson = False,
) -> None:
    """Write NAME.toml, NAME_rows.jsonl and NAME_reward.py into this folder, to start a run of your own.

    They train as they are, in seconds: sortedrl train NAME.toml. Existing files are never overwritten.
    """
    _check_name(name)
    files = {Path(pattern.format(name)): STARTER / source for source, pattern in STARTER_FILES.items()}
    if there := [path for path in files if path.exists() or path.is_symlink()]:
        raise RunDirError(f"{there[0]} is already here, and nothing was written: choose another name, or move it")
    for path, source in files.items():
        text = source.read_text(encoding="utf-8")
        _write_new(path, text.replace("starter", name))
    if as_json:
        print(json.dumps({"files": [str(path) for path in files]}))
        return
    toml, rows, reward = map(str, files)
    err.print(f"wrote {toml}, {rows} and {reward}; train with: sortedrl train {toml}", highlight=False, soft_wrap=True)


def _check_name(name: str) -> None:
    if name in shipped_names():
        raise ConfigError(f"{name} is the name of a shipped configuration: choose another name")
    if not _NAME.fullmatch(name):
        near = re.sub(r"\W+", "_", name.removesuffix(".toml"), flags=re.ASCII).strip("_")
        hint = f", such as {near}" if _NAME.fullmatch(near) else ""
        raise ConfigError(
            f"{name!r} cannot be the name of a Python file: use letters, digits and _, and begin with a letter{hint}"
        )


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {error.strerror or error}; choose another folder") from None
