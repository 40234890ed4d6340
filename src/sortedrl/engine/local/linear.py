"""Matrix products of the lean decoder: weights in float32 or bfloat16, laid out once for the processor.

The lean decoder makes these at every publication. On a CPU, oneDNN packs a large matrix once; a plain product would
pack it again at each call, which takes up to half of the time when few rows meet a wide matrix. A small matrix is
stored transposed for a plain product, because a plain call is cheaper than a packed one.

Shapes: t rows, i inputs, o outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch

# Measured with 8 to 64 rows, float32, AVX2: at 512 x 512 packed and plain are equal, at 576 x 49,152 packed takes half
# to two thirds of the time, at 64 x 192 packed takes three times as long.
_PACK_ELEMENTS = 1 << 19
_PACK_ROWS = 64  # oneDNN chooses the layout for this number of rows; other numbers work with it too


class Linear(Protocol):
    def __call__(self, x_ti: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual_to: torch.Tensor, x_ti: torch.Tensor) -> torch.Tensor:
        """Return residual + product, in the residual's precision."""
        ...


class PlainLinear:
    def __init__(self, weight_oi: torch.Tensor, bias_o: torch.Tensor | None) -> None:
        self._weight_io, self._bias_o = weight_oi.t().contiguous(), bias_o

    def __call__(self, x_ti: torch.Tensor) -> torch.Tensor:
        if self._bias_o is None:
            return torch.mm(x_ti, self._weight_io)
        return torch.addmm(self._bias_o, x_ti, self._weight_io)

    def add_to(self, residual_to: torch.Tensor, x_ti: torch.Tensor) -> torch.Tensor:
        if self._bias_o is None and residual_to.dtype == x_ti.dtype:
            return torch.addmm(residual_to, x_ti, self._weight_io)
        return residual_to + self(x_ti)


class PackedLinear:
    def __init__(self, weight_oi: torch.Tensor, bias_o: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_oi.contiguous(), _PACK_ROWS)
        self._bias_o = bias_o

    def __call__(self, x_ti: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_ti, self._packed, self._bias_o, "none", [], "")

    def add_to(self, residual_to: torch.Tensor, x_ti: torch.Tensor) -> torch.Tensor:
        if residual_to.dtype == x_ti.dtype:
            return torch.ops.mkldnn._linear_pointwise.binary(x_ti, residual_to, self._packed, self._bias_o, "add")
        return residual_to + self(x_ti)


def make_linear(weight_oi: torch.Tensor, bias_o: torch.Tensor | None, dtype: torch.dtype) -> Linear:
    """A copy of the weights in this dtype, in the layout that suits their size."""
    weight_oi = weight_oi.to(dtype)
    bias_o = None if bias_o is None else bias_o.to(dtype)
    if weight_oi.numel() >= _PACK_ELEMENTS and can_pack(weight_oi.device, dtype):
        return PackedLinear(weight_oi, bias_o)
    return PlainLinear(weight_oi, bias_o)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 faster than float32. A CPU without such instructions is far slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not can_pack(device, torch.bfloat16):
        return False
    return torch.cpu._is_avx512_bf16_supported() or has_matrix_unit(device)


def has_matrix_unit(device: torch.device) -> bool:
    """Whether bfloat16 is far faster than any vector instruction: by a GPU's tensor cores, or by AMX in a CPU."""
    return device.type == "cuda" or (device.type == "cpu" and torch.cpu._is_amx_tile_supported())
