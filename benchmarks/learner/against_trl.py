"""A GRPO step of TRL's `GRPOTrainer` and of sortedrl on a CPU: same model, prompts, rewards, samples and precision.

    python -m benchmarks.learner.against_trl [--steps 1] [--rounds 3] [--threads N] [--full-length] [--quick] [--json]

A step is 4 word puzzles x 8 samples x at most 128 tokens and one update, all in float32. Answers end where the model
ends them, as in training. The two sides draw different answers, so the times are also compared per written token. With
`--full-length` no answer ends early, and both sides write and learn from the same number of tokens. The sides run one
after the other, each in a new process with all threads; each round has its own seed.

TRL runs with its defaults (`trl`: activations are recomputed, the batch is one pass). In the first round it also runs
without recomputation and in four passes (`trl-tuned`), which is faster if there is enough memory. sortedrl runs the
`sync` strategy, which waits for the whole batch as TRL does, so gains from scheduling are not included. If the machine
also does other work, compare CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, run_module, save

OURS = "sortedrl"
ONCE = "trl-tuned"  # runs in the first round only
PARTS = ("generation", "logprobs", "update", "other")
FULL = {"model": "smollm2-135m", "task": "logic", "prompts": 4, "siblings": 8, "new_tokens": 128}
QUICK = {"model": "knights-tiny", "task": "knights", "prompts": 2, "siblings": 4, "new_tokens": 16}


def variety(prompts: list[Any], completions: list[str], **columns: Any) -> Any:
    """A reward that differs between siblings, so that every sample contributes to the gradient."""
    return [len(set(completion)) + len(completion) / 1000 for completion in completions]


def run_ours(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from sortedrl import SortedConfig, SortedTrainer

    rows, model, tokenizer = prepare(job)
    if job["full_length"]:
        model.generation_config.eos_token_id = tokenizer.eos_token = None
    batch = job["prompts"] * job["siblings"]
    config = SortedConfig(
        run={
            "dir": str(folder),
            "samples": batch * job["steps"],
            "threads": job["threads"],
            "seed": job["seed"],
            "report": False,
        },
        task={"max_prompt_tokens": 768},
        engine={"slots": batch, "max_new_tokens": job["new_tokens"], "dtype": "float32"},
        schedule={"strategy": "sync", "update_batch": batch},
        learner={"group_size": job["siblings"], "lr": 1e-6, "micro_tokens": 2048, "dtype": "float32"},
        reward={"grace_s": 60.0},
        eval={"prompts": 0},
        checkpoint={"save": False},
    )
    trainer = SortedTrainer(model, variety, config, rows, processing_class=tokenizer, quiet=True)
    cpu = time.process_time()
    summary = trainer.train()
    cpu = time.process_time() - cpu
    wall, rollout, update = (value or 0.0 for value in (summary.wall_s, summary.rollout_s, summary.update_s))
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "generation_s": rollout,
        "logprobs_s": 0.0,  # the engine returns them with the tokens
        "update_s": update,
        "other_s": wall - rollout - update,
        "steps": summary.optimizer_steps,
        "tokens": summary.trained_tokens,
    }


def run_trl(job: dict[str, Any], folder: Path, *, is_tuned: bool) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    torch.set_num_threads(job["threads"])
    rows, model, tokenizer = prepare(job)
    batch, passes = job["prompts"] * job["siblings"], 4 if is_tuned else 1
    spent = {"prepare": 0.0, "generation": 0.0}
    lengths: list[int] = []

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            made = super()._generate(*args, **options)
            spent["generation"] += time.perf_counter() - start
            lengths.extend(len(answer) for answer in made[1])
            return made

        def _generate_and_score_completions(self, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            made = super()._generate_and_score_completions(*args, **options)
            spent["prepare"] += time.perf_counter() - start
            return made

    settings = GRPOConfig(
        output_dir=str(folder),
        max_steps=job["steps"],
        num_generations=job["siblings"],
        per_device_train_batch_size=batch // passes,
        gradient_accumulation_steps=passes,
        gradient_checkpointing=not is_tuned,
        max_completion_length=job["new_tokens"],
        generation_kwargs={"min_new_tokens": job["new_tokens"]} if job["full_length"] else {},
        learning_rate=1e-6,
        seed=job["seed"],
        beta=0.0,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    table = InMemoryTable.from_pydict({"prompt": [row["prompt"] for row in rows]})
    trainer = Timed(
        model=model,
        reward_funcs=variety,
        args=settings,
        train_dataset=Dataset(table, fingerprint="prompts"),  # a fingerprint avoids hashing by pickle
        processing_class=tokenizer,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.train()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "generation_s": spent["generation"],
        "logprobs_s": spent["prepare"] - spent["generation"],  # rewards and advantages included
        "update_s": wall - spent["prepare"],
        "other_s": 0.0,
        "steps": trainer.state.global_step,
        "tokens": sum(lengths),
    }


def prepare(job: dict[str, Any]) -> tuple[list[dict[str, Any]], Any, Any]:
    """Rows, model (float32) and tokenizer, which are the same for both sides."""
    from sortedrl import SortedConfig
    from sortedrl.learner.model import load_model
    from sortedrl.run.builders.parts import build_task, model_path

    config = SortedConfig(model={"path": job["model"]}, task={"name": job["task"]}, run={"seed": job["seed"]})
    train = build_task(config).train
    rows = [{"prompt": train.row(number)["prompt"]} for number in range(job["prompts"] * job["steps"])]
    return rows, *load_model(model_path(config))


SIDES: dict[str, Callable[[dict[str, Any], Path], dict[str, Any]]] = {
    OURS: run_ours,
    "trl": lambda job, folder: run_trl(job, folder, is_tuned=False),
    ONCE: lambda job, folder: run_trl(job, folder, is_tuned=True),
}


def measure(job: dict[str, Any], sides: list[str], rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
    for number in range(rounds):
        for side in sides:
            if number and side == ONCE:
                continue
            print(f"round {number + 1}: {side}", file=sys.stderr)
            text = json.dumps({**job, "seed": job["seed"] + number})
            printed = run_module("benchmarks.learner.against_trl", "--side", side, "--job", text, env=environment)
            found[side].append(json.loads(printed.splitlines()[-1]))
    results = [result_of(side, found[side], job["steps"]) for side in sides]
    ours, peers = results[0], results[1:]
    ratios = {
        f"ratio{suffix}": {row["name"]: row[key] / ours[key] for row in peers}
        for suffix, key in (("", "wall_s"), ("_cpu", "cpu_s"), ("_per_token", "wall_ms_per_token"))
    }
    return {"results": results, **ratios, **job}


def result_of(side: str, rounds: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Seconds per step and milliseconds per token of one side: the medians of its rounds."""
    times = {
        key: statistics.median(one[key] for one in rounds) / steps
        for key in ("wall_s", "cpu_s", *(f"{part}_s" for part in PARTS))
    }
    per_token = statistics.median(1000 * one["wall_s"] / one["tokens"] for one in rounds)
    tokens = statistics.mean(one["tokens"] for one in rounds) / steps
    return {"name": side, **times, "wall_ms_per_token": per_token, "tokens": tokens, "rounds": rounds}


