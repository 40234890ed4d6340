"""Kill a sharded run while it saves, and its learner processes while it trains: nothing may be lost or trained twice.

    python -m benchmarks.ledger.rank_storm [--kills 20] [--rank-kills 3] [--json]

Two ranks train the tiny model, and write checkpoints in the background.

- `saves`: a checkpoint after every update. The trainer is killed (SIGKILL) at a random moment while one is written, and
  resumed, again and again. A kill counts if it leaves the partial folder of a checkpoint behind. Trainer and ranks are
  copies of one process, because they have to start often: the ranks run the code of Ray's actors, over gloo and pipes.
  After every kill the ledger is verified from its file. At every resume, weights and optimizer state of the ranks are
  compared with the shards of the named checkpoint, read by one process.
- `ranks`: the shipped command, with Ray. A checkpoint after every fifth update, and two engines in processes of their
  own. A rank is killed at a random moment between two updates or during one. The run must end by itself, and no engine
  may be started again.

A run with the same seed that nobody disturbs gives the weights to compare those of `saves` with. The schedule waits for
every update, so they are equal bit by bit. Two engines finish answers in any order, so `ranks` is not compared.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import psutil
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.ledger.forked import fork
from benchmarks.record import QUICKSTART, ROOT, make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.config.shipped import shipped_path
from sortedrl.learner.sharded.learner import ShardedLearner
from sortedrl.learner.sharded.shard_files import OPTIMIZER, SHARDS_FOLDER, WEIGHTS, read_shards
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify
from sortedrl.run import save_and_resume
from sortedrl.run.builders import parts as run_parts
from sortedrl.run.checkpoint_folder import Checkpoints
from sortedrl.telemetry.summary import Summary
from sortedrl.trainer import SortedTrainer

RANKS, ENGINES = "ray::_RankActor", "ray::_EngineActor"  # the titles that Ray gives to their processes
NUM_ENGINES = 2
WARNED, ENGINE_GONE = "the ranks start again from", "of the pool is gone"  # in the messages of a run
PATIENCE_S = 900.0  # a busy machine may hold a process for minutes
LONGEST_SAVE_S = 0.5  # a kill comes at most this long after a checkpoint was begun


def config_of(folder: Path, name: str, seed: int, updates: int) -> SortedConfig:
    return SortedConfig.load(shipped_path(QUICKSTART), settings(folder, name, seed, updates))


def settings(folder: Path, name: str, seed: int, updates: int, *, has_pool: bool = False) -> list[str]:
    chosen = {
        "run.dir": str(folder),
        "run.name": name,
        "run.seed": seed,
        "run.samples": 16 * updates,
        "run.report": "false",
        "schedule.strategy": "sorted-replay",
        "engine.max_new_tokens": 96,
        "eval.prompts": 0,
        "reward.grace_s": 60,  # on a busy machine slow scores would otherwise change batches
        "learner.ranks": 2,
        "learner.rank_cpus": 0.25,
        "checkpoint.every_updates": 1,
    }
    if has_pool:
        chosen |= {"engine.replicas": NUM_ENGINES, "engine.replica_cpus": 0.25, "checkpoint.every_updates": 5}
    return [f"{key}={value}" for key, value in chosen.items()]


# ---- the process that trains -----------------------------------------------------------------------------------------


class ForkedRanks:
    """Ranks in copies of this process, which need no second to start: the code of Ray's actors, over pipes."""

    def __init__(self, size: int, store: Path) -> None:
        self.gpus: list[tuple[str, int]] = []
        self._ends: list[Any] = []
        for rank in range(size):
            ours, theirs = multiprocessing.Pipe()
            if os.fork() == 0:
                for end in (*self._ends, ours):  # so that a rank ends when the trainer does
                    end.close()
                serve_rank(rank, size, store, theirs)
            theirs.close()
            self._ends.append(ours)
        self._lock = threading.Lock()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        with self._lock:
            for end in self._ends:
                end.send((method, arguments))
            return [self._answer(end) for end in self._ends]

    def start(self, method: str) -> Callable[[], list[Any]]:
        """Ask until the save of every rank is done, so that other calls come in between."""

        def wait() -> list[Any]:
            while not all(self.call("is_saved")):
                time.sleep(0.005)
            return self.call(method)

        return wait

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def _answer(self, end: Any) -> Any:
        is_fine, result = end.recv()
        if not is_fine:
            raise RuntimeError(result)
        return result


