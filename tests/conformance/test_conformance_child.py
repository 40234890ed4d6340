"""The engine in a child process: the conformance suite, and what only a process can get wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sortedrl.config import SortedConfig
from sortedrl.engine.pool.child_launcher import ChildLauncher
from sortedrl.engine.pool.pool import Pool
from sortedrl.errors import EngineError
from sortedrl.testing import CHECKS, Caller, Check, EngineCase
from sortedrl.trainer import SortedTrainer
from tests.conformance.process_cases import are_gone, child_case, member_pids
from tests.engine.pool.test_pool import check_same, serve_through
from tests.support.tiny_models import make_requests, serve, source, tiny_model

# They kill the child, which is started again. One such test is below; test_pool_faults.py has more on threads.
# Local engines cannot sleep; tests/engine/pool/test_pool_sleep.py has one in a child that does.
APPLYING = [check for check in CHECKS if check.guarantee != "sleep" and "sleeps" not in check.name]
SLOW = ("staleness-survives-a-recovery", "a-dead-engine-gives-its-samples-back")
MARKED = [pytest.param(check, marks=pytest.mark.slow) if check.name in SLOW else check for check in APPLYING]
ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def case() -> Iterator[EngineCase]:
    with child_case() as case:
        yield case


@pytest.fixture(scope="module")
def pool(case: EngineCase) -> Pool:
    assert isinstance(case.engine, Pool)
    return case.engine


@pytest.mark.parametrize("check", MARKED, ids=str)
def test_child(check: Check, case: EngineCase) -> None:
    assert check.needs(case), "an exact engine in a child promises everything"
    check.run(case)
    assert case.engine.stats().running == 0


def test_a_child_that_is_killed_comes_back_with_its_samples(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    pool.publish(100, source(tiny_model())).wait()
    (victim,) = member_pids(pool)
    num_restarts = pool.stats().extra["restarts"]
    killed: list[int] = []

    def kill(caller: Caller) -> None:
        if not killed and any(answer.tokens for answer in caller.answers.values()):
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    requests = make_requests(8, seed=3)
    answers = serve_through(pool, requests, meanwhile=kill)
    check_same(answers, serve(tiny_model(), requests))
    assert killed
    assert pool.stats().extra["restarts"] == num_restarts + 1
    assert victim not in member_pids(pool)
    assert capfd.readouterr().out == "", "a child must not write to the output of --json"


def test_a_child_that_cannot_make_its_engine_says_why_in_one_line() -> None:
    launcher = ChildLauncher("sortedrl.missing:engine", {}, threads=1)
    with pytest.raises(EngineError, match=r"ModuleNotFoundError: No module named 'sortedrl.missing'") as raised:
        Pool(launcher, size=1, slots=1, exact_replay=True, keep_kv=True)
    assert "\n" not in str(raised.value)


OWNER = """
import time
from sortedrl.engine.pool.child_launcher import ChildLauncher
child = ChildLauncher("sortedrl.missing:engine", {}, threads=1).launch(0)  # it goes on without an engine
try:
    child.slots().result()
except Exception:
    print(child._process.pid, flush=True)
    time.sleep(600)
"""


def test_a_child_ends_with_its_owner() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}
    )
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    owner.kill()
    owner.wait()
    assert len(pids) == 1
    deadline = time.monotonic() + WAIT_S
    while not are_gone(pids):
        assert time.monotonic() < deadline, "the child outlives its owner"
        time.sleep(0.02)


@pytest.mark.slow  # tests/learner/test_forked.py has the learner apart, which is the default
def test_a_run_on_policy_with_rollout_during_updates(tmp_path: Path) -> None:
    """The engine apart and the learner in a thread: every sample is trained once, at staleness 0."""
    config = SortedConfig(
        run={"name": "apart", "dir": str(tmp_path), "samples": 64, "report": False},
        engine={"slots": 8, "max_new_tokens": 96, "own_process": True},
        schedule={"strategy": "async-on-policy", "update_batch": 8},
        learner={"algorithm": "reinforce++", "group_size": 1},
        eval={"prompts": 0},
        checkpoint={"save": False},
    )
    summary = SortedTrainer(args=config, quiet=True).train()
    assert summary.ledger is not None
    assert (summary.ledger.trained, summary.ledger.lost, summary.ledger.duplicated) == (64, 0, 0)
    assert summary.staleness_max == 0
    assert summary.idle_slot_steps is not None
    assert 0 <= summary.idle_slot_steps < 1
