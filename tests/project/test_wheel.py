"""The wheel as a user gets it: built from the source distribution, installed into an environment without a checkout.

The packages that sortedrl depends on are not installed again: a .pth file adds those of the running interpreter, which
`make` has installed from the lock. A .pth file adds one folder and ignores the .pth files in that folder, so that the
editable installation of this checkout is not seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from sortedrl.config.shipped import shipped_names
from tests.project.test_project import tracked_files

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
LIMIT_S = 900
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


def build(kind: str, source: Path, out: Path) -> Path:
    """Build as `python -m build` does, but without an environment of its own, which needs a network."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from a source distribution, which is made from the files that git knows."""
    folder = tmp_path_factory.mktemp("build")
    copy, unpacked, dist = folder / "copy", folder / "unpacked", folder / "dist"
    dist.mkdir()
    for path in tracked_files():
        name = path.relative_to(ROOT)
        if name.parts[0] in SOURCES:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(path.read_bytes())
    with tarfile.open(build("build_sdist", copy, dist)) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build("build_wheel", source, dist)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and the dependencies of the running interpreter."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    target = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    command = [sys.executable, "-m", "pip", "--python", str(folder), "install", "-q", "--no-deps", "--no-index"]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    (Path(target) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(environment: Path, arguments: Sequence[str], cwd: Path) -> str:
    """Run a program of the environment in a folder, without anything that leads to the checkout; returns stdout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(environment / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    assert "Warning" not in done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_the_wheel_has_everything_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    package = ROOT / "src" / "sortedrl"
    wanted = {str(path.relative_to(package.parent)) for path in tracked_files() if path.is_relative_to(package)}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert {f"sortedrl/config/recipes/{name}.toml" for name in shipped_names()} <= wanted
    assert any(name.endswith("LICENSE") for name in names)


def test_from_install_to_a_result(environment: Path, tmp_path: Path) -> None:
    home = run(environment, ["python", "-c", "import sortedrl; print(sortedrl.__file__)"], tmp_path).strip()
    assert Path(home).is_relative_to(environment.parent), "the wheel is imported, not the checkout"

    listed = json.loads(run(environment, ["sortedrl", "configs", "--json"], tmp_path))
    assert [each["name"] for each in listed["configs"]] == shipped_names()

    out = run(environment, ["sortedrl", "train", "quickstart", "run.samples=256", "--json"], tmp_path)
    (trained,) = json.loads(out)["runs"]
    assert (trained["status"], trained["samples"]) == ("complete", 256)
    assert trained["ledger"] == {"loaded": 256, "trained": 256, "lost": 0, "duplicated": 0}
    out = run(environment, ["sortedrl", "report", "runs/quickstart", "--out", "page.html", "--json"], tmp_path)
    assert json.loads(out) == {"report": "page.html"}
    assert "async-on-policy" in (tmp_path / "page.html").read_text()
    run(environment, ["sortedrl", "ledger", "runs/quickstart", "--verify"], tmp_path)

    run(environment, ["sortedrl", "init", "demo"], tmp_path)
    out = run(environment, ["sortedrl", "train", "demo.toml", "run.samples=64", "--json"], tmp_path)
    (own,) = json.loads(out)["runs"]
    assert (own["status"], own["samples"]) == ("complete", 64)
