"""Which process runs on which processor: for benchmarks that say "one core each"."""

from __future__ import annotations

import os
import threading

import psutil

ACTOR = "ray::_EngineActor"


def engine_processes() -> list[psutil.Process]:
    """The engines of a pool among this process's children, the oldest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(ACTOR):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.create_time())


def pin(pid: int, core: int) -> None:
    """Every thread that the process has by now; later ones inherit it from those that start them."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            os.sched_setaffinity(int(thread), {core})
        except ProcessLookupError:
            continue


class EnginesApart(threading.Thread):
    """Keeps this process on the first core and every engine, as it comes up, on the second."""

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
