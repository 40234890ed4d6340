# pyright: reportMissingImports=false, reportMissingTypeStubs=false
"""vLLM's executor for several workers on CPUs, which does not use a core while workers load weights.

vLLM's core process calls it; `core.py` names it where workers compute on CPUs. vLLM's own executor waits for answers in
a loop that never sleeps, for up to a second after each answer. That is right for steps of milliseconds. In a
publication the workers and the learner need the processor that the loop takes.

Guarantees: calls, answers and time limits are those of vLLM's executor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

_LONG_CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class PatientExecutor(MultiprocExecutor):
    def collective_rpc(self, method: Any, *arguments: Any, **named: Any) -> Any:
        if method not in _LONG_CALLS:
            return super().collective_rpc(method, *arguments, **named)
        with self._without_spinning():
            return super().collective_rpc(method, *arguments, **named)

    @contextmanager
    def _without_spinning(self) -> Iterator[None]:
        """Wait for a message's notification at once, instead of looking for the message again and again."""
        conditions = [queue._spin_condition for queue in self.response_mqs]
        before = [condition.busy_loop_s for condition in conditions]
        for condition in conditions:
            condition.busy_loop_s = 0.0
        try:
            yield
        finally:
            for condition, seconds in zip(conditions, before, strict=True):
                condition.busy_loop_s = seconds
