"""The compiled parts of a Llama layer as functions on tensors; compiles and loads `layers.c` once per process.

`llama.py` and `projections.py` call it. All tensors must be contiguous, on the CPU, and float32 unless a function says
otherwise. The GIL is released while a call runs. Large calls are divided among as many threads as torch uses.
Guarantees: results depend on the number of threads, but not on their timing.

Shapes: n packed tokens, t tokens of all rows, m model size, f feed-forward size, h query heads, d head size, j numbers
of a token's queries, keys and values.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortedrl.learner.attention import Layout
from sortedrl.native.c_library import SOURCES, load_library
from sortedrl.native.openmp import run_in_parallel

_SOURCE, _HEADER = SOURCES / "layers.c", SOURCES / "vectors.h"
_ARGUMENTS = {  # p: pointer, n: integer, f: float
    "memory": "pn",
    "attend": "ppppp",
    "attend_backward": "ppppppp",
    "gate": "nppp",
    "gate_backward": "nppppp",
    "gate_low": "nnpnp",
    "gate_low_backward": "nnppp",
    "norm": "nnfpppp",
    "norm_backward": "nnpppppp",
}
_MIN_PARALLEL = 1 << 16  # numbers
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


def _ranges(rows: int, width: int) -> list[slice]:
    """Divide rows among the threads; all to one if they are few, because waking another would take longer."""
    size = torch.get_num_threads() if rows * width >= _MIN_PARALLEL else 1
    edges = [rows * rank // size for rank in range(size + 1)]
    return [slice(edges[rank], edges[rank + 1]) for rank in range(size)]


class _Rows(ctypes.Structure):
    """`struct rows` of layers.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_void_p) for name in ("edges", "index", "owner", "cosines", "sines")),
        ("scale", ctypes.c_float),
    )


class _RowShare:
    """The rows of one thread: where their tokens are, and the memory to attend in."""

    def __init__(
        self, layout: Layout, rows: list[int], cosines_nd: Tensor, sines_nd: Tensor, shape: tuple[int, int, float]
    ) -> None:
        heads, kv_heads, scale = shape
        edges, index, owner = _share_of(layout, rows)
        pointed_to = (edges, index, owner, cosines_nd, sines_nd)
        self._kept_alive = pointed_to  # the C structure holds raw pointers to them
        pointers = (tensor.data_ptr() for tensor in pointed_to)
        self.rows = _Rows(len(rows), heads, kv_heads, cosines_nd.shape[1], *pointers, scale)
        self.num_tokens = len(index)
        self.memory = cosines_nd.new_empty(_call("memory", self.rows, int(edges.diff().max())))


