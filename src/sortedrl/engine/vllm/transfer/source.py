# pyright: reportMissingImports=false
"""The learner's parameters as vLLM's trainers want them: gathered one after another, in the engine's number format.

`sender.py` makes one of the module of each rank. A module that FSDP2 has sharded is taken as it is. Tensors are cast
before they are gathered, so that a learner in float32 sends half of the bytes to an engine in bfloat16. Of a model with
adapters only the base is sent, by the names that it has without them.

Guarantees: all ranks yield the same names in the same order, because gathering is a collective; after an error outside
of gathering, `exhaust` takes the rest of the others' collectives, so that no rank is left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, materialize_full_tensor

from sortedrl.engine.vllm.transfer.packing import WireTensor

_ADAPTED = "base_model.model."  # how peft's names begin
_BASE_LAYER = ".base_layer"
_Item = TypeVar("_Item")


class CastSource(WeightSource):
    """`device`: where gathered tensors must be; None: where they are."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self._module = module
        self._dtype = dtype
        self._device = device
        self._gathering: Iterator[object] | None = None
        self.is_broken = False  # an error came from gathering: the ranks are out of step

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self._wire_dtype(tensor), tuple(tensor.shape)) for name, tensor in self._parameters()]

    @property
    def has_begun(self) -> bool:
        """Whether gathering has been asked for, so that `exhaust` goes on in the same way."""
        return self._gathering is not None

    @property
    def largest_bytes(self) -> int:
        """The size of the largest tensor, as it is sent."""
        return max(tensor.num_bytes for tensor in self.wire_tensors())

    def wire_tensors(self) -> list[WireTensor]:
        """The parameters in the same order, as they are: `packing.py` casts and gathers them."""
        return [WireTensor(tensor, self._wire_dtype(tensor)) for _, tensor in self._parameters()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.watched(self._gather())

    def watched(self, gathering: Iterator[_Item]) -> Iterator[_Item]:
        """The same items. Remembers where it is, for `exhaust`, and whether gathering itself has failed."""
        self._gathering = watching = self._watch(gathering)
        return watching

    def exhaust(self) -> None:
        """Gather what has not been gathered yet, for nobody: the other ranks go through all of it."""
        with torch.no_grad():
            for _ in iter(self) if self._gathering is None else self._gathering:
                pass

    def _watch(self, gathering: Iterator[_Item]) -> Iterator[_Item]:
        try:
            yield from gathering
        except Exception:
            self.is_broken = True
            raise

    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad():
            for name, tensor in self._parameters():
                full = materialize_full_tensor(tensor.detach().to(self._wire_dtype(tensor)))
                yield name, full if self._device is None else full.to(self._device)

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
