"""Shared memory of vLLM's processes does not outlive them. A process that stands for vLLM makes it, and is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from sortedrl.engine.vllm.segments import mapped_segments, note_segments, remove_noted_segments, remove_segments
from sortedrl.engine.vllm.shared_memory import SHARED_MEMORY

pytestmark = pytest.mark.skipif(
    not SHARED_MEMORY.is_dir() or not Path("/proc/self/maps").exists(), reason="no /dev/shm"
)
WORKER = """
import mmap, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
resource_tracker.register = lambda *names: None  # vLLM's processes are killed together with their tracker
queue, other = SharedMemory(create=True, size=4096), SharedMemory(sys.argv[1])
with open(f"/dev/shm/vllm_dist_{sys.argv[2]}", "w+b") as file, open(f"/dev/shm/own_{sys.argv[2]}", "w+b") as own:
    for each in (file, own):
        each.truncate(4096)
    maps = [mmap.mmap(file.fileno(), 0), mmap.mmap(own.fileno(), 0)]
    print(queue.name, flush=True)
    input()
"""


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    """Shared memory of this process, which the worker uses too."""
    memory = SharedMemory(create=True, size=4096)
    yield memory
    memory.close()
    memory.unlink()


def test_what_a_killed_process_leaves_is_removed_and_nothing_else(shared: SharedMemory) -> None:
    key = f"test_{os.getpid()}"
    command = [sys.executable, "-c", WORKER, shared.name, key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        queue = worker.stdout.readline().strip()
        names = mapped_segments([worker.pid])
        worker.kill()
    try:
        assert names == {queue, f"vllm_dist_{key}"}
        remove_segments(names)
        assert not any((SHARED_MEMORY / name).exists() for name in names)
        assert (SHARED_MEMORY / shared.name).exists()
        assert (SHARED_MEMORY / f"own_{key}").exists()
    finally:
        (SHARED_MEMORY / f"own_{key}").unlink()
    remove_segments(names)  # what is gone already is no error
    assert mapped_segments([worker.pid]) == set()


def test_a_process_that_ends_itself_names_its_own(shared: SharedMemory) -> None:
    assert shared.name in mapped_segments([os.getpid()])


def test_what_is_noted_in_the_folder_of_a_killed_process_is_removed(shared: SharedMemory, tmp_path: Path) -> None:
    left = SHARED_MEMORY / f"vllm_dist_noted_{os.getpid()}"
    other = SHARED_MEMORY / f"other_{os.getpid()}"
    for path in (left, other):
        path.touch()
    try:
        note_segments(tmp_path, {left.name, other.name, f"psm_/../{other.name}", "psm_gone"})
        remove_noted_segments(tmp_path)
        assert not left.exists()
        assert other.exists()  # not a name of vLLM's
        assert (SHARED_MEMORY / shared.name).exists()  # not noted
    finally:
        for path in (left, other):
            path.unlink(missing_ok=True)
    remove_noted_segments(tmp_path / "nowhere")
