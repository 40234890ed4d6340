"""The states of an engine that sleeps while a learner on the same device updates, and the order of its calls.

`VllmEngine` holds one; any engine with the capability `sleeps` can. The cycle is

    awake --sleep--> asleep --publish--> loaded --wake--> awake

Asleep, the engine holds neither weights nor KV cache. Loaded, it holds weights, and no KV cache yet, so that the
learner's memory and the KV cache are never there together. Guarantees: a call in any other order raises `EngineError`,
so nothing is decoded with weights that are gone.
"""

from __future__ import annotations

from enum import StrEnum

from sortedrl.errors import EngineError


class Memory(StrEnum):
    """What an engine holds on its device."""

    AWAKE = "awake"  # weights and KV cache
    ASLEEP = "asleep"  # neither
    LOADED = "loaded"  # weights


class SleepState:
    def __init__(self) -> None:
        self.memory = Memory.AWAKE

    @property
    def is_awake(self) -> bool:
        return self.memory is Memory.AWAKE

    def begin_sleep(self, num_running: int) -> None:
        if num_running:
            raise EngineError(f"the engine cannot sleep while {num_running} samples run: interrupt them first")
        self._move(Memory.AWAKE, Memory.ASLEEP, "sleep")

    def begin_publication(self) -> bool:
        """Whether the memory of the weights must be made again first."""
        is_asleep = self.memory is Memory.ASLEEP
        if is_asleep:
            self.memory = Memory.LOADED
        return is_asleep

    def begin_wake(self) -> None:
        if self.memory is Memory.ASLEEP:
            raise EngineError("the engine's weights are gone since it sleeps: publish weights before it wakes")
        self._move(Memory.LOADED, Memory.AWAKE, "wake")

    def check_awake(self) -> None:
        if not self.is_awake:
            raise EngineError(f"the engine is {self.memory.value} and serves no requests: wake it first")

    def _move(self, before: Memory, after: Memory, call: str) -> None:
        if self.memory is not before:
            raise EngineError(f"the engine is {self.memory.value}, so it cannot {call}")
        self.memory = after
