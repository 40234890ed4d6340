"""A long run in one process: does it keep memory, file descriptors, threads or files that it does not need?

    python -m benchmarks.ledger.soak [--samples 500000] [--folder DIR] [--json]

The controller, the durable buffer with its ledger, the event and metric files and the reward workers are those of a
real run. Engine and learner are simulated, so that half a million samples take minutes: answers have real token ids,
which are decoded and scored by the embedded task's verifier in worker processes. Every tenth of the run is one line:
memory of this process and of the reward workers (proportional set size), open file descriptors, threads, processes, and
files of the run directory. Afterwards the ledger is verified, and audited by the fuzzer's SQL.

Goals: every sample trained once; no more descriptors, threads, processes and files at the end than after a tenth of
the run; memory grows by at most 64 MB from there. A goal that is missed is exit code 1.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, save
from fuzz.audit import audit
from sortedrl.adapters.host_files import HostFiles
from sortedrl.clock import VirtualClock
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import OWN_NOISE, Request, Sampling
from sortedrl.engine.sim.cost import UnitCost
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify as verify_ledger
from sortedrl.records import Prompt, Sample, sample_seed
from sortedrl.reward.pool import RewardPool
from sortedrl.reward.scorer import SampleScorer
from sortedrl.schedule import resolve_knobs
from sortedrl.simulate.answers import TraceAnswers
from sortedrl.simulate.run import SimLearner
from sortedrl.tasks.knights import DEFAULT_PEOPLE, KnightsRows, verify
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.telemetry.events import RunEnded, RunStarted
from sortedrl.telemetry.summary import summarize

BATCH, SLOTS, NUM_PROMPTS, CAP, MEDIAN = 128, 128, 5_000, 96, 12
NUM_TOKENS = 44  # of the embedded vocabulary
DIVERGENCE = 1e-3  # share of tokens that each version writes otherwise
GOAL_GROWTH_MB = 64.0


class TokenAnswers(TraceAnswers):
    """Answers with token ids, which follow from seed and position."""

    is_blank = False

    def written(self, request: Request, start: int, count: int, version: int, cache: int) -> tuple[Any, Any]:
        first = request.seed % 7919
        return [(first + 31 * place) % NUM_TOKENS for place in range(start, start + count)], [-0.5] * count


class PuzzleLoader:
    """Samples of the embedded task's puzzles, epoch after epoch."""

    def __init__(self, tokenizer: Any, num_samples: int) -> None:
        source = KnightsRows(seed=0, people=dict(DEFAULT_PEOPLE))
        self.prompts = []
        for number in range(min(NUM_PROMPTS, num_samples)):
            row = source.row(number)
            content = row.pop("prompt")
            tokens = tuple(tokenizer(content)["input_ids"])
            self.prompts.append(Prompt(id=f"knights/{number}", tokens=tokens, content=content, columns=row))
        self.num_samples, self.num_loaded = num_samples, 0
        self.seeds = [self._seed(number) for number in range(num_samples)]

    def _seed(self, number: int) -> int:
        epoch, place = divmod(number, len(self.prompts))
        return sample_seed(0, epoch, self.prompts[place].id, 0)

    def load(self, cohort: int, count: int) -> list[Sample]:
        first, self.num_loaded = self.num_loaded, min(self.num_loaded + count, self.num_samples)
        samples = []
        for number in range(first, self.num_loaded):
            epoch, place = divmod(number, len(self.prompts))
            prompt, seed = self.prompts[place], self.seeds[number]
            samples.append(Sample(id=number, prompt=prompt, index=0, epoch=epoch, cohort=cohort, seed=seed, budget=CAP))
        return samples


def processes() -> list[int]:
    """This process and its children."""
    found = [os.getpid()]
    for thread in Path("/proc/self/task").iterdir():
        found += map(int, (thread / "children").read_text().split())
    return found


