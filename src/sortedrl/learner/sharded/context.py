"""Context parallelism: the ranks of a context group compute one micro-batch together, each a share of its tokens.

`rank.py` makes a `ContextGroup` if `learner.context_parallel` is more than one. Every layer except attention works
token by token, so a rank keeps its own tokens only; a long answer crosses ranks wherever it happens to be cut.
Attention needs all tokens of a sample: around it, ranks exchange their tokens of all heads for all tokens of their
share of the heads, and back (Ulysses). Log-probs and values are then joined, and each rank computes the loss of the
whole micro-batch, with gradients for its own tokens. torch's own context parallelism is not used, because it splits
every row of a batch evenly, and packed samples are rows of different lengths that share prompts.

Guarantees:
- log-probs, losses and summed gradients are those of one process, up to rounding;
- the model's code is unchanged: the exchange is inside the attention function that transformers calls (`attention.py`);
- ranks of a group issue the same collectives of the same sizes, also a rank whose pass failed: it makes a pass of one
  token that sends as much as the micro-batch would have sent.

Shapes: n packed tokens with padding, c tokens of a rank, a sampled answer tokens, g ranks of the group, h heads, d head
size, w numbers of a token that go to one rank, s numbers that ranks join.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from sortedrl.errors import ConfigError
from sortedrl.learner.attention import make_layout
from sortedrl.learner.device import to_device
from sortedrl.learner.logprobs import Scores
from sortedrl.learner.pack import MicroBatch, PromptGroup, arrange
from sortedrl.learner.sharded.exchange import Exchange
from sortedrl.records import Sample

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the newer name first


def check_heads(model_config: Any, size: int) -> None:
    """Refuse a group among whose ranks the model's attention heads cannot be divided."""
    heads = model_config.get_text_config().num_attention_heads
    if heads % size:
        fitting = [number for number in range(2, min(heads, 16) + 1) if heads % number == 0]
        raise ConfigError(
            f"learner.context_parallel = {size} does not divide the model's {heads} attention heads: set it to one of "
            f"{', '.join(map(str, fitting))}, or remove it"
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class SplitMicroBatch(MicroBatch):
    """A micro-batch that a context group shares, and what this rank computes of it."""

    own: MicroBatch  # this rank's tokens, and the answer tokens that they predict
    predicts: bool  # False if they predict none; `own` then has one without meaning, so that the pass is a usual one
    place_a: Tensor  # where each answer token is among the joined results of all ranks
    num_tokens_each: int  # c
    num_answers_each: int  # results that each rank sends: those of the rank that predicts most


class ContextGroup:
    """The `size` consecutive ranks of a mesh that share micro-batches with this one."""

    def __init__(self, group: Any, size: int, exchange: Exchange, device: torch.device) -> None:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) % size:
            raise ConfigError(
                f"learner.context_parallel = {size} does not divide learner.ranks = {len(ranks)}: set learner.ranks to "
                "a multiple of it"
            )
        place = dist.get_rank(group)
        first = place - place % size
        self.size = size
        self.member = place % size
        self.number = place // size  # of this group among the groups
        self.num_groups = len(ranks) // size
        self._group = dist.new_group(
            ranks[first : first + size], timeout=_timeout_of(group, device), use_local_synchronization=True
        )
        self._exchange = exchange

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that counts, where all ranks of a group know the same figures."""
        return self.member == 0

    def split(self, samples: Sequence[Sample], groups: Sequence[PromptGroup], device: torch.device) -> SplitMicroBatch:
        """The micro-batch of some groups of samples, on the device."""
        whole = arrange(samples, groups)
        each = -(-len(whole.tokens_n) // self.size)
        missing = each * self.size - len(whole.tokens_n)
        own_n = slice(self.member * each, (self.member + 1) * each)
        owner_a = whole.predictor_a // each
        counts = np.bincount(owner_a, minlength=self.size)
        num_answers = int(counts.max())
        place_a = np.zeros(len(owner_a), dtype=np.int64)
        for member, count in enumerate(counts):
            place_a[owner_a == member] = member * num_answers + np.arange(count)
        is_own_a = owner_a == self.member
        micro = whole.on(device)
        layout = make_layout(whole.rows, each * self.size, device)
        own = replace(
            micro,
            tokens_n=to_device(np.pad(whole.tokens_n, (0, missing))[own_n], device),
            positions_n=to_device(np.pad(whole.positions_n, (0, missing))[own_n], device),
            layout=replace(layout, heads=HeadExchange(context=self, num_tokens=each)),
            predictor_a=to_device(_or_one(whole.predictor_a[is_own_a] - self.member * each), device),
            targets_a=to_device(_or_one(whole.targets_a[is_own_a]), device),
        )
        return SplitMicroBatch(
            **{name: getattr(micro, name) for name in MicroBatch.__dataclass_fields__},
            own=own,
            predicts=bool(counts[self.member]),
            place_a=to_device(place_a, device),
            num_tokens_each=each,
            num_answers_each=num_answers,
        )

    def stand_in(self, tiny: SplitMicroBatch, real: SplitMicroBatch) -> SplitMicroBatch:
        """`tiny`, whose pass sends as much as one of `real`, for ranks of the group that compute `real`."""
        heads = HeadExchange(context=self, num_tokens=tiny.num_tokens_each, num_sent=real.num_tokens_each)
        own = replace(tiny.own, layout=replace(tiny.own.layout, heads=heads))
        return replace(tiny, own=own, num_answers_each=real.num_answers_each)

    def join(self, micro: SplitMicroBatch, scores: Scores, values_a: Tensor | None) -> tuple[Scores, Tensor | None]:
        """Scores and values of the whole micro-batch, from those that each rank has of its tokens."""
        columns = [scores.logprobs_a, *([] if values_a is None else [values_a])]
        room = micro.num_answers_each
        sent = [pad(column, (0, max(room - len(column), 0)))[:room] for column in columns]
        own_s = torch.cat([*sent, (scores.entropy * float(micro.predicts)).reshape(1)])
        joined_gs: Tensor = _Join.apply(own_s, self)  # pyright: ignore[reportAssignmentType]
        parts = [
            joined_gs[:, place * room : (place + 1) * room].reshape(-1).index_select(0, micro.place_a)
            for place in range(len(columns))
        ]
        whole = Scores(logprobs_a=parts[0], entropy=joined_gs[:, -1].sum())
        return whole, None if values_a is None else parts[1]

    def send_to_each(self, sent_gcw: Tensor) -> Tensor:
        """The g-th block goes to the g-th rank of the group, and its block for this rank comes back in its place."""
        received_gcw = torch.empty_like(sent_gcw)

        def call() -> dist.Work | None:
            return dist.all_to_all_single(received_gcw, sent_gcw, group=self._group)

        self._exchange.issue(call, received_gcw)
        return received_gcw

    def gather(self, own_s: Tensor) -> Tensor:
        """The vectors of all ranks of the group, [g, s]."""
        joined_gs = own_s.new_empty(self.size, len(own_s))

        def call() -> dist.Work | None:
            return _all_gather(joined_gs.view(-1), own_s.contiguous(), group=self._group)

        self._exchange.issue(call, joined_gs)
        return joined_gs


@dataclass(slots=True, kw_only=True, frozen=True)
class HeadExchange:
    """What attention calls: from a rank's tokens of all heads to all tokens of its heads, and back.

    `num_tokens` are those of a rank. `num_sent`: send as many instead, without meaning; see `ContextGroup.stand_in`.
    """

    context: ContextGroup
    num_tokens: int
    num_sent: int | None = None

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, h, c, d] in, [1, h / g, n, d] out. Where ranks are more than key and value heads, those are repeated."""
        size = self.context.size
        repeats = math.lcm(key.shape[1], size) // key.shape[1]
        if repeats > 1:
            key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
        states = (query, key, value)
        sent_gcw = torch.cat([_by_rank(part, size) for part in states], dim=-1)
        received_nw = self._send(sent_gcw).flatten(0, 1)
        widths = [part.shape[1] // size * part.shape[3] for part in states]
        split = received_nw.split(widths, dim=-1)
        heads = [
            part_nw.view(len(part_nw), -1, part.shape[3]).transpose(0, 1)[None]
            for part_nw, part in zip(split, states, strict=True)
        ]
        return heads[0], heads[1], heads[2]

    def to_tokens(self, output: Tensor) -> Tensor:
        """[1, n, h / g, d] in, [1, c, h, d] out."""
        _, _, heads, d = output.shape
        sent_gcw = output.reshape(self.context.size, self.num_tokens, heads * d)
        return self._send(sent_gcw).transpose(0, 1).reshape(1, self.num_tokens, self.context.size * heads, d)

    def _send(self, sent_gcw: Tensor) -> Tensor:
        return _AllToAll.apply(sent_gcw.contiguous(), self.context, self.num_sent)  # pyright: ignore[reportReturnType]


class _AllToAll(torch.autograd.Function):
    """Blocks to ranks; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, sent_gcw: Tensor, context: ContextGroup, num_sent: int | None) -> Tensor:
        ctx.context, ctx.num_sent = context, num_sent
        return _exchanged(sent_gcw, context, num_sent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradients[0].contiguous(), ctx.context, ctx.num_sent), None, None


def _exchanged(sent_gcw: Tensor, context: ContextGroup, num_sent: int | None) -> Tensor:
    if num_sent is None:
        return context.send_to_each(sent_gcw)
    size, _, width = sent_gcw.shape
    context.send_to_each(sent_gcw.new_zeros(size, num_sent, width))
    return torch.zeros_like(sent_gcw)


class _Join(torch.autograd.Function):
    """The results of all ranks, [g, s]. Each rank computes the whole loss, so its gradient is that of its own part."""

    @staticmethod
    def forward(ctx: Any, own_s: Tensor, context: ContextGroup) -> Tensor:
        ctx.member = context.member
        return context.gather(own_s)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0][ctx.member], None


def _by_rank(states: Tensor, size: int) -> Tensor:
    """[1, h, c, d] to [g, c, w]: the heads that each rank gets."""
    _, heads, tokens, d = states.shape
    return states[0].transpose(0, 1).reshape(tokens, size, heads // size * d).transpose(0, 1)


def _or_one(values_a: np.ndarray) -> np.ndarray:
    return values_a if len(values_a) else np.zeros(1, dtype=values_a.dtype)


def _timeout_of(group: Any, device: torch.device) -> Any:
    """How long ranks of a process group wait for each other; None for torch's default."""
    return getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
