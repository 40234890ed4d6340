"""Tools of OpenEnv environments: a base class whose objects pass calls on to an environment of the package `openenv`.

    class Calculator(OpenEnvTools):
        def _make(self):
            return CalculatorEnvironment()  # or a client: MCPToolClient(base_url="http://127.0.0.1:8000").sync()

`environment_factory` takes such a class. The tools are those that the environment lists (MCP tools). An environment
that takes actions of one type instead has the tool `act`, whose arguments are the fields of that type: name the type in
the class attribute `action`. The environment's own `reset` gets the row's columns: all, or those that it names if it
has no `**kwargs`.

The reward is the sum of the rewards that the environment gives with its observations. When it says that the episode is
done, further calls are errors. Its state cannot be brought back, so the kind is `none`; a subclass whose environment
gives the same results for the same calls may set `environment_kind = "repeatable"`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

_OF_EVERY_OBSERVATION = {"done", "reward", "metadata"}


class OpenEnvTools:
    environment_kind = "none"
    action: ClassVar[type[Any] | None] = None  # of an environment without MCP tools

    def __init__(self) -> None:
        self._environment = self._make()
        self._reward, self._is_done = 0.0, False

    def _make(self) -> Any:
        """A new environment of OpenEnv, or a synchronous client of its server."""
        raise NotImplementedError(f"{type(self).__name__} needs a method _make that returns an environment of OpenEnv")

    def reset(self, **row: object) -> None:
        parameters = inspect.signature(self._environment.reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        self._reward, self._is_done = 0.0, False
        self._environment.reset(**row)

    def get_reward(self) -> float:
        return self._reward

    def __getattr__(self, name: str) -> Callable[..., str]:
        """A tool. Which ones there are only the environment knows."""
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._call, name)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # `_make` may have failed, and a server may be gone
            self._environment.close()

    def _tool_schemas(self) -> list[dict[str, Any]]:
        """The tools, as chat templates take them."""
        if self.action is not None:
            text = inspect.getdoc(self.action) or "Acts in the environment."
            return [_as_schema("act", text, self.action.model_json_schema())]
        from openenv.core.env_server.mcp_types import ListToolsAction  # pyright: ignore[reportMissingImports]

        tools = _observed(self._environment.step(ListToolsAction())).tools
        return [_as_schema(tool.name, tool.description, tool.input_schema) for tool in tools]

    def _call(self, tool: str, /, **arguments: Any) -> str:
        if self._is_done:
            raise RuntimeError("the episode is over")
        result = self._environment.step(self._action_of(tool, arguments))
        self._reward += float(result.reward or 0.0)
        self._is_done = bool(result.done)
        observation = _observed(result)
        if (error := getattr(observation, "error", None)) is not None:
            raise RuntimeError(getattr(error, "message", None) or str(error))
        return _as_text(observation)

    def _action_of(self, tool: str, arguments: dict[str, Any]) -> Any:
        if self.action is not None:
            return self.action(**arguments)
        from openenv.core.env_server.mcp_types import CallToolAction  # pyright: ignore[reportMissingImports]

        return CallToolAction(tool_name=tool, arguments=arguments)


def _observed(result: Any) -> Any:
    """Environments return observations; clients wrap them."""
    return getattr(result, "observation", result)


def _as_text(observation: Any) -> str:
    """What a tool returned; of other observations the fields that their environment added."""
    if not hasattr(observation, "result"):
        return json.dumps(observation.model_dump(mode="json", exclude=_OF_EVERY_OBSERVATION))
    value = observation.result
    value = value.get("data", value) if isinstance(value, dict) else getattr(value, "data", value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _as_schema(name: str, text: str, parameters: dict[str, Any]) -> dict[str, Any]:
    wanted = {key: parameters[key] for key in ("properties", "required", "$defs") if key in parameters}
    function = {"name": name, "description": text.strip(), "parameters": {"type": "object", "properties": {}, **wanted}}
    return {"type": "function", "function": function}
