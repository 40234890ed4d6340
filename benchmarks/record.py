"""Result files of the benchmarks: figures with the commit, machine and versions that they came from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def stamp() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    return {
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _changed() else ""),
        "machine": f"{_cpu_model()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def save(name: str, record: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"stamp": stamp(), **record}, indent=1) + "\n", encoding="utf-8")
    return path


def _changed() -> str:
    """What differs from the commit, results and pictures left aside: they are what benchmarks write."""
    return _git("status", "--porcelain", "--", ":/", ":!/benchmarks/results", ":!/docs/images/*.svg")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
