"""The lean decoder for the Llama family (Llama, Mistral without window, Qwen2, Qwen3): few torch calls, no modules.

The local engine uses it instead of the model's own modules, because a small model spends its step on the overhead of
calls and not on arithmetic.
Guarantees: logits equal those of the modules up to rounding. They are those of the published weights even while a
learner changes the module, because `refresh` copies the weights.

The module holds float32; the copies are float32 or bfloat16. With bfloat16, products, keys and values are bfloat16;
the residual stream, norms and rotations stay float32.

What is fused into the weights:
- q, k and v form one matrix, gate and up another;
- the columns of the matrix after an RMS norm are scaled by the norm's gain and by sqrt(size), which turns a norm into a
  root mean square;
- rows of q and k are reordered within each head, so that the two numbers that a rotary embedding rotates together are
  neighbours and one complex product rotates them. Keys are cached in that order; attention scores do not change.

Shapes: t packed tokens, r rows whose logits are wanted, m model size, f feed-forward size, v vocabulary, h query heads,
k key-value heads, e = 2k, d head size, c = d / 2 complex numbers, l positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sortedrl.engine.local.cache import AttentionPlan
from sortedrl.engine.local.linear import Linear, make_linear

_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
# The fused copy takes as much memory as the model; past this size the calls that it saves no longer matter.
_MAX_PARAMETERS = 500_000_000


@dataclass(slots=True, kw_only=True)
class _FusedLayer:
    qkv: Linear
    qk_gain_hd: torch.Tensor | None
    out: Linear
    gate_up: Linear
    down: Linear


class LeanDecoder:
    name = "lean"

    def __init__(self, model: nn.Module, max_length: int, dtype: torch.dtype = torch.float32) -> None:
        assert supports_lean(model), f"{type(model).__name__} cannot run on the lean decoder"
        self._dtype = dtype
        root: Any = model
        config = root.config
        attention = root.model.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._kv_heads: int = config.num_key_value_heads
        self._heads: int = config.num_attention_heads
        self._scale: float = attention.scaling
        self._split = (self._heads, 2 * self._kv_heads)
        size, device = config.hidden_size, root.model.embed_tokens.weight.device
        self._norm_floor = torch.tensor((size * config.rms_norm_eps) ** 0.5, device=device)
        self._head_norm_floor = torch.tensor((self._head_dim * config.rms_norm_eps) ** 0.5, device=device)
        self._rotations_lc = rotary_factors(root.model.rotary_emb, max_length, device)
        self.refresh(model)

    @torch.inference_mode()
    def refresh(self, module: nn.Module) -> int:
        root: Any = module
        self._layers: list[_FusedLayer] = []  # free the old copies before making new ones
        self._embedding_vm = root.model.embed_tokens.weight.to(self._dtype, copy=True)
        self._layers.extend(self._fuse(layer) for layer in root.model.layers)
        self._head = make_linear(_fold_norm(root.model.norm, root.lm_head.weight), None, self._dtype)
        return 0

    def _fuse(self, layer: Any) -> _FusedLayer:
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        weight = torch.cat([self._interleave_halves(q.weight), self._interleave_halves(k.weight), v.weight])
        bias = gain = None
        if q.bias is not None:
            bias = torch.cat([self._interleave_halves(q.bias), self._interleave_halves(k.bias), v.bias])
        if hasattr(attention, "q_norm"):
            gains = [attention.q_norm.weight] * self._heads + [attention.k_norm.weight] * self._kv_heads
            gain = self._interleave_halves(torch.cat(gains)).view(-1, self._head_dim) * self._head_dim**0.5
        gate_up = _fold_norm(layer.post_attention_layernorm, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        return _FusedLayer(
            qkv=make_linear(_fold_norm(layer.input_layernorm, weight), bias, self._dtype),
            qk_gain_hd=gain,
            out=make_linear(attention.o_proj.weight, None, self._dtype),
            gate_up=make_linear(gate_up, None, self._dtype),
            down=make_linear(mlp.down_proj.weight, None, self._dtype),
        )

    def _interleave_halves(self, rows: torch.Tensor) -> torch.Tensor:
        """Interleave the first and second half of each head's rows."""
        return rows.unflatten(0, (-1, 2, self._head_dim // 2)).transpose(1, 2).flatten(0, 2)

    def forward(
        self, tokens_t: torch.Tensor, positions_t: torch.Tensor, rows_r: torch.Tensor | None, plan: AttentionPlan
    ) -> torch.Tensor:
        """Logits [r, v] in float32 at the given rows, or at all."""
        x_tm = self._embedding_vm.index_select(0, tokens_t).float()
        rotations_t1c = self._rotations_lc.index_select(0, positions_t).unsqueeze(1)
        num_t = x_tm.shape[0]
        for index, layer in enumerate(self._layers):
            qkv_thd = layer.qkv(self._normed(x_tm)).view(num_t, -1, self._head_dim)
            q_thd, kv_ted = self._rotate(layer, qkv_thd, rotations_t1c).split_with_sizes(self._split, 1)
            out_thd = plan.attend(index, q_thd, kv_ted, self._scale)
            x_tm = layer.out.add_to(x_tm, out_thd.view(num_t, -1))
            gate_tf, up_tf = layer.gate_up(self._normed(x_tm)).chunk(2, 1)
            x_tm = layer.down.add_to(x_tm, nn.functional.silu(gate_tf).mul_(up_tf))
        if rows_r is not None:
            x_tm = x_tm.index_select(0, rows_r)
        return self._head(self._normed(x_tm)).float()

    def _normed(self, x_tm: torch.Tensor) -> torch.Tensor:
        normed_tm = _normed(x_tm, self._norm_floor)
        return normed_tm if self._dtype == torch.float32 else normed_tm.to(self._dtype)

    def _rotate(self, layer: _FusedLayer, qkv_thd: torch.Tensor, rotations_t1c: torch.Tensor) -> torch.Tensor:
        """Apply rotary embeddings to queries and keys, in place: no one else uses the product's output."""
        qk_thd = qkv_thd[:, : self._heads + self._kv_heads]
        rotated_thd = qk_thd if self._dtype == torch.float32 else qk_thd.float()
        if layer.qk_gain_hd is not None:
            rotated_thd = _normed(rotated_thd, self._head_norm_floor).mul_(layer.qk_gain_hd)
        torch.view_as_complex(rotated_thd.unflatten(2, (-1, 2))).mul_(rotations_t1c)
        if rotated_thd is not qk_thd:
            qk_thd.copy_(rotated_thd)
        return qkv_thd


def supports_lean(model: nn.Module) -> bool:
    """Whether `LeanDecoder` computes what the model's own modules compute."""
    root: Any = model
    config: Any = getattr(root, "config", None)
    if getattr(config, "model_type", None) not in _MODEL_TYPES or not hasattr(root, "lm_head"):
        return False
    layers = root.model.layers
    biases = [getattr(m, "bias", None) for layer in layers for m in (layer.self_attn.o_proj, *layer.mlp.children())]
    parameters = list(model.parameters())
    return (
        all(parameter.dtype == torch.float32 for parameter in parameters)
        and sum(parameter.numel() for parameter in parameters) <= _MAX_PARAMETERS
        and config.hidden_act == "silu"
        and all(bias is None for bias in biases)
        and root.lm_head.bias is None
    )


def _normed(x: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + size * eps): an RMS norm without the factor that is folded into the next weights."""
    return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)


def _fold_norm(norm: Any, weight_om: torch.Tensor) -> torch.Tensor:
    """The matrix after a norm, with the norm's factor multiplied into its columns."""
    return weight_om * norm_gain(norm)


def norm_gain(norm: Any) -> torch.Tensor:
    """The factor by which an RMS norm multiplies x / sqrt(sum(x^2) + size * eps)."""
    return norm.weight * norm.weight.numel() ** 0.5


def rotary_factors(rotary: Any, max_length: int, device: torch.device) -> torch.Tensor:
    """Complex rotation factors [l, c], computed as the module computes cosine and sine."""
    angles_lc = torch.arange(max_length, device=device).float()[:, None] * rotary.inv_freq.float()[None]
    return torch.complex(angles_lc.cos(), angles_lc.sin()) * rotary.attention_scaling
