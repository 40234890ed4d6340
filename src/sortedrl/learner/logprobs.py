"""Log-probs and entropy of packed answers, without holding the logits of all tokens at once.

`learner/torch.py` and `sft.py` call `LogprobScorer.score` on each micro-batch. If the logits would be large, the
model's output layer runs on pieces of the tokens: on a CPU a few hundred, whose logits fit into its cache, on a GPU
thousands, a fixed share of its memory. The log-probs of the first pieces are kept for the backward pass, up to a fixed
size; for the other pieces two numbers per token are kept, and the backward pass computes the logits again. The model is
called as usual, with the forward of its output layer replaced during the call, so hooks on the model and on the layer
(of adapters, a critic, sharded weights) still run.

Guarantees: values and gradients, also those of the output layer's weights, equal those computed from all logits at
once. Small logits are computed at once, bit by bit as in `loss.py`. So are those of a model whose output layer is not a
plain nn.Linear, or which changes the logits afterwards.

Shapes: n packed tokens, a answer tokens, r answer tokens of a piece, h hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sortedrl.learner.device import memory_of
from sortedrl.learner.loss import answer_logprobs, entropy_bonus
from sortedrl.learner.pack import MicroBatch, packed_logits

WHOLE_ELEMENTS = 1 << 22  # logits up to this size are computed at once
PIECE_ELEMENTS = 1 << 22  # larger ones are computed in pieces of about this size
KEPT_ELEMENTS = 1 << 26  # this many, 256 MB, are kept for the backward pass; the rest is computed again
BYTES_PER_ELEMENT = 256  # on a GPU, a piece has one element for so many bytes of memory: 2,055 tokens of 152,064 words
#                          on 80 GB. Logits and log-probs of a piece take 8 bytes per element, 3 % of the memory.


@dataclass(slots=True, kw_only=True, frozen=True)
class PieceSizes:
    """How many logits are computed at once, in elements."""

    whole: int  # up to this size, all of a micro-batch
    piece: int
    kept: int  # for the backward pass

    @classmethod
    def on_cpu(cls) -> PieceSizes:
        return cls(whole=WHOLE_ELEMENTS, piece=PIECE_ELEMENTS, kept=KEPT_ELEMENTS)

    @classmethod
    def on_gpu(cls, memory_bytes: int) -> PieceSizes:
        piece = max(memory_bytes // BYTES_PER_ELEMENT, PIECE_ELEMENTS)
        return cls(whole=WHOLE_ELEMENTS, piece=piece, kept=piece)

    @classmethod
    def on(cls, device: torch.device) -> PieceSizes:
        memory = memory_of(device)
        return cls.on_cpu() if memory is None else cls.on_gpu(memory)


@dataclass(slots=True, kw_only=True, frozen=True)
class Scores:
    logprobs_a: Tensor
    entropy: Tensor  # summed over positions; it has a gradient only if one was asked for


class LogprobScorer:
    """`temperature` is the sampling temperature. 0 is greedy sampling; its log-probs are those of temperature 1.

    `is_fp32` computes the output layer in float32, whatever the precision of the pass. `sizes` replace those that fit
    the device.
    """

    def __init__(self, temperature: float, *, is_fp32: bool = False, sizes: PieceSizes | None = None) -> None:
        self._temperature = temperature
        self._is_fp32 = is_fp32
        self._sizes = sizes
        self._changes_logits = False  # whether the model changes what its output layer returns; seen at the first call

    def score(self, model: Any, micro: MicroBatch, *, has_entropy_gradient: bool = False) -> Scores:
        """Score the answer tokens. Call it, and the backward pass, within `packed_attention(model)`."""
        output_layer = model.get_output_embeddings()
        is_linear = isinstance(output_layer, nn.Linear)
        sizes = self._sizes or PieceSizes.on(micro.targets_a.device)
        if is_linear and not self._changes_logits and _num_logits(output_layer, micro) > sizes.whole:
            scores = self._score_in_pieces(model, output_layer, micro, has_entropy_gradient, sizes)
            if scores is not None:
                return scores
            self._changes_logits = True
        is_replaced = self._is_fp32 and is_linear
        with _replaced_forward(output_layer, _fp32_forward(output_layer)) if is_replaced else nullcontext():
            logits_av = packed_logits(model, micro)
        logprobs_a, entropy = answer_logprobs(logits_av, micro.targets_a, self._temperature)
        if has_entropy_gradient:
            entropy = entropy_bonus(logits_av, self._temperature)
        return Scores(logprobs_a=logprobs_a, entropy=entropy)

    def _score_in_pieces(
        self, model: Any, output_layer: nn.Linear, micro: MicroBatch, has_entropy_gradient: bool, sizes: PieceSizes
    ) -> Scores | None:
        """The scores, or None if the model changes what its output layer returns."""
        scale = 1.0 if self._temperature in (0.0, 1.0) else 1 / self._temperature
        returned: list[Tensor] = []

        def forward(hidden_ah: Tensor) -> Tensor:
            dtype = torch.float32 if self._is_fp32 else _product_dtype(hidden_ah)
            logprobs_a, entropy_a = _LogprobsInPieces.apply(
                hidden_ah[0], output_layer.weight, output_layer.bias, micro.targets_a, scale, dtype, sizes
            )
            if not has_entropy_gradient:
                entropy_a = entropy_a.detach()
            returned.append(torch.stack((logprobs_a, entropy_a), -1)[None])
            return returned[-1]

        with _replaced_forward(output_layer, forward):
            output_a2 = packed_logits(model, micro)
        if not _is_same(output_a2, returned[0][0]):
            return None
        entropy = output_a2[:, 1].sum()
        return Scores(logprobs_a=output_a2[:, 0], entropy=entropy if has_entropy_gradient else entropy.detach())


def _num_logits(output_layer: nn.Linear, micro: MicroBatch) -> int:
    return micro.targets_a.numel() * output_layer.out_features


def _is_same(found_a2: Tensor, returned_a2: Tensor) -> bool:
    """Whether the model passed on what its output layer returned."""
    same_memory = found_a2.untyped_storage()._cdata == returned_a2.untyped_storage()._cdata
    return same_memory and found_a2.dtype == returned_a2.dtype and found_a2.shape == returned_a2.shape


def _product_dtype(hidden_ah: Tensor) -> torch.dtype:
    device = hidden_ah.device.type
    is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_autocast else hidden_ah.dtype


def _fp32_forward(output_layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The forward of an output layer in float32, whatever autocast says."""

    def forward(hidden_ah: Tensor) -> Tensor:
        bias_v = None if output_layer.bias is None else output_layer.bias.float()
        with _no_autocast(hidden_ah.device.type):
            return functional.linear(hidden_ah.float(), output_layer.weight.float(), bias_v)

    return forward


