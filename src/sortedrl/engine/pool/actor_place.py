"""Where an engine's actor must run if it shares GPUs with other processes, which Ray does not plan by itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, frozen=True)
class ActorPlace:
    """`run/builders/machines.py` makes it, `ray_launcher.py` starts the actor there."""

    node: str  # Ray's id of the machine
    gpus: tuple[int, ...]  # their numbers on that machine

    @property
    def visible_devices(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES."""
        return ",".join(map(str, self.gpus))
