"""The pool on real Ray actors: the conformance suite on two local engines, and what only processes can get wrong.

One Ray serves all tests of this file; test_conformance_pool_vllm.py has the pool of vLLM engines.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sortedrl.config import SortedConfig
from sortedrl.engine.pool.pool import Pool
from sortedrl.testing import CHECKS, Caller, Check, EngineCase
from sortedrl.trainer import SortedTrainer
from tests.conformance.process_cases import local_pool_case, member_pids
from tests.engine.pool.test_pool import check_same, serve_through
from tests.support.tiny_models import add_noise, make_requests, serve, source, tiny_model


@pytest.fixture(scope="module")
def case() -> Iterator[EngineCase]:
    with local_pool_case() as case:
        yield case


@pytest.fixture(scope="module")
def pool(case: EngineCase) -> Pool:
    assert isinstance(case.engine, Pool)
    return case.engine


def wait_until_all_are_up(pool: Pool) -> None:
    deadline = time.monotonic() + 200
    while len(member_pids(pool)) < 2 and time.monotonic() < deadline:
        pool.submit([])  # looks after the members
        time.sleep(0.1)
    assert len(member_pids(pool)) == 2


# Kills two more processes, which are started again. test_pool_faults.py shows the same on members in threads.
# Local engines cannot sleep; tests/engine/pool/test_pool_sleep.py has a pool of engines that do.
APPLYING = [check for check in CHECKS if check.guarantee != "sleep" and "sleeps" not in check.name]
SLOW = ("staleness-survives-a-recovery",)
MARKED = [pytest.param(check, marks=pytest.mark.slow) if check.name in SLOW else check for check in APPLYING]


@pytest.mark.parametrize("check", MARKED, ids=str)
def test_pool(check: Check, case: EngineCase) -> None:
    assert check.needs(case), "a pool of exact engines promises everything"
    check.run(case)
    assert case.engine.stats().running == 0


def test_answers_are_those_of_one_engine(pool: Pool) -> None:
    wait_until_all_are_up(pool)
    pool.publish(100, source(tiny_model())).wait()
    requests = make_requests(12)
    check_same(serve_through(pool, requests), serve(tiny_model(), requests))
    assert os.getpid() not in member_pids(pool)
    assert len(set(member_pids(pool))) == 2


def test_ray_listens_on_loopback(pool: Pool) -> None:
    ours = psutil.Process()
    listening = {
        (process.name(), connection.laddr.ip)
        for process in (ours, *ours.children(recursive=True))
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert {name for name, _ in listening} >= {"raylet", "gcs_server"}
    assert {address for _, address in listening} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_published_weights_reach_every_process(pool: Pool) -> None:
    model = tiny_model()
    add_noise(model, 0.1, seed=5)
    pool.publish(101, source(model)).wait()
    requests = make_requests(8, seed=2)
    answers = serve_through(pool, requests)
    check_same(answers, serve(model, requests))
    assert {version for answer in answers.values() for version in answer.versions} == {101}
    pool.publish(102, source(tiny_model())).wait()


def test_a_process_that_is_killed(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    wait_until_all_are_up(pool)
    num_restarts = pool.stats().extra["restarts"]
    victim = member_pids(pool)[0]
    killed: list[int] = []

    def kill(caller: Caller) -> None:
        if not killed and any(answer.tokens for answer in caller.answers.values()):
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    requests = make_requests(24, seed=3)
    answers = serve_through(pool, requests, meanwhile=kill)
    check_same(answers, serve(tiny_model(), requests))
    assert killed
    assert pool.stats().extra["restarts"] == num_restarts + 1
    wait_until_all_are_up(pool)
    assert victim not in member_pids(pool)
    assert capsys.readouterr().out == "", "Ray's own word on a death would spoil the output of --json"


def test_rollout_that_goes_on_during_updates(pool: Pool, tmp_path: Path) -> None:
    """The engine in a process of its own, weights swapped in flight: nothing is dropped, and the bound holds."""
    config = SortedConfig(
        run={"name": "apart", "dir": str(tmp_path), "samples": 96, "report": False},
        engine={"slots": 8, "own_process": True, "replica_cpus": 0.5, "max_new_tokens": 96},
        schedule={"strategy": "async", "update_batch": 8, "max_staleness": 2},
        learner={"algorithm": "reinforce++", "group_size": 1},
        eval={"prompts": 0},
        checkpoint={"save": False},
    )
    watch = RunningDuringUpdates()
    summary = SortedTrainer(args=config, sinks=[watch], quiet=True).train()
    assert summary.ledger is not None
    assert (summary.ledger.trained, summary.ledger.lost, summary.ledger.duplicated) == (96, 0, 0)
    assert summary.staleness_max is not None
    assert summary.staleness_max <= 2
    assert summary.learner_wait_s is not None
    assert 0 < summary.learner_wait_s < summary.wall_s
    assert len(watch.running) == summary.updates
    assert max(watch.running) > 0, "rollout stopped for every update"


class RunningDuringUpdates:
    """The most samples that ran at one time during each update, however fast they ended."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self._now = self._most = 0

    def emit(self, event: Any) -> None:
        self._now += (event.kind == "AttemptStarted") - (event.kind == "AttemptEnded")
        self._most = self._now if event.kind == "BatchTaken" else max(self._most, self._now)
        if event.kind == "UpdateDone":
            self.running.append(self._most)

    def close(self) -> None:
        pass
