"""A single rank of a sharded learner in this process, without Ray: real shards, real files, and losses on demand."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sortedrl.errors import RankLostError


class OneRank:
    """Calls the methods of a rank's actor. `losses` lists the calls at which it is lost: "update", or "update after".

    "after" loses the rank when it has done the call, before it can answer.
    """

    def __init__(self, losses: list[str]) -> None:
        # Not at the top: `ray_cluster.connect` must come before the first import of Ray in a process of tests.
        from sortedrl.learner.sharded.ray_ranks import _RankActor

        self._losses = losses
        self._actor = _RankActor(0, 1, 1)
        self._actor._mesh = init_device_mesh("cpu", (1,))
        self.is_lost = False
        self.methods: list[str] = []
        self.gpus: list[tuple[str, int]] = []
        self.may_finish = threading.Event()  # what was started is done when this is set
        self.may_finish.set()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        self._lose(method)
        self.methods.append(method)
        # Arguments and results are copies, as with Ray.
        result = copy.deepcopy(getattr(self._actor, method)(*copy.deepcopy(arguments)))
        self._lose(f"{method} after")
        return [result]

    def start(self, method: str) -> Callable[[], list[Any]]:
        def wait() -> list[Any]:
            self.may_finish.wait()
            return self.call(method)

        return wait

    def close(self) -> None:
        self.is_lost = True

    def _lose(self, when: str) -> None:
        if self._losses[:1] == [when]:
            self._losses.pop(0)
            self.is_lost = True
        if self.is_lost:
            raise RankLostError(f"rank 0 of 1 has died ({when})", "fix that and resume")


@contextmanager
def gloo_group() -> Iterator[None]:
    """A group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
