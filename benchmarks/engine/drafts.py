"""Drafts on the local engine: are answers the same, how many passes do they save, and what do they cost where not?

    python -m benchmarks.engine.drafts [--only check,tail,live,real] [--samples 500] [--rounds 5] [--json]

- `check`: rounds of `benchmarks.engine.replay` with drafts always and never, side by side: every answer, finished,
  replayed or started over, and every weight that was learned from them must be the same, to the last bit.
- `tail`: synchronous rollout on the embedded model, 16 slots, groups of 8, batch after batch. Passes and seconds of its
  tail (at most a quarter of the slots run) and of the whole, relative to no drafts.
- `live`: runs of the quickstart (512 samples, no evaluation), with its single answers and with groups of 8, `sync` and
  `sorted-replay`: passes and rollout seconds relative to no drafts.
- `real`: the same with SmolLM2-135M in int16, which the native decoder runs on any CPU, on the task of tail-smollm2 (16
  samples of up to 128 tokens, no cold start).

Contenders run in turns, several rounds; figures are medians over rounds of the ratio within a round. Answers do not
depend on drafts, but under `sorted-replay` the order in which answers end does, and with it what is trained together:
compare seconds per trained token there, as this script does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine.replay import SIBLINGS, Answer, Bench
from benchmarks.record import QUICKSTART, make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.engine.base import Finished, Request, Sampling
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.local.speculation import DraftMode
from sortedrl.records import sample_seed
from sortedrl.run.builders.generation import stop_token_ids
from sortedrl.run.builders.parts import prompt_stream
from sortedrl.run.checkpoint_folder import load_model
from sortedrl.tasks.knights import KnightsTask
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.trainer import SortedTrainer

PARTS = ("check", "tail", "live", "real")
SLOTS = 16
Figures = dict[str, float]


class RecordingBench(Bench):
    """Keeps all finished answers of its rounds."""

    def __init__(self, options: argparse.Namespace, drafts: DraftMode) -> None:
        super().__init__(options)
        self.engine = LocalEngine(self.model, slots=64, max_length=768, drafts=drafts)
        self.finished: list[dict[int, Answer]] = []

    def finish(self, requests: Any) -> dict[int, Answer]:
        self.finished.append(super().finish(requests))
        return self.finished[-1]


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Run rounds with and without drafts until `--samples` interrupted samples are replayed."""
    settings = argparse.Namespace(seed=0, lr=5e-4, model="knights-tiny", unverified=False)
    without, drafted = benches = (RecordingBench(settings, "off"), RecordingBench(settings, "always"))
    num_replayed = 0
    while num_replayed < options.samples:
        replayed, _ = (bench.round() for bench in benches)
        num_replayed += len(replayed)
    pairs = [
        (answer.tokens == other[sample].tokens, answer.logprobs == other[sample].logprobs)
        for answers, other in zip(without.finished, drafted.finished, strict=True)
        for sample, answer in answers.items()
    ]
    weights = zip(without.model.parameters(), drafted.model.parameters(), strict=True)
    return {
        "updates": drafted.version,
        "replayed": num_replayed,
        "answers": len(pairs),
        "other_tokens": sum(not same for same, _ in pairs),
        "other_logprobs": sum(not same for _, same in pairs),
        "other_weights": sum(not torch.equal(a, b) for a, b in weights),
        **passes_and_drafts(drafted.engine),
        "passes_without": without.engine.stats().decode_steps,
    }


def passes_and_drafts(engine: LocalEngine) -> dict[str, int]:
    stats = engine.stats()
    kept = {key: value for key, value in stats.extra.items() if key.endswith(("drafted_tokens", "accepted_tokens"))}
    return {"passes": stats.decode_steps, **kept}


