"""Room in shared memory: a container has 64 MB of it unless it was started with more.

`engine.py` checks it before vLLM starts several workers, and `weights.py` before it writes weights there. A process
that writes to shared memory that is full is killed by the system (SIGBUS) without a message.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from sortedrl.errors import EngineError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (nothing is made there by a known name)
WORKER_BYTES = 128 << 20  # message queues of one vLLM worker, and NCCL's buffers
_REMEDY = "start the container with --shm-size=16g or --ipc=host, or remount /dev/shm with a larger size"

log = logging.getLogger(__name__)


def has_room(folder: Path, size: int) -> bool:
    """Whether a folder can be written to and has so many bytes free; says so if only the room is missing."""
    if not os.access(folder, os.W_OK):
        return False
    free = shutil.disk_usage(folder).free
    if free < size:
        log.warning(
            "%s has %.1f GB free and the weights take %.1f GB, so they go to disk, which is slower: %s",
            folder,
            free / 1e9,
            size / 1e9,
            _REMEDY,
        )
    return free >= size


def check_room(num_workers: int, folder: Path = SHARED_MEMORY) -> None:
    """Raise EngineError if shared memory is too small for a vLLM of several workers."""
    if num_workers == 1 or not folder.is_dir():
        return
    needed, free = num_workers * WORKER_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise EngineError(
            f"{folder} has {free >> 20} MB free, and engine.tensor_parallel = {num_workers} needs {needed >> 20} MB: "
            f"{_REMEDY}"
        )
