"""A Llama's layers with hand-written gradients, for updates on a CPU.

`pack.py` uses it where `can_use_compiled_layers` allows. On a CPU, an update spends much of its time on memory traffic
and, if the model is small, on Python calls. Here torch computes the matrix products, and compiled code
(`native_layers.py`) does everything between them. With adapters or in bfloat16 the products are those of
`projections.py`. The model's own modules run in all other cases: with hooks, shards or recomputed activations, on other
devices, without a C compiler; for small models also with several threads, adapters or bfloat16. Guarantees: hidden
states and gradients equal those of the model's own modules, up to rounding; norms, attention and the sum of the layers'
outputs are computed in float32.

A layer is two steps, attention and feed-forward. Each reads the norm of the hidden states and adds its output to them.
Gradients are named `by_`: by_x_nm is the gradient of the loss by x_nm.

Shapes: n packed tokens, m model size, f feed-forward size, j numbers of a token's queries, keys and values; i and o are
the input and output size of a projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama

from sortedrl.learner.attention import Layout
from sortedrl.learner.native_layers import RowAttention, gate, gate_backward, load_layers, norm, norm_backward
from sortedrl.learner.precision import is_large
from sortedrl.learner.projections import LowProjection, Projection, gate_gradient
from sortedrl.weights import is_adapted, is_plain_adapter

MAX_LENGTH = 2048  # of a row: the backward pass holds two square matrices of this size
_VECTOR = 8  # the compiled code works on vectors of this size
_PLAIN_MODULES = {
    *(nn.Embedding, nn.Linear, nn.ModuleList, nn.SiLU, SiLUActivation),
    *(modeling_llama.LlamaModel, modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaAttention),
    *(modeling_llama.LlamaMLP, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding),
}


def llama_of(model: Any) -> Any:
    """The model without the wrapper of its adapters."""
    return model.get_base_model() if is_adapted(model) else model


def can_use_compiled_layers(model: Any, layout: Layout) -> bool:
    """Whether `llama_hidden_states` works for this model and layout, and is faster than the model's own modules."""
    causal = llama_of(model)
    return (
        type(causal) is LlamaForCausalLM
        and (is_large(causal) or _runs_as_small(model))
        and layout.longest_row <= MAX_LENGTH
        and _has_plain_sizes(causal.config)
        and _are_plain(causal.model)
        and load_layers() is not None
    )


def _runs_as_small(model: Any) -> bool:
    """Whether a small model gains: it has no adapters, and computes in float32 on one thread."""
    return torch.get_num_threads() == 1 and not torch.is_autocast_enabled("cpu") and not is_adapted(model)


def _has_plain_sizes(config: Any) -> bool:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        config.hidden_size % _VECTOR == 0
        and config.intermediate_size % _VECTOR == 0
        and head_dim % 2 == 0
        and config.hidden_act == "silu"
        and not (config.attention_bias or config.mlp_bias or config.attention_dropout)
    )


def _are_plain(module: nn.Module) -> bool:
    """Whether the module and all in it are unmodified, or plain LoRA adapters around linear layers."""
    if is_plain_adapter(module):
        linear = [child for child in module.modules() if isinstance(child, nn.Linear)]
        return _is_unmodified(module) and all(map(_is_plain, linear))
    return _is_plain(module) and all(map(_are_plain, module.children()))


def _is_plain(module: nn.Module) -> bool:
    return (
        type(module) in _PLAIN_MODULES
        and _is_unmodified(module)
        and all(
            p.dtype == torch.float32 and p.device.type == "cpu" for p in module._parameters.values() if p is not None
        )
    )


def _is_unmodified(module: nn.Module) -> bool:
    """Whether the module has no hooks and no replaced forward, and keeps its activations."""
    return (
        "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        and not module._backward_pre_hooks
        and not getattr(module, "gradient_checkpointing", False)
    )


def llama_hidden_states(llama: Any, tokens_n: Tensor, positions_n: Tensor, layout: Layout) -> Tensor:
    """The last hidden states of a LlamaModel for packed tokens, [n, m]."""
    x_nm = llama.embed_tokens(tokens_n)
    cosines_1nd, sines_1nd = llama.rotary_emb(x_nm, positions_n[None])
    attention = RowAttention(
        layout,
        cosines_1nd[0],
        sines_1nd[0],
        heads=llama.config.num_attention_heads,
        kv_heads=llama.config.num_key_value_heads,
        scale=llama.layers[0].self_attn.scaling,
    )
    run_layer = _run_layer if _has_plain_products(llama) else _run_projected_layer
    for layer in llama.layers:
        x_nm = run_layer(layer, x_nm, attention)
    return llama.norm(x_nm)


