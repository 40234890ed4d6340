"""The reward pool with real worker processes: what it returns, and what it survives."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType

import numpy as np
import psutil
import pytest

from sortedrl.errors import RewardError
from sortedrl.reward.caller import find_function
from sortedrl.reward.output import WorkerOutput
from sortedrl.reward.pool import RewardPool, RewardScore
from sortedrl.reward.process import clean_environment
from sortedrl.reward.worker import CallFailed, FailureKind, call_reward, printable, serve

# What a user's module of reward functions may hold; most behave by what the answer says.
MODULE = '''
import ctypes, os, pathlib, signal, sys, time

def length(completions, **kwargs):
    return [float(len(text)) for text in completions]

def matches(prompts, completions, answer, **kwargs):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]

def chat(prompts, completions, **kwargs):
    return [len(p[-1]["content"]) + 10 * (c[0]["role"] == "assistant") + 100 * len(c[0]["content"])
            for p, c in zip(prompts, completions)]

def moody(completions, **kwargs):
    """Treats the whole batch as one of its answers asks."""
    rewards = []
    for text in completions:
        if text == "hang":
            time.sleep(600)
        if text == "spin":
            while True: pass
        if text == "stuck":
            ctypes.PyDLL(None).sleep(600)  # C code that keeps the interpreter lock: no thread of the worker runs
        if text == "hungry":
            bytearray(8 << 30)
        if text == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "exit":
            sys.exit(3)
        if text == "raise":
            raise KeyError("no answer")
        if text == "print":
            print("noise on stdout", flush=True)
        if text == "extra":
            rewards.append(0.5)
        rewards.append({"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0"}.get(text, 1.0))
    return rewards

def scalar(completions, **kwargs):
    return 1.0

async def slow_judge(completions, **kwargs):
    return [2.0 for _ in completions]

def pid(completions, **kwargs):
    return [os.getpid() for _ in completions]

def secrets(completions, **kwargs):
    return [float(name in os.environ) for name in completions]

def modules(completions, **kwargs):
    return [float(name in sys.modules) for name in completions]

def with_child(completions, **kwargs):
    import subprocess
    return [subprocess.Popen(["sleep", "600"]).pid for _ in completions]

def reads_stdin(completions, **kwargs):
    return [float(sys.stdin.read() == "") for _ in completions]

hoard = []

def leaky(completions, **kwargs):
    hoard.append(bytearray(100 << 20))
    return [float(len(hoard))] * len(completions)

def loud(completions, **kwargs):
    for text in completions:
        print("saw", text)
        print("saw", text, file=sys.stderr)
    raise ValueError(completions[0])

def floods(completions, **kwargs):
    """Prints far too much: through Python, through the file descriptors, and from a program that it starts."""
    import subprocess
    match completions[0]:
        case "python":
            print("x" * 1_000_000)
            print("last words", file=sys.stderr)
        case "descriptor":
            os.write(1, b"x" * 1_000_000 + b"last words")
        case "program":
            subprocess.run([sys.executable, "-c", "print('x' * 1_000_000 + 'last words')"])
    return [1.0] * len(completions)

def bloated(completions, **kwargs):
    """Returns or raises far too much, or writes to the channel on which the worker replies."""
    channel = next(fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")
                   and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"))
    match completions[0]:
        case "text":
            raise ValueError("x" * 10_000_000)
        case "type":
            raise type("E" * 10_000_000, (Exception,), {})("short")
        case "class":
            return type("C" * 10_000_000, (), {})()
        case "list":
            return [1.0] * 1_000_000
        case "string":
            return ["x" * 10_000_000]
        case "nested":
            value = "x" * 1000
            for _ in range(6):
                value = [value] * 6
            return [value]
        case "line":
            os.write(channel, b"x" * 4_000_000)
            time.sleep(600)
        case "no object":
            os.write(channel, b"[1]\\n")
        case "nan":
            os.write(channel, b'{"rewards": [NaN]}\\n')
        case "kind":
            os.write(channel, b'{"kind": "unheard of", "detail": ""}\\n')
        case "deep":
            os.write(channel, b"[" * 200_000 + b"\\n")
    return [1.0] * len(completions)

def killed_once(completions, **kwargs):
    """Tells that it is at work, and waits to be killed, the first time."""
    at_work = pathlib.Path(completions[0])
    if not at_work.exists():
        at_work.with_suffix(".new").write_text(str(os.getpid()))
        at_work.with_suffix(".new").rename(at_work)
        time.sleep(600)
    return [1.0] * len(completions)

def child_memory(completions, **kwargs):
    import subprocess
    code = "bytearray(8 << 30)"
    return [float(subprocess.run([sys.executable, "-c", code], capture_output=True).returncode) for _ in completions]

def batch_size(completions, **kwargs):
    time.sleep(0.05)
    return [len(completions)] * len(completions)
'''


DROPPED = "\nreward worker: a call printed more than 64 KiB; the rest of its output is dropped\n"


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "user_rewards.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("user_rewards")
    sys.path.remove(str(folder))
    del sys.modules["user_rewards"]


def collect(pool: RewardPool) -> dict[tuple[int, int], RewardScore]:
    scores: dict[tuple[int, int], RewardScore] = {}
    while pool.num_waiting:
        for score in pool.poll(20):
            assert score.key not in scores
            scores[score.key] = score
    return scores


def score_texts(pool: RewardPool, texts: list[str]) -> list[RewardScore]:
    for index, text in enumerate(texts):
        pool.submit((index, 0), "prompt", text, {})
    scores = collect(pool)
    return [scores[index, 0] for index in range(len(texts))]


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which its parent has yet to collect, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_each_key_gets_the_score_of_its_own_answer(rewards) -> None:
    with RewardPool(rewards.length, timeout_s=60, workers=2) as pool:
        for index in range(500):
            pool.submit((index, index % 3), "prompt", "x" * index, {})
        scores = collect(pool)
        assert {key: score.reward for key, score in scores.items()} == {(i, i % 3): float(i) for i in range(500)}
        assert pool.num_waiting == 0
        assert pool.errors == {}


def test_waiting_submissions_share_a_call(rewards) -> None:
    with RewardPool(rewards.batch_size, timeout_s=60, workers=1) as pool:
        sizes = [score.reward for score in score_texts(pool, ["text"] * 40)]
    assert max(sizes) > 10
    # An answer that was told "n in this call" has n - 1 companions that were told the same.
    assert all(sizes.count(size) % size == 0 for size in set(sizes))


def test_columns_reach_the_function_by_row(rewards) -> None:
    with RewardPool(rewards.matches, timeout_s=60, workers=1) as pool:
        pool.submit((0, 0), "p", "yes", {"answer": "yes", "prompt": "p"})
        pool.submit((1, 0), "p", "yes", {"answer": "no"})
        pool.submit((2, 0), "p", "\ud800 é\n", {"answer": "\ud800 é\n"})
        assert [score.reward for _, score in sorted(collect(pool).items())] == [1.0, 0.0, 1.0]


def test_numpy_columns_are_sent_and_other_objects_refused(rewards) -> None:
    with RewardPool(rewards.matches, timeout_s=60, workers=1) as pool:
        pool.submit((0, 0), "p", "a", {"answer": np.array(["a"])[0], "size": np.int64(3)})
        assert collect(pool)[0, 0].reward == 1.0
        with pytest.raises(RewardError, match=r"answer.*object is not JSON.*lambda"):
            pool.submit((1, 0), "p", "a", {"answer": object()})
        assert pool.num_waiting == 0


def test_chat_prompts_get_chat_completions(rewards) -> None:
    with RewardPool(rewards.chat, timeout_s=60, workers=1) as pool:
        pool.submit((0, 0), [{"role": "user", "content": "abc"}], "four", {})
        assert collect(pool)[0, 0].reward == 3 + 10 + 400


def test_weighted_sum_over_processes_and_threads(rewards) -> None:
    functions = [rewards.length, lambda completions, **kwargs: [3.0] * len(completions), rewards.moody]
    with RewardPool(functions, timeout_s=60, workers=1, weights=[0.5, -2, 4]) as pool:
        scores = score_texts(pool, ["123456", "nan"])
    assert scores[0].reward == 0.5 * 6 - 2 * 3.0 + 4 * 1.0
    assert scores[0].by_function is not None
    assert list(scores[0].by_function.values()) == [6.0, 3.0, 1.0]
    assert scores[1].reward == 0.0
    assert "moody" in scores[1].error


@pytest.mark.parametrize("text", ["hang", "spin", "stuck"])
def test_only_the_answer_that_hangs_is_punished(rewards, text: str) -> None:
    with RewardPool(rewards.moody, timeout_s=2, workers=1) as pool:
        scores = score_texts(pool, ["good"] * 5 + [text] + ["good"] * 5)
        assert [score.reward for score in scores] == [1.0] * 5 + [0.0] + [1.0] * 5
        assert "user_rewards.moody took longer than 2 s" in scores[5].error
        assert pool.errors == {"user_rewards.moody: timeout": 1}
        assert score_texts(pool, ["good"])[0].reward == 1.0


def test_answers_that_are_slow_together_are_not_taken_for_hung() -> None:
    def slow(completions, **kwargs):
        time.sleep(0.06 * len(completions))  # 40 take longer than the limit, one does not
        return [1.0] * len(completions)

    with RewardPool(slow, timeout_s=2, workers=1) as pool:
        scores = score_texts(pool, ["text"] * 40)
        assert [score.reward for score in scores] == [1.0] * 40
        assert pool.errors == {}


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("crash", "died", "exit code -9"),
        ("exit", "exception", "SystemExit: 3"),
        ("raise", "exception", r"KeyError: 'no answer' \(user_rewards.py:\d+\)"),
        ("extra", "malformed result", "returned 2 rewards for 1 completions"),
        ("none", "no reward", "returned None"),
        ("nan", "not a number", "returned nan"),
        ("inf", "not a number", "returned inf"),
        ("text", "not a number", "returned '1.0'"),
    ],
)
def test_bad_results_cost_only_their_own_answer(rewards, text: str, kind: str, words: str) -> None:
    with RewardPool(rewards.moody, timeout_s=60, workers=1) as pool:
        scores = score_texts(pool, ["good", text, "print", "good"])
        assert [score.reward for score in scores] == [1.0, 0.0, 1.0, 1.0]
        assert [score.error is None for score in scores] == [True, False, True, True]
        assert re.match(rf"reward function user_rewards\.moody .*{words}.*: \w+", scores[1].error)
        assert pool.errors == {f"user_rewards.moody: {kind}": 1}


def test_a_result_that_is_no_list_is_an_error_for_each(rewards) -> None:
    with RewardPool(rewards.scalar, timeout_s=60, workers=1) as pool:
        scores = score_texts(pool, ["a", "b"])
    assert [score.reward for score in scores] == [0.0, 0.0]
    assert all("returned a float: make it return a list" in score.error for score in scores)
    assert pool.errors.total() == 2


def test_coroutine_functions_are_awaited(rewards) -> None:
    with RewardPool(rewards.slow_judge, timeout_s=60, workers=1) as pool:
        assert score_texts(pool, ["a"])[0].reward == 2.0


def test_a_worker_killed_from_outside_costs_nothing(rewards) -> None:
    with RewardPool(rewards.pid, timeout_s=60, workers=1) as pool:
        first = int(score_texts(pool, ["a"])[0].reward)
        os.kill(first, signal.SIGKILL)
        again = score_texts(pool, ["a", "b"])
        assert [score.error for score in again] == [None, None]
        assert first not in {int(score.reward) for score in again}
        assert pool.errors == {}


def test_a_worker_killed_in_the_middle_of_a_call_costs_nothing(rewards, tmp_path: Path) -> None:
    at_work = tmp_path / "pid"
    with RewardPool(rewards.killed_once, timeout_s=60, workers=1) as pool:
        for index in range(5):
            pool.submit((index, 0), "prompt", str(at_work), {})
        assert wait_until(at_work.exists, 20)
        os.kill(int(at_work.read_text()), signal.SIGKILL)
        scores = collect(pool)
        assert [scores[index, 0].reward for index in range(5)] == [1.0] * 5
        assert pool.errors == {}


memory_is_limited = pytest.mark.skipif(sys.platform != "linux", reason="few other kernels keep a limit of memory")


@memory_is_limited
def test_only_the_answer_that_eats_memory_is_punished(rewards) -> None:
    with RewardPool(rewards.moody, timeout_s=60, workers=1, memory_bytes=1 << 30) as pool:
        scores = score_texts(pool, ["good", "hungry", "good"])
        assert [score.reward for score in scores] == [1.0, 0.0, 1.0]
        assert re.search(r"moody ran out of memory \(MemoryError.*raise reward\.memory_mb", scores[1].error)
        assert pool.errors == {"user_rewards.moody: out of memory": 1}


@memory_is_limited
def test_a_worker_that_has_filled_up_is_replaced(rewards) -> None:
    """100 MiB stay behind at each call, and a worker has 350: a third or fourth call needs another worker."""
    with RewardPool(rewards.leaky, timeout_s=60, workers=1, memory_bytes=350 << 20) as pool:
        scores = [score_texts(pool, ["text"])[0] for _ in range(8)]
        assert [score.error for score in scores] == [None] * 8
        assert [score.reward for score in scores].count(1.0) >= 2
        assert pool.errors == {}


@memory_is_limited
def test_processes_of_a_reward_function_have_the_limit_too(rewards) -> None:
    with RewardPool(rewards.child_memory, timeout_s=60, workers=1, memory_bytes=1 << 30) as pool:
        assert score_texts(pool, ["text"])[0].reward == 1.0


def test_memory_can_be_unlimited(rewards) -> None:
    with RewardPool(rewards.moody, timeout_s=60, workers=1, memory_bytes=None) as pool:
        assert score_texts(pool, ["good"])[0].reward == 1.0


def test_text_of_a_model_reaches_no_terminal_as_it_is(rewards, capfd, caplog: pytest.LogCaptureFixture) -> None:
    """Clear the screen, set the title, end the line early, write from right to left, and a C1 control."""
    evil = "\x1b[2J\x1b]0;owned\x07\rok\u202e\x9b1m é"
    shown = r"\x1b[2J\x1b]0;owned\x07\rok\u202e\x9b1m é"
    with RewardPool(rewards.loud, timeout_s=60, workers=1) as pool:
        score = score_texts(pool, [evil])[0]
    assert f"raised ValueError: {shown} (" in score.error
    logged = "\n".join(caplog.messages)  # not `caplog.text`: Ray, if a test has started it, formats lines with tabs
    assert shown in logged
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count(f"saw {shown}\n") == 2
    assert all(char.isprintable() or char == "\n" for char in err + score.error + logged)


@pytest.mark.parametrize("way", ["python", "descriptor", "program"])
def test_what_a_call_prints_is_limited(rewards, capfd, way: str) -> None:
    with RewardPool(rewards.floods, timeout_s=60, workers=1) as pool:
        assert score_texts(pool, [way])[0].reward == 1.0
    assert capfd.readouterr().err == "x" * 65_536 + DROPPED


def test_output_is_limited_per_call_and_escaped(capfd) -> None:
    output = WorkerOutput()
    with os.fdopen(output.write_fd, "wb", buffering=0) as pipe:
        pipe.write("é\x1b[2J".encode() + b"\xff\n" + b"x" * 70_000)
        assert wait_until(lambda: output.num_dropped == 8 + 70_000 - 65_536)
        output.start_call()
        pipe.write(b"heard again\n")
    output.close()
    err = capfd.readouterr().err
    assert err.startswith("é\\x1b[2J\\xff\nxxx")
    assert err.endswith(f"x{DROPPED}heard again\n")


@pytest.mark.skipif(sys.platform != "linux", reason="the function finds the channel in /proc")
@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("text", "exception", "raised ValueError: xxx"),
        ("type", "exception", "raised EEE"),
        ("class", "malformed result", "returned a CCC"),
        ("list", "malformed result", "returned 1000000 rewards for 1 completions"),
        ("string", "not a number", "returned 'xxx"),
        ("nested", "not a number", "returned [[["),
        ("line", "malformed result", "sent a result of more than 1 MiB"),
        ("no object", "malformed result", "sent a result that is not a list of numbers"),
        ("nan", "malformed result", "sent a result that is not a list of numbers"),
        ("kind", "malformed result", "sent a result that is not a list of numbers"),
        ("deep", "malformed result", "sent a result that is not a list of numbers"),
    ],
)
def test_a_result_is_limited(rewards, text: str, kind: str, words: str) -> None:
    with RewardPool(rewards.bloated, timeout_s=60, workers=1) as pool:
        score = score_texts(pool, [text])[0]
        assert score.reward == 0.0
        assert score.error.startswith(f"reward function user_rewards.bloated {words}")
        assert len(score.error) < 1_500
        assert pool.errors == {f"user_rewards.bloated: {kind}": 1}
        assert score_texts(pool, ["good"])[0].reward == 1.0


def test_printable_keeps_what_is_harmless() -> None:
    assert printable("plain ü 漢字 \u3000 \U0001f600") == "plain ü 漢字 \u3000 \U0001f600"
    assert printable("a\tb\nc") == r"a\tb\nc"
    assert printable("a\tb\nc\x1b", keep="\n\t") == "a\tb\nc\\x1b"
    assert printable("\ud800") == r"\ud800"


def test_secrets_stay_with_the_parent(rewards, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = [
        "MY_API_KEY",
        "hf_token",
        "DB_PASSWORD",
        "AWS_SECRET",
        "GOOGLE_CREDENTIALS",
        "PYTHON_TOKEN",
        "DATABASE_URL",
    ]
    seen = ["JUDGE_KEY", "PATH", "HOME", "LC_ALL", "PYTHONHASHSEED", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"]
    for name in [*hidden, *seen]:
        monkeypatch.setenv(name, "0")
    with RewardPool(rewards.secrets, timeout_s=60, workers=1, keep_env=["JUDGE_KEY"]) as pool:
        assert [score.reward for score in score_texts(pool, hidden)] == [0] * 7
        assert [score.reward for score in score_texts(pool, seen)] == [1] * 7
    assert "JUDGE_KEY" not in clean_environment()


def test_workers_load_neither_this_package_nor_torch(rewards) -> None:
    with RewardPool(rewards.modules, timeout_s=60, workers=1) as pool:
        assert [s.reward for s in score_texts(pool, ["user_rewards", "sortedrl", "torch", "numpy"])] == [1, 0, 0, 0]


def test_reward_functions_cannot_eat_requests(rewards) -> None:
    with RewardPool(rewards.reads_stdin, timeout_s=60, workers=1) as pool:
        assert score_texts(pool, ["a"])[0].reward == 1.0
        assert score_texts(pool, ["b"])[0].reward == 1.0


def test_close_leaves_no_process_behind(rewards) -> None:
    with RewardPool([rewards.pid], timeout_s=60, workers=2) as pool:
        pool.start()
        workers = {int(score.reward) for score in score_texts(pool, ["a"] * 200)}
        assert workers
        assert all(is_alive(pid) for pid in workers)
    assert not any(is_alive(pid) for pid in workers)
    pool.close()


def test_close_ends_a_call_under_way_and_what_it_started(rewards) -> None:
    pool = RewardPool([rewards.with_child, rewards.moody], timeout_s=60, workers=1)
    grandchild = int(score_texts(pool, ["good"])[0].reward) - 1
    assert is_alive(grandchild)
    worker = psutil.Process(grandchild).parent()
    pool.submit((9, 0), "p", "spin", {})
    assert wait_until(lambda: len(worker.children()) == 2)  # the call has started another child, and spins next
    pool.close()
    assert wait_until(lambda: not is_alive(grandchild))


def test_workers_end_with_a_parent_that_is_killed(rewards, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    # No `if __name__ == "__main__"`: a worker must not run the script again.
    script.write_text(
        "import sys, user_rewards\n"
        "from sortedrl.reward.pool import RewardPool\n"
        "pool = RewardPool([user_rewards.pid, user_rewards.moody], timeout_s=60, workers=1)\n"
        "pool.submit((0, 0), 'p', 'good', {})\n"
        "print(int(pool.poll(120)[0].reward) - 1, flush=True)\n"
        "pool.submit((1, 0), 'p', 'hang', {})\n"
        "sys.stdin.read()\n"
    )
    path = os.pathsep.join([str(Path(rewards.__file__).parent), *sys.path])
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        worker = int(parent.stdout.readline())
        assert is_alive(worker)
        parent.kill()
        assert parent.stdout.read() == b""
    assert wait_until(lambda: not is_alive(worker))


def test_lambdas_closures_and_partials_are_called_here(rewards) -> None:
    bonus = 0.25

    def closure(completions, **kwargs):
        return np.array([bonus, float(os.getpid())])[: len(completions)]

    def flat(value, completions, **kwargs):
        return [value] * len(completions)

    with RewardPool([closure, partial(flat, 2)], timeout_s=60, workers=1) as pool:
        assert score_texts(pool, ["a"])[0].reward == 2.25


def test_a_thread_that_hangs_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def waits(completions, **kwargs):
        if "hang" in completions:
            release.wait(120)
        return [1.0] * len(completions)

    with RewardPool(waits, timeout_s=2, workers=1) as pool:
        scores = score_texts(pool, ["good", "hang", "good"])
        assert [score.reward for score in scores] == [1.0, 0.0, 1.0]
        assert "took longer than 2 s" in scores[1].error
        assert "cannot be killed" in caplog.text
        release.set()
        assert [score.reward for score in score_texts(pool, ["good"])] == [1.0]
        assert pool.errors.total() == 1


def test_close_does_not_wait_for_a_thread_that_hangs() -> None:
    release = threading.Event()
    pool = RewardPool(lambda completions, **kwargs: release.wait(30), timeout_s=600, workers=1)
    pool.submit((0, 0), "p", "text", {})
    assert pool.poll(0.05) == []
    pool.close()
    assert not release.is_set()
    release.set()


def test_poll_returns_at_once_when_nothing_is_outstanding(rewards) -> None:
    with RewardPool(rewards.length, timeout_s=60, workers=1) as pool:
        assert pool.poll(1e6) == []
        assert pool.poll() == []


def test_users_mistakes_are_named(rewards) -> None:
    with pytest.raises(RewardError, match="no reward function"):
        RewardPool([], timeout_s=1, workers=1)
    with pytest.raises(RewardError, match="'accuracy' cannot be called"):
        RewardPool(["accuracy"], timeout_s=1, workers=1)
    with pytest.raises(RewardError, match="2 finite numbers"):
        RewardPool([rewards.length, rewards.moody], timeout_s=1, workers=1, weights=[1.0])
    with pytest.raises(RewardError, match=r"at least 64 MiB: raise reward\.memory_mb"):
        RewardPool(rewards.length, timeout_s=1, workers=1, memory_bytes=1 << 20)
    with pytest.raises(RewardError, match=r"reward\.timeout_s"):
        RewardPool(rewards.length, timeout_s=0, workers=1)


@pytest.mark.parametrize("body", ["raise ImportError('no such part')", "import os; os._exit(4)"])
def test_a_module_that_only_this_process_can_import_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    (tmp_path / "fragile.py").write_text(
        f"import os\nif os.environ.get('PARENT_KEY') is None:\n    {body}\ndef f(**kwargs): return [1.0]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PARENT_KEY", "here")
    monkeypatch.delitem(sys.modules, "fragile", raising=False)
    fragile = importlib.import_module("fragile")
    with RewardPool(fragile.f, timeout_s=60, workers=1) as pool, pytest.raises(RewardError, match=r"fragile\.f"):
        pool.start()
    with RewardPool(fragile.f, timeout_s=60, workers=1) as pool:
        pool.submit((0, 0), "p", "text", {})
        with pytest.raises(RewardError, match=r"fragile\.f"):
            pool.poll(20)


def test_find_function_tells_what_another_process_can_import(rewards) -> None:
    assert find_function(rewards.length, 0).is_importable
    assert find_function(json.JSONDecoder.decode, 0).qualname == "JSONDecoder.decode"
    assert not find_function(json.JSONDecoder().decode, 0).is_importable
    assert not find_function(lambda **kwargs: [], 0).is_importable
    by_hand = ModuleType("made_by_hand")
    exec("def f(**kwargs): return []", by_hand.__dict__)
    sys.modules["made_by_hand"] = by_hand
    try:
        assert not find_function(by_hand.f, 0).is_importable
    finally:
        del sys.modules["made_by_hand"]


def test_functions_get_only_the_arguments_they_name() -> None:
    rows = [("p", "a", {"answer": 1, "level": 2}), ("p", "b", {"answer": 3})]
    assert call_reward(lambda completions, answer: answer, rows) == [1.0, 3.0]
    seen = {}
    call_reward(lambda **kwargs: seen.update(kwargs) or [0, 0], rows)
    assert seen == {"prompts": ["p", "p"], "completions": ["a", "b"], "answer": [1, 3], "level": [2, None]}


def test_rewards_are_read_as_numbers() -> None:
    rows = [("p", "a", {})] * 6
    values = [True, np.float32(0.5), 10**400, b"1", {}, -2]
    assert call_reward(lambda completions: values, rows)[:2] == [1.0, 0.5]
    shown = call_reward(lambda completions: values, rows)
    assert all(isinstance(bad, str) for bad in shown[2:5])
    assert shown[5] == -2.0
    with pytest.raises(CallFailed) as failed:
        call_reward(lambda completions: None, rows)
    assert failed.value.kind is FailureKind.MALFORMED


def test_serve_answers_line_by_line(rewards, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: SimpleQueue[bytes | None] = SimpleQueue()
    monkeypatch.setattr(sys, "path", list(sys.path))
    setup = {"path": sys.path, "functions": [["user_rewards", "length"], ["user_rewards", "scalar"]], "timeout_s": 60}
    rows = [["p", "four", {}], ["p", "", {}]]
    for message in (setup, {"function": 0, "rows": rows}, {"function": 1, "rows": rows}):
        lines.put(json.dumps(message).encode())
    lines.put(None)
    ours, theirs = socket.socketpair()
    with ours, theirs, theirs.makefile("wb") as out, ours.makefile("rb") as replies:
        serve(lines, out)
        assert json.loads(replies.readline()) == {"ready": True}
        assert json.loads(replies.readline()) == {"rewards": [4.0, 0.0]}
        assert json.loads(replies.readline()) == {"kind": "malformed result", "detail": "returned a float"}
