"""The watchdog around engines that really hang, in Python, in system calls and in native code, and around others."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sortedrl.clock import VirtualClock
from sortedrl.config import SortedConfig
from sortedrl.engine import watchdog
from sortedrl.engine.base import Finished, InFlight
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.watchdog import EXIT_CODE, SIGNAL, Watchdog
from sortedrl.errors import ConfigError, EngineError
from sortedrl.records import FinishReason
from sortedrl.run.builders.engine import watch
from tests.support.tiny_models import Caller, make_requests, serve, source, tiny_model

DONE = Finished(sample=0, attempt=0, clock=0.0, reason=FinishReason.STOP)


class FakeEngine:
    """Records every call and runs `act` in it."""

    capabilities = object()

    def __init__(self, act: Any = lambda: None) -> None:
        self.act = act
        self.calls: list[tuple[Any, ...]] = []

    def submit(self, requests: Any) -> None:
        self.calls.append(("submit", requests))
        self.act()

    def poll(self, timeout: float | None = None) -> Any:
        self.calls.append(("poll", timeout))
        return self.act()

    def interrupt(self, samples: Any = None) -> Any:
        self.calls.append(("interrupt", samples))
        return self.act()

    def publish(self, version: int, weights: Any, in_flight: InFlight = InFlight.ABORT) -> Any:
        self.calls.append(("publish", version, weights, in_flight))
        return self

    def wait(self) -> None:
        self.calls.append(("wait",))
        self.act()

    def stats(self) -> str:
        return "stats"

    def close(self) -> None:
        self.calls.append(("close",))


def sleep_long() -> None:
    time.sleep(600)


def spin() -> None:
    while True:
        time.sleep(0.001)


def acquire_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@pytest.mark.parametrize("act", [sleep_long, spin, acquire_twice])
def test_a_call_that_hangs_raises(act: Any) -> None:
    engine = FakeEngine(act)
    dog = Watchdog(engine, 0.3, grace_s=60)
    for name, call in {
        "submit": lambda: dog.submit([]),
        "poll": lambda: dog.poll(0),
        "interrupt": dog.interrupt,
        "publish": lambda: dog.publish(1, None).wait(),
    }.items():
        with pytest.raises(EngineError, match=rf"did not answer for 0\.3 s in {name}: .*engine\.watchdog_s"):
            call()
    engine.act = lambda: None
    dog.close()
    assert [call[0] for call in engine.calls] == ["submit", "poll", "interrupt", "publish", "wait", "close"]


def test_calls_are_passed_on_as_they_are() -> None:
    engine = FakeEngine(lambda: [DONE])
    dog = Watchdog(engine, 60)
    dog.submit("requests")
    assert dog.poll(0.5) == [DONE]
    assert dog.poll() == [DONE]
    assert dog.interrupt([3]) == [DONE]
    dog.publish(7, "weights", InFlight.KEEP).wait()
    assert dog.stats() == "stats"
    assert dog.capabilities is engine.capabilities
    dog.close()
    dog.close()
    assert engine.calls == [
        ("submit", "requests"),
        ("poll", 0.5),
        ("poll", 30.0),  # half of the limit, and again if there is no event
        ("interrupt", [3]),
        ("publish", 7, "weights", InFlight.KEEP),
        ("wait",),
        ("close",),
    ]


def test_the_time_a_caller_allows_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that waits as long as it is told, five times the limit in all, before an attempt ends."""
    engine, clock = FakeEngine(), VirtualClock()
    waited = []

    def wait() -> list[Any]:
        waited.append(engine.calls[-1][1])
        clock.advance(clock.now() + waited[-1])
        return [DONE] if len(waited) == 10 else []

    engine.act = wait
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=clock.now))
    dog = Watchdog(engine, 60)
    assert dog.poll() == [DONE]
    assert waited == [30.0] * 10
    assert dog.poll(105.0) == []
    assert waited[10:] == [30.0, 30.0, 30.0, 15.0]
    dog.close()


@pytest.mark.parametrize(("replicas", "poll_s"), [(1, 0), (2, 2 * 600)])
def test_a_poll_may_load_weights_into_an_engine_that_was_started_again(
    monkeypatch: pytest.MonkeyPatch, replicas: int, poll_s: float
) -> None:
    """Otherwise the run would end before the pool has given up that engine. Of others a poll loads nothing."""
    limits: dict[str, float] = {}
    dog = watch(SortedConfig(engine={"kind": "vllm", "replicas": replicas}), FakeEngine(lambda: [DONE]))
    monkeypatch.setattr(dog, "_watched", lambda name, limit_s, call, *rest: limits.setdefault(name, limit_s) and [DONE])
    dog.poll(), dog.publish(1, None), dog.interrupt()
    assert limits == {"poll": 600 + poll_s + 300, "publish": 600 + 2 * 600, "interrupt": 600}
    monkeypatch.undo()
    dog.close()


