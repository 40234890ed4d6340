"""The project as a whole: version, package data, make targets, and no paths of a developer's machine."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import sortedrl

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Folders of a developer's machine: no file may mention them. The pattern does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:home|Users|root|work|mnt|scratch)/[\w.]")
TEXT = {".py", ".toml", ".md", ".txt", ".json", ".jsonl", ".html", ".yaml", ".yml", ".cfg", ".sh", ""}


def tracked_files() -> list[Path]:
    """The files of the repository, including new ones that are not committed yet."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_version_is_the_same_everywhere() -> None:
    assert sortedrl.__version__ == PROJECT["project"]["version"]
    assert f"## [{sortedrl.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_no_file_names_a_machine() -> None:
    found = {
        str(path.relative_to(ROOT)): match.group()
        for path in tracked_files()
        if path.suffix in TEXT and (match := MACHINE_PATH.search(path.read_text(errors="replace")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "is_path"), [("see /ho" + "me/ann/x", True), ("/wo" + "rk/main", True), ("a/wo" + "rk/b", False)]
)
def test_the_check_knows_a_machine_path(text: str, is_path: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) is is_path


def test_every_file_of_the_package_is_shipped() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["sortedrl"]
    package = ROOT / "src" / "sortedrl"
    files = [path for path in tracked_files() if path.is_relative_to(package)]
    left_out = [
        str(name)
        for path in files
        if path.suffix != ".py" and not any(fnmatch(str(name := path.relative_to(package)), p) for p in patterns)
    ]
    assert left_out == []
    # setuptools ships the modules of a folder only if it has an __init__.py.
    assert [path for path in files if path.suffix == ".py" and not (path.parent / "__init__.py").exists()] == []


def test_every_pin_is_a_direct_requirement() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = PROJECT["project"]["dependencies"] + extras["dev"] + extras["docs"]
    names = {re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert {line.split("==")[0] for line in lines if line and not line.startswith("#")} == names


def test_the_promised_commands_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("quickstart", "test", "test-slow", "check", "docs", "clean", "help"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
