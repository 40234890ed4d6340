"""Kill vLLM's processes at random moments of training: is any sample lost, or trained twice?

    python -m benchmarks.engine.vllm_kills [--kills 20] [--seed 0] [--strategy sorted-replay]
                                                          [--limit 900] [--json]

The script trains the tiny model again and again until it has killed the given number of processes. Each kill hits
vLLM's core or its worker, a random time after a random event: during prefill, decode, publication or a new start. A run
whose vLLM is lost too often in a row stops with an error of this package; the script resumes it, as its user would.
Whenever a run stops or completes, its ledger is verified from the file. Nearly all of the time goes into starts of
vLLM: 10 to 30 s for each kill. After `--limit` seconds nothing is killed any more, and the script ends with the run. It
fails if kills are missing, a sample is lost or trained twice, or a process of vLLM is left.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress

from benchmarks.engine.with_vllm import go_on_with_vllm
from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.errors import SortedRLError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verdict import Verdict
from sortedrl.ledger.verify import verify
from sortedrl.telemetry.events import Event
from sortedrl.trainer import SortedTrainer

NAMES = ("VLLM::EngineCor", "VLLM::Worker")
MAX_RESUMES = 3


class Killer:
    """An event sink that kills one of vLLM's processes after a random number of events and a random delay."""

    def __init__(self, kills: int, seed: int, limit_s: float) -> None:
        self.left = kills
        self._deadline = time.monotonic() + limit_s
        self.done: list[dict[str, Any]] = []
        self._rng = random.Random(seed)
        self._countdown = self._draw()
        self._timer: threading.Timer | None = None

    def _draw(self) -> int:
        return self._rng.randrange(20, 140)

    @property
    def is_over(self) -> bool:
        return self.left <= 0 or time.monotonic() > self._deadline

    def emit(self, event: Event) -> None:
        self._countdown -= 1
        if self._countdown <= 0 and not self.is_over:
            self._countdown = self._draw()
            self.left -= 1
            delay = self._rng.choice([0.0, self._rng.random() * 0.2])
            self._timer = threading.Timer(delay, self._kill, [self._rng.choice(NAMES), event.kind])
            self._timer.daemon = True
            self._timer.start()

    def wait(self) -> None:
        """Return when no kill is under way."""
        if self._timer is not None:
            self._timer.join()

    def _kill(self, name: str, after: str) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith(name):
                    process.kill()
                    self.done.append({"process": name, "after": after})
                    return
        self.left += 1  # no such process, since vLLM is restarting: try again

    def close(self) -> None:
        pass


def make_config(folder: Path, seed: int, strategy: str) -> SortedConfig:
    return SortedConfig(
        run={"name": f"kills-{seed}", "dir": str(folder), "seed": seed, "samples": 192, "report": False},
        engine={"kind": "vllm", "slots": 16, "max_new_tokens": 96},
        schedule={"strategy": strategy, "update_batch": 16},
        learner={"algorithm": "reinforce++", "group_size": 1, "lr": 1.5e-4},
        eval={"prompts": 0},
    )


def read_verdict(run_dir: Path) -> Verdict:
    with Ledger(run_dir / "ledger.sqlite") as ledger:
        return verify(ledger)


def train(config: SortedConfig, killer: Killer, outcomes: Counter[str], totals: Counter[str]) -> None:
    """Train until the run is complete; resume it when it stops."""
    for num_resumes in range(MAX_RESUMES + 1):
        trainer = SortedTrainer(args=config, sinks=[killer], quiet=True)
        try:
            summary = trainer.train(resume=num_resumes > 0)
        except SortedRLError as error:
            outcomes[f"stopped: {error}"] += 1
            totals["violations"] += read_verdict(trainer.run_dir).num_violations
            continue
        outcomes[str(summary.status)] += 1
        assert summary.ledger is not None, "a run has a ledger"
        verdict = read_verdict(trainer.run_dir)
        totals.update({"lost": summary.ledger.lost, "duplicated": summary.ledger.duplicated})
        totals.update({name: verdict.counts[name] for name in ("samples", "trained", "live")})
        totals["violations"] += verdict.num_violations
        return
    totals["given_up"] += 1


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="sorted-replay")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which nothing is killed any more")
    options = parser.parse_args()
    go_on_with_vllm()
    began, outcomes, totals, number = time.monotonic(), Counter[str](), Counter[str](), 0
    killer = Killer(options.kills, options.seed, options.limit)
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("kills", total=options.kills)
        while not killer.is_over:
            train(make_config(Path(folder), number, options.strategy), killer, outcomes, totals)
            killer.wait()
            number += 1
            progress.update(task, completed=len(killer.done))
    left = [p.name() for p in psutil.Process().children(recursive=True) if p.name().startswith("VLLM")]
    result = {
        "kills": killer.done,
        "num_kills": len(killer.done),
        "runs": dict(outcomes),
        "ledger": dict(totals),
        "processes_left": left,
        "seconds": round(time.monotonic() - began),
    }
    save("vllm_kills", {"options": vars(options), "result": result})
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))
    faults = ("violations", "lost", "duplicated", "given_up")
    return 1 if left or len(killer.done) < options.kills or any(totals[name] for name in faults) else 0


if __name__ == "__main__":
    sys.exit(main())
