"""Where engines get weights from, within one process.

A learner hands out a `ModuleWeights` as its `source`; an engine's `publish` reads `.module`. An engine that was built
on that very module has nothing to copy. A learner that goes on training while engines read hands out a snapshot
instead, which nobody writes to.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class ModuleWeights:
    """The weights of a live module, or of a copy of it."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def snapshot(self) -> ModuleWeights:
        """A copy that later updates of the module do not reach: no gradients, tied weights still tied."""
        return ModuleWeights(copy.deepcopy(self.module).requires_grad_(False).eval())
