"""The lock in requirements/ is whole and does not name the machine that wrote it; tools/lock.py installs from it."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = ("runtime", "torch-cpu", "torch-cuda", "dev", "docs")


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "tools" / "lock.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "lock", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def commands(lock: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What `install` would run, on a machine that the lock is for and that offers torch's CPU build."""
    seen: list[list[str]] = []

    def note(command: list[str]) -> int:
        assert command[: len(lock.INSTALL)] == list(lock.INSTALL)
        seen.append(command[len(lock.INSTALL) :])
        return 0

    monkeypatch.setattr(lock, "run", note)
    monkeypatch.setattr(lock, "explain_misfit", lambda: None)
    monkeypatch.setattr(lock, "choose_torch", lambda: "torch-cpu")
    return seen


def read_lock(name: str) -> dict[str, str]:
    """Versions by name; fails on any line that is not a pin with a hash."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    pin = r"([a-z0-9-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}\n"
    assert re.fullmatch(f"({pin})+", body)
    return {found[1]: found[2] for found in re.finditer(pin, body)}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in requirements}


def test_the_lock_has_what_the_project_needs_in_the_pinned_versions() -> None:
    versions = {name: read_lock(name) for name in FILES}
    extras = PROJECT["project"]["optional-dependencies"]
    base = PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"]
    runtime = versions["runtime"] | versions["torch-cuda"]
    assert names_of(base) <= runtime.keys()
    assert names_of(extras["dev"]) <= (runtime | versions["dev"]).keys()
    assert names_of(extras["docs"]) <= (runtime | versions["docs"]).keys()
    assert versions["torch-cpu"] == {"torch": versions["torch-cuda"]["torch"] + "+cpu"}
    assert versions["dev"] | versions["docs"] == versions["docs"] | versions["dev"]  # no two versions of one package
    assert runtime.keys().isdisjoint(versions["dev"].keys() | versions["docs"].keys())
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins.items() <= (runtime | versions["dev"] | versions["docs"]).items()


@pytest.mark.parametrize("group", ["runtime", "dev", "docs"])
def test_everything_but_the_project_itself_is_installed_by_hash(
    lock: ModuleType, commands: list[list[str]], group: str
) -> None:
    assert lock.main(["install", group]) == 0
    files = dict.fromkeys(["runtime", "torch-cpu", group])
    strict = ["--require-hashes", "--no-deps", "--no-build-isolation"]
    assert commands == [
        *([*strict, "-r", f"requirements/{file}.txt"] for file in files),
        ["--no-deps", "--no-build-isolation", "-e", "."],
    ]


def test_a_build_for_cuda_gets_its_libraries(
    lock: ModuleType, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(lock, "choose_torch", lambda: "torch-cuda")
    assert lock.main(["install"]) == 0
    assert commands[1][-1] == "requirements/torch-cuda.txt"
    assert commands[-1] == ["-c", "constraints.txt", "torch"]
    assert "without hashes" in capsys.readouterr().out


def test_elsewhere_constraints_are_used_and_a_line_says_so(
    lock: ModuleType, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(lock, "explain_misfit", lambda: "this is Darwin on arm64")
    assert lock.main(["install", "dev"]) == 0
    assert commands == [["-c", "constraints.txt", "-e", ".[dev]"]]
    assert "No hashes are checked (this is Darwin on arm64; the lock is for CPython 3.11" in capsys.readouterr().out


def test_the_lock_knows_where_it_applies(lock: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCK", raising=False)
    monkeypatch.setattr(lock.sys, "platform", "linux")
    monkeypatch.setattr(lock.sys, "version_info", (3, 11, 7))
    monkeypatch.setattr(lock.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(lock.platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert lock.explain_misfit() is None
    monkeypatch.setattr(lock.platform, "libc_ver", lambda: ("glibc", "2.28"))
    assert lock.explain_misfit() == "this is glibc 2.28"
    monkeypatch.setattr(lock.sys, "version_info", (3, 12, 1))
    assert lock.explain_misfit().startswith("this is CPython 3")
    monkeypatch.setattr(lock.platform, "machine", lambda: "aarch64")
    assert lock.explain_misfit() == f"this is {lock.platform.system()} on aarch64"
    monkeypatch.setenv("LOCK", "no")
    assert lock.explain_misfit() == "LOCK=no"


def test_a_file_that_fails_stops_the_installation(
    lock: ModuleType, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], capsys
) -> None:
    monkeypatch.setattr(lock, "run", lambda command: commands.append(command) or 1)
    assert lock.main(["install", "dev"]) == 1
    assert len(commands) == 1
    assert "requirements/runtime.txt could not be installed" in capsys.readouterr().out


def test_groups_hold_what_they_reach(lock: ModuleType) -> None:
    def entry(name: str, *requires: str) -> dict:
        info = {"url": "https://example.org/x.whl", "archive_info": {"hashes": {"sha256": name[0] * 64}}}
        return {"metadata": {"name": name, "version": "1.0", "requires_dist": list(requires)}, "download_info": info}

    report = {
        "install": [
            entry("A.b", "c_d[fast]>=1", 'never; sys_platform == "win32"'),
            entry("C-d", 'quick; extra == "fast"', 'slow; extra == "slow"'),
            entry("quick", "pip"),
            entry("tester", "A.b", "slow"),
            entry("slow"),
            entry("writer"),
            entry("pip"),
            {"metadata": {"name": "sortedrl", "version": "0.1.0"}, "download_info": {"url": "file:///x"}},
        ]
    }
    packages = lock.read_report(report)
    project = {
        "project": {"dependencies": ["a-b"], "optional-dependencies": {"dev": ["tester"], "docs": ["writer"]}},
        "build-system": {"requires": []},
    }
    assert lock.divide(packages, project) == {
        "runtime": {"a-b", "c-d", "quick"},
        "dev": {"tester", "slow"},
        "docs": {"writer"},
    }
    assert packages["a-b"].line() == f"a-b==1.0 \\\n    --hash=sha256:{'A' * 64}\n"
