"""Writes the lock of all packages with their hashes, and installs from it; `make` calls `install`.

    python tools/lock.py install [dev|docs]    # into the environment of this Python
    python tools/lock.py write                 # after a change of pyproject.toml or constraints.txt

The lock is `requirements/runtime.txt` and, for what `make test` and `make docs` need beyond it, `dev.txt` and
`docs.txt`. Each entry names one version and the sha256 of its file, so that pip refuses any other file. Files differ
between platforms: the lock is for CPython 3.11 on Linux x86_64. Elsewhere, and with LOCK=no in the environment,
`install` uses `constraints.txt`, which pins versions of direct dependencies only.

torch has two builds and so two files, `torch-cpu.txt` and `torch-cuda.txt`; `install` takes the CPU build where pip is
offered one. In one file with two hashes, pip would prefer the build for CUDA, because only its index names a hash. The
libraries that the build for CUDA needs are not in the lock, and neither is pip, which checks the hashes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "requirements"
GROUPS = ("runtime", "dev", "docs")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# Byte-compiling every module of torch and transformers would take half of the installation; a run needs one in four.
INSTALL = (*PIP, "install", "-q", "--no-compile")
MIN_GLIBC = (2, 31)  # the newest that a locked file needs
HEADER = "# {title}.\n# Made by `python tools/lock.py write` for CPython 3.11 on Linux x86_64: do not edit.\n"
TITLES = {
    "runtime": "What sortedrl needs except torch, and what builds it",
    "torch-cpu": "torch without CUDA",
    "torch-cuda": "torch with CUDA; its libraries are not in the lock",
    "dev": "What `make test` and `make check` need beyond runtime.txt",
    "docs": "What `make docs` needs beyond runtime.txt",
}


@dataclass(slots=True, kw_only=True, frozen=True)
class LockedPackage:
    name: str
    version: str
    sha256: str
    requires: tuple[str, ...] = ()

    def line(self) -> str:
        return f"{self.name}=={self.version} \\\n    --hash=sha256:{self.sha256}\n"


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def explain_misfit() -> str | None:
    """Why the lock does not apply to this Python, or None if it does."""
    if os.environ.get("LOCK") == "no":
        return "LOCK=no"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"this is {platform.system()} on {platform.machine()}"
    if sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 11):
        return f"this is {platform.python_implementation()} {platform.python_version()}"
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < MIN_GLIBC:
        return f"this is {library or 'a C library that is not glibc'} {version}".rstrip()
    return None


def install(group: str) -> int:
    """Install the package in editable form with the requirements of a group; returns pip's exit code."""
    misfit = explain_misfit()
    if misfit is not None:
        where = "the lock is for CPython 3.11 on Linux x86_64"
        print(f"No hashes are checked ({misfit}; {where}): constraints.txt pins the versions.")
        return run([*INSTALL, "-c", "constraints.txt", "-e", "." if group == "runtime" else f".[{group}]"])
    # The build backend is in runtime.txt. Without isolation it also builds what has no wheel: isolated builds would
    # fetch a backend without checking hashes.
    torch = choose_torch()
    for name in dict.fromkeys(("runtime", torch, group)):
        file = f"requirements/{name}.txt"
        code = run([*INSTALL, "--require-hashes", "--no-deps", "--no-build-isolation", "-r", file])
        if code:
            print(
                f"{file} could not be installed. If pip names hashes that differ, it was offered another file than the "
                "one this project is tested with: find out why. LOCK=no in the environment installs without hashes."
            )
            return code
    code = run([*INSTALL, "--no-deps", "--no-build-isolation", "-e", "."])
    if code == 0 and torch == "torch-cuda":
        print("This torch is a build for CUDA: its libraries are installed by version, without hashes.")
        code = run([*INSTALL, "-c", "constraints.txt", "torch"])
    return code


