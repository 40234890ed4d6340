"""The shipped commands as processes, for tests that talk to them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = [sys.executable, "-c", "from sortedrl.cli import main; main()"]


@contextmanager
def process(*arguments: str | Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """One command, ended with the block."""
    command = [*COMMAND, *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "500", **variables}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as running:
        try:
            yield running
        finally:
            running.terminate()
            running.wait(60)


@contextmanager
def dashboard(*arguments: str | Path, **variables: str) -> Iterator[str]:
    """The address of a dashboard at a free port."""
    with process("dashboard", *arguments, "--port", "0", **variables) as running:
        assert running.stderr is not None
        line = running.stderr.readline()
        found = re.search(r"http://\S+?:(\d+)/", line)
        assert found is not None, line + running.stderr.read()
        yield f"http://127.0.0.1:{found[1]}/"
