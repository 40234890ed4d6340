"""The device that updates run on, and the transfers to it and from it.

`learner/torch.py` chooses the device once. What an update makes on the host goes to it through `to_device`, from pinned
memory and without waiting. What the host must know comes back through `to_host`, which waits: once per optimizer step,
and once for an update's metrics. Nothing else of an update reads values from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortedrl.errors import ConfigError


def choose_device(wanted: str, model: Any) -> torch.device:
    """The device that `learner.device` names. `auto` is where the model is; from the CPU, it goes to a GPU if any."""
    if wanted == "auto":
        current: torch.device = model.device
        is_moved = current.type == "cpu" and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if is_moved else current
    device = torch.device(wanted)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"learner.device = {wanted}, but torch sees {count} CUDA devices here: set learner.device = auto, or "
                "install a torch with CUDA and check CUDA_VISIBLE_DEVICES"
            )
    return device


def to_device(values: np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """A copy of host values on the device. The host does not wait for it; on the CPU nothing is copied."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    device = torch.device(device)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(values: Sequence[Tensor]) -> list[Tensor]:
    """The values in host memory, by one transfer per type and device. The host waits for it."""
    if all(value.is_cpu for value in values):
        return list(values)
    found: list[Tensor] = list(values)
    for kind in {(value.dtype, value.device) for value in values}:
        places = [place for place, value in enumerate(values) if (value.dtype, value.device) == kind]
        joined = torch.cat([values[place].reshape(-1) for place in places]).cpu()
        for place, part in zip(places, joined.split([values[place].numel() for place in places]), strict=True):
            found[place] = part.view(values[place].shape)
    return found


def memory_of(device: torch.device) -> int | None:
    """The bytes of memory that a GPU has; None for other devices."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
