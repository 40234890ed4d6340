"""Moves a learner off its GPU between updates, so that an engine that shares the GPU can use all of it.

`learner/torch.py` makes one if `learner.offload` is set. Weights, those of critic and reference model, and the
optimizer's state go to host memory after each update and come back before the next. The parameters stay the same
objects, so publications and checkpoints read them where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sortedrl.learner.memory import release_free_memory

_HOST = torch.device("cpu")


class Offload:
    def __init__(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._modules = modules
        self._optimizer = optimizer
        self._device = device

    def bring_back(self) -> None:
        self._move(self._device)

    def leave(self) -> None:
        """Free the GPU. Gradients must be gone."""
        self._move(_HOST)
        release_free_memory()

    def _move(self, device: torch.device) -> None:
        for module in self._modules:
            module.to(device)
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)
