"""Adapters for vLLM: which it can take as they are, and the folder from which it takes them.

`build/engine.py` asks `find_adapter_fault`; the engine (`engine.py`) owns an `AdapterFolder` when it is given a
model with adapters. The base model is then loaded once and never written again: a publication writes the adapters
alone, and vLLM loads them in place of those before, under the one number that every request names. Requests that are
running go on under the adapters just loaded, as they would under full weights.

What it keeps true: the folder always holds the adapters in force, so a core that has to be started again takes those.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from sortedrl.engine.vllm.process import AdapterTerms
from sortedrl.errors import EngineError
from sortedrl.weights import adapter_tensors

ADAPTER_ID = 1
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM makes room for
_WEIGHTS = "adapter_model.safetensors"
_SIDES = (".lora_A.weight", ".lora_B.weight")
# Settings of peft's that make more of an adapter than a product of two matrices.
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
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")  # other named ways to begin change the base model


def find_adapter_fault(model: Any) -> str | None:
    """Why vLLM cannot take the adapters of a model (peft's) as they are; None if it can."""
    if len(model.peft_config) != 1:
        return f"the model has {len(model.peft_config)} of them"
    (config,) = model.peft_config.values()
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        return f"they are {config.peft_type}, and vLLM takes LoRA"
    for name in _VARIANTS:
        if getattr(config, name, None):
            return f"vLLM does not know {name}"
    start = config.init_lora_weights
    if isinstance(start, str) and start not in _PLAIN_STARTS:
        return f"init_lora_weights = {start} changes the base model"
    tensors = adapter_tensors(model)
    odd = next((name for name in tensors if not name.endswith(_SIDES)), None)
    if odd is not None:
        return f"vLLM has no place for {odd}"
    head = _head_name(model)
    if head in _modules(tensors):
        return f"cached tokens cannot be verified with an adapter on {head}"
    rank = _rank(tensors)
    if rank > _RANKS[-1]:
        return f"their rank is {rank}, and vLLM takes up to {_RANKS[-1]}"
    return None


class AdapterFolder:
    """As peft saves it: a configuration, which stays, and the weights of the version in force."""

    def __init__(self, path: Path, model: Any) -> None:
        self.path = path
        tensors = adapter_tensors(model)
        (config,) = model.peft_config.values()
        try:
            path.mkdir()
            config.save_pretrained(str(path))
        except OSError as error:
            raise EngineError(f"cannot hand the adapters to vLLM: {error}; make room in {path.parent}") from error
        room = next(size for size in _RANKS if size >= _rank(tensors))
        self.terms = AdapterTerms(rank=room, modules=tuple(sorted(_modules(tensors))))
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.write(tensors)

    def write(self, tensors: Mapping[str, Any] | None) -> None:
        """In place of what is there, which vLLM may still have mapped: another file under its name."""
        shapes = {name: tensor.shape for name, tensor in (tensors or {}).items()}
        if tensors is None or shapes != self._shapes:
            raise EngineError("the adapters to publish are others than the engine was made with: publish those")
        aside = self.path / f"{_WEIGHTS}.part"
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, aside)
            os.replace(aside, self.path / _WEIGHTS)
        except OSError as error:
            raise EngineError(f"cannot hand the adapters to vLLM: {error}; make room in {self.path.parent}") from error


def _modules(tensors: Mapping[str, Any]) -> set[str]:
    return {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}


def _rank(tensors: Mapping[str, Any]) -> int:
    return max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_SIDES[0]))


def _head_name(model: Any) -> str:
    """The last part of the name under which the model has its head."""
    base = model.get_base_model()
    head = base.get_output_embeddings()
    return next((name.rpartition(".")[2] for name, module in base.named_modules() if module is head), "lm_head")
