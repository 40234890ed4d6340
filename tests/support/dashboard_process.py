"""A process that runs `sortedrl dashboard`, for tests that send requests to it."""

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
    """Serve a dashboard at a free port, yield its address, and stop it when the block ends."""
    command = [*COMMAND, "dashboard", *map(str, arguments), "--port", "0"]
    environment = {**os.environ, "COLUMNS": "500", **variables}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stderr is not None
        try:
            line = running.stderr.readline()
            address = dashboard_address(line)
            assert address is not None, line + running.stderr.read()
            yield address
        finally:
            running.terminate()
            running.wait(60)


def dashboard_address(printed: str) -> str | None:
    """The address in the line that a dashboard prints when it starts; None if there is none."""
    found = re.search(r"http://\S+?:(\d+)/", printed)
    return None if found is None else f"http://127.0.0.1:{found[1]}/"
