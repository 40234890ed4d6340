"""PPO's critic: a value head on the model's last hidden state, and GAE from its values.

`learner/torch.py` makes one if the algorithm needs it. The head reads the input of the model's output layer, so the
pass that computes log-probs gives values too. It starts at 0, so in the first update the advantages are the rewards.
Its gradients also reach the model, weighted by `learner.value_coef`.

Shapes: a answer tokens, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sortedrl.errors import ModelError
from sortedrl.learner.device import to_device

_EPSILON = 1e-6


class Critic(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self._output = [model.get_output_embeddings()]  # in a list, so that it is not registered as a submodule
        if self._output[0] is None:
            raise ModelError(
                f"{type(model).__name__} has no output layer for a critic to read: use another learner.algorithm"
            )
        self.head = nn.Linear(self._output[0].weight.shape[1], 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._hidden_ah: Tensor | None = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside the block, keep the hidden states that the output layer reads, for `values`."""
        hook = self._output[0].register_forward_pre_hook(self._capture)
        try:
            yield
        finally:
            hook.remove()
            self._hidden_ah = None

    def values(self) -> Tensor:
        """The value before each answer token of the last pass, [a]."""
        assert self._hidden_ah is not None, "values() needs a pass inside capturing()"
        return self.head(self._hidden_ah.float())[:, 0]

    def _capture(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._hidden_ah = inputs[0][0]


def gae(rewards_a: Tensor, values_a: Tensor, lengths: Sequence[int], *, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates of answers that lie end to end. The value after an answer's last token is 0.

    An estimate is the sum of the errors that follow it, each discounted by its distance. The sums grow by doubling:
    from those over 1 error to those over 2, 4 and so on, for all tokens at once. Summed in float64.
    """
    left_a = to_device(np.concatenate([np.arange(length)[::-1] for length in lengths]), values_a.device)
    rewards_a, values_a, dtype = rewards_a.double(), values_a.double(), values_a.dtype
    next_a = torch.where(left_a > 0, values_a.roll(-1), 0.0)
    advantages_a = rewards_a + gamma * next_a - values_a
    step = 1
    while step < max(lengths):
        later_a = torch.where(left_a >= step, advantages_a.roll(-step), 0.0)
        advantages_a = advantages_a + (gamma * lam) ** step * later_a
        step *= 2
    return advantages_a.to(dtype)


def whitened(advantages_a: Tensor) -> Tensor:
    """Advantages minus their mean, in standard deviations, over all tokens; all 0 if they do not differ."""
    std = advantages_a.std(correction=0)
    return torch.where(std < _EPSILON, 0.0, (advantages_a - advantages_a.mean()) / (std + _EPSILON))


def value_loss(values_a: Tensor, old_a: Tensor, returns_a: Tensor, *, clip: float) -> Tensor:
    """Half the squared error, summed. A value gets no gradient for moving further than `clip` within an update."""
    clipped_a = old_a + (values_a - old_a).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_a - returns_a).square(), (clipped_a - returns_a).square()).sum()
