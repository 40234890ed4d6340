"""The book of the embedded task with a tool, misbehaving for the fuzzer. What happens follows from the arguments."""

from __future__ import annotations

import os
import time
import zlib

from fuzz import hits
from sortedrl.tasks.tools import Book


class Chaos(Book):
    """Dies, raises, dawdles or returns a megabyte for one name in five."""

    def lookup(self, who: str) -> str:
        """
        Looks up whom a person points to.

        Args:
            who: Name of the person.

        Returns:
            The name of the person that they point to.
        """
        found = self.book[who]
        number = zlib.crc32(f"{who} {sorted(self.book.items())}".encode()) % 20
        if number in (1, 2, 3) or (number == 0 and _is_worker()):
            hits.note("tool chaos")
        if number == 0 and _is_worker():
            os._exit(7)
        if number == 1:
            raise ValueError("no such page\x1b[31m\n" + "x" * 10_000)
        if number == 2:
            time.sleep(0.2)
        return found * 200_000 if number == 3 else found


class ChaosAgain(Chaos):
    """Its calls can be made again."""

    environment_kind = "repeatable"


class ChaosSaved(Chaos):
    """Its state can be saved."""

    environment_kind = "snapshot"

    def _snapshot(self) -> dict[str, str]:
        return self.book

    def _restore(self, state: dict[str, str]) -> None:
        self.book = state


class ChaosLost(Chaos):
    """Its state cannot be made again."""

    environment_kind = "none"


def _is_worker() -> bool:
    """Whether this is a worker process; a tool that runs in a thread of the trainer must not end the trainer."""
    with open("/proc/self/cmdline", "rb") as file:
        return b"worker" in file.read()
