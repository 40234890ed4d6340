"""Run a compiled function on several threads, as many as torch uses for its own operations.

The native decoder and the kernel's sampler use it. The threads run in parallel, because ctypes releases the interpreter
lock during a call.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


class KernelThreads:
    """The caller's thread and a pool of others. `max_size` threads in total, fixed at construction."""

    def __init__(self) -> None:
        self.max_size = torch.get_num_threads()
        self._others = self._start()

    def size(self, *, is_large: bool) -> int:
        """How many threads a call should use. A small call uses one, because waking another would take longer."""
        return min(self.max_size, torch.get_num_threads()) if is_large else 1

    def run(self, call: Callable[[int], None], size: int, abandon: Callable[[], None] = lambda: None) -> None:
        """Run `call(rank)` for each rank below `size` at the same time.

        If the caller's thread is interrupted, `abandon` must release the others, which may wait for it; `run` then
        waits until they have ended.
        """
        try:
            others = [self._others.submit(call, rank) for rank in range(1, size)]
            call(0)
        except BaseException:
            abandon()
            self._others.shutdown()
            self._others = self._start()
            raise
        for other in others:
            other.result()

    def _start(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max(1, self.max_size - 1), thread_name_prefix="kernel")
