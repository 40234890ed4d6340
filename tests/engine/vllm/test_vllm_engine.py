"""Real vLLM beyond the conformance suite: the local engine's answers, lack of memory, hangs, orphans, a run."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from sortedrl.config.shipped import shipped_path
from sortedrl.engine.base import Delta, Finished, Partial
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.vllm.core import vllm_version
from sortedrl.engine.vllm.segments import mapped_segments
from sortedrl.engine.vllm.shared_memory import SHARED_MEMORY
from sortedrl.testing import Caller
from tests.support.tiny_models import make_requests, tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.timeout(900),
]
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
BLOCK_BYTES = 32 * 2 * 2 * 2 * 32 * 4  # tokens, keys and values, layers, heads, head size, bytes
QUICKSTART = shipped_path("quickstart")


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(**HEADS)


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[Any]:
    """With memory for one answer and a half, so that four of them are in each other's way."""
    from sortedrl.engine.vllm.engine import VllmEngine

    engine = VllmEngine(model, slots=4, max_length=256, kv_bytes=12 * BLOCK_BYTES, limit_s=60.0)
    yield engine
    engine.close()


def test_answers_are_the_local_engines_and_survive_a_lack_of_memory(model: Any, engine: Any) -> None:
    requests = make_requests(4, budget=160)
    expected = Caller(LocalEngine(copy.deepcopy(model), slots=4, max_length=256)).serve(requests)
    answers = Caller(engine).serve(requests)
    for sample, answer in answers.items():
        assert answer.tokens == expected[sample].tokens
        assert answer.logprobs == pytest.approx(expected[sample].logprobs, abs=1e-3)
    extra = engine.stats().extra
    assert extra["preemptions"] > 0
    assert extra["kv_usage_peak"] > 0.8


def test_tokens_of_running_answers_are_streamed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool: what an engine has sent is not lost with it."""
    monkeypatch.setattr(engine, "_stream_s", 0.01)
    (request,) = make_requests(1, budget=200)
    engine.submit([replace(request, budget=200)])
    events = []
    while not any(isinstance(event, Delta) for event in events):
        events += engine.poll(0.01)
    assert not any(isinstance(event, Finished) for event in events)
    assert engine.stats().running == 1
    engine.interrupt()


def test_a_core_that_hangs_gives_its_samples_back(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(3, budget=200)
    engine.submit(requests)
    before = engine.stats().decoded_tokens
    while engine.stats().decoded_tokens < before + 6:
        engine.poll(0.01)
    pids = engine.pids
    segments = mapped_segments(pids)
    assert segments
    monkeypatch.setattr(engine, "_limit_s", 5.0)  # it has answered: its silence need not be waited out in full
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    events = []
    while engine.stats().running:
        events += engine.poll(1.0)
    assert {event.sample for event in events if isinstance(event, Partial)} == {0, 1, 2}
    assert engine.stats().extra["losses"] == 1
    assert all(is_gone(pid) for pid in pids)
    assert not any((SHARED_MEMORY / name).exists() for name in segments)


def test_a_core_that_dies_while_it_starts_again_is_another_loss(model: Any, engine: Any) -> None:
    requests = make_requests(3)
    expected = Caller(LocalEngine(copy.deepcopy(model), slots=4, max_length=256)).serve(requests)
    Caller(engine).serve(requests)  # starts vLLM, if an earlier test has killed it
    losses, events = engine.stats().extra["losses"], []
    engine.submit(make_requests(3, budget=200))
    os.kill(engine.pids[0], signal.SIGKILL)
    while engine.stats().running:
        engine.poll(1.0)

    killed: list[int] = []

    def kill_the_next_core() -> None:
        while not killed:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name().startswith("VLLM::Engine") and child.status() != psutil.STATUS_ZOMBIE:
                        child.kill()
                        killed.append(child.pid)
            time.sleep(0.01)

    killer = threading.Thread(target=kill_the_next_core, daemon=True)
    killer.start()
    engine.submit(requests)
    while engine.stats().running:
        events += engine.poll(1.0)
    killer.join()
    assert {event.sample for event in events if isinstance(event, Partial)} == {0, 1, 2}
    assert engine.stats().extra["losses"] == losses + 2
    assert not engine.pids
    answers = Caller(engine).serve(requests)
    assert {sample: answer.tokens for sample, answer in answers.items()} == {
        sample: answer.tokens for sample, answer in expected.items()
    }


OWNER = """
import sys, time
sys.path.insert(0, {root!r})
from tests.support.tiny_models import tiny_model
from sortedrl.engine.vllm.engine import VllmEngine
if __name__ == "__main__":
    engine = VllmEngine(tiny_model(**{heads!r}), slots=2, max_length=64)
    print(*engine.pids, flush=True)
    time.sleep(600)
"""


def test_vllm_does_not_outlive_an_owner_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER.format(root=str(Path(__file__).parents[3]), heads=HEADS), encoding="utf-8")
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    segments = mapped_segments(pids)
    assert len(pids) >= 1
    assert segments
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 120
    while not all(is_gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert all(is_gone(pid) for pid in pids)
    assert not any((SHARED_MEMORY / name).exists() for name in segments)


def test_a_run_on_vllm_is_the_run_on_the_local_engine(tmp_path: Path) -> None:
    """Float32, the same noise, replay: the same answers are trained, so the same weights come out."""

    def train(kind: str) -> dict[str, Any]:
        changes = [f"engine={kind}", "run.samples=48", "eval.prompts=16", "engine.max_new_tokens=64"]
        command = [Path(sys.executable).with_name("sortedrl"), "train", QUICKSTART, *changes]
        command += [f"run.dir={tmp_path}", f"run.name={kind}", "run.report=false", "eval.every_samples=0", "--json"]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["runs"][0]

    ours, theirs = train("vllm"), train("local")
    assert ours["ledger"] == {"loaded": 48, "trained": 48, "lost": 0, "duplicated": 0}
    assert ours["staleness_max"] == 0
    assert ours["accuracy_before"] == theirs["accuracy_before"]
