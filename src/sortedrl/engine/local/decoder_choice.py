"""Choose how the local engine runs a model: which decoder computes the logits, and in which precision.

There are three decoders: the model's own modules, the lean decoder on torch, and the native decoder in compiled code.
The run's builder asks for the precision, the engine for the decoder and the cache that fits it. The lean decoder copies
the weights in float32 or bfloat16, the native decoder in float32 or int16 (fixed point); a model's own modules run in
the precision of their weights.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from sortedrl.engine.local.cache import SlotCache
from sortedrl.engine.local.lean_decoder import LeanDecoder, supports_lean
from sortedrl.engine.local.linear import has_fast_bfloat16, has_matrix_unit
from sortedrl.engine.local.module_decoder import Geometry, ModuleDecoder
from sortedrl.engine.local.native_decoder import (
    BlockCache,
    NativeDecoder,
    has_fast_int16,
    supports_native,
    whole_blocks,
)
from sortedrl.errors import ModelError

_MIN_16_BIT_PARAMETERS = 10_000_000  # a smaller model spends its time on calls, which 16 bits do not make faster
# In these precisions a token does not depend on the rest of the batch, so replay is exact.
EXACT_DTYPES = (torch.float32, torch.int16)


class Decoder(Protocol):
    """Computes logits of packed tokens; the plan knows their positions in the cache."""

    name: str

    def refresh(self, module: nn.Module) -> int:
        """Copy the weights of `module`; returns how many first layers had the same ones before, 0 if not known."""
        ...

    def forward(
        self, tokens_t: torch.Tensor, positions_t: torch.Tensor, rows_r: torch.Tensor | None, plan: Any
    ) -> torch.Tensor:
        """Logits [r, v] in float32 at the given rows, or at all. `plan` comes from the decoder's own cache."""
        ...


def choose_dtype(
    model: nn.Module, wanted: str, *, needs_exact_replay: bool, is_this_machine: bool = True
) -> torch.dtype:
    """The dtype to compute in: `wanted`, or for "auto" the fastest one that fits the model and the replay.

    `is_this_machine`: the engine runs here, so the processor is known.
    """
    if wanted != "auto":
        return getattr(torch, wanted)
    parameter = next(model.parameters())
    if not supports_lean(model) or sum(p.numel() for p in model.parameters()) < _MIN_16_BIT_PARAMETERS:
        return parameter.dtype
    is_compiled = is_this_machine and supports_native(model, torch.int16)
    return fast_dtype(parameter.device, is_compiled=is_compiled, is_exact=needs_exact_replay)


def fast_dtype(device: torch.device | None = None, *, is_compiled: bool, is_exact: bool = False) -> torch.dtype:
    """The fastest dtype for matrix products of large models, by torch or, if `is_compiled`, by the kernel.

    `is_exact`: only those in which replay is exact. int16 is as fast as bfloat16 on the same vectors.
    """
    device = device or torch.device("cpu")
    has_bfloat16 = has_fast_bfloat16(device) and not is_exact
    if is_compiled and has_fast_int16() and not (has_bfloat16 and has_matrix_unit(device)):
        return torch.int16
    return torch.bfloat16 if has_bfloat16 else torch.float32


def make_decoder(
    model: PreTrainedModel, path: str, *, slots: int, max_length: int, dtype: torch.dtype, spare: int = 0
) -> tuple[SlotCache, Decoder]:
    """The cache and the decoder that `path` names, or for "auto" the fastest decoder that can run the model.

    `spare`: rows of the cache beyond the slots, for kept prefixes, which only the native decoder can continue.
    """
    name = type(model).__name__
    is_native, has_lean = path in ("auto", "native") and supports_native(model, dtype), supports_lean(model)
    if path == "native" and not is_native:
        raise ModelError(
            f"{name} cannot run on the native decoder, which needs a C compiler and a float32 Llama, Mistral, Qwen2 or "
            "Qwen3 on a CPU, small or with AVX2 or AVX-512 VNNI: use path='auto'"
        )
    if dtype == torch.int16 and not is_native:
        raise ModelError(
            f"{name} cannot run in int16, which only the native decoder supports; that one needs a C compiler and a "
            "Llama, Mistral, Qwen2 or Qwen3 on a CPU: set engine.dtype = auto"
        )
    if path == "lean" and not has_lean:
        raise ModelError(
            f"{name} cannot run on the lean decoder, which needs a float32 Llama, Mistral, Qwen2 or Qwen3: "
            "use path='module'"
        )
    geometry, parameter = Geometry.of(model), next(model.parameters())
    cache = (BlockCache if is_native else SlotCache)(
        num_layers=geometry.num_layers,
        slots=slots + (spare if is_native else 0),
        kv_heads=geometry.kv_heads,
        max_length=whole_blocks(max_length) if is_native else max_length,
        head_dim=geometry.head_dim,
        dtype=torch.float32 if is_native else dtype,
        device=parameter.device,
    )
    if isinstance(cache, BlockCache):
        return cache, NativeDecoder(model, cache, dtype)
    if has_lean and path != "module":
        return cache, LeanDecoder(model, max_length, dtype)
    if parameter.dtype != dtype:
        raise ModelError(
            f"{name} runs on its own modules, in their {parameter.dtype}, and cannot run in {dtype}: "
            "load it in that dtype, or set engine.dtype = auto"
        )
    return cache, ModuleDecoder(model, cache)
