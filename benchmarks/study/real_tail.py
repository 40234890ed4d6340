"""A real model whose answers have a tail: trained tokens per second of each strategy against `sync` and `sync-large`.

    python -m benchmarks.study.real_tail [--strategies sync,sorted-replay] [--samples 240] [--slots 16] [--full]
        [--dtype bfloat16] [--threads 1] [--engine vllm] [--learn] [--json]

Trains the configuration tail-smollm2 once per strategy and seed, with the same prompts and sampling noise, each run a
process of the command `sortedrl train`. The first call makes the cold start with `sortedrl sft` and keeps it in the
folder of `--runs`. `rollout` is trained tokens / seconds of rollout. `whole` is trained tokens / seconds of rollout,
updates and publications together, without checkpoints and evaluations; updates of an `async` strategy overlap with
rollout.

`--learn` evaluates on held-out questions before and after training, and writes checkpoints. Its runs start from a model
with a bad habit: it is fine-tuned further on lists that an impatient teacher often ends too early, which training with
rewards can mend. The same command continues runs that were stopped and takes complete ones as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import ROOT, make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.schedule import Strategy
from sortedrl.tasks.counting import Questions, draw
from sortedrl.tasks.knights import is_heldout
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import BatchTaken
from sortedrl.telemetry.summary import Summary, share

CONFIG = "tail-smollm2"
STRATEGIES = ("sync", "sync-large", "sorted-replay", "async-on-policy")
SAMPLES = 240
LEARN_SAMPLES = 160
# As the recipe says. The seed is not the run's, so that the run gets prompts that the cold start has not seen.
SFT = ("task.options.median=6", "task.options.spread=0.9", "task.options.most=240", "--seed", "1")
# An engine in its own process and the learner take a core each. A process with two threads would disturb the other.
OVERLAP = ("engine.own_process=true", "run.threads=1")
# A higher rate than the recipe's, for few updates: later the model unlearns to stop (docs/research/log.md).
LEARN = ("learner.lr=2e-4",)
SPEED = ("eval.prompts=0", "checkpoint.save=false", "run.report=false")
FULL = ("lora.rank=0", "learner.lr=1e-5")
# The impatient teacher writes this share of the demonstrations and stops after each number with this probability.
IMPATIENT_SHARE, GIVE_UP = 0.75, 0.1
DEMONSTRATIONS = 640
IMPATIENT_SFT = ("sft.steps=40", "sft.lr=1e-4", "--seed", "2")

_out = Console(stderr=True, highlight=False)


# ---- runs ------------------------------------------------------------------------------------------------------------


def command(python: str, *arguments: str) -> list[str]:
    return [python, "-m", "sortedrl", *arguments]


def start_folder(runs: Path, base: SortedConfig) -> Path:
    """The folder of the cold start; its name changes with the settings that the weights depend on."""
    settings = base.resolved()
    settings["task"]["options"] |= {"median": None, "spread": None, "most": None}  # the cold start has its own: see SFT
    text = json.dumps([SFT, *(settings[name] for name in ("model", "task", "sft"))], sort_keys=True)
    return runs / f"start-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def make_start(runs: Path) -> Path:
    """Return the fine-tuned model to start from, made with the recipe's own command if it is not there."""
    folder = start_folder(runs, SortedConfig.load(CONFIG))
    if not folder.is_dir():
        _out.print(f"cold start of {CONFIG}, once: about nine minutes")
        arguments = ("sft", CONFIG, *SFT, "--out", str(folder))
        subprocess.run(command(sys.executable, *arguments), cwd=ROOT, stdout=sys.stderr, check=True)
    return folder


def make_impatient_start(runs: Path, start: Path) -> Path:
    """Return the model to start from with `--learn`: `start`, fine-tuned on lists that often end too early."""
    settings = json.dumps([IMPATIENT_SHARE, GIVE_UP, DEMONSTRATIONS, IMPATIENT_SFT])
    folder = runs / f"{start.name}-impatient-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
    if not folder.is_dir():
        _out.print("an impatient cold start, once: about two minutes")
        rows = folder.with_suffix(".jsonl")
        rows.write_text("".join(json.dumps(row) + "\n" for row in demonstrations(DEMONSTRATIONS)), encoding="utf-8")
        arguments = ("sft", CONFIG, f"model.path={start}", f"sft.path={rows}", *IMPATIENT_SFT, "--out", str(folder))
        subprocess.run(command(sys.executable, *arguments), cwd=ROOT, stdout=sys.stderr, check=True)
    return folder