def _share_of(layout: Layout, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """`edges`, `unpadded_t` and `in_unpadded_n` of a layout, for some of its rows only.

    A token whose result another share owns gets -1.
    """
    if len(rows) == len(layout.edges) - 1:
        return layout.edges, layout.unpadded_t, layout.in_unpadded_n
    edges: list[int] = layout.edges.tolist()
    places = np.concatenate([np.arange(edges[row], edges[row + 1]) for row in rows])
    in_share = np.full(edges[-1], -1, dtype=np.int64)
    in_share[places] = np.arange(len(places))
    own_edges = np.cumsum([0, *(edges[row + 1] - edges[row] for row in rows)]).astype(np.int32)
    owner_n = in_share[layout.in_unpadded_n.numpy()]
    return torch.from_numpy(own_edges), layout.unpadded_t[torch.from_numpy(places)], torch.from_numpy(owner_n)


def _divide_rows(layout: Layout, size: int) -> list[list[int]]:
    """Divide a layout's rows among threads so that each computes about as many scores; no share is empty."""
    lengths = layout.edges.diff().tolist()
    shares: list[list[int]] = [[] for _ in range(min(size, len(lengths)))]
    costs = [0.0] * len(shares)
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        least = costs.index(min(costs))
        shares[least].append(row)
        costs[least] += lengths[row] ** 2
    return [sorted(share) for share in shares]


class RowAttention:
    """Causal attention within the rows of a micro-batch. It applies the rotary embedding to queries and keys too."""

    def __init__(
        self, layout: Layout, cosines_nd: Tensor, sines_nd: Tensor, *, heads: int, kv_heads: int, scale: float
    ) -> None:
        cosines_nd, sines_nd = cosines_nd.contiguous(), sines_nd.contiguous()
        divided = _divide_rows(layout, torch.get_num_threads())
        self._shares = [_RowShare(layout, rows, cosines_nd, sines_nd, (heads, kv_heads, scale)) for rows in divided]
        self._heads, self._out_size = heads, heads * cosines_nd.shape[1]

    def forward(self, qkv_nj: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The attention output, [n, h d], and the log-sum-exps that the backward pass needs, [h, t] of each share."""
        out_n = qkv_nj.new_empty(len(qkv_nj), self._out_size)
        logs = [qkv_nj.new_empty(self._heads, share.num_tokens) for share in self._shares]

        def attend(rank: int) -> None:  # siblings in two shares write the same numbers for the tokens of their prompt
            share = self._shares[rank]
            _call("attend", share.rows, qkv_nj, out_n, logs[rank], share.memory)

        run_in_parallel(attend, len(self._shares))
        return out_n, logs

    def backward(self, qkv_nj: Tensor, out_n: Tensor, logs: list[Tensor], by_out_n: Tensor) -> Tensor:
        by_qkv = [torch.zeros_like(qkv_nj) for _ in self._shares]

        def attend(rank: int) -> None:
            share = self._shares[rank]
            _call("attend_backward", share.rows, qkv_nj, out_n, logs[rank], by_out_n, by_qkv[rank], share.memory)

        run_in_parallel(attend, len(self._shares))
        for other_nj in by_qkv[1:]:
            by_qkv[0] += other_nj
        return by_qkv[0]


def gate(gate_nf: Tensor, up_nf: Tensor) -> Tensor:
    """silu(gate) * up."""
    out_nf = torch.empty_like(gate_nf)
    ranges = _ranges(*gate_nf.shape)

    def run(rank: int) -> None:
        own = ranges[rank]
        _call("gate", gate_nf[own].numel(), gate_nf[own], up_nf[own], out_nf[own])

    run_in_parallel(run, len(ranges))
    return out_nf


def gate_backward(gate_nf: Tensor, up_nf: Tensor, by_out_nf: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up. Overwrites `by_out_nf` with the output of `gate`."""
    by_gate_nf, by_up_nf = torch.empty_like(gate_nf), torch.empty_like(up_nf)
    ranges = _ranges(*gate_nf.shape)

    def run(rank: int) -> None:
        parts = (tensor[ranges[rank]] for tensor in (gate_nf, up_nf, by_out_nf, by_gate_nf, by_up_nf))
        _call("gate_backward", gate_nf[ranges[rank]].numel(), *parts)

    run_in_parallel(run, len(ranges))
    return by_gate_nf, by_up_nf


def gate_low(inner_nf2: Tensor, out_nk: Tensor) -> None:
    """silu(gate) * up in bfloat16, from gate and up side by side, into the first columns of `out_nk`."""
    ranges, size = _ranges(*inner_nf2.shape), inner_nf2.shape[1] // 2

    def run(rank: int) -> None:
        own = ranges[rank]
        _call("gate_low", len(inner_nf2[own]), size, inner_nf2[own], out_nk.shape[1], out_nk[own])

    run_in_parallel(run, len(ranges))


def gate_low_backward(inner_nf2: Tensor, by_out_nf: Tensor) -> Tensor:
    """The gradient of `inner_nf2` in bfloat16; that of the output is float32."""
    by_inner_nf2 = torch.empty_like(inner_nf2)
    ranges, size = _ranges(*inner_nf2.shape), inner_nf2.shape[1] // 2

    def run(rank: int) -> None:
        own = ranges[rank]
        _call("gate_low_backward", len(inner_nf2[own]), size, inner_nf2[own], by_out_nf[own], by_inner_nf2[own])

    run_in_parallel(run, len(ranges))
    return by_inner_nf2


def norm(x_nm: Tensor, gain_m: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The RMS norm, and the scale factor of each token, [n]."""
    out_nm, factor_n = torch.empty_like(x_nm), x_nm.new_empty(len(x_nm))
    ranges = _ranges(*x_nm.shape)

    def run(rank: int) -> None:
        own = ranges[rank]
        _call("norm", *x_nm[own].shape, epsilon, x_nm[own], gain_m, out_nm[own], factor_n[own])

    run_in_parallel(run, len(ranges))
    return out_nm, factor_n


def norm_backward(x_nm: Tensor, gain_m: Tensor, factor_n: Tensor, by_x_nm: Tensor, by_out_nm: Tensor) -> Tensor:
    """The gradient of the gain. Overwrites `by_out_nm` with the gradient of x: through the norm, plus `by_x_nm`."""
    ranges = _ranges(*x_nm.shape)
    by_gains = [torch.zeros_like(gain_m) for _ in ranges]

    def run(rank: int) -> None:
        own = ranges[rank]
        parts = (factor_n[own], by_x_nm[own], by_out_nm[own], by_gains[rank])
        _call("norm_backward", *x_nm[own].shape, x_nm[own], gain_m, *parts)

    run_in_parallel(run, len(ranges))
    for other_m in by_gains[1:]:
        by_gains[0] += other_m
    return by_gains[0]
