"""The command line: configs, init, train, compare, eval, simulate, plan, sft, export, report, trace, ledger, doctor,
dashboard, bench.

Each module defines one kind of command. Importing it adds its commands to `app`; the order of imports is the order of
commands in `--help`.

Guarantees: with `--json`, stdout holds one JSON object and nothing else; progress and messages go to stderr; a user's
mistake ends with a one-line message and exit code 2, a run that cannot learn with exit code 3, a signal with 128 + its
number (Ctrl-C: 130).
"""

from sortedrl.cli import configs  # isort: skip
from sortedrl.cli import train  # isort: skip
from sortedrl.cli import eval as evaluation  # isort: skip
from sortedrl.cli import simulate  # isort: skip
from sortedrl.cli import sft  # isort: skip
from sortedrl.cli import export  # isort: skip
from sortedrl.cli import inspect  # isort: skip
from sortedrl.cli import dashboard  # isort: skip
from sortedrl.cli import bench  # isort: skip
from sortedrl.cli.app import app, main, run_command

__all__ = [
    "app",
    "bench",
    "configs",
    "dashboard",
    "evaluation",
    "export",
    "inspect",
    "main",
    "run_command",
    "sft",
    "simulate",
    "train",
]