def demonstrations(num: int) -> list[dict[str, str]]:
    """Lists by two teachers: one is right, the other often stops before the end."""
    options: dict[str, Any] = dict(SortedConfig.load(CONFIG).task.options)
    rng, questions = random.Random("real_tail/demonstrations"), Questions(**options)
    rows: list[dict[str, str]] = []
    while len(rows) < num:
        count = draw(rng, questions)
        if is_heldout(count.prompt):
            continue
        numbers, give_up = count.numbers, GIVE_UP if rng.random() < IMPATIENT_SHARE else 0.0
        end = next((place for place in range(1, len(numbers)) if rng.random() < give_up), len(numbers))
        rows.append({"prompt": count.prompt, "completion": " ".join(map(str, numbers[:end]))})
    return rows


def overrides(strategy: str, seed: int, start: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    samples = options.samples or (LEARN_SAMPLES if options.learn else SAMPLES)
    given = [
        f"schedule.strategy={strategy}",
        f"run.seed={seed}",
        f"run.dir={folder.parent}",
        f"run.name={folder.name}",
        f"run.samples={samples}",
        f"model.path={start}",
        f"engine.slots={options.slots}",
        f"schedule.update_batch={options.slots}",
        f"engine.kind={options.engine}",
    ]
    given += [f"engine.dtype={options.dtype}"] if options.dtype else []
    given += FULL if options.full else ()
    given += [f"run.threads={options.threads}"] if options.threads else []
    given += OVERLAP if strategy.startswith("async") else ()
    given += LEARN if options.learn else SPEED
    return given


def train(folder: Path, settings: Sequence[str], options: argparse.Namespace) -> None:
    """Run `sortedrl train`, or continue the run in `folder`. A speed run starts anew."""
    summary = folder / "summary.json"
    if options.learn and summary.exists() and Summary.read(summary).status == "complete":
        return
    if options.learn and (folder / "config.toml").exists():
        arguments = ["train", "--resume", str(folder), "--json"]
    else:
        shutil.rmtree(folder, ignore_errors=True)
        arguments = ["train", CONFIG, *settings, "--json"]
    done = subprocess.run(command(options.python, *arguments), cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"the run {folder} ended with exit code {done.returncode}: see the message above")


def read_lengths(folder: Path) -> list[int]:
    """The lengths of all trained answers, in tokens."""
    batches = (event for event in read_events(folder / "events.jsonl") if isinstance(event, BatchTaken))
    return [length for batch in batches for length in batch.lengths]


# ---- figures ---------------------------------------------------------------------------------------------------------


def speeds(runs: Sequence[Summary]) -> dict[str, float]:
    """Trained tokens per second of the runs of one strategy, over rollout and over the whole loop."""
    tokens = sum(run.trained_tokens for run in runs)
    whole_s = sum((run.wall_s or 0.0) - (run.save_s or 0.0) for run in runs)
    return {"rollout": tokens / sum(run.rollout_s or 0.0 for run in runs), "whole": tokens / whole_s}


def ratios(by_strategy: dict[str, list[Summary]], base: str) -> dict[str, dict[str, float]]:
    """The speeds of every strategy as multiples of those of `base`; empty if `base` was not run."""
    if base not in by_strategy:
        return {}
    own = speeds(by_strategy[base])
    return {
        strategy: {name: round(speed / own[name], 3) for name, speed in speeds(runs).items()}
        for strategy, runs in by_strategy.items()
    }


def idle_slot_steps(runs: Sequence[Summary]) -> float:
    """The mean over runs of the share of slot-steps in which the slot did not run."""
    return round(statistics.mean(run.idle_slot_steps or 0.0 for run in runs), 3)


def quantiles(lengths: Sequence[int]) -> dict[str, float]:
    cuts = statistics.quantiles(lengths, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def result(by_strategy: dict[str, list[Summary]], lengths: Sequence[int]) -> dict[str, Any]:
    return {
        "runs": [run.model_dump(mode="json") for runs in by_strategy.values() for run in runs],
        "ratio": ratios(by_strategy, "sync"),
        "ratio_large": ratios(by_strategy, "sync-large"),
        "lengths": quantiles(lengths),
        "idle_slot_steps": {strategy: idle_slot_steps(runs) for strategy, runs in by_strategy.items()},
    }


def table(by_strategy: dict[str, list[Summary]], found: dict[str, Any]) -> Table:
    lengths = ", ".join(f"{name} {value:.0f}" for name, value in found["lengths"].items())
    shown = Table("strategy", box=None, caption=f"lengths in tokens: {lengths}", caption_justify="left")
    for header in ("idle", "tokens/s", "rollout", "whole", "whole/large", "rollout s", "update s", "stale", "accuracy"):
        shown.add_column(header, justify="right")
    for strategy, runs in by_strategy.items():
        ratio, large = found["ratio"].get(strategy), found["ratio_large"].get(strategy)
        before, after = runs[-1].accuracy_before, runs[-1].accuracy_after
        shown.add_row(
            strategy,
            share(found["idle_slot_steps"][strategy]),
            f"{speeds(runs)['whole']:.1f}",
            *(f"{ratio[name]:.2f}" if ratio else "–" for name in ("rollout", "whole")),
            f"{large['whole']:.2f}" if large else "–",
            f"{sum(run.rollout_s or 0 for run in runs):.0f}",
            f"{sum(run.update_s or 0 for run in runs):.0f}",
            str(max(run.staleness_max or 0 for run in runs)),
            "–" if before is None or after is None else f"{before:.2f} → {after:.2f}",
        )
    return shown


# ---- the command -----------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    known = [name for name in STRATEGIES if name in list(Strategy)]
    parser.add_argument("--strategies", default=",".join(known), help=f"default: {','.join(known)}")
    parser.add_argument("--samples", type=int, help=f"per run; default {SAMPLES}, with --learn {LEARN_SAMPLES}")
    parser.add_argument("--seeds", type=int, default=1, help="runs per strategy")
    parser.add_argument("--slots", type=int, default=8, help="slots, and samples per update")
    parser.add_argument("--threads", type=int, help="run.threads; one is faster than two beside other work")
    parser.add_argument("--full", action="store_true", help="train all weights instead of adapters")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "int16"), help="engine.dtype")
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--learn", action="store_true", help="evaluate before and after; continues stopped runs")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "real_tail", help="folder of the runs")
    parser.add_argument("--python", help="interpreter of the runs; default: this one, for vllm that of `make vllm`")
    options = parser.parse_args()
    options.strategies = [name.strip() for name in options.strategies.split(",") if name.strip()]
    unknown = [name for name in options.strategies if name not in list(Strategy)]
    if unknown or not options.strategies:
        parser.error(f"unknown strategy {', '.join(unknown)}: choose from {', '.join(Strategy)}")
    if options.slots < 1 or options.seeds < 1 or (options.samples is not None and options.samples < options.slots):
        parser.error("--slots and --seeds must be at least 1, and --samples at least --slots")
    options.python = options.python or find_python(options.engine)
    options.runs = options.runs.resolve()
    return options


