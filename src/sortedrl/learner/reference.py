"""The model that a KL penalty keeps the policy near: what it was when the run began.

`learner/torch.py` has one where `learner.kl_coef` asks for it. A peft model is its own reference with the adapter off;
any other is copied, and the copy is saved with the learner's state, since a resumed run begins with trained weights.
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
        if self._adapted is None:
            yield self._frozen
        else:
            with self._adapted.disable_adapter():
                yield self._adapted

    def tensors(self) -> dict[str, Tensor]:
        """The copy's weights, tied ones once; nothing where there is no copy."""
        return {} if self._frozen is None else {name: value.data for name, value in self._frozen.named_parameters()}
