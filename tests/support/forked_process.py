"""Test processes that start with torch and the library already imported.

A new process needs about five seconds to import what training needs. Here one fork server per test process imports it
once and forks, so tests that kill, signal or limit a process start it at once. Other tests start the installed command
as a new process and show that its own imports work.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    ["sortedrl.trainer", "sortedrl.run.builders.parts", "transformers.models.llama.modeling_llama"]
)
WAIT_S = 120.0  # for a process to end, on a busy machine


class ForkedProcess:
    """Runs `call` in a forked process inside `folder`, with output in files there; leaving the block kills it."""

    def __init__(self, folder: Path, call: Callable[..., object], *arguments: Any, **variables: str) -> None:
        folder.mkdir(exist_ok=True)
        self._number = sum(1 for _ in folder.glob("out-*.txt"))
        self._files = [folder / f"{name}-{self._number}.txt" for name in ("out", "err")]
        for path in self._files:
            path.touch()  # so that they can be read before the process has started
        self.process = FORK_SERVER.Process(target=_run, args=(folder, self._files, variables, call, arguments))
        self.process.start()

    def __enter__(self) -> ForkedProcess:
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
        """The exit code, after the process has ended without being killed."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds:g} s: {self.err}"
        return self.process.exitcode


def forked_command(folder: Path, *arguments: str, **variables: str) -> ForkedProcess:
    """Run the command `sortedrl` with these arguments."""
    return ForkedProcess(folder, _command, arguments, **variables)


def _run(
    folder: Path, files: list[Path], variables: dict[str, str], call: Callable[..., object], arguments: Any
) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under `nohup`, which ignores it
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    call(*arguments)


def _command(arguments: tuple[str, ...]) -> None:
    from sortedrl import cli

    sys.argv = ["sortedrl", *arguments]
    cli.main()
