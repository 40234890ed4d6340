"""The Typer application, the options and consoles that commands share, and the entry point `main`."""

from __future__ import annotations

import errno
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
TABLE_WIDTH = 110  # columns, when stdout is not a terminal

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration file (TOML); configs/ has examples.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Configuration keys to override, such as run.seed=1."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"sortedrl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Online length-aware rollout scheduling for RL post-training."""


def stdout_console() -> Console:
    """A console for tables, as wide as the terminal, or of a fixed width if there is none."""
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def print_error(message: str, *notes: str) -> None:
    """Print an error as one line, and each note on a line below it."""
    safe = [escape(printable(redact_text(text))) for text in (message, *notes)]
    for line in (f"[bold red]error:[/] {safe[0]}", *safe[1:]):
        err.print(line, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command of sys.argv; errors of this package end it with one line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    handler = RichHandler(console=err, show_path=False)
    handler.addFilter(SafeText())
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    command = typer.main.get_command(app)
    try:
        # `app()` would turn an interrupt into an exit, and an exit into a return value.
        with command.make_context("sortedrl", sys.argv[1:]) as context:
            command.invoke(context)
    except SortedRLError as error:
        print_error(str(error), *getattr(error, "__notes__", []))
        sys.exit(2)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted: what was written to the run directory is kept", soft_wrap=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of stdout, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MemoryError:
        print_error("memory ran out: lower engine.slots or learner.micro_tokens; sortedrl doctor CONFIG estimates both")
        sys.exit(2)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            print_error(f"{error.filename}: {error.strerror}; choose a shorter name")
            sys.exit(2)
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        if usage():  # empty without any argument: the help has been printed
            print_error(usage())
        sys.exit(2)