def _no_autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace a module's forward inside the block; its hooks still run."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


class _LogprobsInPieces(torch.autograd.Function):
    """From hidden states to the log-probs of the targets and the entropies, [a] each, in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ah: Tensor,
        weight_vh: Tensor,
        bias_v: Tensor | None,
        targets_a: Tensor,
        scale: float,
        dtype: torch.dtype,
        sizes: PieceSizes,
    ) -> tuple[Tensor, Tensor]:
        logprobs_a, entropy_a = (hidden_ah.new_empty(len(hidden_ah), dtype=torch.float32) for _ in range(2))
        kept: list[Tensor] = []
        room = sizes.kept if ctx.needs_input_grad[0] else -1  # nothing is kept in a pass without gradients
        pieces = _pieces(len(hidden_ah), len(weight_vh), sizes.piece)
        with _no_autocast(hidden_ah.device.type):
            lower_vh = weight_vh.to(dtype)
            logprobs_of = _make_logprobs(hidden_ah, lower_vh, bias_v, scale, dtype)
            for piece in pieces:
                logprobs_rv = logprobs_of(piece)
                logprobs_a[piece] = logprobs_rv.gather(1, targets_a[piece, None])[:, 0]
                entropy_a[piece] = -logprobs_rv.exp().mul_(logprobs_rv).sum(-1)
                room -= logprobs_rv.numel()
                if room >= 0:
                    kept.append(logprobs_rv)
        ctx.save_for_backward(hidden_ah, weight_vh, bias_v, targets_a, entropy_a)
        ctx.scale, ctx.dtype, ctx.kept, ctx.lower_vh, ctx.pieces = scale, dtype, kept, lower_vh, pieces
        ctx.set_materialize_grads(False)
        return logprobs_a, entropy_a

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by_logprob_a, by_entropy_a = gradients
        hidden_ah, weight_vh, bias_v, targets_a, entropy_a = ctx.saved_tensors
        scale, dtype = ctx.scale, ctx.dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # In float32, because they are sums over all pieces.
        by_weight_vh = torch.zeros_like(weight_vh, dtype=torch.float32) if needs_weight else None
        by_bias_v = torch.zeros_like(bias_v, dtype=torch.float32) if needs_bias else None
        by_hidden_ah = torch.empty_like(hidden_ah) if needs_hidden else None
        lower_vh = ctx.lower_vh
        logprobs_of = _make_logprobs(hidden_ah, lower_vh, bias_v, scale, dtype)
        kept, ctx.kept = ctx.kept[::-1], []  # overwritten below, and freed piece by piece
        for piece in ctx.pieces:
            by_logits_rv = _by_logits(
                kept.pop() if kept else logprobs_of(piece),
                targets_a[piece],
                entropy_a[piece],
                None if by_logprob_a is None else by_logprob_a[piece] * scale,
                None if by_entropy_a is None else by_entropy_a[piece] * scale,
            )
            if by_bias_v is not None:
                by_bias_v += by_logits_rv.sum(0)
            lower_rv = by_logits_rv.to(dtype)
            if by_hidden_ah is not None:
                by_hidden_ah[piece] = (lower_rv @ lower_vh).to(hidden_ah.dtype)
            if by_weight_vh is not None:
                if dtype == torch.float32:
                    by_weight_vh.addmm_(lower_rv.T, hidden_ah[piece].to(dtype))
                else:
                    by_weight_vh += lower_rv.T @ hidden_ah[piece].to(dtype)
        return (
            by_hidden_ah,
            None if by_weight_vh is None else by_weight_vh.to(weight_vh.dtype),
            None if by_bias_v is None else by_bias_v.to(bias_v.dtype),
            *(None, None, None, None),
        )


def _by_logits(
    logprobs_rv: Tensor, targets_r: Tensor, entropy_r: Tensor, by_logprob_r: Tensor | None, by_entropy_r: Tensor | None
) -> Tensor:
    """The gradient of a piece's logits: g (1 at the target - p) for the log-prob, -g p (log p + H) for the entropy."""
    weight_r1 = torch.zeros_like(entropy_r)[:, None] if by_logprob_r is None else by_logprob_r[:, None]
    if by_entropy_r is None:
        gradient_rv = logprobs_rv.exp_().mul_(-weight_r1)
    else:
        factor_rv = (logprobs_rv + entropy_r[:, None]).mul_(by_entropy_r[:, None]).add_(weight_r1)
        gradient_rv = logprobs_rv.exp_().mul_(factor_rv).neg_()
    return gradient_rv.scatter_add_(1, targets_r[:, None], weight_r1)


def _make_logprobs(
    hidden_ah: Tensor, lower_vh: Tensor, bias_v: Tensor | None, scale: float, dtype: torch.dtype
) -> Callable[[slice], Tensor]:
    """A function from a piece to its log-probs over the vocabulary, in float32; the caller may overwrite them.

    `lower_vh` are the weights in the dtype of the product.
    """
    bias_v = None if bias_v is None else bias_v.to(dtype)

    def logprobs_of(piece: slice) -> Tensor:
        logits_rv = functional.linear(hidden_ah[piece].to(dtype), lower_vh, bias_v).float()
        return (logits_rv if scale == 1.0 else logits_rv.mul_(scale)).log_softmax(-1)

    return logprobs_of


def _pieces(num_tokens: int, vocabulary: int, elements: int) -> list[slice]:
    """Divide the tokens into slices of about equal size.

    The logits of a slice have at most `elements` elements, unless a single token has more.
    """
    num_pieces = -(-num_tokens // max(elements // vocabulary, 1))
    edges = [num_tokens * number // num_pieces for number in range(num_pieces + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]
