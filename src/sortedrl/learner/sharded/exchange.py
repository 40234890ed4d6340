"""The collectives of a sharded pass, counted, so that a rank whose pass failed can catch up with the others.

`shards.py` gives one `Exchange` to all sharded modules of a rank. Every rank issues the same collectives in a pass, in
the same order. If a rank runs out of memory in the middle of one, the others wait for the rest of its collectives. It
then makes a tiny pass in which those that it had issued already are left out, and all ranks are in step again. Results
of such a pass have no meaning, so the ranks agree afterwards to discard the attempt (`rank.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

# Newer names first: torch warns of the older ones.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Exchange:
    """Issues collectives and counts those of the current pass."""

    def __init__(self) -> None:
        self._num_issued = 0
        self._num_skipped = 0

    def begin_pass(self) -> None:
        self._num_issued = self._num_skipped = 0

    @contextmanager
    def catching_up(self) -> Iterator[None]:
        """Inside the block, a pass leaves out the collectives that were issued in the pass before."""
        self._num_skipped, self._num_issued = self._num_issued, 0
        try:
            yield
        finally:
            self.begin_pass()

    def attach(self, module: FSDPModule) -> None:
        """Let a sharded module communicate through this."""
        module.set_custom_all_gather(_Collective(self, _all_gather))  # pyright: ignore[reportArgumentType]
        module.set_custom_reduce_scatter(_Collective(self, _reduce_scatter))  # pyright: ignore[reportArgumentType]

    def issue(self, call: Callable[[], dist.Work | None], output: Tensor) -> dist.Work | None:
        if self._num_issued < self._num_skipped:
            output.zero_()  # finite numbers, which nobody reads
            work = None
        else:
            work = call()
        self._num_issued += 1
        return work


class _Collective:
    """One kind of collective, in the form that FSDP2 takes in place of its own."""

    def __init__(self, exchange: Exchange, call: Callable[..., dist.Work | None]) -> None:
        self._exchange = exchange
        self._call = call

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **options: Any) -> dist.Work | None:
        def call() -> dist.Work | None:
            return self._call(output_tensor, input_tensor, group=group, **options)

        return self._exchange.issue(call, output_tensor)
