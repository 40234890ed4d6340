"""Which packages an import of sortedrl loads, and which modules use only the standard library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sortedrl

PACKAGE = Path(sortedrl.__file__).parent
HEAVY = {"torch", "transformers", "vllm", "ray", "plotly", "datasets"}


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a new interpreter has loaded after the statement."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import sortedrl",
        "import sortedrl.buffer, sortedrl.schedule, sortedrl.controller",
        "import sortedrl.reward.pool, sortedrl.config",
        "import sortedrl.telemetry.events, sortedrl.engine.base, sortedrl.learner.base",
    ],
)
def test_heavy_packages_are_loaded_only_when_needed(statement: str) -> None:
    loaded = loaded_by(statement)
    assert "sortedrl" in loaded
    assert loaded & HEAVY == set()


def test_the_check_sees_a_heavy_import() -> None:
    assert "plotly" in loaded_by("import plotly")


@pytest.mark.parametrize(
    "name",
    [
        "records.py",
        "errors.py",
        "buffer.py",
        "schedule/decisions.py",
        "clock.py",
        "reward/worker.py",
        "telemetry/events.py",
    ],
)
def test_the_core_needs_the_standard_library_only(name: str) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").split(".")[0])
    assert imported - sys.stdlib_module_names <= {"sortedrl"}


def test_workers_and_records_import_nothing_of_the_package() -> None:
    for name in ("records.py", "errors.py", "reward/worker.py", "telemetry/events.py"):
        assert "import sortedrl" not in (PACKAGE / name).read_text()
        assert "from sortedrl" not in (PACKAGE / name).read_text()
