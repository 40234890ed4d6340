"""AsyncGRPOTrainer on a machine without a GPU, for examples and tests: its attention in plain torch, slow but equal.

The trainer asks for FlashAttention 3 and for the name of a CUDA device. Inside `trl_on_cpu` it gets a replacement.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    *_: Any,
    softmax_scale: float | None = None,
    **__: Any,
) -> torch.Tensor:
    """Causal attention over packed sequences; the last query of a sequence sees all of its keys."""
    repeats = query.shape[1] // key.shape[1]
    outs = []
    for place in range(len(ends_q) - 1):
        q = query[ends_q[place] : ends_q[place + 1]].transpose(0, 1)
        k = key[ends_k[place] : ends_k[place + 1]].transpose(0, 1).repeat_interleave(repeats, 0)
        v = value[ends_k[place] : ends_k[place + 1]].transpose(0, 1).repeat_interleave(repeats, 0)
        num_q, num_k = q.shape[1], k.shape[1]
        seen = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


@contextmanager
def trl_on_cpu() -> Iterator[None]:
    """Context in which AsyncGRPOTrainer is made and trains on a CPU."""
    from trl.experimental.async_grpo import packing

    kernel = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    before = packing._flash_attn, torch.cuda.get_device_name
    packing._flash_attn, torch.cuda.get_device_name = (lambda: kernel), (lambda *_: "cpu")
    try:
        yield
    finally:
        packing._flash_attn, torch.cuda.get_device_name = before