def table_of(result: dict[str, Any]) -> Table:
    title = (
        f"a step: {result['prompts']} prompts x {result['siblings']} samples x {result['new_tokens']} tokens "
        f"{'each' if result['full_length'] else 'at most'}, {result['model']}, float32, {result['threads']} threads"
    )
    faster = ("time / ours", "CPU s / ours", "per token")
    table = Table("", "wall s", "CPU s", *(f"{part} s" for part in PARTS), "tokens", *faster, title=title)
    for row in result["results"]:
        name = row["name"]
        times = (f"{row[key]:.1f}" for key in ("wall_s", "cpu_s", *(f"{part}_s" for part in PARTS)))
        kinds = ("ratio", "ratio_cpu", "ratio_per_token")
        ratios = (f"{result[kind][name]:.2f}" if name in result[kind] else "" for kind in kinds)
        table.add_row(name, *times, f"{row['tokens']:.0f}", *ratios)
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", default=f"trl,{ONCE}")
    parser.add_argument("--full-length", action="store_true", help="all answers have the maximum length")
    parser.add_argument("--quick", action="store_true", help="the tiny model and few tokens; saves nothing")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        with tempfile.TemporaryDirectory(prefix="against-trl-") as folder:
            print("\n" + json.dumps(SIDES[options.side](options.job, Path(folder))))
        return
    shared = {key: getattr(options, key) for key in ("steps", "threads", "seed", "full_length")}
    result = measure(
        {**(QUICK if options.quick else FULL), **shared}, [OURS, *options.against.split(",")], options.rounds
    )
    print(json.dumps(result)) if options.json else Console(width=140).print(table_of(result))
    if not options.quick:
        print(f"saved {save('against_trl', result)}", file=sys.stderr)


if __name__ == "__main__":
    main()
