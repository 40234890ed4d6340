"""A lean decoder for the Llama family (Llama, Mistral without window, Qwen2, Qwen3): few calls, no modules.

The local engine calls it instead of the model's own modules, to which it is equal up to rounding: a small model spends
its step on calling overhead, not on arithmetic. It keeps fused copies of the weights, taken at `refresh`; a learner may
change the module meanwhile, and tokens are still those of the published weights. The module holds float32; the copies
are float32 or bfloat16. In bfloat16, products, keys and values are; the residual stream, norms and rotations are not.

What is fused into the weights:
- q, k and v are one matrix, gate and up another;
- the gain of an RMS norm, and the root of the size that turns a norm into a root mean square, scale the columns of the
  matrix behind it;
- rows of q and k are reordered within each head so that the two numbers that a rotary position turns together lie side
  by side: one complex product does it. Keys are cached in that order; scores do not change.

Shapes: t packed tokens, r rows whose logits are wanted, m model size, f feed-forward size, v vocabulary, h query heads,
k key-value heads, e = 2k, d head size, c = d / 2 complex numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from sortedrl.engine.local.cache import Plan
from sortedrl.engine.local.linear import Linear, make_linear

_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
# The fused copy takes as much memory as the model; past this size the calls it saves no longer matter.
_MAX_PARAMETERS = 500_000_000


class Decoder(Protocol):
    """Packed tokens to logits; the plan holds their place in the cache."""

    name: str

    def refresh(self, module: nn.Module) -> None:
        """Take over the weights of `module`."""
        ...

    def forward(
        self, tokens_t: torch.Tensor, positions_t: torch.Tensor, rows_r: torch.Tensor | None, plan: Any
    ) -> torch.Tensor:
        """`plan`: of the cache that the decoder was made with."""
        ...


@dataclass(slots=True, kw_only=True)
class _Layer:
    qkv: Linear
    qk_gain_hd: torch.Tensor | None
    out: Linear
    gate_up: Linear
    down: Linear


class LeanDecoder:
    name = "lean"

    def __init__(self, model: nn.Module, max_length: int, dtype: torch.dtype = torch.float32) -> None:
        assert supports_lean(model), f"{type(model).__name__} has no lean path"
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
        self._floor = torch.tensor((size * config.rms_norm_eps) ** 0.5, device=device)
        self._head_floor = torch.tensor((self._head_dim * config.rms_norm_eps) ** 0.5, device=device)
        self._turns_lc = rotary_turns(root.model.rotary_emb, max_length, device)
        self.refresh(model)

    @torch.inference_mode()
    def refresh(self, module: nn.Module) -> None:
        root: Any = module
        self._layers: list[_Layer] = []  # the old copies go before the new ones come
        self._embedding_vm = root.model.embed_tokens.weight.to(self._dtype, copy=True)
        self._layers.extend(self._fuse(layer) for layer in root.model.layers)
        self._head = make_linear(fold_norm(root.model.norm, root.lm_head.weight), None, self._dtype)

    def _fuse(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        weight = torch.cat([self._side_by_side(q.weight), self._side_by_side(k.weight), v.weight])
        bias = gain = None
        if q.bias is not None:
            bias = torch.cat([self._side_by_side(q.bias), self._side_by_side(k.bias), v.bias])
        if hasattr(attention, "q_norm"):
            gains = [attention.q_norm.weight] * self._heads + [attention.k_norm.weight] * self._kv_heads
            gain = self._side_by_side(torch.cat(gains)).view(-1, self._head_dim) * self._head_dim**0.5
        gate_up = fold_norm(layer.post_attention_layernorm, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        return _Layer(
            qkv=make_linear(fold_norm(layer.input_layernorm, weight), bias, self._dtype),
            qk_gain_hd=gain,
            out=make_linear(attention.o_proj.weight, None, self._dtype),
            gate_up=make_linear(gate_up, None, self._dtype),
            down=make_linear(mlp.down_proj.weight, None, self._dtype),
        )

    def _side_by_side(self, rows: torch.Tensor) -> torch.Tensor:
        """Within each head, first and second half interleaved."""
        return rows.unflatten(0, (-1, 2, self._head_dim // 2)).transpose(1, 2).flatten(0, 2)

    def forward(
        self, tokens_t: torch.Tensor, positions_t: torch.Tensor, rows_r: torch.Tensor | None, plan: Plan
    ) -> torch.Tensor:
        """Logits [r, v] in float32 at the wanted rows, or at all."""
        x_tm = self._embedding_vm.index_select(0, tokens_t).float()
        turns_t1c = self._turns_lc.index_select(0, positions_t).unsqueeze(1)
        num_t = x_tm.shape[0]
        for index, layer in enumerate(self._layers):
            qkv_thd = layer.qkv(self._normed(x_tm)).view(num_t, -1, self._head_dim)
            q_thd, kv_ted = self._turn(layer, qkv_thd, turns_t1c).split_with_sizes(self._split, 1)
            out_thd = plan.attend(index, q_thd, kv_ted, self._scale)
            x_tm = layer.out.added(x_tm, out_thd.view(num_t, -1))
            gate_tf, up_tf = layer.gate_up(self._normed(x_tm)).chunk(2, 1)
            x_tm = layer.down.added(x_tm, nn.functional.silu(gate_tf).mul_(up_tf))
        if rows_r is not None:
            x_tm = x_tm.index_select(0, rows_r)
        return self._head(self._normed(x_tm)).float()

    def _normed(self, x_tm: torch.Tensor) -> torch.Tensor:
        normed_tm = _normed(x_tm, self._floor)
        return normed_tm if self._dtype == torch.float32 else normed_tm.to(self._dtype)

    def _turn(self, layer: _Layer, qkv_thd: torch.Tensor, turns_t1c: torch.Tensor) -> torch.Tensor:
        """Queries and keys turned to their positions, in place; the decoder owns what a product has made."""
        qk_thd = qkv_thd[:, : self._heads + self._kv_heads]
        turned_thd = qk_thd if self._dtype == torch.float32 else qk_thd.float()
        if layer.qk_gain_hd is not None:
            turned_thd = _normed(turned_thd, self._head_floor).mul_(layer.qk_gain_hd)
        torch.view_as_complex(turned_thd.unflatten(2, (-1, 2))).mul_(turns_t1c)
        if turned_thd is not qk_thd:
            qk_thd.copy_(turned_thd)
        return qkv_thd


def supports_lean(model: nn.Module) -> bool:
    """Whether `LeanDecoder` is equal to the model's own modules."""
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
    """x / sqrt(sum(x^2) + size * eps): the RMS norm but for a factor that the weights behind it hold."""
    return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)


def fold_norm(norm: Any, weight_om: torch.Tensor) -> torch.Tensor:
    """The matrix behind a norm, with the norm's gain and factor in its columns."""
    return weight_om * norm_gain(norm)


def norm_gain(norm: Any) -> torch.Tensor:
    """What is left of an RMS norm behind x / sqrt(sum(x^2) + n eps)."""
    return norm.weight * norm.weight.numel() ** 0.5


def rotary_turns(rotary: Any, max_length: int, device: torch.device) -> torch.Tensor:
    """Complex factors [l, c], computed as the module computes cosine and sine."""
    angles_lc = torch.arange(max_length, device=device).float()[:, None] * rotary.inv_freq.float()[None]
    return torch.complex(angles_lc.cos(), angles_lc.sin()) * rotary.attention_scaling
