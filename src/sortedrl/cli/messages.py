"""What the commands show of log records and warnings: those of sortedrl, one line each, on stderr.

`app.py` calls `show_messages` before a command runs. Other packages (transformers, torch, tqdm and more) warn about
things that a user of a command cannot change, so their warnings and progress bars are left out, and their errors stay.
`sortedrl -v` and SORTEDRL_DEBUG=1 show all.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings

from rich.console import Console
from rich.markup import escape

from sortedrl.redact import SafeText

_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}  # read when these packages are imported


def show_messages(console: Console, *, is_verbose: bool) -> None:
    """Send log records to the console; without `is_verbose`, keep warnings of other packages away."""
    is_verbose = is_verbose or bool(os.environ.get("SORTEDRL_DEBUG"))
    handler = LineHandler(console)
    handler.addFilter(SafeText())
    if not is_verbose:
        handler.addFilter(_is_shown)
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO if is_verbose else logging.WARNING, format="%(message)s", handlers=[handler])


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.name.partition(".")[0] == "sortedrl"


class LineHandler(logging.Handler):
    """Prints each record as one line: time, level and message."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            clock = time.strftime("%H:%M:%S", time.localtime(record.created))
            line = f"{clock} {record.levelname.lower()}: {self.format(record)}"
            self.console.print(escape(line), highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)
