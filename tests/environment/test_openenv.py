"""Environments of OpenEnv give tools to a run: in the trainer's process, in workers, and over a server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.environment.base import Kind, ToolCall, Turn, TurnResult, describe
from sortedrl.environment.openenv import OpenEnvTools
from sortedrl.environment.runner import EnvironmentRunner

pytestmark = pytest.mark.openenv
pytest.importorskip("openenv", reason="OpenEnv is an optional package: `make openenv` sets it up and runs these")

from tests.support import openenv_signs as signs  # noqa: E402 -- it imports OpenEnv

SIGNS = {"Ann": "Bob", "Bob": "Cid", "Cid": "Dan", "Dan": "Eve", "Eve": "Fay", "Fay": "Ann"}
ROW = {"prompt": "Ann two ?", "signs": SIGNS, "goal": "Cid"}


class Remote(OpenEnvTools):
    url = ""

    def _make(self) -> Any:
        from openenv.core import MCPToolClient

        return MCPToolClient(base_url=self.url).sync()


@pytest.fixture
def server() -> Any:
    import uvicorn
    from openenv.core import create_app
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    app = create_app(signs.SignEnvironment, CallToolAction, CallToolObservation, env_name="signs")
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    thread.join(20)


def play(factory: type, run_in: str) -> list[TurnResult]:
    """Two right calls, one that fails, one after the end, and the reward."""
    runner = EnvironmentRunner(describe(factory), run_in=run_in, workers=1, timeout_s=60)
    results: list[TurnResult] = []
    try:
        for number, who in enumerate(("Ann", "Zoe", "Bob", "Cid")):
            calls = [ToolCall(name="lookup", arguments={"who": who})]
            runner.submit(Turn(sample=0, serial=number, number=number, row=ROW, calls=calls))
            results += take(runner.poll)
        runner.submit(Turn(sample=0, serial=9, number=4, row=ROW, asks_reward=True))
        results += take(runner.poll_rewards)
    finally:
        runner.close()
    return results


def take(poll: Any) -> list[TurnResult]:
    while not (results := poll(1.0)):
        pass
    return results


def check(results: list[TurnResult]) -> None:
    first, unknown, second, late, asked = results
    assert (first.results[0].text, first.results[0].error) == ("Bob", "")
    assert unknown.results[0].error == "exception"
    assert "Zoe" in unknown.results[0].text
    assert second.results[0].text == "Cid"  # the goal: the episode is over
    assert "the episode is over" in late.results[0].text
    assert asked.reward == 1.0


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_tools_of_an_environment_in_process(run_in: str) -> None:
    spec = describe(signs.Signs)
    assert (spec.tool_names, spec.kind, spec.has_reward) == (["lookup"], Kind.NONE, True)
    assert spec.tools[0]["function"]["description"] == "Reads the sign of a person."
    assert spec.tools[0]["function"]["parameters"]["properties"]["who"]["type"] == "string"
    check(play(signs.Signs, run_in))


def test_tools_of_a_server(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Remote, "url", server)
    check(play(Remote, "thread"))


def test_an_environment_with_typed_actions_has_one_tool() -> None:
    spec = describe(signs.Guesses)
    assert spec.tool_names == ["act"]
    assert spec.tools[0]["function"]["parameters"]["required"] == ["number"]
    tools = signs.Guesses()
    tools.reset(secret=3, prompt="?")
    assert tools.act(number=5) == '{"hint": "smaller"}'
    assert tools.act(number=3) == '{"hint": "right"}'
    assert tools.get_reward() == 1.0


def test_a_run_trains_with_an_environment_of_openenv(tmp_path: Path) -> None:
    rows = [ROW, {"prompt": "Dan one ?", "signs": SIGNS, "goal": "Eve"}]
    config = SortedConfig(
        run={"dir": str(tmp_path), "samples": 32, "report": False},
        schedule={"update_batch": 8},
        engine={"slots": 8, "max_new_tokens": 96},
        eval={"prompts": 0},
    )
    summary = SortedTrainer("tools-tiny", None, config, rows, environment_factory=signs.Signs, quiet=True).train()
    assert summary.tools is not None
    assert summary.tools["calls"] > 32
    assert summary.ledger is not None
    assert (summary.ledger.lost, summary.samples) == (0, 32)
