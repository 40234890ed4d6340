"""What pydantic found wrong with a configuration, in one line with the remedy.

`SortedConfig` raises it as a ConfigError. For an unknown key it names the nearest known one, or our key if the name is
another framework's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from sortedrl.config.foreign_names import foreign_hints
from sortedrl.config.overrides import shown
from sortedrl.config.sections import Section

_MAX_HINTS = 5  # keys of other frameworks that one message names


def one_line(error: ValidationError, sections: Mapping[str, Any]) -> str:
    """The first mistake in one line, and how many more there are. `sections` are the fields of the configuration."""
    first = error.errors()[0]
    count = len({details["loc"][:2] for details in error.errors()})
    where = ".".join(str(part) for part in first["loc"][:2])  # what follows section and key are branches of a union
    more = f" (and {count - 1} more)" if count > 1 else ""
    if first["type"] == "extra_forbidden":
        if hints := _foreign_hints(error):
            return "; ".join(hints)
        return f"unknown configuration key {where!r}{_nearest(first['loc'], sections)}{more}"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if where else message
    given = f", not {shown(first['input'])}" if where and not isinstance(first["input"], Mapping) else ""
    return f"{where}: {message}{given}{more}" if where else f"{message}{more}"


def _foreign_hints(error: ValidationError) -> list[str]:
    """What to set instead of keys that are another framework's; the first of many."""
    unknown = [details for details in error.errors() if details["type"] == "extra_forbidden"]
    hints = [hint for one in unknown for hint in foreign_hints(one["input"], ".".join(map(str, one["loc"])))]
    return list(dict.fromkeys(hints))[:_MAX_HINTS]


def _nearest(location: tuple[int | str, ...], sections: Mapping[str, Any]) -> str:
    """A hint that names the known key most like an unknown one, or else all known keys."""
    fields = sections
    for part in location[:-1]:
        annotation = fields[str(part)].annotation if str(part) in fields else None
        fields = annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, Section) else {}
    prefix = ".".join(str(part) for part in (*location[:-1], ""))
    if elsewhere := _same_name_elsewhere(str(location[-1]), sections):
        return f": did you mean {' or '.join(elsewhere)}?"
    near = difflib.get_close_matches(str(location[-1]), fields, n=1, cutoff=0.5)
    if near:
        return f": did you mean {prefix}{near[0]}?"
    return f": the keys there are {', '.join(fields)}" if fields else ""


def _same_name_elsewhere(key: str, sections: Mapping[str, Any]) -> list[str]:
    """The keys of this name in all sections."""
    return [f"{name}.{key}" for name, section in sections.items() if key in type(section.default).model_fields]
