"""One rank of a sharded learner: a `TorchLearner` that computes its share of each batch.

`ray_ranks.py` runs one per process. Every rank gets the whole batch, makes the same loss inputs from it and splits it
into the same micro-batches, of which it computes its share. Weights, gradients and optimizer state are sharded
(`shards.py`).

Guarantees:
- an update gives the loss and metrics that one process would give, and the same weights up to rounding;
- all ranks run the same number of passes, because each pass exchanges weights between them. A rank with too few
  micro-batches repeats one of another rank, with a gradient of 0;
- all ranks take the same decisions, because these depend only on values that were summed over the ranks;
- the saved state is that of one process, so a run can resume with any number of ranks or in one process.

Shapes: a sampled answer tokens, f metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from sortedrl.errors import LearnerError
from sortedrl.learner.base import UpdateResult
from sortedrl.learner.loss import PolicyRatios, TokenInputs
from sortedrl.learner.loss_inputs import LossInputs, PerToken
from sortedrl.learner.optimizer import LearnerSettings
from sortedrl.learner.pack import MicroBatch, pack
from sortedrl.learner.sharded.shards import META, full_local, full_tensor, shard_like, shard_model
from sortedrl.learner.torch import TorchLearner
from sortedrl.learner.update_metrics import StepMetrics
from sortedrl.records import Batch, Sample
from sortedrl.weights import array_of

_SLACK = 1.1  # micro-batches may exceed an even share of the tokens by this factor, since samples are not split


class RankLearner(TorchLearner):
    """`weights` are the weights to fill a skeleton model with (see `shards.py`)."""

    def __init__(
        self,
        model: Any,
        settings: LearnerSettings,
        *,
        temperature: float,
        mesh: DeviceMesh,
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        self._mesh = mesh
        self._weights = weights
        self._group = mesh.get_group()
        self._is_repeat = False  # whether the current micro-batch belongs to another rank
        super().__init__(model, settings, temperature=temperature)
        self._weights = None

    def trained_weights(self) -> dict[str, Any]:
        """The full trainable weights as arrays. Every rank must call it; only rank 0 gets them."""
        weights: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                full = full_tensor(parameter.detach())
                if self._mesh.get_rank() == 0:
                    weights[name] = array_of(full)
        return weights

    def find_nonfinite(self) -> str | None:
        """The name of a trained parameter that is infinite or not a number on any rank. Every rank must call it."""
        parameters = [(name, full_local(p)) for name, p in self.model.named_parameters() if p.requires_grad]
        is_broken = torch.tensor(
            [0.0 if not p.numel() or bool(torch.stack(p.aminmax()).isfinite().all()) else 1.0 for _, p in parameters],
            device=self.model.device,
        )
        dist.all_reduce(is_broken, group=self._group)
        return next((name for (name, _), broken in zip(parameters, is_broken.tolist(), strict=True) if broken), None)

    def state_dict(self) -> dict[str, Any]:
        """The state of one process. Every rank must call it; only rank 0 gets the tensors."""
        state = super().state_dict()
        tensors: dict[str, Tensor] = {}
        for name, value in state["optimizer"].items():
            full = full_tensor(value)
            if self._mesh.get_rank() == 0:
                tensors[name] = full
        return {**state, "optimizer": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known: dict[str, Tensor] = {**self._parameters(), **self._extra_tensors()}
        tensors: dict[str, Tensor] = {}
        for path, value in state["optimizer"].items():
            name = path.rpartition("/")[0]
            tensors[path] = shard_like(value, known[name]) if name in known else value
        super().load_state_dict({**state, "optimizer": tensors})

    def _check_model(self, model: Any) -> None:
        """`ShardedLearner` has checked the model before it is sharded."""

    def _check_update(self, batch: Batch, result: UpdateResult) -> None:
        """`ShardedLearner` checks the whole weights: a rank that raises alone would leave the others waiting."""

    def _place_weights(self) -> None:
        shard_model(self.model, self._mesh, self._weights)
        if self.reference is not None:
            with self.reference.module() as module:
                if module is not self.model:
                    shard_model(module, self._mesh, self._weights)
        if self.critic is not None:
            if self.critic.head.weight.device == META:
                self.critic.to_empty(device="cpu")
                nn.init.zeros_(self.critic.head.weight)
                nn.init.zeros_(self.critic.head.bias)
            shard_model(self.critic.head, self._mesh)

    def _micro_batches(self, samples: Sequence[Sample], indices: Sequence[int]) -> Iterator[MicroBatch]:
        """This rank's share of the micro-batches. All ranks get the same number of them."""
        size = self._mesh.size()
        micros = split_evenly(samples, indices, self._micro_tokens, size, self.model.device)
        for first in range(0, len(micros), size):
            number = first + self._mesh.get_rank()
            self._is_repeat = number >= len(micros)
            yield micros[min(number, len(micros) - 1)]

    def _out_of_memory(self, size: int, num_samples: int, reason: str) -> LearnerError:
        """Always an error: the other ranks are exchanging weights with this one, so it cannot try again alone."""
        return LearnerError(
            f"a micro-batch of {size} tokens does not fit in memory ({reason}): lower learner.micro_tokens, or raise "
            "learner.ranks, and resume"
        )

    def _backward(
        self, micro: MicroBatch, inputs: LossInputs, divisor: float, num_tokens: float, step: StepMetrics
    ) -> None:
        if not self._is_repeat:
            super()._backward(micro, inputs, divisor, num_tokens, step)
            return
        repeated = StepMetrics.zeros(self.model.device)
        super()._backward(micro, inputs, math.inf, math.inf, repeated)  # dividing by infinity makes the gradient 0
        for name, value in repeated.sums.items():  # all ranks must sum the same names, even a rank without samples
            step.sums.setdefault(name, torch.zeros_like(value))

    def _gradients(self, inputs: LossInputs, indices: range, learned: Sequence[int]) -> StepMetrics:
        return self._sum_over_ranks(super()._gradients(inputs, indices, learned))

    def _clip_gradients(self) -> Tensor:
        parameters = [parameter for parameter in self._parameters().values() if parameter.grad is not None]
        norm = full_tensor(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))
        clip_grads_with_norm_(parameters, self.settings.grad_clip, norm)
        return norm

    def _score(
        self, module: Any, samples: Sequence[Sample], indices: Sequence[int], *, is_policy: bool = True
    ) -> tuple[PerToken, PerToken]:
        logprobs, values = super()._score(module, samples, indices, is_policy=is_policy)
        logprobs = self._gather_samples(samples, indices, logprobs)
        has_values = is_policy and self.critic is not None
        return logprobs, self._gather_samples(samples, indices, values) if has_values else {}

    def _gather_samples(self, samples: Sequence[Sample], indices: Sequence[int], own: PerToken) -> PerToken:
        """Values at the tokens of the samples at `indices`, from the ranks that computed them."""
        lengths = [samples[index].num_sampled for index in indices]
        both = torch.zeros(2, sum(lengths), device=self.model.device)  # the sums, and how many ranks added to them
        for index, part in zip(indices, both.split(lengths, dim=1), strict=True):
            if index in own:
                part[0], part[1] = own[index], 1.0
        dist.all_reduce(both, group=self._group)
        return dict(zip(indices, (both[0] / both[1]).split(lengths), strict=True))

    def _sum_over_ranks(self, step: StepMetrics) -> StepMetrics:
        names = sorted(step.sums)
        own = [step.loss, *(step.sums[name] for name in names)]
        counts = torch.tensor([step.num_learned, step.num_computed], dtype=torch.float64, device=self.model.device)
        total_f = torch.cat([torch.stack([value.double() for value in own]), counts])
        dist.all_reduce(total_f, group=self._group)
        num_learned, num_computed = (int(count) for count in total_f[-2:].tolist())
        return StepMetrics(
            loss=total_f[0].to(step.loss.dtype),
            sums=dict(zip(names, total_f[1:-2].float().unbind(), strict=True)),
            num_learned=num_learned,
            num_computed=num_computed,
            micro_batches=self._gather_tokens(step),
        )

    def _gather_tokens(self, step: StepMetrics) -> list[tuple[TokenInputs, PolicyRatios]]:
        """The tokens of all ranks, as if they were one micro-batch."""
        rows = [
            (t.sample_a, t.behaviour_a, t.advantages_a, t.staleness_a, r.ratio_a, r.is_clipped_a, r.log_ratio_a)
            for t, r in step.micro_batches
        ]
        columns = [torch.cat([value.double() for value in column]) for column in zip(*rows, strict=True)]
        own = torch.stack(columns) if columns else torch.zeros(7, 0, dtype=torch.float64, device=self.model.device)
        sample_a, behaviour_a, advantages_a, staleness_a, ratio_a, is_clipped_a, log_ratio_a = self._gather_columns(own)
        tokens = TokenInputs(
            sample_a=sample_a.long(),
            behaviour_a=behaviour_a.float(),
            advantages_a=advantages_a.float(),
            staleness_a=staleness_a.long(),
        )
        ratios = PolicyRatios(
            ratio_a=ratio_a.float(), is_clipped_a=is_clipped_a.bool(), log_ratio_a=log_ratio_a.float()
        )
        return [(tokens, ratios)]

    def _gather_columns(self, own: Tensor) -> Tensor:
        """The columns of all ranks side by side; ranks may have different numbers of them."""
        width = torch.tensor([own.shape[1]], device=own.device)
        widths = [torch.zeros_like(width) for _ in range(self._mesh.size())]
        dist.all_gather(widths, width, group=self._group)
        sizes = [int(size) for size in widths]
        padded = nn.functional.pad(own, (0, max(sizes) - own.shape[1])).contiguous()
        blocks = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(blocks, padded, group=self._group)
        return torch.cat([block[:, :size] for block, size in zip(blocks, sizes, strict=True)], dim=1)


def split_evenly(
    samples: Sequence[Sample], indices: Sequence[int], micro_tokens: int, num_ranks: int, device: torch.device | str
) -> list[MicroBatch]:
    """Micro-batches, the largest first, to be computed in rounds of one per rank.

    Of the split by `micro_tokens` and a finer split into even shares, it returns the one that takes less time.
    """
    coarse = pack(samples, indices, micro_tokens, device)
    if not coarse:
        return []
    num_rounds = -(-len(coarse) // num_ranks)
    share = math.ceil(sum(micro.num_tokens for micro in coarse) / (num_rounds * num_ranks) * _SLACK)
    fine = pack(samples, indices, min(share, micro_tokens), device)
    splits = [sorted(micros, key=lambda micro: -micro.num_tokens) for micros in (coarse, fine)]
    # A round takes as long as its largest micro-batch, which is its first.
    return min(splits, key=lambda micros: sum(micro.num_tokens for micro in micros[::num_ranks]))
