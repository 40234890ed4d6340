"""PPO's critic: a value head on the model's last hidden state, and GAE from its values.

`learner/torch.py` makes one if the algorithm needs it. The head reads the input of the model's output layer, so the
pass that computes log-probs gives values too. It starts at 0, so in the first update the advantages are the rewards.
Its gradients also reach the model, weighted by `learner.value_coef`.

Shapes: a answer tokens, t tokens of one sample, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sortedrl.errors import ModelError

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


def gae(rewards_t: Tensor, values_t: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates of one answer. The value after its last token is 0."""
    advantages_t = torch.zeros_like(values_t)
    following = next_value = 0.0
    rewards, values = rewards_t.tolist(), values_t.tolist()
    for t in range(len(values) - 1, -1, -1):
        following = rewards[t] + gamma * next_value - values[t] + gamma * lam * following
        next_value = values[t]
        advantages_t[t] = following
    return advantages_t


def whitened(advantages: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Advantages minus their mean, in standard deviations, over all tokens; all 0 if they do not differ."""
    if not advantages:
        return {}
    all_a = torch.cat(list(advantages.values()))
    std = all_a.std(correction=0)
    if std < _EPSILON:
        return {index: torch.zeros_like(values_t) for index, values_t in advantages.items()}
    return {index: (values_t - all_a.mean()) / (std + _EPSILON) for index, values_t in advantages.items()}


def value_loss(values_a: Tensor, old_a: Tensor, returns_a: Tensor, *, clip: float) -> Tensor:
    """Half the squared error, summed. A value gets no gradient for moving further than `clip` within an update."""
    clipped_a = old_a + (values_a - old_a).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_a - returns_a).square(), (clipped_a - returns_a).square()).sum()
