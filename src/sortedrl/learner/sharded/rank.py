"""One rank of a learner that is cut over several processes: what `TorchLearner` does, on its share of each batch.

Every rank gets the whole batch, makes the same terms of it and cuts it into the same micro-batches, of which it
computes its share. Weights, gradients and optimiser state are cut over the ranks (`shards.py`). What it keeps true:
- an update gives the loss, the metrics and, up to rounding, the weights that one process would give;
- all ranks run the same number of passes, since each pass moves weights between them: a rank that has too few repeats
  one of another rank's, whose gradient then counts nothing;
- all ranks take the same decisions: whatever they depend on has been added up over the ranks before;
- the state that is saved is that of one process, so that any number of ranks, or one process, goes on from it.

Shapes: a sampled answer tokens, t sampled tokens of one sample, f figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from sortedrl.errors import LearnerError
from sortedrl.learner.loss import Moved, Tokens
from sortedrl.learner.loss_inputs import ByPlace, Terms, marks
from sortedrl.learner.memory import first_line, is_out_of_memory
from sortedrl.learner.optimizer import LearnerSettings
from sortedrl.learner.pack import MicroBatch, pack
from sortedrl.learner.sharded.shards import META, cut_like, shard_model, whole
from sortedrl.learner.torch import TorchLearner
from sortedrl.learner.update_metrics import Found
from sortedrl.records import Sample
from sortedrl.weights import array_of

SLACK = 1.1  # room over an even share of the tokens: samples do not fill micro-batches to the last token


class RankLearner(TorchLearner):
    """`weights`: what to fill a model with that is a skeleton (see `shards.py`)."""

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
        self._is_repeat = False  # whether the pass at hand is another rank's
        super().__init__(model, settings, temperature=temperature)
        self._weights = None

    def trained_weights(self) -> dict[str, Any]:
        """What training moves, whole, as arrays; on rank 0 only, but every rank has to ask."""
        found: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                full = whole(parameter.detach())
                if self._mesh.get_rank() == 0:
                    found[name] = array_of(full)
        return found

    def state_dict(self) -> dict[str, Any]:
        """That of one process, on rank 0; every rank has to ask, and the others get no tensors."""
        state = super().state_dict()
        tensors: dict[str, Tensor] = {}
        for name, value in state["optimizer"].items():
            full = whole(value)
            if self._mesh.get_rank() == 0:
                tensors[name] = full
        return {**state, "optimizer": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known: dict[str, Tensor] = {**self._parameters(), **self._own_tensors()}
        tensors: dict[str, Tensor] = {}
        for path, value in state["optimizer"].items():
            name = path.rpartition("/")[0]
            tensors[path] = cut_like(value, known[name]) if name in known else value
        super().load_state_dict({**state, "optimizer": tensors})

    def _check_model(self, model: Any) -> None:
        """Whoever starts the ranks has checked the model that they get."""

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

    def _visit(
        self,
        samples: Sequence[Sample],
        places: Sequence[int],
        visit: Callable[[MicroBatch], None],
        *,
        begin: Callable[[], None],
    ) -> None:
        """Call `visit` on this rank's share of the micro-batches, and on as many of all as any other rank does."""
        begin()
        micros = deal(samples, marks(len(samples), places), self._micro_tokens, self._mesh.size(), self.model.device)
        for first in range(0, len(micros), self._mesh.size()):
            place = first + self._mesh.get_rank()
            self._is_repeat = place >= len(micros)
            micro = micros[min(place, len(micros) - 1)]
            try:
                visit(micro)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise LearnerError(
                    f"a micro-batch of {micro.num_tokens} tokens does not fit in memory ({first_line(error)}): lower "
                    "learner.micro_tokens, or raise learner.ranks, and resume"
                ) from error
            finally:
                self._is_repeat = False

    def _backward(self, micro: MicroBatch, terms: Terms, divisor: float, num_tokens: float, found: Found) -> None:
        if not self._is_repeat:
            super()._backward(micro, terms, divisor, num_tokens, found)
            return
        spare = Found.zeros(self.model.device)
        super()._backward(micro, terms, math.inf, math.inf, spare)  # divided by infinity, no gradient is left
        for name, value in spare.sums.items():  # a rank without a share knows the names too
            found.sums.setdefault(name, torch.zeros_like(value))

    def _gradients(self, terms: Terms, places: range, learned: Sequence[int]) -> Found:
        return self._added_up(super()._gradients(terms, places, learned))

    def _clip(self) -> Tensor:
        parameters = [parameter for parameter in self._parameters().values() if parameter.grad is not None]
        norm = whole(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))
        clip_grads_with_norm_(parameters, self.settings.grad_clip, norm)
        return norm

    def _score(
        self, module: Any, samples: Sequence[Sample], places: Sequence[int], *, is_policy: bool = True
    ) -> tuple[ByPlace, ByPlace]:
        logprobs, values = super()._score(module, samples, places, is_policy=is_policy)
        logprobs = self._exchanged(samples, places, logprobs)
        has_values = is_policy and self.critic is not None
        return logprobs, self._exchanged(samples, places, values) if has_values else {}

    def _exchanged(self, samples: Sequence[Sample], places: Sequence[int], mine: ByPlace) -> dict[int, Tensor]:
        """Numbers at the tokens of all these samples, from what each rank has computed."""
        lengths = [samples[place].num_sampled for place in places]
        both = torch.zeros(2, sum(lengths), device=self.model.device)  # sums, and how many ranks added to them
        for place, part in zip(places, both.split(lengths, dim=1), strict=True):
            if place in mine:
                part[0], part[1] = mine[place], 1.0
        dist.all_reduce(both, group=self._group)
        return dict(zip(places, (both[0] / both[1]).split(lengths), strict=True))

    def _added_up(self, found: Found) -> Found:
        """What the micro-batches of all ranks add up to."""
        names = sorted(found.sums)
        figures = [found.loss, *(found.sums[name] for name in names)]
        counts = torch.tensor([found.num_learned, found.num_computed], dtype=torch.float64, device=self.model.device)
        total_f = torch.cat([torch.stack([figure.double() for figure in figures]), counts])
        dist.all_reduce(total_f, group=self._group)
        num_learned, num_computed = (int(count) for count in total_f[-2:].tolist())
        return Found(
            loss=total_f[0].to(found.loss.dtype),
            sums=dict(zip(names, total_f[1:-2].float().unbind(), strict=True)),
            num_learned=num_learned,
            num_computed=num_computed,
            parts=self._all_parts(found),
        )

    def _all_parts(self, found: Found) -> list[tuple[Tokens, Moved]]:
        """The tokens of all ranks, as one part."""
        rows = [
            (t.sample_a, t.behaviour_a, t.advantages_a, t.staleness_a, m.ratio_a, m.is_clipped_a, m.log_ratio_a)
            for t, m in found.parts
        ]
        columns = [torch.cat([value.double() for value in column]) for column in zip(*rows, strict=True)]
        mine = torch.stack(columns) if columns else torch.zeros(7, 0, dtype=torch.float64, device=self.model.device)
        sample_a, behaviour_a, advantages_a, staleness_a, ratio_a, is_clipped_a, log_ratio_a = self._joined(mine)
        tokens = Tokens(
            sample_a=sample_a.long(),
            behaviour_a=behaviour_a.float(),
            advantages_a=advantages_a.float(),
            staleness_a=staleness_a.long(),
        )
        moved = Moved(ratio_a=ratio_a.float(), is_clipped_a=is_clipped_a.bool(), log_ratio_a=log_ratio_a.float())
        return [(tokens, moved)]

    def _joined(self, mine: Tensor) -> Tensor:
        """Columns of all ranks side by side."""
        width = torch.tensor([mine.shape[1]], device=mine.device)
        widths = [torch.zeros_like(width) for _ in range(self._mesh.size())]
        dist.all_gather(widths, width, group=self._group)
        sizes = [int(size) for size in widths]
        padded = nn.functional.pad(mine, (0, max(sizes) - mine.shape[1])).contiguous()
        blocks = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(blocks, padded, group=self._group)
        return torch.cat([block[:, :size] for block, size in zip(blocks, sizes, strict=True)], dim=1)


def deal(
    samples: Sequence[Sample], marks: Sequence[float], micro_tokens: int, num_ranks: int, device: torch.device | str
) -> list[MicroBatch]:
    """Micro-batches in rounds of one per rank, the largest first, in as little time as `pack` allows."""
    coarse = pack(samples, marks, micro_tokens, device)
    if not coarse:
        return []
    num_rounds = -(-len(coarse) // num_ranks)
    share = math.ceil(sum(micro.num_tokens for micro in coarse) / (num_rounds * num_ranks) * SLACK)
    fine = pack(samples, marks, min(share, micro_tokens), device)
    dealt = [sorted(micros, key=lambda micro: -micro.num_tokens) for micros in (coarse, fine)]
    # A round takes as long as its largest, which is its first.
    return min(dealt, key=lambda micros: sum(micro.num_tokens for micro in micros[::num_ranks]))
