"""Pins processes to CPU cores, for the benchmarks of this folder that compare "one core each"."""

from __future__ import annotations

import os
import threading

import psutil

ACTOR = "ray::_EngineActor"


def engine_processes() -> list[psutil.Process]:
    """The engine processes of a pool among the children of this process, oldest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(ACTOR):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.create_time())


def pin(pid: int, core: int) -> None:
    """Pin all current threads of a process to a core; threads that they start later inherit it."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            os.sched_setaffinity(int(thread), {core})
        except ProcessLookupError:
            continue


class EnginesApart(threading.Thread):
    """Keeps this process on the first core, and every engine process on the second as soon as it appears."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.5):
            pin(os.getpid(), 0)
            for process in engine_processes():
                try:
                    pin(process.pid, 1)
                except FileNotFoundError:
                    continue

    def stop(self) -> None:
        self._is_over.set()
        self.join()
