"""The model folder that vLLM is started with: always the configuration, and weights if they travel by file.

`engine.py` owns it. With weights, it is written at the start and again at every publication, so a restarted vLLM simply
loads it. It is in shared memory where that has room: a publication then touches no disk.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sortedrl.engine.vllm.segments import remove_noted_segments
from sortedrl.engine.vllm.shared_memory import SHARED_MEMORY, has_room
from sortedrl.errors import EngineError
from sortedrl.weights import no_progress_bars

_PREFIX = "sortedrl-vllm-"
_WEIGHTS = "model.safetensors"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class WeightFolder:
    """A model folder as `save_pretrained` writes it, in the engine's `dtype`, or its configuration alone."""

    def __init__(self, model: Any, dtype: torch.dtype, *, has_weights: bool = True) -> None:
        _remove_orphans(SHARED_MEMORY)
        size = sum(tensor.numel() for tensor in model.parameters()) * dtype.itemsize if has_weights else 0
        parent = SHARED_MEMORY if has_room(SHARED_MEMORY, size) else Path(tempfile.gettempdir())
        self._dtype = dtype
        self._mapped: dict[str, torch.Tensor] = {}
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        try:
            if not has_weights:
                model.config.architectures = [type(model).__name__]
                model.config.save_pretrained(self.path)
                return
            # One file, whatever its size, because publications rewrite one file.
            with no_progress_bars():
                model.save_pretrained(self.path, max_shard_size="1000GB")
            self._write_file(model)
            self._mapped = map_tensors(self.weights)
        except (OSError, RuntimeError) as error:
            self.close()
            raise EngineError(f"cannot write the model for vLLM: {error}; free space in {parent}") from error

    @property
    def weights(self) -> Path:
        return self.path / _WEIGHTS

    def write(self, model: Any) -> None:
        """Overwrite the file with the model's weights, in one pass through the mapping.

        vLLM never reads meanwhile: it reads at its start and when the caller of this method tells it to.
        """
        state = model.state_dict()
        missing = [name for name in self._mapped if name not in state]
        if missing:
            raise EngineError(
                f"the weights to publish lack {missing[0]}: publish the model that the engine was created with"
            )
        # Loop over the file's names: a head that is tied to the embedding is in it once.
        with torch.no_grad():
            for name, target in self._mapped.items():
                target.copy_(state[name])

    def _write_file(self, model: Any) -> None:
        """Rewrite the file in the engine's dtype."""
        with safe_open(self.weights, framework="pt") as file:
            names = list(file.keys())
        state = model.state_dict()
        tensors = {name: state[name].detach().to("cpu", self._dtype).contiguous() for name in names}
        temporary = self.path / f"{_WEIGHTS}.part"
        save_file(tensors, temporary, metadata={"format": "pt"})
        os.replace(temporary, self.weights)

    def close(self) -> None:
        self._mapped = {}
        shutil.rmtree(self.path, ignore_errors=True)


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file as views of the mapped file: writing to them writes the file."""
    with path.open("r+b") as file:
        populate = getattr(mmap, "MAP_POPULATE", 0)  # Linux: map all pages now, not at the first write
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | populate)
    start = 8 + int.from_bytes(memory[:8], "little")  # a length, a header, the tensors
    header = json.loads(memory[8:start])
    mapped: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, _ = entry["data_offsets"]
            count = math.prod(entry["shape"])
            flat = torch.frombuffer(memory, dtype=_DTYPES[entry["dtype"]], count=count, offset=start + begin)
            mapped[name] = flat.view(entry["shape"])
    return mapped


def _remove_orphans(parent: Path) -> None:
    """Remove the folders of processes that were killed: they use up shared memory."""
    for folder in parent.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not _exists(int(pid)):
            remove_noted_segments(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _exists(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        return True
    return False
