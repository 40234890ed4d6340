# pyright: reportMissingImports=false
"""Ends the step that vLLM's worker is computing when all requests are interrupted.

On a CPU a step of many sequences takes long, and its tokens are not wanted once every sequence is to stop. The request
loop (`request_loop.py`) raises a flag in shared memory. The worker (`worker.py`) reads the flag before every layer and
leaves the forward pass when it is raised. For vLLM that is a step like any other; its tokens have the log-prob NaN, and
a request that is being stopped ignores them.

Guarantees: a token is either computed in full or not delivered; KV of an aborted step is never read, because the next
requests cache prefixes under another name. With several workers, or on GPUs, steps are not aborted: workers that wait
for each other must all finish, and a step is short there.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class AbortFlag:
    """One byte of a file that two processes have mapped."""

    def __init__(self, path: Path) -> None:
        path.touch()
        with path.open("r+b") as file:
            file.truncate(1)
            self._byte = mmap.mmap(file.fileno(), 1)

    @property
    def is_raised(self) -> bool:
        return self._byte[0] != 0

    @contextmanager
    def raised(self) -> Iterator[None]:
        self._byte[0] = 1
        try:
            yield
        finally:
            self._byte[0] = 0


class _StepAborted(Exception):
    """Leaves a forward pass."""


class StepAborter:
    """Runs in the worker: wraps the model's forward pass, which ends early when the flag is raised."""

    def __init__(self, runner: Any, flag: AbortFlag) -> None:
        self.is_aborted = False  # whether the current step was aborted
        self._runner, self._flag = runner, flag
        self._forward, self._compute_logits = runner._model_forward, runner.model.compute_logits
        for layer in _layers(runner.model):
            layer.register_forward_pre_hook(self._check_flag)
        runner._model_forward = self._run_forward
        runner.model.compute_logits = self._run_logits

    def _check_flag(self, layer: Any, args: Any) -> None:
        if self._flag.is_raised:
            raise _StepAborted

    def _run_forward(self, *args: Any, **named: Any) -> Any:
        import torch

        self.is_aborted = False
        try:
            return self._forward(*args, **named)
        except _StepAborted:
            self.is_aborted = True
            config = self._runner.model_config
            return torch.zeros(named["positions"].shape[-1], config.get_hidden_size(), dtype=config.dtype)

    def _run_logits(self, hidden_td: Any) -> Any:
        if not self.is_aborted:
            return self._compute_logits(hidden_td)
        return hidden_td.new_zeros(len(hidden_td), self._runner.model_config.get_vocab_size())


def _layers(model: Any) -> list[Any]:
    """The model's layers: its longest ModuleList."""
    from torch import nn

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
