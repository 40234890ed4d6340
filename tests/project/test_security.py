"""The package never runs data as code, and docs/guides/security.md names only files and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sortedrl"
BUILTINS = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
CALLS = {"torch.load", "os.system", "os.popen", "numpy.load", "np.load", "subprocess.getoutput"}


def faults(source: str) -> list[str]:
    """The names in a module's source that could run data as code."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                found.append(name)
            case ast.Call(func=ast.Attribute()) if ast.unparse(node.func) in CALLS:
                found.append(ast.unparse(node.func))
            case ast.Import():
                found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                found.append(module)
            case ast.keyword(arg="shell" | "trust_remote_code", value=value) if ast.unparse(value) != "False":
                found.append(f"{node.arg}={ast.unparse(value)}")
            case _:
                pass
    return found


def test_the_package_runs_no_data() -> None:
    found = {str(path.relative_to(ROOT)): faults(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 50
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("eval(answer)", ["eval"]),
        ("import pickle", ["pickle"]),
        ("from yaml.loader import Loader", ["yaml.loader"]),
        ("torch.load(path)", ["torch.load"]),
        ("run(command, shell=True)", ["shell=True"]),
        ("load(path, trust_remote_code=trust)", ["trust_remote_code=trust"]),
        ("model.eval(); re.compile(''); load(path, trust_remote_code=False)", []),
    ],
)
def test_the_check_knows_a_fault(source: str, names: list[str]) -> None:
    assert faults(source) == names


def test_the_security_page_names_what_is_there() -> None:
    page = (ROOT / "docs" / "guides" / "security.md").read_text()
    named = re.findall(r"`([\w/]+\.(?:py|toml))`", page)
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).is_file() and not (PACKAGE / name).is_file()] == []
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    claimed = re.findall(r"`(test_\w+)`", page)
    assert len(claimed) > 6
    assert [name for name in claimed if f"def {name}(" not in tests] == []
