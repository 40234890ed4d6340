"""The library that is loaded before libc: it notes the shared memory that processes make."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from fuzz.control import environment

ROOT = Path(__file__).parents[2]
LEAVES_ONE = """
import os, subprocess, sys
from fuzz.control import left_shared_memory
SOURCE = '''
from multiprocessing import resource_tracker, shared_memory
made = shared_memory.SharedMemory(create=True, size=64)
if {is_left}:
    resource_tracker.unregister(made._name, "shared_memory")
    print(made.name)
else:
    made.unlink()
'''
calls = [[sys.executable, "-c", SOURCE.format(is_left=is_left)] for is_left in (1, 0)]
left = [subprocess.check_output(call, text=True) for call in calls]
assert left_shared_memory() == left[0].split(), left
assert left_shared_memory() == []
assert not os.path.exists("/dev/shm/" + left[0].strip())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer needs Linux")
def test_shared_memory_is_found_if_a_process_of_the_fuzzer_made_it(tmp_path: Path) -> None:
    of_another = shared_memory.SharedMemory(create=True, size=64)
    try:
        started = environment(tmp_path) | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", LEAVES_ONE], env=started, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert os.path.exists(f"/dev/shm/{of_another.name}")
    finally:
        of_another.close()
        of_another.unlink()
