"""Finds the objects that a configuration names: your own engine, algorithm, strategy, task, tracker or reward function.

Every place that takes such an object is a `PlugPoint`. Its value is one of four: a built-in name, `module:Object`, the
name of an entry point that an installed package declares, or (in Python) the object itself. A module is imported only
when its object is needed. Importing runs the module's code with the user's rights, so a configuration is as trusted as
a program.

Guarantees: every mistake is a ConfigError in one line that names the key, the value and the remedy. An object that was
given in Python is recorded as `<module.Name>`, which no configuration file can load.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sortedrl.errors import ConfigError, SortedRLError, first_line

_NUM_NEAREST = 2
_MAX_NAMED = 10  # names of a module that a message lists
_SHOWN = 200  # characters of a value in a message


def no_fault(found: Any) -> str:
    return ""


@dataclass(slots=True, kw_only=True, frozen=True)
class PlugPoint:
    """One configuration key that takes an object of the user's.

    If `is_made`, the value may also be a class, or a function that returns the object.
    """

    key: str  # as in "engine.kind"
    noun: str  # what it takes, as in "engine"
    argument: str  # of SortedTrainer
    group: str  # of entry points
    names: tuple[str, ...]  # built in
    page: str  # of the documentation
    fault: Callable[[Any], str] = no_fault  # what is wrong with an object, such as "it has no submit"; or ""
    is_made: bool = False

    def check_name(self, value: Any) -> None:
        """Refuse a name that means nothing. Nothing is imported."""
        if not isinstance(value, str) or value in self.names:
            return
        if is_given(value):
            raise ConfigError(
                f"{self.key} {_short(value)} is an object that Python code gave to SortedTrainer: start or resume this "
                f"run from Python, with SortedTrainer(..., {self.argument}=...)"
            )
        if ":" not in value:
            self._declared(value)

    def find(self, value: Any) -> Any:
        """The object behind a value that is not a built-in name."""
        self.check_name(value)
        found = value
        if isinstance(value, str):
            found = import_object(self.key, value if ":" in value else self._declared(value))
        if not (self.is_made and callable(found)):
            self._check(value, found)
        return found

    def make(self, value: Any, signature: str = "()", /, *arguments: Any, **options: Any) -> Any:
        """The object behind a value; a class or a function is called with the arguments, as `signature` shows."""
        found = self.find(value)
        if not (inspect.isclass(found) or (callable(found) and self.fault(found))):
            return found
        try:
            made = found(*arguments, **options)
        except SortedRLError:
            raise
        except Exception as error:  # the user's code
            why = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(
                f"{self.key} {_short(name_of(value))!r} cannot be made: {why}; it is called with {signature}"
            ) from error
        self._check(value, made)
        return made

    def _check(self, value: Any, found: Any) -> None:
        if fault := self.fault(found):
            article = "an" if self.noun[0] in "aeiou" else "a"
            name = _short(name_of(value))
            raise ConfigError(f"{self.key} {name!r} is not {article} {self.noun}: {fault}; see {self.page}")

    def _declared(self, name: str) -> str:
        """`module:Object` of the entry point with this name; raises if no installed package declares one."""
        declared = entry_points(group=self.group)
        values = {f"{entry.module}:{entry.attr}" for entry in declared if entry.name == name}
        if len(values) > 1:
            raise ConfigError(
                f"{self.key} {name!r} is declared by several installed packages, as {' and '.join(sorted(values))}: "
                "write the one that you mean"
            )
        if values:
            return values.pop()
        known = [*self.names, *sorted(declared.names - set(self.names))]
        near = difflib.get_close_matches(name, known, n=_NUM_NEAREST, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? Or " if near else ""
        raise ConfigError(
            f"{self.key}: unknown {self.noun} {_short(name)!r}: {hint}choose from {', '.join(known)}, or write your "
            "own as module:Object"
        )


def lacking(found: Any, members: Iterable[str]) -> str:
    """Which of these members an object lacks, as a fault; "" if it has them all."""
    missing = [member for member in members if not hasattr(found, member)]
    return f"it has no {' and no '.join(missing)}" if missing else ""


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def is_given(value: str) -> bool:
    """Whether a text is the record of an object that was given in Python."""
    return value.startswith("<") and value.endswith(">")


def name_of(value: Any) -> str:
    """The text that stands for a value in files and messages: itself, or `<module.Name>` of an object."""
    if isinstance(value, str):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"<{named.__module__}.{named.__qualname__}>"


def import_object(key: str, spec: str) -> Any:
    """The object that `module:Object` names; the current folder is searched for the module too."""
    module_name, _, path = spec.partition(":")
    what = f"{key} {_short(spec)!r}"
    if not module_name or not path:
        raise ConfigError(f"{what}: write module:Object, as in my_module:MyClass")
    if module_name.startswith("."):
        raise ConfigError(f"{what} is relative: name the whole module, as in package.module:Object")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # reward workers get the same path
    try:
        found: Any = importlib.import_module(module_name)
    except SortedRLError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} cannot be loaded: {_missing_module(module_name, error)}") from error
    except Exception as error:  # the module is the user's code
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{what} cannot be loaded: {why}; correct its module") from error
    for name in path.split("."):
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, dir(found), n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {_public_names(found)}"
            raise ConfigError(f"{what} cannot be loaded: {getattr(found, '__name__', found)} has no {name}: {hint}")
        found = getattr(found, name)
    return found


def _public_names(found: Any) -> str:
    """The first names that a module defines itself, or that an object has."""
    names = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
    own = [name for name in names if getattr(getattr(found, name), "__module__", None) == getattr(found, "__name__", 0)]
    return ", ".join((own or names)[:_MAX_NAMED]) or "none"


def _missing_module(module_name: str, error: ModuleNotFoundError) -> str:
    missing = error.name or module_name
    if module_name == missing or module_name.startswith(f"{missing}."):
        return f"there is no module {missing} in {Path.cwd()} or on Python's path: check its name, or install it"
    return f"{module_name} needs {missing}, which is not installed: install it"