def roll_out(drafts: DraftMode, num_batches: int = 40) -> Figures:
    """Synchronous batches on the embedded model: passes and seconds, in the tail and in all."""
    model, tokenizer = load_model(knights_tiny_path())
    sampling = Sampling(stop_tokens=stop_token_ids(model, tokenizer))
    stream = prompt_stream(SortedConfig(run={"seed": 0}), KnightsTask(seed=0), tokenizer)
    engine = LocalEngine(model, slots=SLOTS, max_length=768, drafts=drafts)
    found: Figures = dict.fromkeys(("tail_passes", "tail_s", "passes", "seconds"), 0.0)
    for number in range(num_batches):
        engine.submit(
            Request(
                sample=number * SLOTS + group * SIBLINGS + index,
                attempt=0,
                prompt=prompt.tokens,
                budget=512,
                seed=sample_seed(0, epoch, prompt.id, index),
                sampling=sampling,
            )
            for group, (epoch, prompt) in enumerate(stream.take(SLOTS // SIBLINGS))
            for index in range(SIBLINGS)
        )
        running = SLOTS
        while running:
            is_tail, passes, start = running <= SLOTS // 4, engine.stats().decode_steps, time.perf_counter()
            events = engine.poll()
            seconds, passes = time.perf_counter() - start, engine.stats().decode_steps - passes
            running -= sum(isinstance(event, Finished) for event in events)
            found["passes"] += passes
            found["seconds"] += seconds
            found["tail_passes"] += passes * is_tail
            found["tail_s"] += seconds * is_tail
    return found


def train(keys: Sequence[str], drafts: DraftMode, name: str) -> Figures:
    """One training run: passes and rollout seconds per trained token."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = (f"run.dir={Path(folder) / 'runs'}", "eval.prompts=0", "checkpoint.save=false", "run.report=false")
        config = SortedConfig.load(name, [*keys, *fixed, f"engine.drafts={drafts}"])
        summary = SortedTrainer(args=config, quiet=True).train()
    found = {"passes": summary.decode_steps, "seconds": summary.rollout_s}
    return {key: (value or 0) / summary.trained_tokens for key, value in found.items()}


def compare(contenders: Mapping[str, Callable[[], Figures]], num_rounds: int) -> dict[str, Figures]:
    """Medians of the ratios to the first contender, over rounds in which all run in turns."""
    rounds = [{name: run() for name, run in contenders.items()} for _ in range(num_rounds)]
    base, *others = contenders
    return {
        name: {key: median(found[name][key] / found[base][key] for found in rounds) for key in rounds[0][base]}
        for name in others
    }


def live(name: str, groups: Mapping[str, Sequence[str]], keys: Sequence[str], num_rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for strategy in ("sync", "sorted-replay"):
        for group, more in groups.items():
            chosen = (f"schedule.strategy={strategy}", f"schedule.lookahead={0 if strategy == 'sync' else 2}")
            modes: tuple[DraftMode, ...] = ("off", "auto")
            contenders = {mode: partial(train, (*keys, *chosen, *more), mode, name) for mode in modes}
            result[f"{strategy}, {group}"] = compare(contenders, num_rounds)
    return result


def measure(options: argparse.Namespace) -> dict[str, Any]:
    chosen, result = options.only.split(","), {}
    if "check" in chosen:
        result["check"] = check(options)
    if "tail" in chosen:
        modes: tuple[DraftMode, ...] = ("off", "auto", "always")
        result["tail"] = compare({mode: partial(roll_out, mode) for mode in modes}, options.rounds)
    if "live" in chosen:
        groups = {
            "single answers": (),
            "groups of 8": ("learner.algorithm=grpo", "learner.group_size=8"),
        }
        result["live"] = live(QUICKSTART, groups, ("run.samples=512", "run.threads=1"), options.rounds)
    if "real" in chosen:
        keys = ("run.samples=16", "engine.max_new_tokens=128", "engine.dtype=int16")
        groups = {"groups of 4": ("learner.algorithm=grpo", "learner.group_size=4")}
        result["real"] = live("tail-smollm2", groups, keys, max(1, options.rounds // 3))
    return result


def show(result: Mapping[str, Any]) -> None:
    console = Console(width=120)
    if "check" in result:
        console.print(", ".join(f"{key} {value:,}" for key, value in result["check"].items()))
    rows = {
        f"{part}: {name}" if part == "tail" else f"{part}: {name}, {mode}": figures
        for part in ("tail", "live", "real")
        for name, found in result.get(part, {}).items()
        for mode, figures in ({"": found} if part == "tail" else found).items()
    }
    for columns in {tuple(figures) for figures in rows.values()}:
        table = Table("relative to no drafts", *columns)
        for name, figures in rows.items():
            if tuple(figures) == columns:
                table.add_row(name, *(f"{value:.3f}" for value in figures.values()))
        console.print(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(options)
    if options.json:
        print(json.dumps(result))
        return
    show(result)
    if set(options.only.split(",")) == set(PARTS):
        print(f"saved {save('drafts', {'arguments': vars(options), **result})}", file=sys.stderr)


if __name__ == "__main__":
    main()
