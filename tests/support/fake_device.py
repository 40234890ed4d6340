"""A device that computes on the CPU, refuses to mix its tensors with the CPU's, and counts transfers to the host.

It stands for a GPU where there is none. Inside `FakeDevice`, torch's device "meta" has values: a `DeviceTensor` says
that it is on "meta" and holds a tensor of the CPU. Every operation passes `FakeDevice`, which raises `MixedDevices` if
an operation on the device reads a tensor that stayed behind, as CUDA would.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

NAME = "meta"
# Operations that must know values on the host, so that they wait for the device.
_WAITING = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal")


class MixedDevices(RuntimeError):
    """An operation got tensors of two devices."""


class DeviceTensor(Tensor):
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=NAME,
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"DeviceTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran outside of FakeDevice")


class FakeDevice(TorchDispatchMode):
    """Inside the block, "meta" is a device with values. `transfers` counts what was read from it, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: Counter[str] = Counter()

    def __enter__(self) -> FakeDevice:
        # Without swapping, `Module.to` would make new parameters, and tied ones would come apart.
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch._C._set_only_lift_cpu_tensors(True)  # so that `torch.tensor` moves by an operation that is seen here
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        flat, _ = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        on_device = [value for value in tensors if isinstance(value, DeviceTensor)]
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == NAME
        if to_device:
            kwargs["device"] = torch.device("cpu")
        is_copy = name in ("_to_copy", "copy_")
        if on_device and not is_copy and any(value.ndim and not isinstance(value, DeviceTensor) for value in tensors):
            raise MixedDevices(f"{func} got tensors of {NAME} and of the CPU")
        to_host = name == "_to_copy" and target is not None and not to_device
        if name == "copy_":
            to_host = not isinstance(args[0], DeviceTensor)
        if on_device and (to_host or name in _WAITING or _has_unknown_size(name, args, kwargs)):
            self.transfers[name] += 1
        plain_args, plain_kwargs = tree_map_only(DeviceTensor, lambda value: value.inner, (args, kwargs))
        found = func(*plain_args, **plain_kwargs)
        if not (on_device or to_device) or to_host:
            return found
        owners = {id(value.inner): value for value in on_device}
        return tree_map_only(
            Tensor, lambda value: owners[id(value)] if id(value) in owners else DeviceTensor(value), found
        )


def _has_unknown_size(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the operation must read a tensor to know the size of its result."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "index":
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
    return False
