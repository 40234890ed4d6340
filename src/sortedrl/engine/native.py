"""The decoder of small models of the Llama family on a CPU: a whole forward pass is one call of compiled code.

`paths.py` takes it where a compiler is, for what `LeanDecoder` could run and is small enough. `kernel.c` does the work,
on one thread; here weights are laid out for it, and cache and places handed to it. Log-probs are those of the lean
decoder up to rounding; among themselves they are equal to the last bit, decoded or prefilled, alone or together.

Shapes: t packed tokens, r rows whose logits are wanted, i inputs, o outputs, v vocabulary.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sortedrl.engine.cache import SlotCache
from sortedrl.engine.decoder import fold_norm, rotary_turns, supports_lean
from sortedrl.engine.kernel import Layer, Model, load_kernel

# Past about this size products are most of a step, and torch's on several threads outrun ours on one.
_MAX_PARAMETERS = 2_000_000
_BLOCK = 8  # positions whose keys lie together
_PANEL = 16  # outputs whose weights do


@dataclass(slots=True, kw_only=True)
class Places:
    """Where tokens stand: a plan that needs no preparation, for a prefill or for any number of steps."""

    slots_t: torch.Tensor
    positions_t: torch.Tensor
    num_steps: int = sys.maxsize
    runs: Sequence[int] = field(default=())

    def advance(self) -> None:
        """One position further in every slot."""
        self.positions_t += 1


class BlockCache(SlotCache):
    """The slots' memory in the kernel's layout: keys of a head as [positions / 8, d, 8]. Made with whole blocks."""

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        super().copy(source, targets, whole_blocks(length))

    def plan_prefill(self, slots: Sequence[int], lengths: Sequence[int]) -> Places:
        slots_n, lengths_n = torch.tensor(slots), torch.tensor(lengths)
        return Places(
            slots_t=slots_n.repeat_interleave(lengths_n),
            positions_t=torch.cat([torch.arange(length) for length in lengths]),
        )

    def plan_decode(self, lengths: Sequence[int], runs: Sequence[int] | None = None) -> Places:
        return Places(slots_t=torch.arange(len(lengths)), positions_t=torch.tensor(lengths) - 1)


class NativeDecoder:
    name = "native"

    def __init__(self, model: nn.Module, cache: BlockCache) -> None:
        assert supports_native(model, cache.dtype), f"{type(model).__name__} has no native path"
        kernel = load_kernel()
        assert kernel is not None, "there is no compiled kernel"
        self._kernel = kernel
        root: Any = model
        config, attention = root.config, root.model.layers[0].self_attn
        turns_lc = rotary_turns(root.model.rotary_emb, cache.max_length, torch.device("cpu"))
        self._kept = [cache.store, turns_lc.real.contiguous(), turns_lc.imag.contiguous()]
        self._model = Model(
            num_layers=cache.num_layers,
            size=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=cache.kv_heads,
            head_dim=cache.head_dim,
            vocab=config.vocab_size,
            slots=cache.slots,
            positions=cache.max_length,
            floor=config.hidden_size * config.rms_norm_eps,
            head_floor=cache.head_dim * config.rms_norm_eps,
            scale=attention.scaling,
            cache=self._kept[0].data_ptr(),
            cosines=self._kept[1].data_ptr(),
            sines=self._kept[2].data_ptr(),
        )
        self._memory = torch.zeros(kernel.sortedrl_memory(self._model))
        self.refresh(model)

    @torch.inference_mode()
    def refresh(self, module: nn.Module) -> None:
        root: Any = module
        layers = [_lay_out(layer) for layer in root.model.layers]
        embedding_vm = root.model.embed_tokens.weight.clone()
        head = _panels(fold_norm(root.model.norm, root.lm_head.weight))
        self._weights = (layers, embedding_vm, head)  # kept: the kernel has their addresses alone
        addresses = [{name: weight.data_ptr() for name, weight in layer.items()} for layer in layers]
        self._layers = (Layer * len(layers))(*(Layer(**layer) for layer in addresses))
        self._model.layers = ctypes.addressof(self._layers)
        self._model.embedding, self._model.head = embedding_vm.data_ptr(), head.data_ptr()

    def forward(
        self, tokens_t: torch.Tensor, positions_t: torch.Tensor, rows_r: torch.Tensor | None, plan: Places
    ) -> torch.Tensor:
        """Logits [r, v] in float32 at the wanted rows, or at all."""
        num_rows = len(tokens_t) if rows_r is None else len(rows_r)
        logits_rv = torch.empty(num_rows, self._model.vocab)
        self._kernel.sortedrl_forward(
            self._model,
            self._memory.data_ptr(),
            len(tokens_t),
            tokens_t.data_ptr(),
            plan.slots_t.data_ptr(),
            positions_t.data_ptr(),
            num_rows,
            None if rows_r is None else rows_r.data_ptr(),
            logits_rv.data_ptr(),
        )
        return logits_rv


def supports_native(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the kernel is equal to the model's own modules, there, and faster than the lean decoder."""
    if dtype != torch.float32 or not supports_lean(model):
        return False
    root: Any = model
    parameters = list(model.parameters())
    return (
        all(parameter.is_cpu for parameter in parameters)
        and sum(parameter.numel() for parameter in parameters) <= _MAX_PARAMETERS
        and root.model.layers[0].self_attn.head_dim % _BLOCK == 0
        and load_kernel() is not None
    )


def whole_blocks(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK


def _lay_out(layer: Any) -> dict[str, torch.Tensor]:
    """A layer's weights by the names of the kernel, which has no place for what a model lacks."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = fold_norm(layer.input_layernorm, torch.cat([linear.weight for linear in projections]))
    weights = {
        "qkv": _panels(qkv),
        "out": _panels(attention.o_proj.weight),
        "gate_up": torch.cat(
            [_panels(fold_norm(layer.post_attention_layernorm, m.weight)) for m in (mlp.gate_proj, mlp.up_proj)]
        ),
        "down": _panels(mlp.down_proj.weight),
    }
    if projections[0].bias is not None:
        bias_o = torch.cat([linear.bias for linear in projections])
        weights["qkv_bias"] = nn.functional.pad(bias_o, (0, -len(bias_o) % _PANEL))
    if hasattr(attention, "q_norm"):
        root_d = attention.head_dim**0.5
        weights["q_gain"], weights["k_gain"] = (n.weight * root_d for n in (attention.q_norm, attention.k_norm))
    return weights


def _panels(weight_oi: torch.Tensor) -> torch.Tensor:
    """[o / 16, i, 16], the last panel filled up with zeros."""
    padded = nn.functional.pad(weight_oi, (0, 0, 0, -len(weight_oi) % _PANEL))
    return padded.unflatten(0, (-1, _PANEL)).transpose(1, 2).contiguous()