def choose_torch() -> str:
    """The file of the lock for the build of torch that is installed, or that pip is offered."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = read_report(resolve(["--no-deps", "torch"]))["torch"].version
    return "torch-cpu" if version.endswith("+cpu") else "torch-cuda"


def run(command: list[str]) -> int:
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def write() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    misfit = explain_misfit()
    if misfit is not None:
        print(f"the lock is written by CPython 3.11 on Linux x86_64, and {misfit}: run it there")
        return 2
    backend = project["build-system"]["requires"]
    packages = read_report(resolve([".[dev,docs]", *backend]))
    torch = packages["torch"]
    if not torch.version.endswith("+cpu"):
        print(
            f"torch {torch.version} is not the CPU build: offer that to pip, by PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS"
        )
        return 2
    # === compares text: it excludes builds such as +cpu and leaves the one of the registry.
    (registered,) = read_report(resolve(["--no-deps", f"torch==={torch.version.partition('+')[0]}"])).values()
    groups = divide(packages, project)
    contents = {group: [packages[name] for name in sorted(names - {"torch"})] for group, names in groups.items()}
    LOCKS.mkdir(exist_ok=True)
    for file, locked in {**contents, "torch-cpu": [torch], "torch-cuda": [registered]}.items():
        lines = [package.line() for package in locked]
        (LOCKS / f"{file}.txt").write_text(HEADER.format(title=TITLES[file]) + "".join(lines))
        print(f"requirements/{file}.txt: {len(lines)} packages")
    return 0


def resolve(arguments: list[str]) -> dict[str, Any]:
    """What pip would install into an empty environment under constraints.txt: a report that has hashes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [*PIP, "install", "-q", "--dry-run", "--ignore-installed", "--report", str(file)]
        subprocess.run([*command, "-c", "constraints.txt", *arguments], cwd=ROOT, check=True)
        return json.loads(file.read_text())


def read_report(report: dict[str, Any]) -> dict[str, LockedPackage]:
    """The packages of pip's report by normalized name, without pip and without this project, which has no hash."""
    packages: dict[str, LockedPackage] = {}
    for entry in report["install"]:
        name = normalize(entry["metadata"]["name"])
        if name in ("pip", "sortedrl"):
            continue
        packages[name] = LockedPackage(
            name=name,
            version=entry["metadata"]["version"],
            sha256=entry["download_info"]["archive_info"]["hashes"]["sha256"],
            requires=tuple(entry["metadata"].get("requires_dist", ())),
        )
    return packages


def divide(packages: dict[str, LockedPackage], project: dict[str, Any]) -> dict[str, set[str]]:
    """The names of each group; `dev` and `docs` without those of `runtime`."""
    extras = project["project"]["optional-dependencies"]
    runtime = reach(project["project"]["dependencies"] + project["build-system"]["requires"], packages)
    return {
        "runtime": runtime,
        "dev": reach(extras["dev"], packages) - runtime,
        "docs": reach(extras["docs"], packages) - runtime,
    }


def reach(roots: Iterable[str], packages: dict[str, LockedPackage]) -> set[str]:
    """The names of requirements and of everything that they need on this platform."""
    seen: set[tuple[str, str]] = set()  # with one extra, or none
    waiting = [pair for root in roots for pair in expand(root, "")]
    while waiting:
        name, extra = pair = waiting.pop()
        if pair in seen or name not in packages:  # only pip is not
            continue
        seen.add(pair)
        waiting += [found for requirement in packages[name].requires for found in expand(requirement, extra)]
    return {name for name, _ in seen}


def expand(requirement: str, extra: str) -> Iterator[tuple[str, str]]:
    """The package that a requirement names, without and with each extra, if its condition holds."""
    from packaging.requirements import Requirement  # a development tool, which `install` must do without

    parsed = Requirement(requirement)
    if parsed.marker is None or parsed.marker.evaluate({"extra": extra}):
        for wanted in ("", *parsed.extras):
            yield normalize(parsed.name), wanted


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["install"]:
                return install("runtime")
            case ["install", group] if group in GROUPS:
                return install(group)
            case ["write"]:
                return write()
            case _:
                print("use: python tools/lock.py install [dev|docs], or python tools/lock.py write")
                return 2
    except subprocess.CalledProcessError as error:  # pip has said why it finds no versions
        return error.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
