"""The dashboard as the shipped command serves it, for tests that talk to it."""

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
def dashboard(*arguments: str | Path, **variables: str) -> Iterator[str]:
    """The address of a dashboard at a free port; it ends with the block."""
    command = [*COMMAND, "dashboard", *map(str, arguments), "--port", "0"]
    environment = {**os.environ, "COLUMNS": "500", **variables}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stderr is not None
        try:
            line = running.stderr.readline()
            address = address_in(line)
            assert address is not None, line + running.stderr.read()
            yield address
        finally:
            running.terminate()
            running.wait(60)


def address_in(told: str) -> str | None:
    """Where a dashboard says that it serves."""
    found = re.search(r"http://\S+?:(\d+)/", told)
    return None if found is None else f"http://127.0.0.1:{found[1]}/"