def serve_rank(rank: int, size: int, store: Path, end: Any) -> NoReturn:
    """The program of a rank. It ends with the trainer."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from sortedrl.learner.sharded.ray_ranks import _RankActor

    meeting = dist.FileStore(str(store), size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size)
    actor = _RankActor(rank, size, 1)
    actor._mesh = init_device_mesh("cpu", (size,))
    while True:
        try:
            method, arguments = end.recv()
        except EOFError:
            os._exit(0)
        try:
            if method == "is_saved":
                end.send((True, actor._writer._saving.done()))
            else:
                end.send((True, getattr(actor, method)(*arguments)))
        except Exception as error:
            end.send((False, f"{type(error).__name__}: {error}"))


def train_forked(config: SortedConfig, errors: Path, *, resume: bool) -> int:
    """Train in a copy of this process, with ranks in copies of that; returns its process id.

    A resumed run first compares its ranks with the checkpoint, and notes what differs.
    """
    inner = save_and_resume.restore

    def restore(parts: Any, evaluator: Any, version: int, checkpoint: Path) -> dict[str, Any]:
        state = inner(parts, evaluator, version, checkpoint)
        note = {"checkpoint": checkpoint.name, "different": differences(parts.learner, checkpoint)}
        with (checkpoint.parents[1] / "compared.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
        return state

    def build_learner(config: SortedConfig, model: Any, initial: Any = None) -> ShardedLearner:
        ranks = ForkedRanks(config.num_ranks, errors.with_name(f"store-{os.getpid()}"))
        return ShardedLearner(model, config.learner, temperature=config.engine.temperature, ranks=ranks)

    def work() -> None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        save_and_resume.restore = restore
        run_parts.build_learner = build_learner
        SortedTrainer(args=config, quiet=True).train(resume=resume)

    return fork(work)


def differences(learner: Any, checkpoint: Path) -> list[str]:
    """Names of tensors that differ between the ranks and a checkpoint, which this process reads as a whole."""
    found = {WEIGHTS: dict(learner.model.named_parameters()), OPTIMIZER: learner.state_dict()["optimizer"]}
    different: list[str] = []
    for prefix, tensors in found.items():
        saved = read_shards(checkpoint / SHARDS_FOLDER, prefix)
        different += sorted(saved.keys() ^ tensors.keys())
        different += [name for name in saved.keys() & tensors.keys() if not torch.equal(saved[name], tensors[name])]
    return different


# ---- the process that kills ------------------------------------------------------------------------------------------


class Child(Protocol):
    """A training process."""

    pid: int

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class ForkedChild:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def start(words: list[str], errors: Path) -> subprocess.Popen[bytes]:
    """The command `train`, in a process of its own."""
    command = [sys.executable, "-c", "from sortedrl.cli import main; main()", "train", *words]
    with errors.open("ab") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True)


def wait_for(is_there: Callable[[], object], child: Child, errors: Path) -> bool:
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
    rng, errors = random.Random(seed), folder / "errors.txt"
    runs: list[SortedConfig] = []
    violations, is_under_way = 0, False
    counts = {"kills": 0, "kills_beside": 0, "resumes": 0, "resumes_of_checkpoints": 0}

    def train() -> ForkedChild:
        if is_under_way:
            counts["resumes"] += 1
            counts["resumes_of_checkpoints"] += Checkpoints(runs[-1].run_dir / "checkpoints").latest() is not None
        return ForkedChild(train_forked(runs[-1], errors, resume=is_under_way))

    for _ in track(range(kills), "kills in saves", console=Console(stderr=True), disable=quiet):
        while True:  # until a kill hits
            if not is_under_way:
                runs.append(config_of(folder, f"saves-{len(runs)}", seed + len(runs), updates))
            has_hit = kill_in_save(train(), runs[-1].run_dir, rng, errors)
            is_under_way = has_hit is not None
            violations += check_ledger(runs[-1].run_dir)
            if has_hit:
                counts["kills"] += 1
                break
            counts["kills_beside"] += is_under_way
    wait_for(lambda: False, train(), errors)
    folders = [run.run_dir for run in runs]
    compared = [json.loads(line) for run_dir in folders for line in _lines(run_dir / "compared.jsonl")]
    calm = config_of(folder, "calm", seed, updates)
    wait_for(lambda: False, ForkedChild(train_forked(calm, errors, resume=False)), errors)
    return {
        **counts,
        "runs": len(runs),
        "violations": violations + sum(map(check_ledger, folders)),
        "resumes_compared": len(compared),
        "resumes_different": sum(bool(note["different"]) for note in compared),
        "weights_as_undisturbed": digest(folders[0]) == digest(calm.run_dir),
        **totals(folders),
    }


def kill_in_save(child: ForkedChild, run_dir: Path, rng: random.Random, errors: Path) -> bool | None:
    """Kill the child in a checkpoint, not always its first; None if the run ended before.

    Returns whether the kill hit: the partial folder of a checkpoint is left behind.
    """
    checkpoints = run_dir / "checkpoints"

    def partial() -> Path | None:
        return next(checkpoints.glob(f".*.partial-{child.pid}"), None)

    for number in range(rng.randint(1, 4)):
        if number and not wait_for(lambda: partial() is None, child, errors):
            return None
        if not wait_for(partial, child, errors):
            return None
    time.sleep(rng.uniform(0, LONGEST_SAVE_S))
    if child.poll() is not None:
        wait_for(lambda: False, child, errors)  # raises if it failed
        return None
    others = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    psutil.wait_procs(others, timeout=60)  # its ranks end by themselves
    return partial() is not None


def kill_ranks(folder: Path, kills: int, seed: int, updates: int) -> dict[str, Any]:
    """Kill a rank again and again in one run."""
    rng, errors, run_dir = random.Random(seed), folder / "rank-errors.txt", folder / "ranks"
    child = start([QUICKSTART, *settings(folder, run_dir.name, seed, updates, has_pool=True)], errors)
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


def is_within_goal(record: dict[str, Any]) -> bool:
    """Whether nothing was lost, trained twice or restored wrongly, and everything was tried that should be."""
    parts = [record[part] for part in ("saves", "ranks") if part in record]
    bad = ("lost", "duplicated", "violations", "resumes_different", "engines_restarted")
    if any(part["trained"] != part["loaded"] or any(part.get(key, 0) for key in bad) for part in parts):
        return False
    saves, ranks = record.get("saves"), record.get("ranks")
    if ranks is not None and ranks["restarts"] != ranks["kills"]:
        return False
    if saves is None:
        return True
    is_compared = saves["resumes_compared"] == saves["resumes_of_checkpoints"] > 0
    return is_compared and saves["weights_as_undisturbed"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of the trainer, while a checkpoint is written")
    parser.add_argument("--rank-kills", type=int, default=3)
    parser.add_argument("--updates", type=int, default=40, help="updates per run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-save", action="store_true", help="do not write the result file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record: dict[str, Any] = {"updates": options.updates}
        if options.kills:
            record["saves"] = kill_in_saves(folder, options.kills, options.seed, options.updates, options.json)
        if options.rank_kills:
            record["ranks"] = kill_ranks(folder, options.rank_kills, options.seed, options.updates)
    if options.rank_kills:
        assert record["ranks"]["warnings"] == record["ranks"]["restarts"], "the run's messages are complete"
    record["within_goal"] = is_within_goal(record)
    if not options.no_save:
        save("rank_storm", record)
    print(json.dumps(record)) if options.json else Console().print(record)
    sys.exit(not record["within_goal"])


if __name__ == "__main__":
    main()
