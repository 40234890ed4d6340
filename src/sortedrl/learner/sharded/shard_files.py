"""Shards on disk: torch's distributed checkpoints (DCP) in safetensors files, for any number of ranks.

Every rank owns a `ShardWriter`, which copies its rows to host memory and writes them in a background thread
(`async_save`). `load_shards` fills the tensors of ranks from such a folder, and `read_shards` reads whole tensors
in one process. DCP's own storage keeps pickled metadata, so its Hugging Face storage is used: each file is a
safetensors file whose header says which rows of which tensor it holds. Loading runs no code of the files.

A folder does not say how many files it should have: whoever names a checkpoint lists them (`run/manifest.py`).

Guarantees: what is written is what the tensors held when `begin` returned; `wait` returns after every rank's files have
been flushed to disk.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sortedrl.errors import LearnerError, RunDirError, first_line

if TYPE_CHECKING:  # it takes a second to import, and most runs save no shards
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

SHARDS_FOLDER = "shards"  # in a checkpoint
WEIGHTS = "weights/"  # begins the names of the model's parameters
OPTIMIZER = "optimizer/"  # begins the names of a learner's other tensors
FILE_BYTES = 2**30  # a file is put together in memory, so a rank splits its rows


class ShardWriter:
    """Writes the rows of one rank. `group`: a gloo group of all ranks that nothing else uses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._saving: Future[Any] | None = None
        self._folder = Path()

    def begin(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors and start to write them. All ranks must call it with the same names."""
        assert self._saving is None, "the save before this one must be waited for first"
        if not folder.parent.is_dir():
            raise LearnerError(
                f"{folder.parent} is not there on the machine of rank {self._group.rank()}: put run.dir on a file "
                "system that all machines share, or set checkpoint.sharded = false"
            )
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        writer = HuggingFaceStorageWriter(
            str(folder), fqn_to_index_mapping=_assign_files(tensors, self._group.size()), save_distributed=True
        )
        self._folder = folder
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        saving = async_save(detached, storage_writer=writer, process_group=self._group)
        assert isinstance(saving, Future), "this storage is copied to at once"
        self._saving = saving

    def wait(self) -> dict[str, dict[str, Any]]:
        """Wait until all ranks have written; returns size and SHA-256 of this rank's files by name."""
        from torch.distributed.checkpoint.api import CheckpointException

        assert self._saving is not None, "nothing is being saved"
        saving, self._saving = self._saving, None
        try:
            saving.result()
        except (Exception, CheckpointException) as error:  # raised on all ranks, each with the failures of all
            why = " ".join(f"rank {rank}: {first_line(cause[0])}" for rank, cause in _failures(error))
            raise RunDirError(
                f"checkpoint {self._folder.parent} cannot be written ({why}): free some space or check permissions; "
                "others are intact"
            ) from error
        own = sorted(self._folder.glob(f"shard-{self._group.rank() + 1:05d}-*.safetensors"))
        return {path.name: {"size": path.stat().st_size, "sha256": _digest(path)} for path in own}


def load_shards(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill the tensors, sharded or not, from a folder. All ranks must call it with the same names."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=group)


def read_shards(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The whole tensors of a folder whose names begin with `prefix`, by the rest of their names."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    found = {name: entry for name, entry in shard_metadata(folder).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def shard_metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Size and number format of the whole tensors in a folder, by name."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def _assign_files(tensors: Mapping[str, Tensor], num_ranks: int) -> dict[str, int]:
    """Which file of a rank gets its rows of each tensor: 1, 2 and so on, each of about FILE_BYTES."""
    numbers: dict[str, int] = {}
    total = 0
    for name, tensor in tensors.items():
        total += math.ceil(tensor.numel() * tensor.element_size() / num_ranks)
        numbers[name] = 1 + total // FILE_BYTES
    return numbers


def _failures(error: BaseException) -> list[tuple[Any, Any]]:
    """The errors of ranks by number, of DCP's exception or of another one."""
    found = getattr(error, "failures", None)
    return list(found.items()) if found else [("?", (error,))]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
