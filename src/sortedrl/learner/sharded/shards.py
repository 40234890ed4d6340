"""Shards a model over ranks with FSDP2 (`torch.distributed.fsdp`).

Each parameter is split by rows, and gathered layer by layer where it is computed. The driver makes a skeleton, which is
the model without its weights and is cheap to send. Each rank fills it layer by layer and keeps only its own rows. The
ranks of a machine read the weights from one shared place, so no rank ever holds the whole model. Gradients are summed
over the ranks and never averaged, because losses are already divided by numbers of the whole mini-batch.

Embedding and output layer are gathered on their own, like a layer, so that no rank holds them through the whole pass;
tied ones together. With bfloat16, weights are gathered and computed in that format; each rank keeps its rows in
float32, and gradients are summed in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from sortedrl.errors import ConfigError, ModelError
from sortedrl.learner.sharded.exchange import Exchange
from sortedrl.weights import array_of, tensor_of

META = torch.device("meta")


def check_torch() -> None:
    """Raise ConfigError if this torch cannot sum gradients over gloo, or go on after a pass that failed."""
    needed = ("set_force_sum_reduction_for_comms", "set_custom_all_gather", "reset_iter_state")
    if not all(hasattr(FSDPModule, name) for name in needed):
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


class BlankWeights(Mapping[str, Any]):
    """Arrays for the parameters of a skeleton that will be loaded: they have memory, but no values yet."""

    def __init__(self, skeleton: nn.Module) -> None:
        self._shapes = {name: (tuple(p.shape), p.dtype) for name, p in skeleton.named_parameters()}

    def __getitem__(self, name: str) -> Any:
        shape, dtype = self._shapes[name]
        return array_of(torch.zeros(shape, dtype=dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@dataclass(slots=True, kw_only=True, frozen=True)
class Sharding:
    """How models are sharded: over which ranks, and in which format weights are gathered."""

    mesh: DeviceMesh
    dtype: torch.dtype = torch.float32
    is_head_fp32: bool = False  # the output layer is gathered in float32 all the same
    exchange: Exchange | None = None
    is_on_host: bool = False  # weights, gradients and optimizer state are kept in host memory

    @property
    def offload(self) -> OffloadPolicy:
        """FSDP2's policy for host memory. Pinned memory speeds up copies to a GPU, and needs one."""
        if not self.is_on_host:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.mesh.device_type == "cuda")

    def policy(self, *, is_head: bool = False) -> MixedPrecisionPolicy:
        if self.dtype == torch.float32:
            return MixedPrecisionPolicy()
        dtype = torch.float32 if is_head and self.is_head_fp32 else self.dtype
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def shard_model(model: nn.Module, sharding: Sharding, weights: Mapping[str, Any] | None = None) -> None:
    """Shard a model in place, so that this rank keeps its rows only. `weights` fill a skeleton, by name."""
    head = _end_of(model, "get_output_embeddings")
    for group in [*([block] for block in _blocks(model)), *_ends(model)]:
        if weights is not None:
            _fill(group, weights)
        modules = [module for _, module in group]
        policy = sharding.policy(is_head=head is not None and any(module is head for module in modules))
        shared: Any = modules if len(modules) > 1 else modules[0]
        fully_shard(
            shared,
            mesh=sharding.mesh,
            reshard_after_forward=True,
            mp_policy=policy,
            offload_policy=sharding.offload,
        )
    if weights is not None:
        _fill([("", model)], weights)
    # The root is resharded after a pass too: otherwise its parameters would stay gathered, and be read as such.
    fully_shard(
        model,
        mesh=sharding.mesh,
        reshard_after_forward=True,
        mp_policy=sharding.policy(),
        offload_policy=sharding.offload,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
            if sharding.exchange is not None:
                sharding.exchange.attach(module)


def replicated_mesh(mesh: DeviceMesh, num_replicas: int) -> DeviceMesh:
    """The mesh of copies of the model, each over neighbouring ranks (HSDP); without copies the same mesh."""
    if num_replicas == 1:
        return mesh
    shape = (num_replicas, mesh.size() // num_replicas)
    return init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))


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


def _end_of(model: nn.Module, getter: str) -> nn.Module | None:
    """The embedding or the output layer of a model; None if it has none, as a critic."""
    get = getattr(model, getter, None)
    return None if get is None else get()


def _ends(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Embedding and output layer, to be gathered on their own; in one group if they share weights."""
    names = {id(module): name for name, module in model.named_modules()}
    getters = ("get_input_embeddings", "get_output_embeddings")
    found = [module for getter in getters if (module := _end_of(model, getter)) is not None and id(module) in names]
    if len(found) == 2 and found[0] is found[1]:
        found = found[:1]
    ends = [(names[id(module)], module) for module in found]
    owned = [{id(parameter) for parameter in module.parameters()} for module in found]
    is_tied = len(owned) == 2 and bool(owned[0] & owned[1])
    return [ends] if is_tied else [[end] for end in ends]


@torch.no_grad()
def _fill(modules: Sequence[tuple[str, nn.Module]], weights: Mapping[str, Any]) -> None:
    """Give its weights to every parameter that has no memory; tied parameters stay tied."""
    filled: dict[int, nn.Parameter] = {}
    parts = [(f"{name}.{part}".strip("."), found) for name, module in modules for part, found in module.named_modules()]
    for part_name, part in parts:
        for key, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.device != META:
                continue
            if id(parameter) not in filled:
                name = f"{part_name}.{key}" if part_name else key
                if name not in weights:
                    raise ModelError(
                        f"there are no weights for {name}: send those of the model that the skeleton was made from"
                    )
                value = tensor_of(weights[name], is_floating=parameter.is_floating_point()).clone()
                filled[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            setattr(part, key, filled[id(parameter)])
