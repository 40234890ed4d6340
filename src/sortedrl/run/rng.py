"""Save and restore the global random generators of Python, numpy and torch, as about 13 kB of JSON.

Checkpoints contain this state, so that a resumed run draws the same numbers as one that was not interrupted. It holds
numbers and base64 text; nothing is unpickled.
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
    """Set every global generator to a state that `rng_state` returned, in this process or another."""
    try:
        python = state["python"]
        words = tuple(_decode(python["words"]).tolist())
        torch_state = torch.from_numpy(_decode(state["torch"]))
        cuda_states = [torch.from_numpy(_decode(one)) for one in state["cuda"]]
        np.random.set_state(_decode(state["numpy"]))
        torch.set_rng_state(torch_state)
        random.setstate((python["version"], words, python["gauss"]))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, binascii.Error) as error:
        raise RunDirError(f"the saved random state is damaged ({error}): resume from another checkpoint") from error
    _set_cuda_states(cuda_states)


def _cuda_states() -> list[torch.Tensor]:
    # Asking initialises CUDA, which takes memory on every device.
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []


def _set_cuda_states(states: list[torch.Tensor]) -> None:
    num_devices = torch.cuda.device_count() if states else 0
    if len(states) != num_devices:
        log.warning("the checkpoint has random states of %d CUDA devices, but there are %d", len(states), num_devices)
    for device, saved in enumerate(states[:num_devices]):
        torch.cuda.set_rng_state(saved, device)


def _encode(value: Any) -> Any:
    """Turn arrays, also inside dicts, into their dtype and base64 bytes; other values stay."""
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
        return array.astype(array.dtype.newbyteorder("="))  # a writable copy, which torch needs
    return {key: _decode(inner) for key, inner in value.items()}
