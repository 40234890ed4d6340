"""The state of the global random generators, Python's, numpy's and torch's, as JSON values of some 13 kB.

Saved with a checkpoint and set when a run is resumed, so that whatever draws from them goes on as if it had not been
interrupted. Nothing is unpickled: a state is numbers, and bytes in base64.
"""

from __future__ import annotations

import base64
import binascii
import logging
import random
from typing import Any

import numpy as np
import torch

from sortedrl.errors import RunDirError

log = logging.getLogger(__name__)


def rng_state() -> dict[str, Any]:
    """The state of every global generator; CUDA's only if this process has used CUDA."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": _encode(np.array(words, dtype="<u4")), "gauss": gauss},
        "numpy": _encode(np.random.get_state(legacy=False)),
        "torch": _encode(torch.get_rng_state().numpy()),
        "cuda": [_encode(state.numpy()) for state in _cuda_states()],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Set every global generator to what `rng_state` gave, in this process or another."""
    try:
        python = state["python"]
        words = tuple(_decode(python["words"]).tolist())
        torch_state = torch.from_numpy(_decode(state["torch"]))
        cuda_states = [torch.from_numpy(_decode(one)) for one in state["cuda"]]
        np.random.set_state(_decode(state["numpy"]))
        torch.set_rng_state(torch_state)
        random.setstate((python["version"], words, python["gauss"]))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, binascii.Error) as error:
        raise RunDirError(f"the saved random state is damaged ({error}): go on from another checkpoint") from error
    _set_cuda_states(cuda_states)


def _cuda_states() -> list[torch.Tensor]:
    # Asking a process that has not used CUDA would take memory on every device.
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []


def _set_cuda_states(states: list[torch.Tensor]) -> None:
    num_devices = torch.cuda.device_count() if states else 0
    if len(states) != num_devices:
        log.warning("the checkpoint has random states of %d CUDA devices, here are %d", len(states), num_devices)
    for device, saved in enumerate(states[:num_devices]):
        torch.cuda.set_rng_state(saved, device)


def _encode(value: Any) -> Any:
    """Arrays become their dtype and bytes, however deep they are in dicts; other values stay."""
    match value:
        case np.ndarray():
            array = value.astype(value.dtype.newbyteorder("<"), copy=False)
            return {"dtype": array.dtype.str, "base64": base64.b64encode(array.tobytes()).decode("ascii")}
        case np.generic():
            return value.item()
        case dict():
            return {key: _encode(inner) for key, inner in value.items()}
        case _:
            return value


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "base64"}:
        array = np.frombuffer(base64.b64decode(value["base64"], validate=True), dtype=value["dtype"])
        return array.astype(array.dtype.newbyteorder("="))  # a copy of its own: torch refuses memory it cannot write
    return {key: _decode(inner) for key, inner in value.items()}
