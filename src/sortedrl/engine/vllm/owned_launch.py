"""Starts a command that ends when its owner ends: `start_owned`, and the program `owned_launch.py COMMAND ARGUMENT...`

`server.py` starts vLLM's server so, and holds the other end of the pipe that is the program's stdin. The program forks
a watcher and becomes COMMAND, so COMMAND has the process id that the owner knows. The watcher waits until the
pipe closes, which the kernel does when the owner ends in whatever way, or until COMMAND ends. Then it kills the process
group, itself included. It imports nothing but the standard library, because it must be ready at once.

Guarantees: whenever the owner ends, also while COMMAND is starting, no process of COMMAND's group stays.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

_CHECK_S = 0.5  # how often the watcher looks whether COMMAND is still there


def start_owned(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command whose messages go to stderr. It lives as long as this process, and the pipe `stdin`, at most."""
    launcher = [sys.executable, "-I", "-S", __file__]
    return subprocess.Popen([*launcher, *command], env=environment, stdin=subprocess.PIPE, stdout=2)


def _watch(command: int) -> None:
    """Kill this process group when stdin is closed, or when the process `command` has ended."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):  # a reader of the server's messages must not wait for the watcher
        os.dup2(nowhere, output)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for COMMAND
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == command:
        readable, _, _ = select.select([0], [], [], _CHECK_S)
        if readable and not os.read(0, 1):
            break
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    os.setsid()  # a group of its own, which Ctrl-C in the owner's terminal does not reach
    command = os.getpid()
    if os.fork() == 0:
        try:
            _watch(command)
        finally:
            os._exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - the command of the owner


if __name__ == "__main__":
    main()
