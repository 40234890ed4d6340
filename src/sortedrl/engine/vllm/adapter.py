"""Adapters for vLLM: which ones it can load unmerged, and the folder from which it loads them.

`run/builders/engine.py` calls `find_adapter_fault`. The engine (`engine.py`) owns an `AdapterFolder` when its model has
adapters. vLLM then loads the base model once. A publication writes only the adapters, and vLLM loads them in place of
the previous ones, under the one number that every request names. Running requests continue under the adapters just
loaded, as they would under full weights.

Guarantees: the folder always holds the current adapters, so a restarted vLLM loads those.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from sortedrl.engine.vllm.process import AdapterSettings
from sortedrl.errors import EngineError
from sortedrl.weights import adapter_tensors

ADAPTER_ID = 1
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts as max_lora_rank
_WEIGHTS = "adapter_model.safetensors"
_SIDES = (".lora_A.weight", ".lora_B.weight")
# Settings of peft under which an adapter is more than a product of two matrices.
_VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")  # other named initialisations change the base model


def find_adapter_fault(model: Any) -> str | None:
    """Why vLLM cannot load the adapters of a peft model unmerged; None if it can."""
    if len(model.peft_config) != 1:
        return f"the model has {len(model.peft_config)} of them"
    (config,) = model.peft_config.values()
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        return f"they are {config.peft_type}, and vLLM supports LoRA only"
    for name in _VARIANTS:
        if getattr(config, name, None):
            return f"vLLM does not support {name}"
    init = config.init_lora_weights
    if isinstance(init, str) and init not in _PLAIN_INITS:
        return f"init_lora_weights = {init} changes the base model"
    tensors = adapter_tensors(model)
    odd = next((name for name in tensors if not name.endswith(_SIDES)), None)
    if odd is not None:
        return f"vLLM cannot load {odd}"
    head = _head_name(model)
    if head in _modules(tensors):
        return f"cached tokens cannot be verified with an adapter on {head}"
    rank = _rank(tensors)
    if rank > _RANKS[-1]:
        return f"their rank is {rank}, and vLLM supports up to {_RANKS[-1]}"
    return None


class AdapterFolder:
    """A folder as peft saves it: a configuration, which stays, and the weights of the current version."""

    def __init__(self, path: Path, model: Any) -> None:
        self.path = path
        tensors = adapter_tensors(model)
        (config,) = model.peft_config.values()
        try:
            path.mkdir()
            config.save_pretrained(str(path))
        except OSError as error:
            raise EngineError(f"cannot write the adapters for vLLM: {error}; free space in {path.parent}") from error
        rank = next(size for size in _RANKS if size >= _rank(tensors))
        self.settings = AdapterSettings(rank=rank, modules=tuple(sorted(_modules(tensors))))
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.write(tensors)

    def write(self, tensors: Mapping[str, Any] | None) -> None:
        """Replace the weights. vLLM may still have the old file mapped, so write a new one and rename it."""
        shapes = {name: tensor.shape for name, tensor in (tensors or {}).items()}
        if tensors is None or shapes != self._shapes:
            raise EngineError(
                "the published adapters do not match those that the engine was created with: publish the same adapters"
            )
        temporary = self.path / f"{_WEIGHTS}.part"
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
            os.replace(temporary, self.path / _WEIGHTS)
        except OSError as error:
            raise EngineError(
                f"cannot write the adapters for vLLM: {error}; free space in {self.path.parent}"
            ) from error


def _modules(tensors: Mapping[str, Any]) -> set[str]:
    return {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}


def _rank(tensors: Mapping[str, Any]) -> int:
    return max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_SIDES[0]))


def _head_name(model: Any) -> str:
    """The last part of the name of the model's head."""
    base = model.get_base_model()
    head = base.get_output_embeddings()
    return next((name.rpartition(".")[2] for name, module in base.named_modules() if module is head), "lm_head")
