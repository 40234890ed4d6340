"""What an environment is, what the tools of a class are, and the records of turns that the other modules share.

An environment is a class as TRL's `environment_factory` takes it. One object belongs to one sample. `reset(**row)` gets
the row's columns. Every other public method is a tool, with type hints and a docstring in Google's style. An optional
`get_reward()` returns a number when the trajectory is complete. Methods may be coroutines.

A class also says how its state can be brought back, because a replay may keep only some of the turns (`Kind`): with the
class attribute `environment_kind = "stateless"` or `"repeatable"`, or by the methods `_snapshot` and `_restore`. TRL
ignores both, so the same class works there.

`run/builders` calls `describe` before a run starts; a class that cannot work raises ConfigError there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sortedrl.errors import ConfigError, DataError, first_line

NOT_TOOLS = ("reset", "get_reward")
Factory = Callable[[], Any]


class Kind(StrEnum):
    """How the state of an environment after a given turn can be made again."""

    STATELESS = "stateless"  # there is none: what a tool returns depends on the row and its arguments only
    SNAPSHOT = "snapshot"  # `_snapshot()` returns it as JSON has it, `_restore(state)` sets it
    REPEATABLE = "repeatable"  # the same calls in a fresh object give the same state: they are made again, and counted
    NONE = "none"  # not at all: a trajectory that loses a turn starts over


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolCall:
    """A call that the model wrote. With an `error` it is malformed: nothing is called, and the error is fed back."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": dict(self.arguments), "error": self.error}


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolResult:
    """What a call returned, as clean text of limited length."""

    text: str
    seconds: float = 0.0
    error: str = ""  # empty, or the kind of failure: malformed, exception, timeout, died, out of memory, not called


@dataclass(slots=True, kw_only=True, frozen=True)
class Turn:
    """A turn of a trajectory for its environment to work on.

    `number` counts the turns with tools that the trajectory keeps before this one, and `history` has those of their
    calls that must be made again in a fresh object. With `asks_reward` there are no calls, and the trajectory is over;
    `number` then counts a last turn too whose result was not fed.
    """

    sample: int
    serial: int  # tells the turn from earlier ones of the same sample, whose results are ignored
    number: int
    row: Mapping[str, Any]
    calls: Sequence[ToolCall] = ()
    history: Sequence[Sequence[ToolCall]] = ()
    state: Any = None  # the snapshot after the kept turns, for a new object
    asks_reward: bool = False
    is_over: bool = False  # with `asks_reward`: the object died in the last turn, so it cannot be asked any more
    may_repeat: bool = False  # the calls of `history` are recorded, so they may be made again


@dataclass(slots=True, kw_only=True, frozen=True)
class TurnResult:
    """The end of a turn's work.

    If `is_lost`, the state cannot be made again, and the trajectory may start over. If `must_repeat`, it can, by calls
    of kept turns, which must be recorded before they are made: the turn has to be submitted again with `may_repeat`. In
    neither case was a tool called.
    """

    sample: int
    serial: int
    number: int
    results: Sequence[ToolResult] = ()
    state: Any = None  # the snapshot after this turn, of a class that has them
    reward: float | None = None
    error: str = ""  # why there is no reward
    is_lost: bool = False
    must_repeat: bool = False
    is_over: bool = False  # the object died or could not begin, and cannot be made again: the trajectory ends here
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True, frozen=True)
class EnvironmentSpec:
    """A class of environments as the package sees it."""

    factory: Factory
    name: str
    kind: Kind
    tools: tuple[dict[str, Any], ...]  # JSON schemas, as chat templates take them
    has_reward: bool
    needed: tuple[str, ...]  # arguments of `reset` without a default

    @property
    def tool_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        """Raise DataError for a row without a column that `reset` needs."""
        missing = [name for name in self.needed if name not in row]
        if missing:
            columns = ", ".join(repr(column) for column in row) or "none"
            raise DataError(
                f"row {where} has no column {missing[0]!r}, which reset of {self.name} needs (it has: {columns}); add "
                "it to the rows, or give the argument a default"
            )


def describe(factory: Factory, key: str = "environment.factory") -> EnvironmentSpec:
    """Make one object, and read tools, kind and reward from its class."""
    name = getattr(factory, "__qualname__", None) or type(factory).__qualname__
    try:
        probe = factory()
    except Exception as error:  # the user's code
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{key} {name} cannot be made: {why}; it is called without arguments") from error
    made = type(probe)
    methods = dict(inspect.getmembers(made, predicate=inspect.isfunction))
    if "reset" not in methods:
        raise ConfigError(f"{key} {name} has no method reset: add reset(self, **row), which begins a trajectory")
    kind = _kind_of(made, methods, f"{key} {name}")
    schemas = _listed(probe, f"{key} {name}") if "_tool_schemas" in methods else _schemas(methods, f"{key} {name}")
    if not schemas:
        raise ConfigError(f"{key} {name} has no tools: add a public method with type hints and a docstring")
    return EnvironmentSpec(
        factory=factory,
        name=name,
        kind=kind,
        tools=tuple(schemas),
        has_reward="get_reward" in methods,
        needed=_needed(methods["reset"]),
    )


def _kind_of(made: type, methods: Mapping[str, Any], what: str) -> Kind:
    if ("_snapshot" in methods) != ("_restore" in methods):
        raise ConfigError(f"{what} has only one of _snapshot and _restore: add the other")
    declared = getattr(made, "environment_kind", None)
    if declared is None:
        return Kind.SNAPSHOT if "_snapshot" in methods else Kind.NONE
    if declared not in list(Kind):
        raise ConfigError(f"{what} has environment_kind {declared!r:.80}: choose one of {', '.join(Kind)}")
    if declared == Kind.SNAPSHOT and "_snapshot" not in methods:
        raise ConfigError(f"{what} has environment_kind snapshot: add the methods _snapshot and _restore")
    return Kind(declared)


def _schemas(methods: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    tools = [found for found in methods if not found.startswith("_") and found not in NOT_TOOLS]
    return [_schema(methods[tool], f"{what}: the tool {tool}") for tool in tools]


def _listed(probe: Any, what: str) -> list[dict[str, Any]]:
    """The tools of an object that lists them itself, such as those of another package's environments."""
    try:
        return list(probe._tool_schemas())
    except Exception as error:  # the user's code, or another package's
        raise ConfigError(f"{what} cannot list its tools: {type(error).__name__}: {first_line(error)}") from error


def _schema(method: Callable[..., Any], what: str) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema  # at need: it loads transformers

    try:
        return get_json_schema(method)
    except Exception as error:  # of the docstring, of the type hints
        why = first_line(error)
        raise ConfigError(
            f"{what} cannot be described to a model ({why}): give it type hints and a docstring in Google's style, "
            "which describes every argument"
        ) from error


def _needed(reset: Callable[..., Any]) -> tuple[str, ...]:
    parameters = list(inspect.signature(reset).parameters.values())[1:]
    named = (p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    return tuple(p.name for p in named if p.default is p.empty)
