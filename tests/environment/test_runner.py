"""Environments in worker processes and threads: results, limits, hostile tools, and how states come back."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.environment.base import Kind, ToolCall, Turn, TurnResult, describe
from sortedrl.environment.objects import EnvironmentObjects
from sortedrl.environment.runner import EnvironmentRunner, ProcessChannel
from sortedrl.errors import ConfigError, DataError
from sortedrl.reward.process import _MAX_REPLY
from tests.environment.sample_environments import Counter, Hostile, Plain, Saved, Timed

SERIAL = iter(range(1, 10**6))


@pytest.fixture(scope="module", params=["process", "thread"])
def hostile(request: pytest.FixtureRequest) -> Iterator[EnvironmentRunner]:
    runner = EnvironmentRunner(describe(Hostile), run_in=request.param, workers=1, timeout_s=1.5, max_chars=80)
    yield runner
    runner.close()


def run(runner: EnvironmentRunner, *whats: str, tool: str = "act", sample: int = 0, **row: Any) -> TurnResult:
    calls = [ToolCall(name=tool, arguments={"what": what}) for what in whats]
    return work(runner, Turn(sample=sample, serial=next(SERIAL), number=0, row=row, calls=calls))


def work(runner: EnvironmentRunner, turn: Turn) -> TurnResult:
    runner.submit(turn)
    while True:
        for result in runner.poll(20.0) if not turn.asks_reward else runner.poll_rewards(20.0):
            if result.serial == turn.serial:
                return result


@pytest.mark.parametrize(
    ("what", "text", "error"),
    [
        ("jump", "did jump", ""),
        ("raise", r'{"error": "ValueError: bad \\u001b', "exception"),
        ("exit", '{"error": "SystemExit: 3', "exception"),
        ("megabytes", "x" * 80 + " [3145648 more characters]", ""),
        ("control", "\\x1b[2J\\x00 a\\u202eb \\ud800 ok", ""),
        ("itself", '{"error": "RecursionError', "exception"),
    ],
)
def test_what_a_tool_does_is_text(hostile: EnvironmentRunner, what: str, text: str, error: str) -> None:
    (result,) = run(hostile, what).results
    assert result.error == error
    if what == "raise":
        assert "\x1b" not in result.text
        assert result.text.startswith('{"error": "ValueError: bad')
    else:
        assert result.text.startswith(text)


@pytest.mark.parametrize("char", ["\U0001f600", "\U000e0001", "\x00", '"'])
def test_the_longest_text_that_may_be_set_fits_into_a_reply(char: str) -> None:
    class Long(Counter):
        def add(self, number: int) -> str:
            return char * (number + 1)

    longest = 80_000
    SortedConfig.model_validate({"environment": {"max_output_chars": longest}})
    objects = EnvironmentObjects(Long, kind="none", max_chars=longest)
    key = {"sample": 0, "serial": 1}
    objects.handle({**key, "op": "open", "turn": 0, "row": {}})
    reply = objects.handle({**key, "op": "call", "name": "add", "arguments": {"number": longest}})
    assert len(json.dumps(reply)) < _MAX_REPLY


def test_a_tool_may_be_a_coroutine(hostile: EnvironmentRunner) -> None:
    assert [r.text for r in run(hostile, "now", tool="later").results] == ["later now"]


def test_a_tool_that_hangs_is_an_error_and_the_next_turn_works(hostile: EnvironmentRunner) -> None:
    result = run(hostile, "jump", "hang", "run")
    assert [r.error for r in result.results] == ["", "timeout", "not called"]
    assert "did not return within 1.5 s" in result.results[1].text
    assert not result.is_over  # without state, a fresh object is as good
    assert [r.text for r in run(hostile, "jump").results] == ["did jump"]
    assert hostile.errors["act: timeout"] >= 1


def test_a_tool_that_ends_its_process_or_fills_its_memory_is_an_error() -> None:
    runner = EnvironmentRunner(describe(Hostile), run_in="process", workers=1, timeout_s=20, memory_bytes=1 << 28)
    try:
        assert [r.error for r in run(runner, "memory", "die").results] == ["out of memory", "died"]
        assert [r.text for r in run(runner, "jump").results] == ["did jump"]
    finally:
        runner.close()


def test_a_reset_that_raises_is_told_to_the_model(hostile: EnvironmentRunner) -> None:
    (result,) = run(hostile, "jump", sample=5, bad=True).results
    assert "could not begin: RuntimeError: no such game" in result.text
    assert result.error == "not called"


def test_malformed_calls_are_told_and_nothing_is_called(hostile: EnvironmentRunner) -> None:
    turn = Turn(sample=1, serial=next(SERIAL), number=0, row={}, calls=[ToolCall(name="", error="no JSON")])
    (result,) = work(hostile, turn).results
    assert (result.text, result.error) == ('{"error": "no JSON"}', "malformed")


def add(number: int) -> ToolCall:
    return ToolCall(name="add", arguments={"number": number})


@pytest.mark.parametrize("made", [Counter, Saved, Plain])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_turn_begins_in_the_state_after_the_kept_turns(made: type, is_lost: bool, tmp_path: Any) -> None:
    """Two turns are made, the second is lost, and another one follows the first; perhaps the object is gone too."""
    runner, log = EnvironmentRunner(describe(made), run_in="thread", workers=1), tmp_path / "log"
    row, states = {"log": str(log)}, []
    for number, amount in enumerate((3, 10)):
        state = states[-1] if states else None
        history = [[add(3)]] if number else []
        turn = Turn(sample=0, serial=next(SERIAL), number=number, row=row, calls=[add(amount)], history=history)
        states.append(work(runner, turn).state)
        assert state is None or made is Saved
    if is_lost:
        runner.forget(0)
    last = Turn(sample=0, serial=next(SERIAL), number=1, row=row, calls=[add(100)], history=[[add(3)]], state=states[0])
    result = work(runner, last)
    assert result.is_lost == (made is Plain)
    assert result.must_repeat == (made is Counter)
    if result.must_repeat:  # nothing is called before the caller has recorded it
        assert log.read_text().split() == ["3", "10"]
        result = work(runner, replace(last, may_repeat=True))
    runner.close()
    assert [r.text for r in result.results] == ([] if made is Plain else ["103"])
    again = ["3"] if made is Counter else []
    assert log.read_text().split() == ["3", "10", *again, *([] if made is Plain else ["100"])]


def test_calls_that_are_made_again_have_the_processor_time_of_as_many(tmp_path: Any) -> None:
    runner, log = EnvironmentRunner(describe(Timed), run_in="process", workers=1, timeout_s=100.0), tmp_path / "log"
    turn = Turn(sample=0, serial=1, number=1, row={"log": str(log)}, calls=[add(1)], history=[[add(3), add(4)]])
    try:
        assert [r.text for r in work(runner, replace(turn, may_repeat=True)).results] == ["8"]
    finally:
        runner.close()
    cores = os.cpu_count() or 1
    # An opening that makes two calls may take three times as long as a call. A few seconds are added and used.
    shares = [round(float(line) / (100 * cores), 1) for line in log.read_text().split()]
    assert shares == [pytest.approx(share, abs=0.1) for share in (3, 3, 1)]


@pytest.mark.parametrize("asks_reward", [False, True])
def test_a_worker_that_was_killed_while_it_was_idle_has_lost_its_objects(asks_reward: bool) -> None:
    """Not the first trajectory that needs it afterwards has failed: all of its objects are lost alike."""
    runner = EnvironmentRunner(describe(Plain), run_in="process", workers=1)
    try:
        work(runner, Turn(sample=0, serial=next(SERIAL), number=0, row={}, calls=[add(4)]))
        (channel,) = runner._channels
        assert isinstance(channel, ProcessChannel)
        assert channel._process is not None
        channel._process.kill()
        channel._process.wait()
        calls = [] if asks_reward else [add(5)]
        result = work(
            runner,
            Turn(sample=0, serial=next(SERIAL), number=1, row={}, calls=calls, history=[[]], asks_reward=asks_reward),
        )
        assert (result.is_lost, list(result.results)) == (True, [])
    finally:
        runner.close()


def test_an_object_that_has_told_its_reward_begins_no_new_trajectory() -> None:
    """A sample without tool calls got its reward and starts over: its object may be finished."""
    runner = EnvironmentRunner(describe(Counter), run_in="thread", workers=1)
    try:
        work(runner, Turn(sample=0, serial=next(SERIAL), number=0, row={}, asks_reward=True))
        runner._objects._held[0].made.total = 7  # what `get_reward` left behind
        result = work(runner, Turn(sample=0, serial=next(SERIAL), number=0, row={}, calls=[add(4)]))
        assert [made.text for made in result.results] == ["4"]
    finally:
        runner.close()


def test_the_reward_is_of_the_state_after_the_kept_turns() -> None:
    runner = EnvironmentRunner(describe(Saved), run_in="process", workers=1)
    try:
        first = work(runner, Turn(sample=0, serial=next(SERIAL), number=0, row={}, calls=[add(4)]))
        work(runner, Turn(sample=0, serial=next(SERIAL), number=1, row={}, calls=[add(5)], state=first.state))
        asked = Turn(sample=0, serial=next(SERIAL), number=1, row={}, state=first.state, asks_reward=True)
        assert work(runner, asked).reward == 4.0
    finally:
        runner.close()


def test_kinds_and_schemas_are_read_from_the_class() -> None:
    assert [describe(made).kind for made in (Counter, Saved, Plain, Hostile)] == [
        Kind.REPEATABLE,
        Kind.SNAPSHOT,
        Kind.NONE,
        Kind.STATELESS,
    ]
    spec = describe(Counter)
    assert (spec.tool_names, spec.has_reward) == (["add"], True)
    assert spec.tools[0]["function"]["parameters"]["properties"]["number"]["type"] == "integer"


class NoReset:
    def act(self) -> None: ...


class NoTools:
    def reset(self) -> None: ...


class NoDocstring(NoTools):
    def act(self, x): ...  # type: ignore[no-untyped-def]


class OnlyHalf(NoDocstring):
    def _snapshot(self) -> int:
        return 0


class BadKind(Counter):
    environment_kind = "forever"


class ListsNothing(NoTools):
    """Lists its tools itself, as those of another package do."""

    def _tool_schemas(self) -> list[dict[str, object]]:
        raise ConnectionError("no server at port 8000")


class Needs(Counter):
    def reset(self, board: str, **row: object) -> None: ...


class CannotBeMade:
    def __init__(self, size: int) -> None: ...


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (NoReset, "NoReset has no method reset"),
        (NoTools, "NoTools has no tools"),
        (NoDocstring, "the tool act cannot be described to a model"),
        (OnlyHalf, "only one of _snapshot and _restore"),
        (BadKind, "environment_kind 'forever': choose one of stateless"),
        (CannotBeMade, "cannot be made: TypeError"),
        (ListsNothing, "ListsNothing cannot list its tools: ConnectionError: no server at port 8000"),
    ],
)
def test_a_class_that_cannot_work_is_refused_in_one_line(made: type, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        describe(made)
    assert "\n" not in str(caught.value)


def test_a_row_without_what_reset_needs_is_refused() -> None:
    with pytest.raises(DataError, match="row toys/3 has no column 'board', which reset of Needs needs"):
        describe(Needs).check_row({"prompt": "?"}, "toys/3")


def test_a_class_that_no_other_process_can_import_runs_in_threads() -> None:
    class Local(Counter): ...

    assert not EnvironmentRunner(describe(Local)).is_remote
    assert EnvironmentRunner(describe(Counter)).is_remote
    with pytest.raises(ConfigError, match="another process cannot import"):
        EnvironmentRunner(describe(Local), run_in="process")


def test_a_runner_whose_threads_cannot_start_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    runner = EnvironmentRunner(describe(Plain), run_in="thread", workers=1, timeout_s=1.5, max_chars=80)
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        runner.start()
    runner.close()


def test_a_runner_whose_second_thread_cannot_start_is_closed_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    started: list[subprocess.Popen[bytes]] = []
    spawn = ProcessChannel._spawn

    def fail_second(thread: threading.Thread) -> None:
        if thread.name == "environment" and len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    def note(channel: ProcessChannel) -> None:
        spawn(channel)
        assert channel._process is not None
        started.append(channel._process)

    monkeypatch.setattr(threading.Thread, "start", fail_second)
    monkeypatch.setattr(ProcessChannel, "_spawn", note)
    runner = EnvironmentRunner(describe(Counter), run_in="process", workers=2, timeout_s=5.0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run(runner, "jump")
    assert [process.returncode is not None for process in started] == [True, True]
    with pytest.raises(AssertionError, match="closed"):
        run(runner, "jump", sample=1)
    runner.close()
