# pyright: reportMissingImports=false
"""Breaking off the step that vLLM's worker is in, when everything is interrupted.

A step of many sequences takes long on a CPU, and what it would write is not wanted once all of them are to stop. The
tower (`request_loop.py`) raises a flag in shared memory; the worker (`worker.py`) looks at it before every layer and
leaves the step there. vLLM sees a step like any other, whose tokens come with log-probs that are no numbers: a flight
that is being stopped takes none of them.

What it keeps true: a token is either computed in full or not delivered; KV that a broken step left unfinished is never
read, since prefixes are cached under another name from then on. With several workers, or on GPUs, nothing is broken
off: workers that wait for each other must all come to the end, and a step is short there.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class HaltFlag:
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


class _Halted(Exception):
    """Leaves a forward pass."""


class Halts:
    """In the worker: the model's forward pass, left when the flag is raised."""

    def __init__(self, runner: Any, flag: HaltFlag) -> None:
        self.has_halted = False  # the step under way was broken off
        self._runner, self._flag = runner, flag
        self._forward, self._compute_logits = runner._model_forward, runner.model.compute_logits
        for layer in _layers(runner.model):
            layer.register_forward_pre_hook(self._look)
        runner._model_forward = self._run
        runner.model.compute_logits = self._logits

    def _look(self, layer: Any, args: Any) -> None:
        if self._flag.is_raised:
            raise _Halted

    def _run(self, *args: Any, **named: Any) -> Any:
        import torch

        self.has_halted = False
        try:
            return self._forward(*args, **named)
        except _Halted:
            self.has_halted = True
            config = self._runner.model_config
            return torch.zeros(named["positions"].shape[-1], config.get_hidden_size(), dtype=config.dtype)

    def _logits(self, hidden_td: Any) -> Any:
        if not self.has_halted:
            return self._compute_logits(hidden_td)
        return hidden_td.new_zeros(len(hidden_td), self._runner.model_config.get_vocab_size())


def _layers(model: Any) -> list[Any]:
    """The model's layers: the longest list of modules that it has."""
    from torch import nn

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
