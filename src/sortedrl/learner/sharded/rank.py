"""One rank of a sharded learner: a `TorchLearner` that computes its share of each batch.

`ray_ranks.py` runs one per process. Every rank gets the whole batch, makes the same loss inputs from it and plans the
same micro-batches (`balance.py`), of which it lays out and computes its share. Weights, gradients and optimizer state
are sharded (`shards.py`).

Guarantees:
- an update gives the loss and metrics that one process would give, and the same weights up to rounding;
- all ranks run the same number of passes, because each pass exchanges weights between them. A rank without a
  micro-batch makes a pass of one token, with a gradient of 0;
- all ranks take the same decisions, because these depend only on values that were summed over the ranks;
- if one rank runs out of memory, it catches up with the others (`exchange.py`), and all start over with smaller
  micro-batches, before any weight moves;
- the saved state is that of one process, so a run can resume with any number of ranks or in one process.

With `learner.context_parallel`, a context group of ranks takes the place of a rank: its ranks compute one micro-batch
together (`context.py`), know the same figures of it, and the first of them counts.

Shapes: a sampled answer tokens, f metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from sortedrl.errors import LearnerError
from sortedrl.learner.attention import packed_attention
from sortedrl.learner.base import UpdateResult
from sortedrl.learner.device import to_device, to_host
from sortedrl.learner.logprobs import Scores
from sortedrl.learner.loss_inputs import LossInputs, PerToken
from sortedrl.learner.memory import Shortage, collect_and_release, try_pass
from sortedrl.learner.optimizer import LearnerSettings
from sortedrl.learner.pack import MicroBatch, PromptGroup, lay_out, prompt_groups
from sortedrl.learner.precision import product_dtype
from sortedrl.learner.sharded.balance import attention_weight, plan_rounds
from sortedrl.learner.sharded.context import ContextGroup, SplitMicroBatch, check_heads
from sortedrl.learner.sharded.exchange import Exchange
from sortedrl.learner.sharded.shards import (
    META,
    Sharding,
    full_local,
    full_tensor,
    replicated_mesh,
    shard_like,
    shard_model,
)
from sortedrl.learner.torch import TorchLearner
from sortedrl.learner.update_metrics import MEANS, StepMetrics, TokenFigures
from sortedrl.records import Batch, Prompt, Sample, Segment
from sortedrl.weights import array_of


class RankLearner(TorchLearner):
    """`weights` are the weights to fill a skeleton model with (see `shards.py`)."""

    _memory_remedy = (
        "raise learner.context_parallel or learner.ranks, set learner.recompute, or lower engine.max_new_tokens, and "
        "resume"
    )

    def __init__(
        self,
        model: Any,
        settings: LearnerSettings,
        *,
        temperature: float,
        mesh: DeviceMesh,
        weights: Mapping[str, Any] | None = None,
        shares_device: bool = False,
    ) -> None:
        self._num_replicas: int = getattr(settings, "rank_replicas", 1)
        self._mesh = mesh
        self._weights = weights
        self._group = mesh.get_group()
        self._exchange = Exchange()
        self._context: ContextGroup | None = None
        if settings.context_parallel > 1:
            check_heads(model.config, settings.context_parallel)
            device = torch.device(mesh.device_type)
            self._context = ContextGroup(self._group, settings.context_parallel, self._exchange, device)
        self._attention = attention_weight(model)
        super().__init__(model, settings, temperature=temperature, shares_device=shares_device)
        self._weights = None
        if self.reference is not None and len(self._roots) == 1 + (self.critic is not None):
            self._make_first_pass()

    @torch.no_grad()
    def _make_first_pass(self) -> None:
        """FSDP2 sees at the first pass what is trained. The reference pass of a model with adapters trains nothing."""
        with packed_attention(self.model):
            self._forward(self.model, self._tiny(), has_values=False)

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

    def _choose_device(self) -> torch.device:
        is_cuda = self._mesh.device_type == "cuda"
        return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device(self._mesh.device_type)

    def _place_model(self) -> None:
        """Nothing yet: the model may have no weights. `ShardedLearner` has checked it."""

    def _precision(self) -> AbstractContextManager[object]:
        return nullcontext()  # the weights are gathered in the format of the pass

    def _check_update(self, batch: Batch, result: UpdateResult) -> None:
        """`ShardedLearner` checks the whole weights: a rank that raises alone would leave the others waiting."""

    def _place_weights(self) -> None:
        dtype = product_dtype(self.settings.dtype, self.model, self.device)
        sharding = Sharding(
            mesh=replicated_mesh(self._mesh, self._num_replicas),
            dtype=dtype,
            is_head_fp32=self.settings.fp32_head,
            exchange=self._exchange,
            is_on_host=getattr(self.settings, "host_states", False),
        )
        shard_model(self.model, sharding, self._weights)
        self._roots: list[Any] = [self.model]
        if self.reference is not None:
            with self.reference.module() as module:
                if module is not self.model:
                    shard_model(module, sharding, self._weights)
                    self._roots.append(module)
        if self.critic is not None:
            if self.critic.head.weight.device == META:
                self.critic.to_empty(device="cpu")
                nn.init.zeros_(self.critic.head.weight)
                nn.init.zeros_(self.critic.head.bias)
            shard_model(self.critic.head, replace(sharding, dtype=torch.float32))  # its input is float32
            self._roots.append(self.critic.head)

    def _attempt(
        self,
        samples: Sequence[Sample],
        indices: Sequence[int],
        run: Callable[[MicroBatch], None],
        idle: Callable[[MicroBatch], None],
    ) -> Shortage | None:
        """Run this rank's share of the micro-batches. All ranks return a shortage if one of them has one."""
        shortage: Shortage | None = None
        number, num_groups = self._mesh.get_rank(), self._mesh.size()
        if self._context is not None:
            number, num_groups = self._context.number, self._context.num_groups
        for plans in plan_rounds(samples, indices, self._micro_tokens, num_groups, self._attention):
            own = plans[number]
            self._exchange.begin_pass()
            if own is None:
                idle(self._tiny())
                continue
            micro = self._lay_out(samples, own.groups)
            if shortage is not None:  # what is computed is discarded
                idle(self._tiny(micro))
                continue
            shortage = try_pass(run, micro)
            if shortage is not None:
                self._catch_up(idle, micro)
        return self._agree(shortage)

    def _lay_out(self, samples: Sequence[Sample], groups: Sequence[PromptGroup]) -> MicroBatch:
        if self._context is None:
            return lay_out(samples, groups, self.device)
        return self._context.split(samples, groups, self.device)

    def _tiny(self, real: MicroBatch | None = None) -> MicroBatch:
        """A micro-batch of one token, for passes whose result is not used. `real`: what the context group computes."""
        tiny = self._lay_out([_IDLE], prompt_groups([_IDLE], [0], 1))
        if self._context is None or not (isinstance(tiny, SplitMicroBatch) and isinstance(real, SplitMicroBatch)):
            return tiny
        return self._context.stand_in(tiny, real)

    def _forward(self, module: Any, micro: MicroBatch, *, has_values: bool) -> tuple[Scores, Tensor | None]:
        if self._context is None or not isinstance(micro, SplitMicroBatch):
            return super()._forward(module, micro, has_values=has_values)
        return self._context.join(micro, *super()._forward(module, micro.own, has_values=has_values))

    @property
    def _is_counted(self) -> bool:
        """Whether this rank adds its figures: the ranks of a context group have the same ones."""
        return self._context is None or self._context.is_first

    def _catch_up(self, idle: Callable[[MicroBatch], None], failed: MicroBatch) -> None:
        """Finish the pass that failed, so that the other ranks can finish theirs."""
        self._check_repeatable()
        for root in self._roots:
            with suppress(AttributeError):  # a root that has made no pass has nothing to reset, and says so like this
                root.reset_iter_state()
        collect_and_release()
        with self._exchange.catching_up():
            idle(self._tiny(failed))

    def _agree(self, own: Shortage | None) -> Shortage | None:
        """A shortage that all ranks know: that of the largest micro-batch; a single sample comes before others."""
        found = [0, 0, 0] if own is None else [int(own.num_samples == 1), own.num_tokens, own.num_samples]
        found_3 = to_device(torch.tensor(found), self.device)
        dist.all_reduce(found_3, dist.ReduceOp.MAX, group=self._group)
        is_single, num_tokens, num_samples = to_host([found_3])[0].tolist()
        if num_tokens == 0:
            return None
        reason = "on another rank" if own is None else own.reason
        return Shortage(num_tokens=num_tokens, num_samples=1 if is_single else num_samples, reason=reason)

    def _check_repeatable(self) -> None:
        """FSDP2 adds the gradients of copies of the model by a collective that `exchange.py` cannot count."""
        if self._num_replicas > 1:
            raise LearnerError(
                "a micro-batch does not fit in memory, and with learner.rank_replicas above 1 it cannot be tried again "
                "with half of it: lower learner.micro_tokens and resume"
            )

    def _sum_names(self) -> list[str]:
        """What every rank sums over tokens, also a rank that computed none."""
        objective = self.objective
        return [
            *MEANS,
            *(["kl_reference"] if objective.has_loss_kl else []),
            *(["value_loss"] if self.critic is not None else []),
            *(["mask_fraction"] if objective.importance_mask != "none" else []),
        ]

    def _gradients(self, inputs: LossInputs, indices: range, learned: Sequence[int]) -> StepMetrics:
        step = super()._gradients(inputs, indices, learned)
        return self._sum_over_ranks(step if self._is_counted else StepMetrics.zeros(self.device))

    def _clip_gradients(self) -> Tensor:
        parameters = [parameter for parameter in self._parameters().values() if parameter.grad is not None]
        norm = full_tensor(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))
        clip_grads_with_norm_(parameters, self.settings.grad_clip, norm)
        return norm.to(self.device)  # gradients may be in host memory

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
        mine = [index for index in indices if index in own and self._is_counted]
        if mine:
            starts = dict(zip(indices, accumulate([0, *lengths]), strict=False))
            places = np.concatenate([np.arange(samples[i].num_sampled) + starts[i] for i in mine])
            values_a = torch.cat([own[index] for index in mine]).float()
            total_a = values_a.new_zeros(sum(lengths)).index_copy(0, to_device(places, self.device), values_a)
        else:
            total_a = torch.zeros(sum(lengths), device=self.device)
        dist.all_reduce(total_a, group=self._group)  # a sample's tokens are all on one rank, and 0 elsewhere
        return dict(zip(indices, total_a.split(lengths), strict=True))

    def _sum_over_ranks(self, step: StepMetrics) -> StepMetrics:
        names = self._sum_names()
        zero = torch.zeros((), device=self.device)
        own = [step.loss, *(step.sums.get(name, zero) for name in names)]
        counts = to_device(torch.tensor([step.num_learned, step.num_computed], dtype=torch.float64), self.device)
        total_f = torch.cat([torch.stack([value.double() for value in own]), counts])
        dist.all_reduce(total_f, group=self._group)
        num_learned, num_computed = (int(count) for count in to_host([total_f[-2:]])[0].tolist())
        return StepMetrics(
            loss=total_f[0].to(step.loss.dtype),
            sums=dict(zip(names, total_f[1:-2].float().unbind(), strict=True)),
            num_learned=num_learned,
            num_computed=num_computed,
            has_start=self.critic is not None or self.objective.needs_start_logprobs,
            tokens=step.tokens,
        )

    def _all_tokens(self, tokens: list[TokenFigures]) -> list[TokenFigures]:
        """The tokens of all ranks, as if they were one micro-batch."""
        names = [field.name for field in fields(TokenFigures)]
        if tokens:
            columns = zip(*(figures.tensors() for figures in tokens), strict=True)
            own = torch.stack([torch.cat(column).double() for column in columns])
        else:
            own = torch.zeros(len(names), 0, dtype=torch.float64, device=self.device)
        gathered = dict(zip(names, self._gather_columns(own), strict=True))
        kinds = {"sample_a": torch.int64, "staleness_a": torch.int64}
        return [TokenFigures(**{name: value.to(kinds.get(name, torch.float32)) for name, value in gathered.items()})]

    def _gather_columns(self, own: Tensor) -> Tensor:
        """The columns of all ranks side by side; ranks may have different numbers of them."""
        width = to_device(torch.tensor([own.shape[1]]), own.device)
        widths = [torch.zeros_like(width) for _ in range(self._mesh.size())]
        dist.all_gather(widths, width, group=self._group)
        sizes = [int(size) for size in to_host([torch.cat(widths)])[0].tolist()]
        padded = nn.functional.pad(own, (0, max(sizes) - own.shape[1])).contiguous()
        blocks = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(blocks, padded, group=self._group)
        return torch.cat([block[:, :size] for block, size in zip(blocks, sizes, strict=True)], dim=1)


_IDLE = Sample(
    id=0,
    prompt=Prompt(id="idle", tokens=(0,), content=""),
    index=0,
    epoch=0,
    cohort=0,
    seed=0,
    budget=1,
    segments=[Segment(version=0, tokens=[0], logprobs=[0.0])],
)
