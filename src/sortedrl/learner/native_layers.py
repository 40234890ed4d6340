"""Compiled parts of a layer, on tensors: what `layers.c` gives, and that it is compiled and loaded once.

`llama.py` calls it. All tensors are float32, whole (`contiguous`) and on the CPU; the interpreter is free for other
threads while a call runs.

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
_ARGUMENTS = {  # p: a pointer, n: a whole number, f: a float
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
    """The library; None, and the reason in the log, where it cannot be compiled."""
    library = load_library(_SOURCE, [_HEADER], fallback="updates run on torch, small models' take almost twice as long")
    if library is not None:
        for name, kinds in _ARGUMENTS.items():
            function = getattr(library, f"sortedrl_layers_{name}")
            function.argtypes = [_TYPES[kind] for kind in kinds]
            function.restype = ctypes.c_int64 if name == "memory" else None
    return library


def _call(name: str, *arguments: Tensor | ctypes.Structure | float) -> Any:
    library = load_layers()
    assert library is not None, "compiled layers are used where there are none"
    return getattr(library, f"sortedrl_layers_{name}")(*map(_plain, arguments))


def _plain(argument: Tensor | ctypes.Structure | float) -> float:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous(), "compiled code reads whole tensors"
        return argument.data_ptr()
    return ctypes.addressof(argument) if isinstance(argument, ctypes.Structure) else argument


class _Rows(ctypes.Structure):
    """`struct rows` of the source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_void_p) for name in ("edges", "index", "owner", "cosines", "sines")),
        ("scale", ctypes.c_float),
    )


class RowAttention:
    """Causal attention within the rows of a micro-batch, queries and keys turned to their positions by it."""

    def __init__(
        self, layout: Layout, cosines_nd: Tensor, sines_nd: Tensor, *, heads: int, kv_heads: int, scale: float
    ) -> None:
        pointed_to = (layout.edges, layout.index_t, layout.place_n, cosines_nd.contiguous(), sines_nd.contiguous())
        self._kept = pointed_to  # as long as they are pointed to
        pointers = (tensor.data_ptr() for tensor in pointed_to)
        self._rows = _Rows(len(layout.edges) - 1, heads, kv_heads, cosines_nd.shape[1], *pointers, scale)
        self._out_size = heads * cosines_nd.shape[1]
        self._logs_shape = heads, len(layout.index_t)
        self._memory = cosines_nd.new_empty(_call("memory", self._rows, layout.shapes[0][1]))

    def forward(self, qkv_nj: Tensor) -> tuple[Tensor, Tensor]:
        """What is attended to, [n, h d], and what the backward pass needs besides, [h, t]."""
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
    """The gradients of gate and up. What `gate` gave is written over the gradient of it."""
    by_gate_nf, by_up_nf = torch.empty_like(gate_nf), torch.empty_like(up_nf)
    _call("gate_backward", gate_nf.numel(), gate_nf, up_nf, by_out_nf, by_gate_nf, by_up_nf)
    return by_gate_nf, by_up_nf


def norm(x_nm: Tensor, gain_m: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The RMS norm, and the factor of each token, [n]."""
    out_nm, factor_n = torch.empty_like(x_nm), x_nm.new_empty(len(x_nm))
    _call("norm", *x_nm.shape, epsilon, x_nm, gain_m, out_nm, factor_n)
    return out_nm, factor_n


def norm_backward(x_nm: Tensor, gain_m: Tensor, factor_n: Tensor, by_x_nm: Tensor, by_out_nm: Tensor) -> Tensor:
    """The gradient of the gain; that of x by way of the norm, and by others as given, is written over `by_out_nm`."""
    by_gain_m = torch.zeros_like(gain_m)
    _call("norm_backward", *x_nm.shape, x_nm, gain_m, factor_n, by_x_nm, by_out_nm, by_gain_m)
    return by_gain_m
