"""Decoding with the model's own transformers modules: the decoder that works for every architecture.

The local engine calls `forward` on packed tokens. An attention function that is registered with transformers passes
queries, keys and values to the plan of the call. The plan is a keyword argument of the call, so there is no global
state.
Guarantees: a learner may share the module, because each call restores train flags and attention implementation.

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

from sortedrl.engine.local.cache import AttentionPlan, PrefillPlan, SlotCache
from sortedrl.errors import ModelError

_ATTENTION = "sortedrl_slots"
_SUPPORTED = "full causal attention with fixed rotary or learned positions, such as Llama, Qwen2, Qwen3 and GPT-NeoX"


@dataclass(slots=True, kw_only=True, frozen=True)
class Geometry:
    """The sizes of a model that determine its cache."""

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
                f"the config of {type(model).__name__} does not describe its attention ({error}); "
                f"the local engine runs {_SUPPORTED}"
            ) from error


def check_supported(model: nn.Module) -> PreTrainedModel:
    """Raise a ModelError for a model that the local engine cannot run; returns the model otherwise."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} is not a transformers model: load it with AutoModelForCausalLM")
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
    slot_plan: AttentionPlan,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Call `AttentionPlan.attend` in the form that transformers expects: [1, heads, t, d] in, [1, t, h, d] out."""
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

    def refresh(self, module: nn.Module) -> int:
        """Do nothing: every call reads the module's own parameters."""
        return 0

    def forward(
        self, tokens_t: torch.Tensor, positions_t: torch.Tensor, rows_r: torch.Tensor | None, plan: AttentionPlan
    ) -> torch.Tensor:
        """Logits [r, v] in float32 at the given rows, or at all."""
        with self._inference_settings():
            output = self._model(
                input_ids=tokens_t.unsqueeze(0),
                position_ids=positions_t.unsqueeze(0),
                use_cache=False,
                logits_to_keep=0 if rows_r is None else rows_r,
                slot_plan=plan,
            )
        return output.logits[0].float()

    @contextmanager
    def _inference_settings(self) -> Iterator[None]:
        """Put the module in eval mode and on our attention for one call, then restore its settings."""
        config: Any = self._model.config
        in_train_mode = [module for module in self._modules if module.training]
        attention = config._attn_implementation
        for module in in_train_mode:
            module.training = False
        config._attn_implementation = _ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = attention
            for module in in_train_mode:
                module.training = True

    def _probe(self, cache: SlotCache) -> None:
        """Run one token, because a model with a layer that does not call our attention would decode nonsense."""
        probe = _LayerRecorder(PrefillPlan(cache, [0], [1]))
        token_t = torch.zeros(1, dtype=torch.int64, device=cache.device)
        name, remedy = type(self._model).__name__, f"the local engine runs {_SUPPORTED}"
        try:
            with torch.inference_mode():
                self.forward(token_t, token_t, None, probe)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise ModelError(f"{name} cannot run on the slot cache ({error}); {remedy}") from error
        if probe.layers != list(range(cache.num_layers)):
            raise ModelError(f"{name} has layers that do not use transformers' attention interface; {remedy}")
        cache.clear(0)


class _LayerRecorder:
    """A plan that records which layers called attention."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self.layers: list[int] = []

    def attend(self, layer: int, q_thd: torch.Tensor, kv_ted: torch.Tensor, scale: float) -> torch.Tensor:
        self.layers.append(layer)
        return self._plan.attend(layer, q_thd, kv_ted, scale)
