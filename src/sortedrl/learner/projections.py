"""The matrix products of a Llama layer, with LoRA adapters folded in and hand-written gradients.

`llama.py` makes a `Projection` of the linear layers that read the same input (queries, keys and values; gate and up).
In float32 the products read the parameters. In bfloat16 they read copies: those of frozen weights are kept, those of
trained weights are made in every pass. Weights and adapters' B lie side by side there, and an input is followed by what
the adapters' A make of it, so that one product computes W x + B A x, and one product both of its gradients.

Guarantees: gradients exist only for parameters that want them; they are float32, summed in float32 within a product.

Shapes: n packed tokens, f feed-forward size, i inputs, o outputs of all layers, r ranks of all adapters, k = i + r.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sortedrl.learner.native_layers import gate, gate_backward, gate_low, gate_low_backward

_LOW = torch.bfloat16


@dataclass(slots=True, kw_only=True, frozen=True)
class _Part:
    """One linear layer: its weights, and its adapter if it has one."""

    weight_oi: Tensor
    a_ri: Tensor | None
    b_or: Tensor | None
    scale: float  # of the adapter

    @property
    def rank(self) -> int:
        return 0 if self.a_ri is None else len(self.a_ri)


def _part_of(layer: Any) -> _Part:
    if isinstance(layer, nn.Linear):
        return _Part(weight_oi=layer.weight, a_ri=None, b_or=None, scale=1.0)
    weight_oi = layer.get_base_layer().weight
    if layer.disable_adapters:
        return _Part(weight_oi=weight_oi, a_ri=None, b_or=None, scale=1.0)
    name = layer.active_adapters[0]
    a_ri, b_or = layer.lora_A[name].weight, layer.lora_B[name].weight
    return _Part(weight_oi=weight_oi, a_ri=a_ri, b_or=b_or, scale=float(layer.scaling[name]))


class Projection:
    """Linear layers that read the same input, in float32. Their outputs lie side by side."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._parts = [_part_of(layer) for layer in layers]
        self.sizes = [len(part.weight_oi) for part in self._parts]  # of the outputs

    @property
    def parameters(self) -> list[Tensor]:
        """The weights, A and B of each layer, in the order in which `backward` returns their gradients."""
        found = ((part.weight_oi, part.a_ri, part.b_or) for part in self._parts)
        return [tensor for part in found for tensor in part if tensor is not None]

    def forward(self, x_ni: Tensor) -> tuple[Tensor, Tensor]:
        """What `backward` needs, and the outputs, [n, o]."""
        y_no = x_ni.new_empty(len(x_ni), sum(self.sizes), dtype=torch.float32)
        for part, y_np in zip(self._parts, y_no.split(self.sizes, 1), strict=True):
            torch.mm(x_ni, part.weight_oi.T, out=y_np)
            if part.a_ri is not None and part.b_or is not None:
                y_np.addmm_(x_ni @ part.a_ri.T, part.b_or.T, alpha=part.scale)
        return x_ni, y_no

    def forward_gated(self, inner_nf2: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` of silu(gate) * up; gate and up lie side by side."""
        return self.forward(gate(*_halves(inner_nf2)))

    def backward(self, kept: Tensor, by_y_no: Tensor, *, has_input: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of the input, if `has_input`, and of the parameters. `kept` is from `forward`."""
        x_ni = kept
        by_x_ni = x_ni.new_zeros(x_ni.shape) if has_input and len(self._parts) > 1 else None
        gradients: list[Tensor | None] = []
        for part, by_np in zip(self._parts, by_y_no.split(self.sizes, 1), strict=True):
            gradients.append(by_np.T @ x_ni if part.weight_oi.requires_grad else None)
            if has_input:
                by_x_ni = by_np @ part.weight_oi if by_x_ni is None else by_x_ni.addmm_(by_np, part.weight_oi)
            if part.a_ri is not None and part.b_or is not None:
                by_inner_nr = (by_np @ part.b_or).mul_(part.scale)
                gradients.append(by_inner_nr.T @ x_ni if part.a_ri.requires_grad else None)
                inner_nr = (x_ni @ part.a_ri.T).mul_(part.scale)
                gradients.append(by_np.T @ inner_nr if part.b_or.requires_grad else None)
                if by_x_ni is not None:
                    by_x_ni.addmm_(by_inner_nr, part.a_ri)
        return by_x_ni, gradients


class LowProjection(Projection):
    """The same with products in bfloat16. What `forward` keeps is the input and what the adapters' A make of it."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__(layers)
        self._num_inputs = self._parts[0].weight_oi.shape[1]
        self._ranks = [part.rank for part in self._parts]
        self._joined_ok = _joined_copy(layers[0], self._parts)
        scaled = [part.a_ri.detach() * part.scale for part in self._parts if part.a_ri is not None]
        self._a_ri = torch.cat(scaled) if scaled else None
        self._low_a_ri = None if self._a_ri is None else self._a_ri.to(_LOW)

    def forward(self, x_ni: Tensor) -> tuple[Tensor, Tensor]:
        joined_nk = torch.empty(len(x_ni), self._joined_ok.shape[1], dtype=_LOW)
        joined_nk[:, : self._num_inputs] = x_ni
        return self._multiply(joined_nk)

    def forward_gated(self, inner_nf2: Tensor) -> tuple[Tensor, Tensor]:
        joined_nk = torch.empty(len(inner_nf2), self._joined_ok.shape[1], dtype=_LOW)
        gate_low(inner_nf2, joined_nk)
        return self._multiply(joined_nk)

    def _multiply(self, joined_nk: Tensor) -> tuple[Tensor, Tensor]:
        """Let the adapters' A fill the last columns of the input, and multiply it."""
        if self._low_a_ri is not None:
            joined_nk[:, self._num_inputs :] = joined_nk[:, : self._num_inputs] @ self._low_a_ri.T
        return joined_nk, joined_nk @ self._joined_ok.T

    def backward(self, kept: Tensor, by_y_no: Tensor, *, has_input: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        joined_nk, by_y_no = kept, by_y_no.to(_LOW)
        first = 0 if has_input else self._num_inputs
        by_joined_nk = by_y_no @ self._joined_ok[:, first:] if has_input or self._a_ri is not None else None
        by_x_ni = by_a_ri = by_b_or = None
        if self._a_ri is not None:
            assert by_joined_nk is not None, "adapters have gradients"
            by_inner_nr = by_joined_nk[:, self._num_inputs - first :]
            by_a_ri = (by_inner_nr.T @ joined_nk[:, : self._num_inputs]).float()
            by_b_or = (by_y_no.T @ joined_nk[:, self._num_inputs :]).float()
        if has_input:
            assert by_joined_nk is not None, "the input has a gradient"
            by_x_ni = by_joined_nk[:, : self._num_inputs].float()
            if self._a_ri is not None:
                by_x_ni.addmm_(by_joined_nk[:, self._num_inputs :].float(), self._a_ri)
        return by_x_ni, self._split_gradients(by_y_no, joined_nk, by_a_ri, by_b_or)

    def _split_gradients(
        self, by_y_no: Tensor, joined_nk: Tensor, by_a_ri: Tensor | None, by_b_or: Tensor | None
    ) -> list[Tensor | None]:
        """The gradients of each layer's parameters."""
        gradients: list[Tensor | None] = []
        output = inner = 0
        for part, size, rank in zip(self._parts, self.sizes, self._ranks, strict=True):
            outputs, ranks = slice(output, output + size), slice(inner, inner + rank)
            if part.weight_oi.requires_grad:
                gradients.append((by_y_no[:, outputs].T @ joined_nk[:, : self._num_inputs]).float())
            else:
                gradients.append(None)
            if by_a_ri is not None and by_b_or is not None and part.a_ri is not None:
                gradients += [by_a_ri[ranks] * part.scale, by_b_or[outputs, ranks]]
            output, inner = output + size, inner + rank
        return gradients


def gate_gradient(inner_nf2: Tensor, by_gated_nf: Tensor) -> Tensor:
    """The gradient of gate and up from that of silu(gate) * up, which is overwritten."""
    if inner_nf2.dtype == _LOW:
        return gate_low_backward(inner_nf2, by_gated_nf)
    return torch.cat(gate_backward(*_halves(inner_nf2), by_gated_nf), 1)


def _halves(inner_nf2: Tensor) -> tuple[Tensor, Tensor]:
    gate_nf, up_nf = inner_nf2.chunk(2, 1)
    return gate_nf.contiguous(), up_nf.contiguous()


@dataclass(slots=True, kw_only=True)
class _FrozenCopy:
    joined_ok: Tensor
    sources: tuple[tuple[int, int], ...]  # address and version of each weight that was copied


_frozen_copies: weakref.WeakKeyDictionary[nn.Module, _FrozenCopy] = weakref.WeakKeyDictionary()
"""By the first layer of a projection. A copy of frozen weights is made once and not at every pass."""


def _joined_copy(key: nn.Module, parts: Sequence[_Part]) -> Tensor:
    """Weights and adapters' B side by side in bfloat16, [o, k]. B is block diagonal: each layer has its own columns."""
    sizes, num_inputs = [len(part.weight_oi) for part in parts], parts[0].weight_oi.shape[1]
    shape = sum(sizes), num_inputs + sum(part.rank for part in parts)
    is_frozen = not any(part.weight_oi.requires_grad for part in parts)
    sources = tuple((part.weight_oi.data_ptr(), part.weight_oi._version) for part in parts)
    kept = _frozen_copies.get(key) if is_frozen else None
    if kept is not None and kept.sources == sources and shape[1] == num_inputs:
        return kept.joined_ok[:, :num_inputs]  # the adapters are disabled for this pass
    with torch.no_grad():
        if kept is None or kept.sources != sources or kept.joined_ok.shape != shape:
            joined_ok = torch.zeros(shape, dtype=_LOW)
            for part, rows_pk in zip(parts, joined_ok.split(sizes), strict=True):
                rows_pk[:, :num_inputs] = part.weight_oi
            kept = _FrozenCopy(joined_ok=joined_ok, sources=sources)
            if is_frozen:
                _frozen_copies[key] = kept
        column = num_inputs
        for part, rows_pk in zip(parts, kept.joined_ok.split(sizes), strict=True):
            if part.b_or is not None:
                rows_pk[:, column : column + part.rank] = part.b_or
            column += part.rank
    return kept.joined_ok
