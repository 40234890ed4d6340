"""The precision of the learner's passes. Weights, gradients and optimizer state are always float32.

`learner/torch.py` opens `pass_precision` around every pass. With bfloat16, torch's autocast computes matrix products in
that format from float32 weights; norms, log-probs and losses stay in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Dtype = Literal["auto", "float32", "bfloat16"]


def pass_precision(dtype: Dtype, device: torch.device) -> AbstractContextManager[object]:
    """The context for one pass. `auto` is bfloat16 on a GPU with native bfloat16, and float32 elsewhere."""
    if dtype == "auto":
        has_units = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if has_units else "float32"
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()
