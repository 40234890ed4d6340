"""A local engine that sleeps, with a device of its own whose memory is counted.

It stands for vLLM with sleep mode on a GPU that a learner shares. `CountedDevice` fails when engine and learner want
more than there is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sortedrl.engine.base import Capabilities, CompletedHandle, EngineEvent, InFlight, Request
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.sleep_state import SleepState

SIZES = {"weights": 2, "kv_cache": 6, "update": 7}


class CountedDevice:
    """Memory for the engine's weights and KV cache, or for the learner's update with the engine's weights: not all."""

    def __init__(self, room: int = 8) -> None:
        self.room, self.held = room, set[str]()

    def take(self, *names: str) -> None:
        self.held |= set(names)
        used = sum(SIZES[name] for name in self.held)
        assert used <= self.room, f"out of memory: {sorted(self.held)} take {used} of {self.room}"

    def free(self, *names: str) -> None:
        self.held -= set(names)


class SleepyEngine(LocalEngine):
    def __init__(self, *arguments: Any, device: CountedDevice | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.device, self.calls = device or CountedDevice(), list[str]()
        self._state = SleepState()
        self.device.take("weights", "kv_cache")

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, sleeps=True)

    def submit(self, requests: Iterable[Request]) -> None:
        self._state.check_awake()
        self.calls.append("submit")
        super().submit(requests)

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        self.calls.append("interrupt")
        return super().interrupt(samples)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> CompletedHandle:
        if self._state.begin_publication():
            self.device.take("weights")
        self.calls.append("publish")
        return super().publish(version, source, in_flight)

    def sleep(self) -> None:
        self._state.begin_sleep(self.num_running)
        self.calls.append("sleep")
        self.device.free("weights", "kv_cache")

    def wake(self) -> None:
        self._state.begin_wake()
        self.calls.append("wake")
        self.device.take("kv_cache")
