"""The folder from which vLLM takes a model: written at the start, and again at every publication.

It always holds the weights in force, so a core that has to be started again simply loads it. It lies in shared memory
where the machine has some: a publication then touches no disk. `vllm.py` owns it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sortedrl.errors import EngineError
from sortedrl.quiet import no_progress_bars

_PREFIX = "sortedrl-vllm-"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (the folder in it is made by mkdtemp)
_WEIGHTS = "model.safetensors"


class WeightFolder:
    """A model folder as `save_pretrained` writes it; `dtype` is that of the engine."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        _remove_orphans(parent)
        self._dtype = dtype
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        try:
            # One file, whatever the size: what is written at publications has its name.
            with no_progress_bars():
                model.save_pretrained(self.path, max_shard_size="1000GB")
            with safe_open(self.weights, framework="pt") as file:
                self._names = list(file.keys())
            self.write(model)
        except (OSError, RuntimeError) as error:
            self.close()
            raise EngineError(f"cannot hand the model to vLLM: {error}; make room in {parent}") from error

    @property
    def weights(self) -> Path:
        return self.path / _WEIGHTS

    def write(self, model: Any) -> None:
        """The model's weights, in place of those that are there. Nobody ever sees half a file."""
        state = model.state_dict()
        missing = [name for name in self._names if name not in state]
        if missing:
            raise EngineError(
                f"the weights to publish lack {missing[0]}: publish the model that the engine was made of"
            )
        # By the names of the first file: a head that is tied to the embedding is written once.
        tensors = {name: state[name].detach().to("cpu", self._dtype).contiguous() for name in self._names}
        aside = self.path / f"{_WEIGHTS}.part"
        save_file(tensors, aside, metadata={"format": "pt"})
        os.replace(aside, self.weights)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_orphans(parent: Path) -> None:
    """A process that was killed could not remove its folder, and shared memory is memory."""
    for folder in parent.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not _exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _exists(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        return True
    return False
