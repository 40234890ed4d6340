"""The memory of a vLLM engine: how much its KV cache needs, and how much vLLM is told to take.

`engine.py` calls it when it is made. Numbers are for one device: with tensor parallelism each device holds its share
of the attention heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from sortedrl.engine.local.module_decoder import Geometry

BLOCK = 32  # tokens per KV block: the smallest that CPU kernels accept, so that short prefixes are shared too
DEFAULT_SHARE = 0.85  # of a GPU's memory, if the configuration names neither a share nor bytes
BYTES_SHARE = 0.01  # with `kv_bytes`: vLLM uses the share only to refuse a start where less than that is free


def choose_memory(kv_bytes: int | None, memory_share: float | None, needed: int) -> dict[str, Any]:
    """vLLM's memory: bytes for the KV cache, or a share of each device. A CPU without either gets what it needs."""
    has_gpu = torch.cuda.is_available()
    if kv_bytes is not None:
        return {"kv_bytes": kv_bytes, "memory_share": memory_share or (BYTES_SHARE if has_gpu else None)}
    if memory_share is None and not has_gpu:
        return {"kv_bytes": needed, "memory_share": None}
    return {"kv_bytes": None, "memory_share": memory_share or DEFAULT_SHARE}


def needed_kv_bytes(
    geometry: Geometry, slots: int, max_length: int, dtype: torch.dtype, tensor_parallel: int = 1
) -> int:
    """Memory of each device for the KV of all slots at full length, in whole blocks, plus one that vLLM reserves."""
    heads = max(1, geometry.kv_heads // tensor_parallel)
    per_token = 2 * geometry.num_layers * heads * geometry.head_dim * dtype.itemsize
    blocks = slots * math.ceil(max_length / BLOCK) + 1
    return blocks * BLOCK * per_token
