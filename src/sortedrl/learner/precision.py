"""In what precision the learner's passes run; weights, gradients and optimiser state are float32 all the same.

`learner/torch.py` opens `passes_in` around every pass. In bfloat16 the matrix products and what torch's autocast counts
with them are computed in that format from float32 weights, and norms, log-probs and losses stay in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Dtype = Literal["auto", "float32", "bfloat16"]


def passes_in(dtype: Dtype, device: torch.device) -> AbstractContextManager[object]:
    """`auto` is bfloat16 on a GPU that multiplies in it, and float32 elsewhere, as exact as engines are there."""
    if dtype == "auto":
        has_units = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if has_units else "float32"
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()
