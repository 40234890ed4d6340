"""Calls of compiled code on several threads: as many as torch has for its own operations.

`local/native_decoder.py` and `sampling/draw.py` use it; ctypes lets go of the interpreter while such a call runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


class Threads:
    """The caller's thread and others that wait for work; their number is fixed when it is made."""

    def __init__(self) -> None:
        self.max_size = torch.get_num_threads()
        self._others = self._start()

    def size(self, *, is_large: bool) -> int:
        """How many threads a call should have: waking another takes longer than a small one."""
        return min(self.max_size, torch.get_num_threads()) if is_large else 1

    def run(self, call: Callable[[int], None], size: int, give_up: Callable[[], None] = lambda: None) -> None:
        """`call(rank)` for each rank below `size`, all at the same time.

        Interrupted on the way it calls `give_up`, for those that wait for a rank that does not come, and sees them end.
        """
        try:
            others = [self._others.submit(call, rank) for rank in range(1, size)]
            call(0)
        except BaseException:
            give_up()
            self._others.shutdown()
            self._others = self._start()
            raise
        for other in others:
            other.result()

    def _start(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max(1, self.max_size - 1), thread_name_prefix="kernel")
