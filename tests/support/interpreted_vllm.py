"""Marks of tests that need vLLM's V2 model runner on a CPU: see tests/support/vllm_v2/sitecustomize.py."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

MARKS = [
    pytest.mark.vllm_v2,
    pytest.mark.skipif(
        find_spec("vllm") is None or os.environ.get("TRITON_INTERPRET") != "1",
        reason="no vLLM under Triton's interpreter here: make test-vllm-v2",
    ),
    pytest.mark.timeout(1200),
]
