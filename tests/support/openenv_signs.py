"""Environments written for OpenEnv, and the classes that give their tools to a run; worker processes import them."""

from __future__ import annotations

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.env_server.types import Action, Observation, State

from sortedrl.environment.openenv import OpenEnvTools


class SignEnvironment(MCPEnvironment):
    """Signs that say whom each person points to. The episode is over when the goal is reached."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("signs")
        self.signs: dict[str, str] = {}
        self.goal = self.reached = ""

        @server.tool
        def lookup(who: str) -> str:
            """Reads the sign of a person."""
            self.reached = self.signs[who]
            return self.reached

        super().__init__(server)

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        signs: dict[str, str] | None = None,
        goal: str = "",
        **kwargs: Any,
    ) -> Observation:
        self.signs, self.goal, self.reached = signs or {}, goal, ""
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._scored(action, super().step(action, timeout_s, **kwargs))

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._scored(action, await super().step_async(action, timeout_s, **kwargs))

    def _scored(self, action: Action, observation: Observation) -> Observation:
        if isinstance(action, CallToolAction):
            observation.done = self.reached == self.goal
            observation.reward = float(observation.done)
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise NotImplementedError("there are only tools")

    @property
    def state(self) -> State:
        return State()


class Signs(OpenEnvTools):
    def _make(self) -> SignEnvironment:
        return SignEnvironment()


class Guess(Action):
    """Guesses the secret number."""

    number: int


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment):
    def reset(self, seed: int | None = None, episode_id: str | None = None, secret: int = 0, **kwargs: Any) -> Hint:
        self.secret = secret
        return Hint(hint="guess")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        is_right = action.number == self.secret
        hint = "right" if is_right else "smaller" if action.number > self.secret else "larger"
        return Hint(hint=hint, done=is_right, reward=float(is_right))

    @property
    def state(self) -> State:
        return State()


class Guesses(OpenEnvTools):
    action = Guess

    def _make(self) -> GuessEnvironment:
        return GuessEnvironment()
