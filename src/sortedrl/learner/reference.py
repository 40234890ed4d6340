"""The reference model of the KL penalty: the policy as it was when the run began.

`learner/torch.py` makes one if `learner.kl_coef` is not 0. A peft model with its adapter disabled is the reference
itself. Any other model is copied, and the copy is saved with the learner's state, because a resumed run starts from
trained weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class Reference:
    def __init__(self, model: Any) -> None:
        self._adapted = model if hasattr(model, "disable_adapter") else None
        self._frozen: Any = None
        if self._adapted is None:
            self._frozen = copy.deepcopy(model).requires_grad_(False).eval()
            self._frozen.zero_grad()

    @contextmanager
    def module(self) -> Iterator[Any]:
        """Give the reference model; a peft model has its adapter disabled inside the block."""
        if self._adapted is None:
            yield self._frozen
        else:
            with self._adapted.disable_adapter():
                yield self._adapted

    def tensors(self) -> dict[str, Tensor]:
        """The copy's weights, tied ones once; empty for a peft model."""
        return {} if self._frozen is None else {name: value.data for name, value in self._frozen.named_parameters()}
