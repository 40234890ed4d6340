"""Where engines get weights from.

A learner hands out a `ModuleWeights` as its `source`; an engine's `publish` reads `.module`. An engine that was built
on that very module has nothing to copy. A learner that goes on training while engines read hands out a snapshot
instead, which nobody writes to.

A model with adapters (peft) is trained as it is and sampled from merged weights: `.module` is then a plain copy of the
model, into which base weights plus adapters are written anew whenever it is asked for. Base and adapters stay as they
are: merging in place and taking it back would leave rounding behind. An engine that takes adapters as they are reads
`.adapter` instead, and nothing is merged for it.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModuleWeights:
    """The weights of a live module, or of a copy of it."""

    __slots__ = ("_adapter", "_merged", "_trained")

    def __init__(self, module: nn.Module, adapter: dict[str, Tensor] | None = None) -> None:
        self._trained = module
        self._merged: nn.Module | None = None
        self._adapter = adapter

    @property
    def module(self) -> nn.Module:
        """A plain module with the weights as they are at this moment; the same object at every call."""
        if not is_adapted(self._trained):
            return self._trained
        if self._merged is not None:
            merge_into(self._trained, self._merged)
            return self._merged
        self._merged = merged = merged_copy(self._trained)
        return merged

    @property
    def adapter(self) -> dict[str, Tensor] | None:
        """The adapters alone, as they are at this moment, by the names that peft saves them under; None without any."""
        return adapter_tensors(self._trained) if is_adapted(self._trained) else self._adapter

    def snapshot(self) -> ModuleWeights:
        """A copy that later updates of the module do not reach: no gradients, tied weights still tied."""
        if is_adapted(self._trained):
            adapter = {name: tensor.clone() for name, tensor in adapter_tensors(self._trained).items()}
            return ModuleWeights(merged_copy(self._trained), adapter)
        return ModuleWeights(copy.deepcopy(self._trained).requires_grad_(False).eval())


def is_adapted(model: object) -> bool:
    """Whether a model is one of peft's, which then has been imported."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The adapters of one of peft's models, not copied, by the names that it saves them under; none if it uses several
    sets of them at once."""
    if len(model.active_adapters) != 1:
        return {}
    read = import_module("peft").get_peft_model_state_dict
    state = read(model, adapter_name=model.active_adapters[0], save_embedding_layers=False)
    return {key: tensor.detach() for key, tensor in state.items()}


def base_copy(model: Any) -> Any:
    """The plain model that adapters stand on, without them."""
    return copy.deepcopy(model).unload().requires_grad_(False).eval()


def merged_copy(model: Any) -> Any:
    """A plain model with the weights of base and adapters together: no gradients, in eval mode."""
    return copy.deepcopy(model).merge_and_unload().requires_grad_(False).eval()


def merge_into(model: Any, target: nn.Module) -> None:
    """Write the weights of base and adapters together into a plain copy of the model, in place."""
    import torch

    tuner_layer: type = import_module("peft.tuners.tuners_utils").BaseTunerLayer
    wrapper: type = import_module("peft.utils.other").AuxiliaryTrainingWrapper
    done = ""
    with torch.no_grad():
        for name, layer in model.get_base_model().named_modules():
            if not isinstance(layer, (tuner_layer, wrapper)) or (done and name.startswith(done)):
                continue
            done = f"{name}."  # what it consists of goes with it
            aside: Any = copy.deepcopy(layer)  # one layer at a time: the model is not there twice
            if isinstance(layer, tuner_layer):
                aside.merge()
                merged = aside.get_base_layer()
            else:
                merged = aside.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            written = dict(target.get_submodule(name).named_parameters())
            for key, parameter in merged.named_parameters():
                written[key].copy_(parameter)


def array_of(tensor: Tensor) -> Any:
    """A tensor as an array that processes can share; a half-precision one as bits, since numpy knows no bfloat16."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    return (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()


def tensor_of(array: Any, *, is_floating: bool) -> Tensor:
    """The tensor that `array_of` was given, in the array's memory: not to be written to."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read
        plain = torch.from_numpy(array)
    is_bits = plain.dtype == torch.int16 and is_floating
    return plain.view(torch.bfloat16) if is_bits else plain


def arrays_of(module: nn.Module) -> dict[str, Any]:
    """The weights as arrays that processes can share."""
    return {name: array_of(tensor) for name, tensor in module.state_dict().items()}


def load_arrays(arrays: Mapping[str, Any], module: nn.Module) -> ModuleWeights:
    """Write such arrays into a module of the same shape, in place."""
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
