"""The compiled parts of a Llama layer as functions on tensors; compiles and loads `layers.c` once per process.

`llama.py` calls it. All tensors must be float32, contiguous and on the CPU. The GIL is released while a call runs.

Shapes: n packed tokens, t tokens of all rows, m model size, f feed-forward size, h query heads, d head size, j numbers
of a token's queries, keys and values.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from sortedrl.learner.attention import Layout
from sortedrl.native.c_library import SOURCES, load_library

_SOURCE, _HEADER = SOURCES / "layers.c", SOURCES / "vectors.h"
_ARGUMENTS = {  # p: pointer, n: integer, f: float
    "memory": "pn",
    "attend": "ppppp",
    "attend_backward": "ppppppp",
    "gate": "nppp",
    "gate_backward": "nppppp",
    "norm": "nnfpppp",
    "norm_backward": "nnpppppp",
}
_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float}


@functools.cache
def load_layers() -> ctypes.CDLL | None:
    """The compiled library, or None if it cannot be compiled; the log says why."""
    library = load_library(
        _SOURCE, [_HEADER], fallback="updates run on torch and take almost twice as long for small models"
    )
    if library is not None:
        for name, kinds in _ARGUMENTS.items():
            function = getattr(library, f"sortedrl_layers_{name}")
            function.argtypes = [_TYPES[kind] for kind in kinds]
            function.restype = ctypes.c_int64 if name == "memory" else None
    return library


def _call(name: str, *arguments: Tensor | ctypes.Structure | float) -> Any:
    library = load_layers()
    assert library is not None, "the compiled layers could not be loaded: check load_layers() first"
    return getattr(library, f"sortedrl_layers_{name}")(*map(_as_c_argument, arguments))


def _as_c_argument(argument: Tensor | ctypes.Structure | float) -> float:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous(), "compiled code needs contiguous tensors"
        return argument.data_ptr()
    return ctypes.addressof(argument) if isinstance(argument, ctypes.Structure) else argument


class _Rows(ctypes.Structure):
    """`struct rows` of layers.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_void_p) for name in ("edges", "index", "owner", "cosines", "sines")),
        ("scale", ctypes.c_float),
    )


class RowAttention:
    """Causal attention within the rows of a micro-batch. It applies the rotary embedding to queries and keys too."""

    def __init__(
        self, layout: Layout, cosines_nd: Tensor, sines_nd: Tensor, *, heads: int, kv_heads: int, scale: float
    ) -> None:
        pointed_to = (
            layout.edges,
            layout.unpadded_t,
            layout.in_unpadded_n,
            cosines_nd.contiguous(),
            sines_nd.contiguous(),
        )
        self._kept_alive = pointed_to  # the C structure holds raw pointers to them
        pointers = (tensor.data_ptr() for tensor in pointed_to)
        self._rows = _Rows(len(layout.edges) - 1, heads, kv_heads, cosines_nd.shape[1], *pointers, scale)
        self._out_size = heads * cosines_nd.shape[1]
        self._logs_shape = heads, len(layout.unpadded_t)
        self._memory = cosines_nd.new_empty(_call("memory", self._rows, layout.longest_row))

    def forward(self, qkv_nj: Tensor) -> tuple[Tensor, Tensor]:
        """The attention output, [n, h d], and the log-sum-exps that the backward pass needs, [h, t]."""
        out_n = qkv_nj.new_empty(len(qkv_nj), self._out_size)
        logs_ht = qkv_nj.new_empty(self._logs_shape)
        _call("attend", self._rows, qkv_nj, out_n, logs_ht, self._memory)
        return out_n, logs_ht

    def backward(self, qkv_nj: Tensor, out_n: Tensor, logs_ht: Tensor, by_out_n: Tensor) -> Tensor:
        by_qkv_nj = torch.zeros_like(qkv_nj)
        _call("attend_backward", self._rows, qkv_nj, out_n, logs_ht, by_out_n, by_qkv_nj, self._memory)
        return by_qkv_nj


def gate(gate_nf: Tensor, up_nf: Tensor) -> Tensor:
    """silu(gate) * up."""
    out_nf = torch.empty_like(gate_nf)
    _call("gate", gate_nf.numel(), gate_nf, up_nf, out_nf)
    return out_nf


def gate_backward(gate_nf: Tensor, up_nf: Tensor, by_out_nf: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up. Overwrites `by_out_nf` with the output of `gate`."""
    by_gate_nf, by_up_nf = torch.empty_like(gate_nf), torch.empty_like(up_nf)
    _call("gate_backward", gate_nf.numel(), gate_nf, up_nf, by_out_nf, by_gate_nf, by_up_nf)
    return by_gate_nf, by_up_nf


def norm(x_nm: Tensor, gain_m: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The RMS norm, and the scale factor of each token, [n]."""
    out_nm, factor_n = torch.empty_like(x_nm), x_nm.new_empty(len(x_nm))
    _call("norm", *x_nm.shape, epsilon, x_nm, gain_m, out_nm, factor_n)
    return out_nm, factor_n


def norm_backward(x_nm: Tensor, gain_m: Tensor, factor_n: Tensor, by_x_nm: Tensor, by_out_nm: Tensor) -> Tensor:
    """The gradient of the gain. Overwrites `by_out_nm` with the gradient of x: through the norm, plus `by_x_nm`."""
    by_gain_m = torch.zeros_like(gain_m)
    _call("norm_backward", *x_nm.shape, x_nm, gain_m, factor_n, by_x_nm, by_out_nm, by_gain_m)
    return by_gain_m
