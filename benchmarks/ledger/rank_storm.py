"""Kill a sharded run while it saves, and its learner processes while it trains: nothing may be lost or trained twice.

    python -m benchmarks.ledger.rank_storm [--kills 20] [--rank-kills 3] [--json]

Two ranks train the tiny model, and write checkpoints in the background.

- `saves`: a checkpoint after every update. The trainer is killed (SIGKILL) at a random moment while one is written, and
  resumed, again and again. After every kill the ledger is verified from its file. At every resume, weights and
  optimizer state of the ranks are compared with the shards of the named checkpoint, which one process reads.
- `ranks`: a checkpoint after every fifth update, and two engines in processes of their own. A rank is killed at a
  random moment between two updates or during one. The run must end by itself, and no engine may be started again.

A run with the same seed that nobody disturbs gives the weights to compare those of `saves` with. The schedule waits for
every update, so they are equal bit by bit. Two engines finish answers in any order, so `ranks` is not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import track

from benchmarks.record import QUICKSTART, ROOT, make_parser, save
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify
from sortedrl.telemetry.summary import Summary

RANKS, ENGINES = "ray::_RankActor", "ray::_EngineActor"  # the titles that Ray gives to their processes
NUM_ENGINES = 2
WARNED, ENGINE_GONE = "the ranks start again from", "of the pool is gone"  # in the messages of a run
PATIENCE_S = 900.0  # a busy machine may hold a process for minutes
LONGEST_SAVE_S = 0.5  # a kill comes at most this long after a checkpoint was begun


def settings(folder: Path, name: str, seed: int, updates: int, *, engines: int) -> list[str]:
    chosen = {
        "run.dir": str(folder),
        "run.name": name,
        "run.seed": seed,
        "run.samples": 16 * updates,
        "run.report": "false",
        "schedule.strategy": "sorted-replay",
        "engine.max_new_tokens": 96,
        "eval.prompts": 0,
        "learner.ranks": 2,
        "learner.rank_cpus": 0.25,
        "checkpoint.every_updates": 1,
    }
    if engines > 1:
        chosen |= {"engine.replicas": engines, "engine.replica_cpus": 0.25, "checkpoint.every_updates": 5}
    return [f"{key}={value}" for key, value in chosen.items()]


# ---- the process that trains -----------------------------------------------------------------------------------------


def train(words: list[str]) -> None:
    """Run the command `train`; a resumed run first compares its ranks with the checkpoint, and notes what differs."""
    from sortedrl.cli import main
    from sortedrl.run import save_and_resume

    inner = save_and_resume.restore

    def restore(parts: Any, evaluator: Any, version: int, checkpoint: Path) -> dict[str, Any]:
        state = inner(parts, evaluator, version, checkpoint)
        note = {"checkpoint": checkpoint.name, "different": differences(parts.learner, checkpoint)}
        with (checkpoint.parents[1] / "compared.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
        return state

    save_and_resume.restore = restore
    sys.argv = ["sortedrl", "train", *words]
    main()


def differences(learner: Any, checkpoint: Path) -> list[str]:
    """Names of tensors that differ between the ranks and a checkpoint, which this process reads as a whole."""
    import torch

    from sortedrl.learner.sharded.shard_files import OPTIMIZER, SHARDS_FOLDER, WEIGHTS, read_shards

    found = {WEIGHTS: dict(learner.model.named_parameters()), OPTIMIZER: learner.state_dict()["optimizer"]}
    different: list[str] = []
    for prefix, tensors in found.items():
        saved = read_shards(checkpoint / SHARDS_FOLDER, prefix)
        different += sorted(saved.keys() ^ tensors.keys())
        different += [name for name in saved.keys() & tensors.keys() if not torch.equal(saved[name], tensors[name])]
    return different


# ---- the process that kills ------------------------------------------------------------------------------------------


def start(words: list[str], errors: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.ledger.rank_storm", "--train", *words]
    with errors.open("ab") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True)


def wait_for(is_there: Callable[[], object], child: subprocess.Popen[bytes], errors: Path) -> bool:
    """Wait until something is there; False if the child has ended before. Raises SystemExit if the child failed."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_there():
        if (code := child.poll()) is not None:
            if code:
                raise SystemExit(f"a training process failed with exit code {code}:\n{errors.read_text()[-3000:]}")
            return False
        if time.monotonic() > deadline:
            child.kill()
            raise SystemExit(f"the training process did nothing for {PATIENCE_S:g} s:\n{errors.read_text()[-3000:]}")
        time.sleep(0.005)
    return True


