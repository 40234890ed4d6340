"""Every benchmark is listed in benchmarks/README.md, has a command line, and still starts under its old path."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.record import ROOT

FOLDER = ROOT / "benchmarks"
NUM_OLD_PATHS = 35  # scripts that stood in benchmarks/ itself; later ones have their folder only
# Scripts whose imports are cheap: --help is tried on these.
QUICK = ("schedule/where_not.py", "schedule/forecast.py", "study/draw_study.py", "tasks/verifiers.py")


def has_main(path: Path) -> bool:
    """Whether a file is a script: it defines `main` and calls it."""
    source = path.read_text(encoding="utf-8")
    functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    return "main" in functions and 'if __name__ == "__main__":' in source


SCRIPTS = sorted(path for path in FOLDER.glob("*/*.py") if has_main(path))


def test_the_readme_lists_every_script_and_no_other() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\((\w+/\w+\.py)\)", page))
    assert listed == {str(path.relative_to(FOLDER)) for path in SCRIPTS}


def test_the_readme_names_the_commit_of_every_result() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    stamped = re.compile(r'"stamp": \{.*?"commit": "([^"]+)"', re.DOTALL)
    commits = {}
    for path in (FOLDER / "results").glob("*.json"):
        found = stamped.search(path.read_text(encoding="utf-8"))
        assert found, f"{path} has no stamp"
        commits[path.stem] = found[1]
    # The README has one row for both goodput files, and leaves out the short study and bfloat16 on a CPU.
    left_out = {"study_quick", "vllm_control_bfloat16"}
    missing = {name: commit for name, commit in commits.items() if f"| {commit} |" not in page and name not in left_out}
    assert not missing, f"results are newer than benchmarks/README.md, put their figures there: {missing}"


def test_every_script_shows_its_own_command_in_its_help() -> None:
    for path in SCRIPTS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        command = f"python -m benchmarks.{path.parent.name}.{path.stem} "
        assert command in (ast.get_docstring(tree) or "") + " ", path


def test_every_old_path_leads_to_a_script() -> None:
    names = {path.name for path in FOLDER.glob("*.py")} - {"__init__.py", "moved.py", "record.py"}
    assert names - {path.name for path in SCRIPTS} == set()
    assert len(names) == NUM_OLD_PATHS


@pytest.mark.parametrize("script", QUICK)
def test_help(script: str) -> None:
    module = f"benchmarks.{script.removesuffix('.py').replace('/', '.')}"
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "usage:" in done.stdout


def test_an_old_path_names_the_new_one_and_runs_it(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "where_not.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stderr == "benchmarks/where_not.py has moved: use python -m benchmarks.schedule.where_not\n"
    assert "usage:" in done.stdout
