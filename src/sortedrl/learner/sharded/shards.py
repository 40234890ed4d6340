"""Shards a model over ranks with FSDP2 (`torch.distributed.fsdp`).

Each parameter is split by rows, and gathered layer by layer where it is computed. The driver makes a skeleton, which is
the model without its weights and is cheap to send. Each rank fills it layer by layer and keeps only its own rows. The
ranks of a machine read the weights from one shared place, so no rank ever holds the whole model. Gradients are summed
over the ranks and never averaged, because losses are already divided by numbers of the whole mini-batch.
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
    """Raise ConfigError if this torch cannot sum gradients over gloo."""
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ConfigError(
            f"learner.ranks needs a newer torch than {torch.__version__}: upgrade torch, or set learner.ranks = 1"
        )


def skeleton_of(model: nn.Module) -> Any:
    """A copy of the model whose parameters keep shape, dtype and ties, but have no memory."""
    bare: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device=META), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, bare)


def weights_of(model: nn.Module) -> dict[str, Any]:
    """The model's parameters as arrays by name; tied parameters occur once."""
    return {name: array_of(parameter) for name, parameter in model.named_parameters()}


def shard_model(model: nn.Module, mesh: DeviceMesh, weights: Mapping[str, Any] | None = None) -> None:
    """Shard a model in place, so that this rank keeps its rows only. `weights` fill a skeleton, by name."""
    for name, block in _blocks(model):
        if weights is not None:
            _fill(block, weights, f"{name}.")
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    if weights is not None:
        _fill(model, weights, "")
    # The root is resharded after a pass too: otherwise its parameters would stay gathered, and be read as such.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces


def full_tensor(tensor: Tensor) -> Tensor:
    """All rows of a sharded tensor. Every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_local(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of a full tensor, sharded in the same way as `like`."""
    if not isinstance(like, DTensor) or tensor.ndim != like.ndim:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that transformers marks as not to be split, the outermost only."""
    names = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if type(module).__name__ in names and not is_inside and name:
            found.append((name, module))
    return found


@torch.no_grad()
def _fill(module: nn.Module, weights: Mapping[str, Any], prefix: str) -> None:
    """Give its weights to every parameter that has no memory; tied parameters stay tied."""
    filled: dict[int, nn.Parameter] = {}
    for part_name, part in module.named_modules():
        for key, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.device != META:
                continue
            if id(parameter) not in filled:
                name = f"{prefix}{part_name}.{key}" if part_name else f"{prefix}{key}"
                if name not in weights:
                    raise ModelError(
                        f"there are no weights for {name}: send those of the model that the skeleton was made from"
                    )
                value = tensor_of(weights[name], is_floating=parameter.is_floating_point()).clone()
                filled[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            setattr(part, key, filled[id(parameter)])
