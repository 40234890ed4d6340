"""Decoding with the model's own transformers modules: the path for every architecture.

The local engine calls `forward` on packed tokens. An attention function registered with transformers sends queries,
keys and values to the plan of the call, which rides along as a keyword; so nothing is global, and a learner that shares
the module finds it as it left it: train flags and attention implementation are put back after each call.

Shapes: t packed tokens, r rows whose logits are wanted, v vocabulary, h query heads, k key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from sortedrl.engine.local.cache import Plan, PrefillPlan, SlotCache
from sortedrl.errors import ModelError

_ATTENTION = "sortedrl_slots"
_SUPPORTED = "full causal attention with fixed rotary or learned positions, such as Llama, Qwen2, Qwen3 and GPT-NeoX"


@dataclass(slots=True, kw_only=True, frozen=True)
class Geometry:
    """What the cache must know of a model."""

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_length: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Geometry:
        config = model.config.get_text_config()
        try:
            heads = config.num_attention_heads
            return cls(
                num_layers=config.num_hidden_layers,
                heads=heads,
                kv_heads=getattr(config, "num_key_value_heads", None) or heads,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
                vocab=config.vocab_size,
                max_length=config.max_position_embeddings,
            )
        except AttributeError as error:
            raise ModelError(
                f"{type(model).__name__} does not describe its attention ({error}); the local engine runs {_SUPPORTED}"
            ) from error


def check_supported(model: nn.Module) -> PreTrainedModel:
    """Refuse what slots cannot hold before any memory is taken."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} is no transformers model; load it with AutoModelForCausalLM")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None) is not None:
        raise ModelError(
            f"{type(model).__name__} has sliding-window or other layers ({', '.join(sorted(kinds))}); "
            f"the local engine runs {_SUPPORTED}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in {"dynamic", "longrope"}:
        raise ModelError(
            f"{type(model).__name__} has {rope['rope_type']} rotary positions, with which an answer would depend on "
            f"its neighbours' lengths; the local engine runs {_SUPPORTED}"
        )
    return model


def _slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_plan: Plan,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' side of `Plan.attend`: [1, heads, t, d] in, [1, t, h, d] out."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise ModelError(f"attention with {name} is not supported; the local engine runs {_SUPPORTED}")
    q_thd, k_tkd, v_tkd = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return slot_plan.attend(layer, q_thd, torch.cat([k_tkd, v_tkd], 1), scale).unsqueeze(0), None


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters and saved buffers by name, in place, so that tied ones stay tied."""
    weights = source.state_dict(keep_vars=True)
    for name, tensor in target.state_dict(keep_vars=True).items():
        if name not in weights or weights[name].shape != tensor.shape:
            raise ModelError(f"the published weights do not fit the engine's model at {name}: publish the same model")
        tensor.copy_(weights[name])


class ModuleDecoder:
    """Runs a transformers causal language model over slots."""

    name = "module"

    def __init__(self, model: PreTrainedModel, cache: SlotCache) -> None:
        AttentionInterface.register(_ATTENTION, _slot_attention)
        self._model = model
        self._modules = list(model.modules())
        self._probe(cache)

    def refresh(self, module: nn.Module) -> None:
        """The module's parameters are read at every call: nothing to take over."""

    def forward(
        self, tokens_t: torch.Tensor, positions_t: torch.Tensor, rows_r: torch.Tensor | None, plan: Plan
    ) -> torch.Tensor:
        """Logits [r, v] in float32 at the wanted rows, or at all."""
        with self._borrowed():
            output = self._model(
                input_ids=tokens_t.unsqueeze(0),
                position_ids=positions_t.unsqueeze(0),
                use_cache=False,
                logits_to_keep=0 if rows_r is None else rows_r,
                slot_plan=plan,
            )
        return output.logits[0].float()

    @contextmanager
    def _borrowed(self) -> Iterator[None]:
        """The module in eval mode and on our attention, for one call."""
        config: Any = self._model.config
        trained = [module for module in self._modules if module.training]
        attention = config._attn_implementation
        for module in trained:
            module.training = False
        config._attn_implementation = _ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = attention
            for module in trained:
                module.training = True

    def _probe(self, cache: SlotCache) -> None:
        """Run one token: a model whose layers do not all come to our attention would decode nonsense in silence."""
        probe = _Probe(PrefillPlan(cache, [0], [1]))
        token_t = torch.zeros(1, dtype=torch.int64, device=cache.device)
        name = type(self._model).__name__
        try:
            with torch.inference_mode():
                self.forward(token_t, token_t, None, probe)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise ModelError(f"{name} cannot run on slots ({error}); the local engine runs {_SUPPORTED}") from error
        if probe.layers != list(range(cache.num_layers)):
            raise ModelError(f"{name} has attention of its own kind; the local engine runs {_SUPPORTED}")
        cache.clear(0)


class _Probe:
    """A plan that notes which layers attended."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.layers: list[int] = []

    def attend(self, layer: int, q_thd: torch.Tensor, kv_ted: torch.Tensor, scale: float) -> torch.Tensor:
        self.layers.append(layer)
        return self._plan.attend(layer, q_thd, kv_ted, scale)
