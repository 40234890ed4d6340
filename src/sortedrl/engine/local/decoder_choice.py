"""How the local engine runs a model: by its own modules, by the lean decoder or by compiled code; in which precision.

`build/engine.py` asks for the precision, the engine for the decoder and the memory that suits it. The lean decoder has
a copy of the weights in float32 or bfloat16, the native one in float32 or, fixed point, int16; a model's modules run in
the precision of their weights.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from sortedrl.engine.local.cache import SlotCache
from sortedrl.engine.local.lean_decoder import Decoder, LeanDecoder, supports_lean
from sortedrl.engine.local.linear import has_fast_bfloat16
from sortedrl.engine.local.module_decoder import Geometry, ModuleDecoder
from sortedrl.engine.local.native_decoder import (
    BlockCache,
    NativeDecoder,
    has_fast_int16,
    supports_native,
    whole_blocks,
)
from sortedrl.errors import ModelError

_MIN_HALF_PARAMETERS = 10_000_000  # a smaller model spends its time on calls, which 16 bits make no cheaper
EXACT = (torch.float32, torch.int16)  # in which a token is the same whatever shares its batch, so that replay is exact


def choose_dtype(model: nn.Module, wanted: str, *, is_exact: bool, is_here: bool = True) -> torch.dtype:
    """What the engine computes in: as wanted, or (auto) the fastest that gives what is asked for.

    `is_here`: on this machine, whose processor is known, and not on others.
    """
    if wanted != "auto":
        return getattr(torch, wanted)
    parameter = next(model.parameters())
    if not supports_lean(model) or sum(p.numel() for p in model.parameters()) < _MIN_HALF_PARAMETERS:
        return parameter.dtype
    fast = fast_dtype(parameter.device, is_compiled=is_here and supports_native(model, torch.int16))
    return parameter.dtype if is_exact and fast not in EXACT else fast


def fast_dtype(device: torch.device | None = None, *, is_compiled: bool) -> torch.dtype:
    """What products of large float32 models are fastest in, by torch or, `is_compiled`, by the kernel too."""
    if has_fast_bfloat16(device or torch.device("cpu")):
        return torch.bfloat16
    return torch.int16 if is_compiled and has_fast_int16() else torch.float32


def make_path(
    model: PreTrainedModel, path: str, *, slots: int, max_length: int, dtype: torch.dtype
) -> tuple[SlotCache, Decoder]:
    """The slots' memory and the decoder that `path` names, or (auto) the fastest that can run the model."""
    geometry = Geometry.of(model)
    is_native, has_lean = path in ("auto", "native") and supports_native(model, dtype), supports_lean(model)
    if path == "native" and not is_native:
        raise ModelError(
            f"{type(model).__name__} has no native path (a C compiler; Llama, Mistral, Qwen2 or Qwen3 in float32 on a "
            "CPU, small or with AVX2): use path='auto'"
        )
    if dtype == torch.int16 and not is_native:
        raise ModelError(
            f"{type(model).__name__} has no native path here (a C compiler; Llama, Mistral, Qwen2 or Qwen3 on a CPU), "
            "and int16 no other: set engine.dtype = auto"
        )
    if path == "lean" and not has_lean:
        raise ModelError(
            f"{type(model).__name__} has no lean path (float32 Llama, Mistral, Qwen2, Qwen3): use path='module'"
        )
    cache = (BlockCache if is_native else SlotCache)(
        num_layers=geometry.num_layers,
        slots=slots,
        kv_heads=geometry.kv_heads,
        max_length=whole_blocks(max_length) if is_native else max_length,
        head_dim=geometry.head_dim,
        dtype=torch.float32 if is_native else dtype,
        device=next(model.parameters()).device,
    )
    if isinstance(cache, BlockCache):
        return cache, NativeDecoder(model, cache, dtype)
    if has_lean and path != "module":
        return cache, LeanDecoder(model, max_length, dtype)
    own = next(model.parameters()).dtype
    if own != dtype:
        raise ModelError(
            f"{type(model).__name__} runs on its own modules, hence in {own}, not {dtype}: "
            "load it in that dtype, or set engine.dtype = auto"
        )
    return cache, ModuleDecoder(model, cache)
