"""The weights that a learner hands to engines.

A learner's `source` is a `ModuleWeights`, and an engine's `publish` reads its `.module`. An engine that was built on
that module has nothing to copy. A learner that trains while engines read returns a snapshot instead, which never
changes.

A model with adapters (peft) is trained with them, but engines sample from merged weights: `.module` is a plain copy of
the model, and each read of `.module` writes base plus adapters into it. Base and adapters are not merged in place,
because undoing that would leave rounding errors. An engine that supports adapters reads `.adapter` instead, and then
nothing is merged.

An engine can also fetch the weights from where they are: `apply` runs a function in the process that holds them, or in
all processes of a sharded learner at the same time.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

HERE = "this process"


@dataclass(slots=True, kw_only=True, frozen=True)
class WeightHolder:
    """One process that holds trained weights, or a shard of them."""

    rank: int
    module: nn.Module


class ModuleWeights:
    """The weights of a live module, or of a copy of it."""

    __slots__ = ("_adapter", "_merged", "_plain", "_trained")

    def __init__(self, module: nn.Module, adapter: dict[str, Tensor] | None = None) -> None:
        self._trained = module
        self._merged: nn.Module | None = None
        self._plain: nn.Module | None = None  # the model without its adapters, for snapshots; it owns no tensors
        self._adapter = adapter

    @property
    def module(self) -> nn.Module:
        """A plain module with the current weights; the same object at every call."""
        if not is_adapted(self._trained):
            return self._trained
        if self._merged is not None:
            merge_into(self._trained, self._merged)
            return self._merged
        self._merged = merged = merged_copy(self._trained)
        return merged

    @property
    def adapter(self) -> dict[str, Tensor] | None:
        """The current adapters, by the names under which peft saves them, or None if the model has none."""
        return adapter_tensors(self._trained) if is_adapted(self._trained) else self._adapter

    @property
    def place(self) -> Hashable:
        """Where the weights are: sources with the same place are held by the same processes."""
        return HERE

    def apply(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(holder, *arguments)` in every process that holds the weights; returns its results by rank."""
        return [function(WeightHolder(rank=0, module=self.module), *arguments)]

    def snapshot(self) -> ModuleWeights:
        """A copy that later updates do not change. It has no gradients, and tied weights stay tied."""
        if is_adapted(self._trained):
            adapter = {name: tensor.clone() for name, tensor in adapter_tensors(self._trained).items()}
            return ModuleWeights(self._merged_snapshot(), adapter)
        return ModuleWeights(copy.deepcopy(self._trained).requires_grad_(False).eval())

    def _merged_snapshot(self) -> nn.Module:
        """Like `merged_copy`; shares the tensors that training does not change, if only plain adapters are trained."""
        import torch

        adapters = _plain_adapters(self._trained)
        if adapters is None:
            return merged_copy(self._trained)
        if self._plain is None:
            self._plain = _shallow_copy(self._trained).unload().eval()
        snapshot = _shallow_copy(self._plain)
        with torch.no_grad():
            for name, layer in adapters.items():
                merged = torch.nn.Parameter(_merged_weight(layer), requires_grad=False)
                snapshot.get_submodule(name).weight = merged
        return snapshot


def is_adapted(model: object) -> bool:
    """Whether a model is a peft model. If peft was not imported, it is not."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def is_plain_adapter(layer: Any) -> bool:
    """Whether a module is peft's LoRA around a linear layer without bias, with one adapter and no variant of it."""
    lora: Any = sys.modules.get("peft.tuners.lora.layer")
    if lora is None or type(layer) is not lora.Linear:
        return False
    from torch import nn

    names: list[str] = layer.active_adapters
    return (
        len(names) == 1
        and names[0] in layer.lora_A
        and not layer.merged
        and not layer.fan_in_fan_out
        and not getattr(layer, "lora_variant", None)
        and not any(getattr(layer, "use_dora", {}).values())
        and layer.lora_A[names[0]].bias is None
        and layer.lora_B[names[0]].bias is None
        and type(layer.get_base_layer()) is nn.Linear
        and layer.get_base_layer().bias is None
    )


def _plain_adapters(model: Any) -> dict[str, Any] | None:
    """The adapters of a peft model by name, or None if it has other ones than plain ones, or trains other weights."""
    tuner_layer: type = import_module("peft.tuners.tuners_utils").BaseTunerLayer
    layers = {name: layer for name, layer in model.get_base_model().named_modules() if isinstance(layer, tuner_layer)}
    own = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    trains_others = any(parameter.requires_grad and id(parameter) not in own for parameter in model.parameters())
    return None if trains_others or not all(map(is_plain_adapter, layers.values())) else layers


