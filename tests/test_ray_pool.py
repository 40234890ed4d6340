"""The pool on real Ray actors: answers, publication through the object store, and processes that are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sortedrl.engine.base import Engine
from sortedrl.engine.local import LocalEngine
from sortedrl.engine.pool import Pool
from sortedrl.engine.ray_cluster import connect, disconnect
from sortedrl.testing import Caller
from test_pool import check_same, serve_through
from tiny_models import make_requests, serve, shake, source, tiny_model

SLOTS = 4


def make_engine() -> tuple[Engine, Any]:
    model = tiny_model()
    return LocalEngine(model, slots=SLOTS, max_length=128, stream_every=1), model


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        here = str(Path(__file__).parent)  # where the actors' processes find `make_engine`
        patch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
        connect()
    from sortedrl.engine.ray_members import RayMembers

    members = RayMembers(make_engine, num_cpus=0.5, num_gpus=0, threads=1)
    pool = Pool(members, size=2, slots=SLOTS, exact_replay=True, keep_kv=True)
    yield pool
    pool.close()
    disconnect()


def pids(pool: Pool) -> list[int]:
    return [member["pid"] for member in pool.stats().extra["members"]]


def test_answers_are_those_of_one_engine(pool: Pool) -> None:
    requests = make_requests(12)
    check_same(serve_through(pool, requests), serve(tiny_model(), requests))
    assert os.getpid() not in pids(pool)
    assert len(set(pids(pool))) == 2


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
    shake(model, 0.1, seed=5)
    pool.publish(3, source(model)).wait()
    requests = make_requests(8, seed=2)
    answers = serve_through(pool, requests)
    check_same(answers, serve(model, requests))
    assert {version for answer in answers.values() for version in answer.versions} == {3}
    pool.publish(4, source(tiny_model())).wait()


def test_a_process_that_is_killed(pool: Pool) -> None:
    victim = pids(pool)[0]
    killed: list[int] = []

    def kill(caller: Caller) -> None:
        if not killed and any(answer.tokens for answer in caller.answers.values()):
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    requests = make_requests(24, seed=3)
    answers = serve_through(pool, requests, meanwhile=kill)
    check_same(answers, serve(tiny_model(), requests))
    assert killed
    assert pool.stats().extra["restarts"] == 1
    deadline = time.monotonic() + 60
    while len(pool.stats().extra["members"][0]) == 0 and time.monotonic() < deadline:
        pool.poll(0.1)
        time.sleep(0.1)
    assert victim not in pids(pool)