def find_python(engine: str) -> str:
    """The interpreter of the runs: this one, or for vLLM that of `make vllm` if it is there."""
    own = ROOT / ".venv-vllm" / "bin" / "python"
    return str(own) if engine == "vllm" and own.exists() else sys.executable


def group_name(options: argparse.Namespace) -> str:
    """The folder of runs with the same flags, so that `--learn` never continues a run with others."""
    parts = (
        "learn" if options.learn else "speed",
        options.engine,
        options.slots,
        options.dtype,
        options.full and "full",
    )
    return "-".join(str(part) for part in parts if part)


def main() -> None:
    options = parse()
    start = make_start(options.runs)
    if options.learn:
        start = make_impatient_start(options.runs, start)
    by_strategy: dict[str, list[Summary]] = {strategy: [] for strategy in options.strategies}
    lengths: list[int] = []
    for seed in range(options.seeds):
        for strategy in options.strategies:
            folder = options.runs / group_name(options) / f"{strategy}-{seed}"
            _out.print(f"{strategy}, seed {seed}")
            train(folder, overrides(strategy, seed, start, folder, options), options)
            by_strategy[strategy].append(Summary.read(folder / "summary.json"))
            lengths += read_lengths(folder)
    found = result(by_strategy, lengths)
    flags = {name: getattr(options, name) for name in ("slots", "full", "dtype", "engine", "seeds")}
    save("real_tail_learn" if options.learn else "real_tail", {"options": flags, **found})
    if options.json:
        print(json.dumps(found))
    else:
        Console(width=int(os.environ.get("COLUMNS", "120"))).print(table(by_strategy, found))


if __name__ == "__main__":
    main()
