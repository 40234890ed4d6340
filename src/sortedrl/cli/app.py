"""The Typer application that every command joins, what commands share, and the entry point."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from sortedrl import __version__
from sortedrl.errors import SortedRLError
from sortedrl.redact import SafeText, redact_text
from sortedrl.reward.worker import printable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
err = Console(stderr=True)
TABLE_WIDTH = 110  # where stdout is no terminal

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, see configs/.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For example run.seed=1.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"sortedrl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Online length-aware rollout scheduling for RL post-training."""


def stdout_console() -> Console:
    """For tables: as wide as the terminal, or of a fixed width where there is none."""
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def complain(message: str, *notes: str) -> None:
    """An error as one line, and what else there is to say below it."""
    safe = [escape(printable(redact_text(text))) for text in (message, *notes)]
    for line in (f"[bold red]error:[/] {safe[0]}", *safe[1:]):
        err.print(line, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: errors of this package become one line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    handler = RichHandler(console=err, show_path=False)
    handler.addFilter(SafeText())
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    command = typer.main.get_command(app)
    try:
        # Not `app()`: it turns an interrupt into an exit, and an exit into a return value.
        with command.make_context("sortedrl", sys.argv[1:]) as context:
            command.invoke(context)
    except SortedRLError as error:
        complain(str(error), *getattr(error, "__notes__", []))
        sys.exit(2)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted: what was written to the run directory is kept", soft_wrap=True)
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        if usage():  # without any argument the help has been printed, and there is nothing to add
            complain(usage())
        sys.exit(2)
