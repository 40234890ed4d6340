"""The command line: train, compare, eval, simulate, plan, sft, report, trace, ledger, doctor, dashboard, bench.

Each command prints a table for people, or with `--json` one JSON object and nothing else on stdout. Progress and
messages go to stderr. Users' mistakes end with one line and exit code 2, Ctrl-C with 130.

One module per kind of command; importing it adds its commands to `app`, in the order of the help.
"""

from sortedrl.cli import train  # isort: skip
from sortedrl.cli import eval as evaluation  # isort: skip
from sortedrl.cli import simulate  # isort: skip
from sortedrl.cli import sft  # isort: skip
from sortedrl.cli import inspect  # isort: skip
from sortedrl.cli import dashboard  # isort: skip
from sortedrl.cli import bench  # isort: skip
from sortedrl.cli.app import app, main

__all__ = ["app", "bench", "dashboard", "evaluation", "inspect", "main", "sft", "simulate", "train"]
