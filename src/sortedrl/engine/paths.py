"""How the local engine runs a model: by its own modules or by the lean decoder, and in which precision.

`build.py` asks for the precision, the engine for the decoder. The lean decoder has a copy of its own in either
precision; a model's modules run in that of their weights.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from sortedrl.engine.cache import SlotCache
from sortedrl.engine.decoder import Decoder, LeanDecoder, supports_lean
from sortedrl.engine.linear import has_fast_bfloat16
from sortedrl.engine.module import ModuleDecoder
from sortedrl.errors import ModelError

_MIN_HALF_PARAMETERS = 10_000_000  # a smaller model spends its time on calls, which bfloat16 makes no cheaper


def choose_dtype(model: nn.Module, wanted: str, *, is_exact: bool) -> torch.dtype:
    """What the engine computes in: as wanted, or (auto) the fastest that gives what is asked for."""
    if wanted != "auto":
        return getattr(torch, wanted)
    parameter = next(model.parameters())
    if is_exact or not supports_lean(model) or not has_fast_bfloat16(parameter.device):
        return parameter.dtype
    is_large = sum(p.numel() for p in model.parameters()) >= _MIN_HALF_PARAMETERS
    return torch.bfloat16 if is_large else parameter.dtype


def make_decoder(model: PreTrainedModel, cache: SlotCache, path: str) -> Decoder:
    """The decoder that `path` names, or (auto) lean where possible, in the cache's precision."""
    has_lean = supports_lean(model)
    if path == "lean" and not has_lean:
        raise ModelError(
            f"{type(model).__name__} has no lean path (float32 Llama, Mistral, Qwen2, Qwen3): use path='module'"
        )
    if has_lean and path != "module":
        return LeanDecoder(model, cache.max_length, cache.dtype)
    own = next(model.parameters()).dtype
    if own != cache.dtype:
        raise ModelError(
            f"{type(model).__name__} runs on its own modules, hence in {own}, not {cache.dtype}: "
            "load it in that dtype, or set engine.dtype = auto"
        )
    return ModuleDecoder(model, cache)
