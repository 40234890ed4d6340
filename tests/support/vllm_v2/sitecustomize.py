"""Lets stock vLLM run its V2 model runner on a CPU: Triton's interpreter runs its kernels with numpy.

Python imports a module of this name at every start, so this folder on PYTHONPATH is enough, also for the worker
processes that vLLM starts. `make test-vllm-v2` sets it, and so can anyone:

    PYTHONPATH=tests/support/vllm_v2 .venv-vllm-v2/bin/python SCRIPT

vLLM's own code stays unchanged. Three things are missing on a CPU, and all of them are added here:
- settings in the environment, which vLLM and Triton read when they are imported;
- a Triton backend named "cpu". vLLM's CPU build looks for one and otherwise does without Triton, and so without V2. The
  interpreter compiles nothing and has no driver, so the backend's driver only says that it is active;
- a method of the counters in loops. `tl.range` counts in tensors on a GPU and in plain integers in the interpreter, so
  that vLLM's kernel for top-k and top-p fails there at `row.to(tl.int64)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.update(
    TRITON_INTERPRET="1",
    VLLM_USE_V2_MODEL_RUNNER="1",  # fail rather than fall back to V1
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # scheduler and, without tensor parallelism, model in the caller's process
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # two workers of tensor parallelism share what cores there are
    VLLM_HOST_IP="127.0.0.1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    TORCHDYNAMO_DISABLE="1",  # torch.compile asks the backend for a device, with tensor parallelism
    HF_HUB_OFFLINE="1",
)

import triton.backends
import triton.language as tl
from triton.runtime import interpreter


class InterpreterDriver:
    @staticmethod
    def is_active() -> bool:
        return True


class LoopCounter(int):
    """An integer that converts to a tensor as the counter of a compiled loop does."""

    def to(self, dtype: tl.dtype) -> tl.tensor:
        return tl.full((), int(self), dtype)


def count(start: Any, end: Any = None, step: Any = 1, **_: Any) -> Iterator[LoopCounter]:
    """The interpreter's `tl.range`, with counters that convert. Hints to the compiler are ignored."""
    return map(LoopCounter, range(start, end, step) if end is not None else range(start))


def patch_language(kernel: Any) -> Any:
    """What the interpreter changes in Triton's language while a kernel runs, and `tl.range` besides."""
    scope = interpret_language(kernel)
    scope.set_attr(tl, "range", count)
    return scope


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=InterpreterDriver)
interpret_language, interpreter._patch_lang = interpreter._patch_lang, patch_language
