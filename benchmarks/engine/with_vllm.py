"""Starts a benchmark that needs vLLM again where vLLM is: `make vllm` puts it into an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from sortedrl.testing.bench.contenders import find_vllm_python


def go_on_with_vllm() -> None:
    """If this Python has no vLLM, run the same command in an environment that has it, and end as that ends."""
    if find_spec("vllm") is not None:
        return
    python, spec = find_vllm_python(None), sys.modules["__main__"].__spec__
    if python is None or spec is None or not Path(python).is_file():
        sys.exit(
            f"this needs vLLM, which was not found ({python or 'no .venv-vllm here'}): run `make vllm`, or set "
            "SORTEDRL_VLLM_PYTHON to the Python of an environment with vLLM and sortedrl"
        )
    print(f"this needs vLLM: going on with {python}", file=sys.stderr, flush=True)
    sys.exit(subprocess.run([python, "-m", spec.name, *sys.argv[1:]], check=False).returncode)