def _shallow_copy(module: Any) -> Any:
    """A copy that shares its tensors with the module."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})


def _merged_weight(layer: Any) -> Tensor:
    """The sum of a plain adapter and the weight below it, rounded as peft's own."""
    name = layer.active_adapters[0]
    delta_oi = (layer.lora_B[name].weight @ layer.lora_A[name].weight).mul_(layer.scaling[name])
    return delta_oi.add_(layer.get_base_layer().weight)


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The adapters of a peft model, not copied, by the names under which peft saves them.

    The result is empty if the model has several active adapters.
    """
    if len(model.active_adapters) != 1:
        return {}
    read = import_module("peft").get_peft_model_state_dict
    state = read(model, adapter_name=model.active_adapters[0], save_embedding_layers=False)
    return {key: tensor.detach() for key, tensor in state.items()}


def base_copy(model: Any) -> Any:
    """A copy of the base model without the adapters, in host memory: no gradients, in eval mode."""
    from torch import nn

    in_host: dict[int, Any] = {id(buffer): buffer.detach().to("cpu", copy=True) for buffer in model.buffers()}
    for parameter in model.parameters():
        in_host[id(parameter)] = nn.Parameter(parameter.detach().to("cpu", copy=True), requires_grad=False)
    return copy.deepcopy(model, in_host).unload().requires_grad_(False).eval()


def merged_copy(model: Any) -> Any:
    """A plain model with the merged weights of base and adapters: no gradients, in eval mode."""
    return copy.deepcopy(model).merge_and_unload().requires_grad_(False).eval()


def merge_into(model: Any, target: nn.Module) -> None:
    """Write the merged weights of base and adapters into `target`, a plain copy of the model."""
    import torch

    tuner_layer: type = import_module("peft.tuners.tuners_utils").BaseTunerLayer
    wrapper: type = import_module("peft.utils.other").AuxiliaryTrainingWrapper
    done = ""
    with torch.no_grad():
        for name, layer in model.get_base_model().named_modules():
            if not isinstance(layer, (tuner_layer, wrapper)) or (done and name.startswith(done)):
                continue
            done = f"{name}."  # its submodules are merged with it
            if is_plain_adapter(layer):
                weight: Any = target.get_submodule(name).weight
                weight.copy_(_merged_weight(layer))
                continue
            layer_copy: Any = copy.deepcopy(layer)  # one layer at a time, so that memory never holds a second model
            if isinstance(layer, tuner_layer):
                layer_copy.merge()
                merged = layer_copy.get_base_layer()
            else:
                merged = layer_copy.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            written = dict(target.get_submodule(name).named_parameters())
            for key, parameter in merged.named_parameters():
                written[key].copy_(parameter)


def array_of(tensor: Tensor) -> Any:
    """A tensor as a numpy array that processes can share; bfloat16 as int16 bits, because numpy has no bfloat16."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    return (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()


def tensor_of(array: Any, *, is_floating: bool) -> Tensor:
    """Turn an array of `array_of` back into a tensor; int16 becomes bfloat16 if `is_floating`.

    The tensor shares the array's memory: do not write to it.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read
        plain = torch.from_numpy(array)
    is_bits = plain.dtype == torch.int16 and is_floating
    return plain.view(torch.bfloat16) if is_bits else plain


def arrays_of(module: nn.Module) -> dict[str, Any]:
    """A module's weights as arrays that processes can share."""
    return {name: array_of(tensor) for name, tensor in module.state_dict().items()}


class AdapterArrays:
    """The adapters of a model as arrays that processes can share."""

    def __init__(self, tensors: Mapping[str, Tensor] | None) -> None:
        self._arrays = {name: array_of(tensor) for name, tensor in (tensors or {}).items()}

    def source(self) -> ModuleWeights:
        """The adapters as an engine's `publish` reads them; there is no module."""
        from torch import nn

        tensors = {name: tensor_of(array, is_floating=True) for name, array in self._arrays.items()}
        return ModuleWeights(nn.Module(), tensors)


def load_arrays(arrays: Mapping[str, Any], module: nn.Module) -> ModuleWeights:
    """Write the arrays of `arrays_of` into a module of the same shape, in place."""
    import torch

    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(tensor_of(arrays[name], is_floating=tensor.is_floating_point()))
    return ModuleWeights(module)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the user's terminal."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
