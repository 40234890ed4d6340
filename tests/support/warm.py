"""Processes that begin with everything imported.

A process that trains imports for five seconds of a processor before it does anything. Here one server per test process
does that once, and forks: whatever has to happen in a process of its own, because it is killed, signalled or limited,
starts at once. That the shipped command imports what it needs is shown by the tests that start it for real.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(
    ["sortedrl.trainer", "sortedrl.run.build.parts", "transformers.models.llama.modeling_llama"]
)
WAIT_S = 120.0  # for a process of its own, on a busy machine


class Warm:
    """A call in a process of its own, in a folder, with what it prints in files; leaving the block ends it."""

    def __init__(self, folder: Path, call: Callable[..., object], *arguments: Any, **variables: str) -> None:
        folder.mkdir(exist_ok=True)
        self._number = sum(1 for _ in folder.glob("out-*.txt"))
        self._files = [folder / f"{name}-{self._number}.txt" for name in ("out", "err")]
        self.process = WARM.Process(target=_run, args=(folder, self._files, variables, call, arguments))
        self.process.start()

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.is_alive()

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    def wait(self, seconds: float = WAIT_S) -> int:
        """The exit code, once it has ended by itself."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds:g} s: {self.err}"
        return self.process.exitcode


def warm_command(folder: Path, *arguments: str, **variables: str) -> Warm:
    """The shipped command."""
    return Warm(folder, _command, arguments, **variables)


def _run(
    folder: Path, files: list[Path], variables: dict[str, str], call: Callable[..., object], arguments: Any
) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    call(*arguments)


def _command(arguments: tuple[str, ...]) -> None:
    from sortedrl import cli

    sys.argv = ["sortedrl", *arguments]
    cli.main()
