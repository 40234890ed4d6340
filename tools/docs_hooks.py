"""Hooks of `mkdocs build`: make the page reference/cli.md from the commands themselves.

mkdocs.yml names this file. The page is made at every build and is not kept in the repository, so it cannot be out of
date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
    from mkdocs.structure.files import Files  # pyright: ignore[reportMissingImports]

PAGE = "reference/cli.md"
HEAD = """# Command line

Every command prints a table for people, or with `--json` one JSON object on stdout and nothing else. Progress and
messages go to stderr. Exit codes: 0 success, 2 a mistake of the user with one line that says what to do, 130 after
Ctrl-C. `python -m sortedrl` is the same program as `sortedrl`. `-h` is `--help`.

CONFIG is the name of a shipped configuration (`sortedrl configs` lists them) or a file that ends in .toml. Messages of
sortedrl go to stderr, one line each; `sortedrl -v COMMAND` or `SORTEDRL_DEBUG=1` also shows warnings of other packages.
`sortedrl --install-completion` installs completion for bash, zsh, fish or PowerShell; `--show-completion` prints it.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated page to the files of the site."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    files.append(File.generated(config, PAGE, content=cli_page()))
    return files


def cli_page() -> str:
    """The commands with their arguments, options, defaults and help, as Markdown."""
    import typer

    from sortedrl.cli import app

    group: Any = typer.main.get_command(app)
    lines = [HEAD, "[Exit codes](../guides/troubleshooting.md#exit-codes) has the full table.", ""]
    for name, command in group.commands.items():
        lines += _command(f"sortedrl {name}", command)
    return "\n".join(lines)


def _command(path: str, command: Any) -> list[str]:
    from rich.text import Text

    subcommands = getattr(command, "commands", None)
    lines = [f"## {path}", "", _text(command.help), "", _text(Text.from_markup(command.epilog or "").plain), ""]
    if subcommands:
        for name, inner in subcommands.items():
            lines += _command(f"{path} {name}", inner)
        return lines
    lines += ["| argument or option | default | meaning |", "| --- | --- | --- |"]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            label, default = parameter.metavar or parameter.name.upper(), ""
        else:
            label = ", ".join([*parameter.opts, *parameter.secondary_opts])
            default = _default(parameter)
        lines.append(f"| `{label}` | {default} | {_text(parameter.help)} |")
    return [*lines, ""]


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if option.is_flag or option.default in (None, (), []) or callable(option.default):
        return ""
    return f"`{option.default}`"


def _text(text: str | None) -> str:
    """One line, safe within a table cell."""
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")
