"""Runs that are stopped by a signal, or go on: what they leave behind, in processes of their own.

One is started by the console script; the others have imported everything before, which is quicker.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.summary import Summary
from tests.cli.test_cli import QUICKSTART, SCRIPT, SMALL, checkpoint_loads, only_json
from tests.support.forked_process import WAIT_S, ForkedProcess, forked_command


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


ENDLESS = ["train", str(QUICKSTART), *SMALL, "run.samples=1000000", "run.dir=out", "run.report=false"]


def wait_for_updates(folder: Path, pid: int, count: int, *, name: str = "quickstart") -> list[int]:
    """Once the run has made so many updates: its worker processes."""
    metrics, deadline = folder / "out" / name / "metrics.jsonl", time.monotonic() + WAIT_S
    while not metrics.is_file() or metrics.read_text().count("\n") < count:
        assert is_alive(pid), "the run has ended by itself"
        assert time.monotonic() < deadline, "no update was made"
        time.sleep(0.02)
    return children(pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")


@needs_proc
def test_ctrl_c_keeps_what_was_trained(call: Any, tmp_path: Path) -> None:
    with subprocess.Popen(
        [SCRIPT, *ENDLESS, "--json"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            workers = wait_for_updates(tmp_path, run.pid, 2)
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=WAIT_S)
        finally:
            run.kill()
    assert run.returncode == 130, err
    check_kept(call, tmp_path, out, err, workers)


@needs_proc
@pytest.mark.parametrize(
    ("request_to_end", "options", "code"),
    [(signal.SIGTERM, [], 143), (signal.SIGHUP, [], 129), (signal.SIGTERM, ["--exit-zero"], 0)],
)
def test_a_request_to_end_keeps_what_was_trained(
    call: Any, tmp_path: Path, request_to_end: int, options: list[str], code: int
) -> None:
    with forked_command(tmp_path, *ENDLESS, "--json", *options) as run:
        workers = wait_for_updates(tmp_path, run.pid, 2)
        os.kill(run.pid, request_to_end)
        assert run.wait() == code, run.err
    check_kept(call, tmp_path, run.out, run.err, workers)


def check_kept(call: Any, folder: Path, out: str, err: str, workers: list[int]) -> None:
    """What a run that was stopped leaves behind: all that it trained, and no process."""
    assert workers
    assert "Traceback" not in err
    run_dir = folder / "out" / "quickstart"
    summary = Summary.read(run_dir / "summary.json")
    assert only_json(out)["runs"][0] == json.loads((run_dir / "summary.json").read_text())
    assert summary.status == "stopped"
    assert summary.updates >= 2
    assert summary.ledger is not None
    assert (summary.ledger.lost, summary.ledger.duplicated) == (0, 0)
    assert summary.ledger.trained == summary.samples
    (line,) = [line for line in err.splitlines() if line.startswith("stopped after")]
    assert f"{summary.updates} updates, {summary.samples} samples trained" in line
    assert f"kept: summary {Path('out/quickstart/summary.json')}, weights {Path('out/quickstart/checkpoints')}" in line
    assert f"go on with: sortedrl train --resume {Path('out/quickstart')}" in err
    assert call("ledger", str(run_dir), "--verify", "--json")[0] == 0
    checkpoint_loads(run_dir, summary.updates)
    assert not [pid for pid in workers if is_alive(pid)]


@needs_proc
def test_a_comparison_that_is_stopped_says_so(tmp_path: Path) -> None:
    with forked_command(tmp_path, "compare", *ENDLESS[1:], "--strategies", "sync,sorted-partial", "--json") as run:
        wait_for_updates(tmp_path, run.pid, 1, name="quickstart-sync-seed0")
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait() == 143, run.err
    assert [summary["status"] for summary in only_json(run.out)["runs"]] == ["stopped"]


@needs_proc
def test_a_closed_terminal_saves_the_run(tmp_path: Path) -> None:
    terminal, inside = os.openpty()
    with ForkedProcess(tmp_path, train_in_terminal, ENDLESS, os.ttyname(inside)) as run:
        wait_for_updates(tmp_path, run.pid, 1)
        os.close(inside)
        os.close(terminal)  # the system sends SIGHUP; from now on every write to the terminal fails
        assert run.wait() == 129, run.err
    assert Summary.read(tmp_path / "out" / "quickstart" / "summary.json").status == "stopped"


def train_in_terminal(arguments: list[str], terminal: str) -> None:
    """Run the command in a session of its own, with `terminal` as its controlling terminal."""
    from sortedrl import cli

    os.setsid()
    file = os.open(terminal, os.O_RDWR)  # the first terminal that a session leader opens becomes its own
    for number in range(3):
        os.dup2(file, number)
    sys.argv = ["sortedrl", *arguments]
    cli.main()


@needs_proc
def test_a_second_request_ends_it_at_once(call: Any, tmp_path: Path) -> None:
    # After the first update comes an evaluation that takes a while: a first request is not heard before it is over.
    with forked_command(tmp_path, *ENDLESS, "eval.prompts=256", "eval.every_samples=16") as run:
        workers = wait_for_updates(tmp_path, run.pid, 1)
        os.kill(run.pid, signal.SIGINT)
        os.kill(run.pid, signal.SIGTERM)  # two of the same kind could be taken for one
        assert run.wait() == 130, run.err
    assert "Traceback" not in run.err
    assert "interrupted: what was written to the run directory is kept" in run.err
    run_dir = tmp_path / "out" / "quickstart"
    assert not (run_dir / "summary.json").exists()
    assert [event.kind for event in read_events(run_dir / "events.jsonl")].count("UpdateDone") == 1
    assert not [pid for pid in workers if is_alive(pid)]
    code, proof, _ = call("ledger", str(run_dir), "--verify")
    assert code == 0, proof
    assert proof.startswith("proven: ")


def test_a_run_of_any_name_can_be_resumed(tmp_path: Path) -> None:
    name = "exp[a] 🚀 é"

    def run(*arguments: str) -> ForkedProcess:
        with forked_command(tmp_path, "train", *arguments) as command:
            assert command.wait() == 0, command.err
        return command

    done = run(str(QUICKSTART), *SMALL, f"run.name={name}", "run.dir=out", "run.report=false")
    assert str(Path("out") / name / "summary.json") in done.err
    again = run("--resume", str(Path("out") / name), "run.samples=128")
    assert "resumed at version" in again.err


ENDING = """
import atexit, os, signal, sys
from sortedrl import cli

def clean_up():
    for _ in range(int(sys.argv.pop())):
        os.kill(os.getpid(), signal.SIGINT)
    print("cleaned up", flush=True)

atexit.register(clean_up)
presses, sys.argv = sys.argv.pop(), ["sortedrl", "configs"]
try:
    cli.main()
finally:
    sys.argv.append(presses)
"""


def test_ctrl_c_while_python_ends_tells_nothing_and_again_ends_it(tmp_path: Path) -> None:
    once, twice = (
        subprocess.run(
            [sys.executable, "-c", ENDING, str(n)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for n in (1, 2)
    )
    assert (once.returncode, once.stderr) == (0, "")
    assert once.stdout.endswith("cleaned up\n")
    assert (twice.returncode, twice.stderr) == (-signal.SIGINT, "")
    assert "cleaned up" not in twice.stdout
