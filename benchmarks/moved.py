"""Runs a benchmark under its old path: `python benchmarks/NAME.py` starts `python -m benchmarks.FOLDER.NAME`.

The short scripts beside this module call `run`. They exist only so that commands written before the folders still work.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(script: str) -> None:
    """Run the benchmark of the same name in one of the folders, with the arguments of this command."""
    (path,) = HERE.glob(f"*/{Path(script).name}")
    module = f"benchmarks.{path.parent.name}.{path.stem}"
    print(f"benchmarks/{path.name} has moved: use python -m {module}", file=sys.stderr)
    sys.path[0] = str(HERE.parent)  # not this folder: `import engine` must not find benchmarks/engine
    runpy.run_module(module, run_name="__main__", alter_sys=True)