def test_an_engine_with_nothing_to_do_returns_at_once() -> None:
    engine = FakeEngine(list)
    dog = Watchdog(engine, 60)
    assert dog.poll() == []
    assert len(engine.calls) == 1
    dog.close()


def test_the_handler_before_is_put_back() -> None:
    before = signal.getsignal(SIGNAL)
    outer = Watchdog(FakeEngine(sleep_long), 0.2, grace_s=60)
    inner = Watchdog(FakeEngine(), 60)
    with pytest.raises(EngineError):  # the inner one passes on a signal that is not for it
        outer.poll(0)
    inner.close()
    with pytest.raises(EngineError):
        outer.poll(0)
    outer.close()
    assert signal.getsignal(SIGNAL) == before


def test_a_late_signal_is_ignored() -> None:
    dog = Watchdog(FakeEngine(), 60)
    signal.raise_signal(SIGNAL)
    dog._overdue = ("poll", 60.0, threading.get_ident())  # of a call that has just returned
    signal.raise_signal(SIGNAL)
    dog.close()


def test_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="time limit is 0 s"):
        Watchdog(FakeEngine(), 0)


def test_a_real_engine_answers_the_same_under_watch() -> None:
    model, requests = tiny_model(), make_requests(6)

    class Watched(Watchdog):
        @property
        def num_running(self) -> int:
            return self.engine.num_running

    caller = Caller(Watched(LocalEngine(model, slots=4, max_length=256), 60))
    caller.engine.publish(0, source(model)).wait()
    watched = caller.serve(requests)
    plain = serve(model, requests)
    assert {key: answer.tokens for key, answer in watched.items()} == {key: a.tokens for key, a in plain.items()}
    caller.engine.close()


# ---- in a child process ----------------------------------------------------------------------------------------------

PRELUDE = """
import ctypes, sys, threading, time
from sortedrl.engine.watchdog import Watchdog
from sortedrl.errors import EngineError

class Engine:
    def __init__(self, act): self.act = act
    def poll(self, timeout=None): return self.act()
    def close(self): pass

def lock_twice():
    # A mutex of the C library goes back to waiting after a signal.
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


def start_child(code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="the mutex's layout is that of glibc")
@pytest.mark.parametrize(
    "run", ["dog.poll(0)", "t = threading.Thread(target=dog.poll, args=(0,), name='trainer'); t.start(); t.join()"]
)
def test_a_call_stuck_in_native_code_ends_the_process(run: str) -> None:
    child = start_child(f"""
        dog = Watchdog(Engine(lock_twice), 0.3, grace_s=0.3)
        print("started", flush=True)
        {run}
        print("not reached", flush=True)
    """)
    out, err = child.communicate(timeout=200)
    assert child.returncode == EXIT_CODE == 70
    assert out == "started\n"
    assert "the engine did not answer for 0.3 s in poll" in err
    assert "in lock_twice" in err  # the stack that hangs
    assert "in _watch" in err  # and the others


def test_an_error_that_the_engine_swallows_ends_the_process() -> None:
    child = start_child("""
        def stubborn():
            while True:
                try:
                    time.sleep(600)
                except EngineError:
                    pass
        Watchdog(Engine(stubborn), 0.2, grace_s=0.2).poll(0)
    """)
    _, err = child.communicate(timeout=200)
    assert child.returncode == EXIT_CODE
    assert "in stubborn" in err


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    call = ("poll", 60.0, 0)
    timer = watchdog._CallTimer(1.0, 100.0)
    assert timer.tick(call, 101.0) == 0.0  # the first tick that sees the call
    assert timer.tick(call, 102.0) == 1.0
    assert timer.tick(call, 1002.0) == 3.0  # stopped for 900 s: counts as two ticks
    assert timer.tick(call, 1003.0) == 4.0
    assert timer.tick((*call,), 1004.0) == 0.0  # an equal tuple, but another call
    assert timer.tick(None, 1005.0) == 0.0


def test_the_code_that_watches_imports_no_tensors() -> None:
    code = f"import sys, {watchdog.__name__}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