def check_ledger(run_dir: Path) -> int:
    """The number of violations in the ledger file of a run."""
    path = run_dir / "ledger.sqlite"
    if not path.is_file():
        return 0
    with Ledger(path) as ledger:
        return len(verify(ledger).violations)


def kill_in_saves(folder: Path, kills: int, seed: int, updates: int, quiet: bool) -> dict[str, Any]:
    """Kill trainers while checkpoints are written, in as many runs as that takes."""
    rng = random.Random(seed)
    errors = folder / "errors.txt"
    runs: list[Path] = []
    hits, violations, words = 0, 0, []
    progress = track(range(kills), "kills in saves", console=Console(stderr=True), disable=quiet)
    for _ in progress:
        while True:
            if not words:
                runs.append(folder / f"saves-{len(runs)}")
                words = [QUICKSTART, *settings(folder, runs[-1].name, seed + len(runs) - 1, updates, engines=1)]
            run_dir = runs[-1]
            child = start(words, errors)
            words = ["--resume", str(run_dir)]
            if kill_in_save(child, run_dir, rng, errors):
                break
            words = []  # the run has ended
        hits += 1
        if not (run_dir / "config.toml").is_file():
            runs.pop()
            words = []
        violations += check_ledger(run_dir)
    if words:
        child = start(words, errors)
        wait_for(lambda: False, child, errors)
    compared = [json.loads(line) for run in runs for line in _lines(run / "compared.jsonl")]
    return {
        "kills": hits,
        "runs": len(runs),
        "violations": violations + sum(check_ledger(run) for run in runs),
        "resumes_compared": len(compared),
        "resumes_different": sum(bool(note["different"]) for note in compared),
        **totals(runs),
    }


def kill_in_save(child: subprocess.Popen[bytes], run_dir: Path, rng: random.Random, errors: Path) -> bool:
    """Kill the child while it writes a checkpoint, not always its first; False if the run ended before."""
    checkpoints = run_dir / "checkpoints"

    def partial() -> Path | None:
        return next(checkpoints.glob(f".*.partial-{child.pid}"), None)

    for number in range(rng.randint(1, 4)):
        if number and not wait_for(lambda: partial() is None, child, errors):
            return False
        if not wait_for(partial, child, errors):
            return False
    time.sleep(rng.uniform(0, LONGEST_SAVE_S))
    if child.poll() is not None:
        return False
    others = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.wait()
    psutil.wait_procs(others, timeout=60)  # what is left of Ray ends by itself
    return True


