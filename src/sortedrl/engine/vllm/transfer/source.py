# pyright: reportMissingImports=false
"""The learner's parameters as vLLM's trainers want them: gathered one after another, in the engine's number format.

`sender.py` makes one of the module of each rank. A module that FSDP2 has sharded is taken as it is. Tensors are cast
before they are gathered, so that a learner in float32 sends half of the bytes to an engine in bfloat16. Of a model with
adapters only the base is sent, by the names that it has without them.

Guarantees: all ranks yield the same names in the same order, because gathering is a collective.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, materialize_full_tensor

from sortedrl.engine.vllm.transfer.packing import WireTensor

_ADAPTED = "base_model.model."  # how peft's names begin
_BASE_LAYER = ".base_layer"


class CastSource(WeightSource):
    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self._wire_dtype(tensor), tuple(tensor.shape)) for name, tensor in self._parameters()]

    def wire_tensors(self) -> list[WireTensor]:
        """The parameters in the same order, as they are: `packing.py` casts and gathers them."""
        return [WireTensor(tensor, self._wire_dtype(tensor)) for _, tensor in self._parameters()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad():
            for name, tensor in self._parameters():
                yield name, materialize_full_tensor(tensor.detach().to(self._wire_dtype(tensor)))

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            plain = plain_name(name)
            if plain is not None:
                yield plain, parameter

    def _wire_dtype(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype


def plain_name(name: str) -> str | None:
    """The name of a parameter in the model without adapters; None for a parameter of an adapter."""
    if not name.startswith(_ADAPTED):
        return name
    if ".lora_" in name or ".modules_to_save." in name:
        return None
    return name.removeprefix(_ADAPTED).replace(_BASE_LAYER, "")