def memory_mb(pid: int) -> float:
    """Of a process, with its share of what it shares with others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def look(run_dir: Path, num_samples: int, began: float) -> dict[str, Any]:
    ours, *helpers = processes()
    return {
        "samples": num_samples,
        "seconds": round(time.perf_counter() - began, 1),
        "memory_mb": round(memory_mb(ours), 1),
        "workers_mb": round(sum(map(memory_mb, helpers)), 1),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "processes": 1 + len(helpers),
        "files": sum(1 for path in run_dir.rglob("*") if path.is_file()),
        "run_mb": round(sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file()) / 1e6, 1),
    }


def soak(run_dir: Path, num_samples: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines that were looked at, and the summary's counts of the ledger."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(knights_tiny_path())
    rng, clock, knobs = random.Random(0), VirtualClock(), resolve_knobs("sorted-replay", BATCH, lookahead=1)
    loader = PuzzleLoader(tokenizer, num_samples)
    lengths = [min(CAP, 1 + int(rng.lognormvariate(0, 1) * MEDIAN)) for _ in range(num_samples)]
    answers = TokenAnswers(lengths, loader.seeds, divergence=DIVERGENCE, cap=CAP)
    engine = SimEngine(answers, slots=SLOTS, clock=clock, cost=UnitCost())
    started = RunStarted(
        t=0.0,
        strategy="sorted-replay",
        seed=0,
        slots=SLOTS,
        update_batch=BATCH,
        total_samples=num_samples,
        max_staleness=knobs.max_staleness,
    )
    files = HostFiles.open(run_dir, updates_done=0, grouped=False, knobs=knobs, noise=OWN_NOISE, started=started)
    lines: list[dict[str, Any]] = []
    every, began = max(1, num_samples // BATCH // 10), time.perf_counter()

    def on_update(_: object) -> None:
        if files.buffer.num_updates % every == 0:
            lines.append(look(run_dir, files.buffer.num_trained, began))

    with RewardPool([verify], timeout_s=10.0, workers=1) as pool:
        parts = LoopParts(
            engine=engine,
            learner=SimLearner(clock=clock, cost=UnitCost()),
            scorer=SampleScorer(pool=pool, tokenizer=tokenizer),
            load_samples=loader.load,
            on_update=on_update,
        )
        settings = LoopSettings(knobs=knobs, total_samples=num_samples, sampling=Sampling())
        controller = Controller(files.buffer, parts, settings, clock=clock, emit=files.emit)
        assert controller.run(), "it stopped before its end"
        files.emit(RunEnded(t=clock.now(), reason="complete"))
        facts = controller.summary_facts()
        summary = summarize(files.metrics, stats=engine.stats(), **facts)
        files.write_summary(summary)
        files.close(commit=True)
    return lines, {"updates": summary.updates, "trained": summary.samples}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=500_000)
    parser.add_argument("--folder", type=Path, help="where to write the run; it needs about 2 GB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run_dir = Path(folder) / "run"
        cpu_began = time.process_time()
        lines, counts = soak(run_dir, options.samples)
        cpu_s = time.process_time() - cpu_began
        found = audit(run_dir / "ledger.sqlite", is_complete=True, num_samples=options.samples)
        with Ledger(run_dir) as ledger:
            violations = verify_ledger(ledger).num_violations
    first, last = lines[0], lines[-1]
    growth = {name: round(last[name] - first[name], 1) for name in ("memory_mb", "workers_mb")}
    kept = {name: last[name] - first[name] for name in ("descriptors", "threads", "processes", "files")}
    record = {
        **counts,
        "cpu_s": round(cpu_s, 1),
        "audit": [str(finding) for finding in found],
        "violations": violations,
        "growth": {**growth, **kept},
        "within_goal": not found
        and not violations
        and max(growth.values()) <= GOAL_GROWTH_MB
        and max(kept.values()) <= 0,
        "lines": lines,
    }
    save("soak", record)
    if options.json:
        print(json.dumps(record))
    else:
        show(record)
    sys.exit(not record["within_goal"])


def show(record: dict[str, Any]) -> None:
    table = Table(*record["lines"][0], box=None)
    for line in record["lines"]:
        table.add_row(*map(str, line.values()))
    Console(width=120).print(table)
    Console(width=120).print({name: value for name, value in record.items() if name != "lines"})


if __name__ == "__main__":
    main()
