"""Kill vLLM's processes at random moments of training: is any sample lost, or trained twice?

    .venv-vllm/bin/python -m benchmarks.engine.vllm_kills [--kills 20] [--seed 0] [--strategy sorted-replay] [--json]

The script trains the tiny model again and again until it has killed the given number of processes. Each kill hits
vLLM's core or its worker, a random time after a random event: during prefill, decode or publication. Every run must
complete, or stop with an error of this package. In both cases its ledger is verified from the file.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress

from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.errors import SortedRLError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify
from sortedrl.telemetry.events import Event
from sortedrl.trainer import SortedTrainer

NAMES = ("VLLM::EngineCor", "VLLM::Worker")


class Killer:
    """An event sink that kills one of vLLM's processes after a random number of events and a random delay."""

    def __init__(self, kills: int, seed: int) -> None:
        self.left = kills
        self.done: list[dict[str, Any]] = []
        self._rng = random.Random(seed)
        self._countdown = self._draw()

    def _draw(self) -> int:
        return self._rng.randrange(20, 140)

    def emit(self, event: Event) -> None:
        self._countdown -= 1
        if self._countdown <= 0 and self.left > 0:
            self._countdown = self._draw()
            self.left -= 1
            delay = self._rng.choice([0.0, self._rng.random() * 0.2])
            timer = threading.Timer(delay, self._kill, [self._rng.choice(NAMES), event.kind])
            timer.daemon = True
            timer.start()

    def _kill(self, name: str, after: str) -> None:
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith(name):
                os.kill(process.pid, signal.SIGKILL)
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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="sorted-replay")
    options = parser.parse_args()
    killer, outcomes, totals, number = Killer(options.kills, options.seed), Counter[str](), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("kills", total=options.kills)
        while killer.left > 0:
            trainer = SortedTrainer(
                args=make_config(Path(folder), number, options.strategy), sinks=[killer], quiet=True
            )
            number += 1
            try:
                summary = trainer.train()
                outcomes[str(summary.status)] += 1
                assert summary.ledger is not None, "a run has a ledger"
                totals.update({"lost": summary.ledger.lost, "duplicated": summary.ledger.duplicated})
            except SortedRLError as error:
                outcomes[f"stopped: {error}"] += 1
            with Ledger(trainer.run_dir / "ledger.sqlite") as ledger:
                verdict = verify(ledger)
            totals.update({name: verdict.counts[name] for name in ("samples", "trained", "live")})
            totals["violations"] += verdict.num_violations
            progress.update(task, completed=options.kills - killer.left)
    left = [p.name() for p in psutil.Process().children(recursive=True) if p.name().startswith("VLLM")]
    result = {
        "kills": killer.done,
        "num_kills": len(killer.done),
        "runs": dict(outcomes),
        "ledger": dict(totals),
        "processes_left": left,
    }
    save("vllm_kills", {"options": vars(options), "result": result})
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
