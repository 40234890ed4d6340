"""What every benchmark shares: its command line, and result files that say where and on which commit they were made."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QUICKSTART = "quickstart"


def make_parser(doc: str | None, *, has_json: bool = True) -> argparse.ArgumentParser:
    """A parser whose help text is the script's docstring, by default with the option `--json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if has_json:
        parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    return parser


def stamp() -> dict[str, Any]:
    """Day, commit, machine and versions of a measurement; "+" after the commit means uncommitted changes."""
    return {
        "day": datetime.now(UTC).date().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _changed() else ""),
        "machine": f"{_cpu_model()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def save(name: str, record: dict[str, Any]) -> Path:
    """Write results/NAME.json with a stamp; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"stamp": stamp(), **record}, indent=1) + "\n", encoding="utf-8")
    return path


def load(name: str) -> dict[str, Any]:
    """The content of results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def run_module(module: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Run a benchmark in a new process, so that its time and memory are its own; returns what it prints."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env, check=True).stdout


def _changed() -> str:
    """Files that differ from the commit, except results and charts, which the benchmarks themselves write."""
    return _git("status", "--porcelain", "--", ":/", ":!/benchmarks/results", ":!/docs/images/*.svg")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