def kill_ranks(folder: Path, kills: int, seed: int, updates: int) -> dict[str, Any]:
    """Kill a rank again and again in one run."""
    rng, errors, run_dir = random.Random(seed), folder / "rank-errors.txt", folder / "ranks"
    child = start([QUICKSTART, *settings(folder, run_dir.name, seed, updates, engines=NUM_ENGINES)], errors)
    engines: set[int] = set()  # all their processes
    for number in range(kills):

        def has_progressed(num_restarts: int = number) -> bool:
            """Whether the restart before is over, and an update has followed it."""
            kinds = [json.loads(line)["kind"] for line in _lines(run_dir / "events.jsonl")]
            after = kinds[-kinds[::-1].index("LearnerRestarted") :] if "LearnerRestarted" in kinds else kinds
            return kinds.count("LearnerRestarted") == num_restarts and "UpdateDone" in after

        if not wait_for(has_progressed, child, errors):
            raise SystemExit(f"the run ended after {number} of {kills} kills: raise --updates")
        time.sleep(rng.uniform(0, 1.5))
        engines |= {process.pid for process in processes_of(child, ENGINES)}
        rng.choice(processes_of(child, RANKS)).send_signal(signal.SIGKILL)

    def look() -> bool:
        engines.update(process.pid for process in processes_of(child, ENGINES))
        time.sleep(0.2)
        return False

    wait_for(look, child, errors)
    warnings = " ".join(errors.read_text().split())
    events = [json.loads(line) for line in _lines(run_dir / "events.jsonl")]
    restarts = [event for event in events if event["kind"] == "LearnerRestarted"]
    return {
        "kills": kills,
        "restarts": len(restarts),
        "updates_repeated": [event["updates_repeated"] for event in restarts],
        "restart_s": [round(event["seconds"], 2) for event in restarts],
        "violations": check_ledger(run_dir),
        "warnings": warnings.count(WARNED),
        "engines_restarted": warnings.count(ENGINE_GONE),
        "engine_processes": len(engines),  # one of them is a spare
        **totals([run_dir]),
    }


def processes_of(child: subprocess.Popen[bytes], title: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    try:
        for process in psutil.Process(child.pid).children(recursive=True):
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                    found.append(process)
            except (psutil.NoSuchProcess, IndexError):
                continue
    except psutil.NoSuchProcess:
        pass
    return found


def totals(runs: list[Path]) -> dict[str, Any]:
    """Counts of the ledgers of complete runs."""
    ledgers = [Summary.read(run / "summary.json").ledger for run in runs]
    found = [ledger.model_dump() for ledger in ledgers if ledger is not None]
    assert len(found) == len(runs), "a complete run has the counts of its ledger"
    return {key: sum(ledger[key] for ledger in found) for key in ("loaded", "trained", "lost", "duplicated")}


def digest(run_dir: Path) -> str:
    """Of the weights that a run has exported at its end."""
    return hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


def _lines(path: Path) -> list[str]:
    """The complete lines of a file that may still grow; empty if it is not there."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.is_file() else []


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of the trainer, while a checkpoint is written")
    parser.add_argument("--rank-kills", type=int, default=3)
    parser.add_argument("--updates", type=int, default=40, help="updates per run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-save", action="store_true", help="do not write the result file")
    parser.add_argument("--train", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # on a busy machine
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record: dict[str, Any] = {"updates": options.updates}
        if options.kills:
            calm = folder / "calm"
            words = [QUICKSTART, *settings(folder, calm.name, options.seed, options.updates, engines=1)]
            wait_for(lambda: False, start(words, folder / "errors.txt"), folder / "errors.txt")
            record["saves"] = kill_in_saves(folder, options.kills, options.seed, options.updates, options.json)
            record["saves"]["weights_as_undisturbed"] = digest(folder / "saves-0") == digest(calm)
        if options.rank_kills:
            record["ranks"] = kill_ranks(folder, options.rank_kills, options.seed, options.updates)
    parts = [record[part] for part in ("saves", "ranks") if part in record]
    bad = ("lost", "duplicated", "violations", "resumes_different", "engines_restarted")
    if options.rank_kills:
        assert record["ranks"]["warnings"] == record["ranks"]["restarts"], "the run's messages are complete"
    record["within_goal"] = all(
        part["trained"] == part["loaded"] and not any(part.get(key, 0) for key in bad) for part in parts
    )
    if not options.no_save:
        save("rank_storm", record)
    print(json.dumps(record)) if options.json else Console().print(record)
    sys.exit(not record["within_goal"])


if __name__ == "__main__":
    main()
