"""Environments that tests run in worker processes; most behave by their arguments."""

from __future__ import annotations

import os
import signal
import time


class Counter:
    """Counts up. With a file, every call leaves a line there, so that calls can be counted over processes."""

    environment_kind = "repeatable"

    def reset(self, log: str = "", **row: object) -> None:
        self.total, self.log = 0, log

    def add(self, number: int) -> int:
        """
        Adds to the total.

        Args:
            number: What to add.
        """
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{number}\n")
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return float(self.total)


class Timed(Counter):
    """Writes down how much processor time its worker may still use."""

    def add(self, number: int) -> int:
        """
        Adds to the total.

        Args:
            number: What to add.
        """
        self.total += number
        with open(self.log, "a") as file:
            file.write(f"{signal.getitimer(signal.ITIMER_PROF)[0]}\n")
        return self.total


class Saved(Counter):
    environment_kind = "snapshot"

    def _snapshot(self) -> int:
        return self.total

    def _restore(self, state: int) -> None:
        self.total = state


class Plain(Counter):
    environment_kind = "none"


class Hostile:
    """Does what its argument says."""

    environment_kind = "stateless"

    def reset(self, **row: object) -> None:
        if row.get("bad"):
            raise RuntimeError("no such game")

    def act(self, what: str) -> str:
        """
        Does something bad.

        Args:
            what: What to do.
        """
        match what:
            case "raise":
                raise ValueError("bad \x1b[31m news")
            case "exit":
                raise SystemExit(3)
            case "die":
                os._exit(7)
            case "hang":
                time.sleep(600)
            case "megabytes":
                return "x" * (3 << 20)
            case "control":
                return "\x1b[2J\x00 a\u202eb \ud800 ok"
            case "itself":
                return self.act(what)
            case "memory":
                return str(len(bytearray(1 << 40)))
            case _:
                pass
        return f"did {what}"

    async def later(self, what: str) -> str:
        """
        Does something later.

        Args:
            what: What to do.
        """
        return f"later {what}"
