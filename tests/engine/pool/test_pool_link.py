"""A cluster of two machines with a bad line between them: what a delay and a cut cost is time.

The driver and Ray's head stand in one network, the engines in another (link.py). Minutes: `make test-slow`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from sortedrl.config.shipped import shipped_path
from tests.support.slow_network import ADDRESSES, SlowNetwork, missing_requirement

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_requirement() is not None, reason=str(missing_requirement())),
    pytest.mark.timeout(1800),
]
DRIVER, ENGINES = 0, 1
DELAY_S, CUT_S = 0.02, 15.0
PORT = 6379
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
}  # nobody else can reach these networks
QUICKSTART = shipped_path("quickstart")


@pytest.fixture
def link() -> Iterator[SlowNetwork]:
    link = SlowNetwork(DELAY_S)
    yield link
    link.close()


@pytest.fixture
def cluster(link: SlowNetwork) -> Iterator[str]:
    """Ray's head on one side without processors, and a node with two on the other."""
    ray = str(Path(sys.executable).parent / "ray")
    folder = tempfile.mkdtemp(prefix="rl-", dir="/tmp")  # sockets lie in it: no long names
    address = f"{ADDRESSES[DRIVER]}:{PORT}"
    shared = ["--disable-usage-stats", "--block", "--object-store-memory=200000000"]
    head = [f"--node-ip-address={ADDRESSES[DRIVER]}", f"--port={PORT}", "--num-cpus=0", f"--temp-dir={folder}"]
    node = [f"--address={address}", f"--node-ip-address={ADDRESSES[ENGINES]}", "--num-cpus=2"]
    started: list[subprocess.Popen[bytes]] = []

    def start(side: int, options: list[str]) -> None:
        command = link.command(side, [ray, "start", *options, *shared])
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT))

    def num_nodes() -> int:
        count = f"import ray; ray.init('{address}', logging_level=50); print(sum(n['Alive'] for n in ray.nodes()))"
        command = link.command(DRIVER, [sys.executable, "-c", count])
        found = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        return int(found.stdout) if found.returncode == 0 else 0

    try:
        start(DRIVER, ["--head", "--include-dashboard=false", *head])
        wait_for(lambda: num_nodes() == 1)
        start(ENGINES, node)
        wait_for(lambda: num_nodes() == 2)
        yield address
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(is_there: Callable[[], bool], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.5)


def times_of(events: Path, kind: str) -> list[float]:
    lines = events.read_text(encoding="utf-8").splitlines() if events.is_file() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event["t"] for event in found if event["kind"] == kind]


def test_a_cut_only_costs_time(link: SlowNetwork, cluster: str, tmp_path: Path) -> None:
    settings = ["engine.replicas=2", "run.samples=512", "eval.prompts=0", "checkpoint.save=false", "run.report=false"]
    code = "from sortedrl.cli import main; main()"
    command = [sys.executable, "-c", code, "train", str(QUICKSTART), *settings, f"run.dir={tmp_path}"]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            link.command(DRIVER, [*command, "--cluster", cluster, "--json"]),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=ENVIRONMENT,
        )
        events = tmp_path / "quickstart" / "events.jsonl"
        wait_for(lambda: len(times_of(events, "UpdateDone")) >= 4 or run.poll() is not None)
        link.is_cut = True
        time.sleep(CUT_S)
        link.is_cut = False
        out, _ = run.communicate(timeout=900)
    messages = (tmp_path / "log").read_text()
    assert run.returncode == 0, messages
    (summary,) = json.loads(out)["runs"]
    assert summary["status"] == "complete"
    assert summary["ledger"] == {"loaded": 512, "trained": 512, "lost": 0, "duplicated": 0}
    assert link.num_dropped > 0, "the run was over before the line was cut"
    ends = times_of(events, "AttemptEnded")
    longest_gap = max(after - before for before, after in pairwise(ends))
    assert longest_gap > CUT_S / 2, "the cut was not felt"
    assert "is gone" not in messages, "an engine was taken for dead"
