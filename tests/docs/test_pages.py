"""The pages name files, modules, configuration keys and commands that exist, and their Python code runs.

`make docs` checks links and anchors between the pages of docs/.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import typer

from sortedrl.cli import app
from sortedrl.config import SortedConfig
from sortedrl.config.plug_points import POINTS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sortedrl"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")])
BASES = (ROOT, PACKAGE, ROOT / "examples")
GENERATED = {"configuration.md"}  # from the code itself
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)```", re.DOTALL)
# Folders that a run, a build or a tracker makes, groups of tags, and the owner of a repository on a hub.
ALLOWED_FOLDERS = {"batch", "slots", "slot_time", "run", "learner", "eval", "adapter", "data", "site", "owner"}
GLOSSARY = ("slot", "bubble", "goodput", "cohort", "harvest", "staleness", "lookahead", "replay", "version", "siblings")


def named(pattern: str) -> list[tuple[str, str]]:
    """(page, text) for every match of a pattern in the pages."""
    return [
        (str(path.relative_to(ROOT)), text)
        for path in PAGES
        if path.name not in GENERATED
        for text in re.findall(pattern, path.read_text(encoding="utf-8"))
    ]


def defines(path: Path, name: str) -> bool:
    """Whether a module defines or imports a name; the module is not run, since it may need vLLM."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) | ast.Name(id=found) | ast.alias(name=found):
                if found == name:
                    return True
            case _:
                pass
    return False


def resolve(dotted: str) -> tuple[Path, list[str]]:
    """The file of the module that `sortedrl.module.name` begins with, and the names behind the module."""
    place, parts = PACKAGE, dotted.split(".")[1:]
    while parts and (place / parts[0]).is_dir():
        place, parts = place / parts[0], parts[1:]
    if parts and (place / f"{parts[0]}.py").is_file():
        place, parts = place / f"{parts[0]}.py", parts[1:]
    return place / "__init__.py" if place.is_dir() else place, parts


def module_of(dotted: str) -> Path:
    return resolve(dotted)[0]


def is_there(dotted: str) -> bool:
    """Whether `sortedrl.module.name` is a module, or a name in one."""
    module, names = resolve(dotted)
    return not names or defines(module, names[0])


def test_every_file_that_is_named_exists() -> None:
    files = named(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|c|h|md|yml))`") + named(r"`((?:[\w.-]+/)+[\w-]*\.?(?:toml|json)?)`")
    missing = [
        (page, name)
        for page, name in files
        if not any((base / name).exists() for base in BASES) and not name.startswith(("runs/", "checkpoints/"))
    ]
    assert len(files) > 100
    assert [entry for entry in missing if entry[1].split("/")[0] not in ALLOWED_FOLDERS] == []


def test_every_module_and_name_exists() -> None:
    groups = {point.group for point in POINTS}  # of entry points
    dotted = [(page, name) for page, name in named(r"\b(sortedrl(?:\.\w+)+)") if name not in groups]
    assert len(dotted) > 10
    assert [(page, name) for page, name in dotted if not is_there(name)] == []


def test_every_member_of_the_api_page_exists() -> None:
    """mkdocstrings leaves out members that it does not find, without a warning."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    entries = re.findall(r"^::: ([\w.]+)(?:\n    options:\n      members: \[(.*?)\])?", page, re.MULTILINE)
    assert len(entries) > 10
    missing = [
        (dotted, member)
        for dotted, members in entries
        for member in re.findall(r"\w+", members)
        if not defines(module_of(dotted), member)
    ]
    assert missing == []


def test_the_import_layers_are_those_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"## Import layers\n.*?```\n(.*?)```", page, re.DOTALL)
    assert block is not None
    assert block[1].splitlines() == [layer.replace(" : ", ", ") for layer in layers]


def test_the_trees_name_modules_that_exist() -> None:
    found = {path.name for path in PACKAGE.rglob("*.py")}
    for name in ("docs/architecture.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        tree = next(
            block for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) if block.startswith("src/sortedrl/")
        )
        modules = set(re.findall(r"\b\w+\.py\b", tree))
        folders = set(re.findall(r"^ +(\w+)/", tree, re.MULTILINE))
        assert modules - found == set()
        assert {folder for folder in folders if not any(path.is_dir() for path in PACKAGE.rglob(folder))} <= {
            "conformance",
            "faults",
            "docs",
        }


def test_every_configuration_key_exists() -> None:
    sections = {name: set(field.annotation.model_fields) for name, field in SortedConfig.model_fields.items()}
    keys = named(rf"`((?:{'|'.join(sections)})\.\w+)")
    methods = {"engine.poll", "engine.submit", "learner.start"}
    wrong = [
        (page, key)
        for page, key in keys
        if key.split(".")[1] not in sections[key.split(".")[0]]
        and not (key.endswith((".py", ".toml")) or key in methods or is_there(f"sortedrl.{key}"))
    ]
    assert len(keys) > 50
    assert wrong == []


def test_every_command_and_option_exists() -> None:
    group = typer.main.get_command(app)
    known = {name: {option for p in c.params for option in p.opts} for name, c in group.commands.items()}
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES if path.name != "CHANGELOG.md")
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(r"^\s*(?:[.\w/-]+/)?sortedrl ([a-z]+) ([^\n#`]*)", joined, re.MULTILINE)
    assert len(lines) > 30
    unknown = [
        (command, option)
        for command, rest in lines
        if command != "bench"
        for option in re.findall(r"(?<!\S)(--[a-z-]+)", rest)
        if option not in known.get(command, set())
    ]
    assert unknown == []


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "```python" in p.read_text(encoding="utf-8")], ids=lambda p: p.name
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks behind a comment `not run: why` are compiled only; README's runs in tests/project/test_readme.py."""
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "page"}
    for is_skipped, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        compiled = compile(code, str(page), "exec")
        if not is_skipped and page.name != "README.md":
            exec(compiled, scope)


def test_the_glossary_has_an_anchor_for_each_word() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert [word for word in GLOSSARY if f'<a id="{word}"></a>' not in page] == []


def test_links_of_pages_outside_the_site_exist() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
        assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in site] == []
