"""The precision of the learner's passes. Weights, gradients and optimizer state are always float32.

`learner/torch.py` opens `pass_precision` around every pass. With bfloat16, torch's autocast computes matrix products in
that format from float32 weights; norms, log-probs and losses stay in float32. Its cache is off: it would hold a copy of
all weights until the end of the pass, also of layers that are computed again for the gradient. Sharded weights are
gathered in bfloat16 instead (`sharded/shards.py`), and nothing is cast in a pass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

Dtype = Literal["auto", "float32", "bfloat16"]

_LARGE_PARAMETERS = 10_000_000  # in smaller models, conversions take the time that products save


def pass_precision(dtype: Dtype, model: Any) -> AbstractContextManager[object]:
    """The context for one pass of the model."""
    device: torch.device = model.device
    if product_dtype(dtype, model, device) == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def product_dtype(dtype: Dtype, model: Any, device: torch.device) -> torch.dtype:
    """The format of matrix products on a device.

    `auto` is bfloat16 where the processor multiplies it faster than float32: on GPUs that have it, and for large models
    on CPUs that have it.
    """
    if dtype == "auto":
        is_worth_it = device.type == "cuda" or is_large(model)
        dtype = "bfloat16" if is_worth_it and has_fast_bfloat16(device) else "float32"
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def is_large(model: Any) -> bool:
    """Whether matrix products take most of the time of a pass on a CPU."""
    return sum(parameter.numel() for parameter in model.parameters()) >= _LARGE_PARAMETERS


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 faster than float32. A CPU without such instructions is far slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
