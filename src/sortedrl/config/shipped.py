"""The configurations that ship with the package, and how a configuration is found by what a user wrote.

`SortedConfig.load` calls `find_config`; the command `configs` lists what `shipped_names` returns. A name alone, such as
`quickstart`, is a shipped configuration. Anything that ends in .toml or has a folder is a file.
"""

from __future__ import annotations

import difflib
import logging
from pathlib import Path

from sortedrl.errors import ConfigError

FOLDER = Path(__file__).parent / "recipes"
CLONE_FOLDER = "configs"  # scripts may name shipped configurations as files of this folder

log = logging.getLogger(__name__)


def shipped_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def shipped_path(name: str) -> Path:
    """The file of a shipped configuration. An unknown name is refused with the nearest ones."""
    names = shipped_names()
    if name in names:
        return FOLDER / f"{name}.toml"
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names
    raise ConfigError(
        f"no configuration {name!r} ships with sortedrl: did you mean {' or '.join(near)}? A file of your own is "
        "given with its ending .toml"
    )


def find_config(given: str | Path) -> Path:
    """The file that a user means by a name or a path."""
    path = Path(given)
    if "=" in str(path) and not path.exists():
        raise ConfigError(f"no configuration is given before {path}: write CONFIG first, such as quickstart")
    is_name = path.name == str(path) and path.suffix != ".toml"
    if is_name:
        return _find_name(path)
    if (path / "config.toml").is_file():
        raise _is_run(path)
    is_of_clone = path.parent.name == CLONE_FOLDER and path.suffix == ".toml" and path.stem in shipped_names()
    return shipped_path(path.stem) if is_of_clone and not path.exists() else path


def _find_name(path: Path) -> Path:
    name, own = str(path), Path(f"{path}.toml")
    if name in shipped_names():
        if own.is_file():
            log.warning("%s is the configuration that ships with sortedrl; for the file here, write %s", name, own)
        return shipped_path(name)
    if (path / "config.toml").is_file():
        raise _is_run(path)
    if path.exists():  # a file without an ending, or a folder, which cannot be read
        return path
    if own.is_file():
        raise ConfigError(f"no configuration {name!r} ships with sortedrl: for the file here, write {own}")
    return shipped_path(name)


def _is_run(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is a run directory, not a configuration: continue it with sortedrl train --resume {path}, or give its "
        f"configuration {path}/config.toml"
    )