def _has_plain_products(llama: Any) -> bool:
    """Whether all products are in float32 and there are no adapters."""
    has_adapters = any(type(module) not in _PLAIN_MODULES for module in llama.layers.modules())
    return not (torch.is_autocast_enabled("cpu") or has_adapters)


def _run_layer(layer: Any, x_nm: Tensor, attention: RowAttention) -> Tensor:
    norm_before, attend = layer.input_layernorm, layer.self_attn
    weights = (attend.q_proj.weight, attend.k_proj.weight, attend.v_proj.weight, attend.o_proj.weight)
    x_nm = _Attend.apply(x_nm, norm_before.weight, *weights, norm_before.variance_epsilon, attention)
    norm_before, mlp = layer.post_attention_layernorm, layer.mlp
    weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    return _FeedForward.apply(x_nm, norm_before.weight, *weights, norm_before.variance_epsilon)


def _run_projected_layer(layer: Any, x_nm: Tensor, attention: RowAttention) -> Tensor:
    """The same with adapters, or with products in bfloat16."""
    kind = LowProjection if torch.is_autocast_enabled("cpu") else Projection
    norm_before, attend = layer.input_layernorm, layer.self_attn
    first, second = kind((attend.q_proj, attend.k_proj, attend.v_proj)), kind((attend.o_proj,))
    parameters = (norm_before.weight, *first.parameters, *second.parameters)
    x_nm = _ProjectedAttend.apply(x_nm, norm_before.variance_epsilon, attention, first, second, *parameters)
    norm_before, mlp = layer.post_attention_layernorm, layer.mlp
    first, second = kind((mlp.gate_proj, mlp.up_proj)), kind((mlp.down_proj,))
    parameters = (norm_before.weight, *first.parameters, *second.parameters)
    return _ProjectedFeedForward.apply(x_nm, norm_before.variance_epsilon, first, second, *parameters)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_nm: Tensor,
        gain_m: Tensor,
        query_om: Tensor,
        key_om: Tensor,
        value_om: Tensor,
        out_mi: Tensor,
        epsilon: float,
        attention: RowAttention,
    ) -> Tensor:
        normed_nm, factor_n = norm(x_nm, gain_m, epsilon)
        sizes = [len(query_om), len(key_om), len(value_om)]
        qkv_nj = x_nm.new_empty(len(x_nm), sum(sizes))
        for part_no, weight_om in zip(qkv_nj.split(sizes, 1), (query_om, key_om, value_om), strict=True):
            torch.mm(normed_nm, weight_om.T, out=part_no)
        attended_ni, logs = attention.forward(qkv_nj)
        ctx.attention = attention
        ctx.save_for_backward(
            *(x_nm, gain_m, factor_n, normed_nm, query_om, key_om, value_om, out_mi, qkv_nj, attended_ni, *logs)
        )
        return torch.addmm(x_nm, attended_ni, out_mi.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_nm, gain_m, factor_n, normed_nm, query_om, key_om, value_om, out_mi, *kept = ctx.saved_tensors
        qkv_nj, attended_ni, *logs = kept
        by_nm = gradients[0].contiguous()
        by_qkv_nj = ctx.attention.backward(qkv_nj, attended_ni, logs, by_nm @ out_mi)
        by_query_no, by_key_no, by_value_no = by_qkv_nj.split([len(query_om), len(key_om), len(value_om)], 1)
        by_x_nm = (by_query_no @ query_om).addmm_(by_key_no, key_om).addmm_(by_value_no, value_om)
        by_gain_m = norm_backward(x_nm, gain_m, factor_n, by_nm, by_x_nm)
        by_weights = (by_no.T @ normed_nm for by_no in (by_query_no, by_key_no, by_value_no))
        return by_x_nm, by_gain_m, *by_weights, by_nm.T @ attended_ni, None, None


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_nm: Tensor, gain_m: Tensor, gate_fm: Tensor, up_fm: Tensor, down_mf: Tensor, epsilon: float
    ) -> Tensor:
        normed_nm, factor_n = norm(x_nm, gain_m, epsilon)
        gate_nf, up_nf = normed_nm @ gate_fm.T, normed_nm @ up_fm.T
        ctx.save_for_backward(x_nm, gain_m, factor_n, normed_nm, gate_fm, up_fm, down_mf, gate_nf, up_nf)
        return torch.addmm(x_nm, gate(gate_nf, up_nf), down_mf.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_nm, gain_m, factor_n, normed_nm, gate_fm, up_fm, down_mf, gate_nf, up_nf = ctx.saved_tensors
        by_nm = gradients[0].contiguous()
        inner_nf = by_nm @ down_mf  # the gradient of the gated values; gate_backward overwrites it with the values
        by_gate_nf, by_up_nf = gate_backward(gate_nf, up_nf, inner_nf)
        by_x_nm = (by_gate_nf @ gate_fm).addmm_(by_up_nf, up_fm)
        by_gain_m = norm_backward(x_nm, gain_m, factor_n, by_nm, by_x_nm)
        return by_x_nm, by_gain_m, by_gate_nf.T @ normed_nm, by_up_nf.T @ normed_nm, by_nm.T @ inner_nf, None


class _ProjectedAttend(torch.autograd.Function):
    """Like `_Attend`. The parameters are passed for autograd's sake; the projections hold them too."""

    @staticmethod
    def forward(
        ctx: Any,
        x_nm: Tensor,
        epsilon: float,
        attention: RowAttention,
        qkv: Projection,
        out: Projection,
        gain_m: Tensor,
        *_parameters: Tensor,
    ) -> Tensor:
        normed_nm, factor_n = norm(x_nm, gain_m, epsilon)
        normed, qkv_nj = qkv.forward(normed_nm)
        qkv_nj = qkv_nj.float()
        attended_ni, logs = attention.forward(qkv_nj)
        attended, y_nm = out.forward(attended_ni)
        ctx.attention, ctx.qkv, ctx.out = attention, qkv, out
        ctx.save_for_backward(x_nm, gain_m, factor_n, normed, attended, qkv_nj, attended_ni, *logs)
        return x_nm + y_nm

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_nm, gain_m, factor_n, normed, attended, qkv_nj, attended_ni, *logs = ctx.saved_tensors
        needs_x, needs_gain = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
        by_nm = gradients[0].contiguous()
        by_attended_ni, by_out = ctx.out.backward(attended, by_nm, has_input=True)
        by_qkv_nj = ctx.attention.backward(qkv_nj, attended_ni, logs, by_attended_ni)
        by_x_nm, by_qkv = ctx.qkv.backward(normed, by_qkv_nj, has_input=needs_x or needs_gain)
        by_gain_m = None if by_x_nm is None else norm_backward(x_nm, gain_m, factor_n, by_nm, by_x_nm)
        return by_x_nm, None, None, None, None, by_gain_m if needs_gain else None, *by_qkv, *by_out


class _ProjectedFeedForward(torch.autograd.Function):
    """Like `_FeedForward`, with the parameters as in `_ProjectedAttend`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_nm: Tensor,
        epsilon: float,
        gate_up: Projection,
        down: Projection,
        gain_m: Tensor,
        *_parameters: Tensor,
    ) -> Tensor:
        normed_nm, factor_n = norm(x_nm, gain_m, epsilon)
        normed, inner_nf2 = gate_up.forward(normed_nm)
        gated, y_nm = down.forward_gated(inner_nf2)
        ctx.gate_up, ctx.down = gate_up, down
        ctx.save_for_backward(x_nm, gain_m, factor_n, normed, inner_nf2, gated)
        return x_nm + y_nm

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_nm, gain_m, factor_n, normed, inner_nf2, gated = ctx.saved_tensors
        needs_x, needs_gain = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
        by_nm = gradients[0].contiguous()
        by_gated_nf, by_down = ctx.down.backward(gated, by_nm, has_input=True)
        by_inner_nf2 = gate_gradient(inner_nf2, by_gated_nf)
        by_x_nm, by_gate_up = ctx.gate_up.backward(normed, by_inner_nf2, has_input=needs_x or needs_gain)
        by_gain_m = None if by_x_nm is None else norm_backward(x_nm, gain_m, factor_n, by_nm, by_x_nm)
        return by_x_nm, None, None, None, by_gain_m if needs_gain else None, *by_gate_up, *by_down
