"""A model cut over ranks: every parameter is shared out by rows, and put together layer by layer where it is computed.

This is FSDP2 (`torch.distributed.fsdp`). The driver makes a skeleton, the model without its weights, which is cheap to
send; each rank fills it in, layer by layer, with its own rows of weights that all ranks of a machine read in one place,
so that no rank ever holds the whole model. Gradients are added up over the ranks, never averaged: losses are divided by
what a whole mini-batch holds, and ranks are to it what micro-batches are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from sortedrl.errors import ConfigError, ModelError
from sortedrl.weights import array_of, tensor_of

META = torch.device("meta")


def check_torch() -> None:
    """Refuse a torch that cannot add gradients up over gloo."""
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ConfigError(f"learner.ranks needs a later torch than {torch.__version__}: upgrade it, or set it to 1")


def skeleton_of(model: nn.Module) -> Any:
    """A copy of the model whose parameters have shape, type and ties, and no memory."""
    bare: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device=META), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, bare)


def weights_of(model: nn.Module) -> dict[str, Any]:
    """The model's parameters as arrays by name, tied ones once."""
    return {name: array_of(parameter) for name, parameter in model.named_parameters()}


def shard_model(model: nn.Module, mesh: DeviceMesh, weights: Mapping[str, Any] | None = None) -> None:
    """Keep this rank's rows of a model, in place. `weights`: what a skeleton is filled with, by name."""
    for name, block in _blocks(model):
        if weights is not None:
            _fill(block, weights, f"{name}.")
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    if weights is not None:
        _fill(model, weights, "")
    # The root too: whoever asks for parameters after a pass is to get what the rank keeps.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale on the way


def whole(tensor: Tensor) -> Tensor:
    """All rows of what is cut over the ranks; every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of a tensor that every rank has whole, cut as another one is."""
    if not isinstance(like, DTensor) or tensor.ndim != like.ndim:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that transformers says must not be split, outermost only; they are computed one after another."""
    names = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if type(module).__name__ in names and not is_inside and name:
            found.append((name, module))
    return found


@torch.no_grad()
def _fill(module: nn.Module, weights: Mapping[str, Any], prefix: str) -> None:
    """Give every parameter that has no memory its weights; tied ones stay tied."""
    filled: dict[int, nn.Parameter] = {}
    for part_name, part in module.named_modules():
        for key, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.device != META:
                continue
            if id(parameter) not in filled:
                name = f"{prefix}{part_name}.{key}" if part_name else f"{prefix}{key}"
                if name not in weights:
                    raise ModelError(f"there are no weights for {name}: model and skeleton differ")
                value = tensor_of(weights[name], is_floating=parameter.is_floating_point()).clone()
                filled[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            setattr(part, key, filled[id(parameter)])
