"""TRL's trainers with and without our scheduler, on a CPU: the same data, fewer decode steps, nothing lost.

    python examples/trl_grpo.py             # a stock GRPOTrainer, then the same with one argument more
    python examples/trl_grpo.py --async     # AsyncGRPOTrainer with six strategies
    python examples/trl_grpo.py --json

Needs: pip install 'sortedrl[trl]'. It exits with 1 if a promise is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from sortedrl.adapters.trl import sorted_rollouts, sorted_worker
from sortedrl.adapters.trl.on_cpu import trl_on_cpu
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify as verify_ledger
from sortedrl.tasks.knights import DEFAULT_PEOPLE, KnightsRows, verify
from sortedrl.tasks.tiny import knights_tiny_path

MODEL = str(knights_tiny_path())
GROUP, BATCH = 4, 16
ASYNC: dict[str, dict[str, Any]] = {
    "sync": {},
    "sorted-partial": {"lookahead": 2},
    "sorted-replay": {"lookahead": 2},
    "april": {"max_staleness": 8, "on_bound": "replay"},
    "async": {},
    "async-on-policy": {"lookahead": 2},
}
Result = dict[str, Any]


def rows_of(seed: int, num_prompts: int) -> Dataset:
    rows = KnightsRows(seed=seed, people=dict(DEFAULT_PEOPLE))
    return Dataset.from_list([rows.row(number) for number in range(num_prompts)])


def settings(folder: str, steps: int, seed: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "seed": seed,
        "max_steps": steps,
        "num_generations": GROUP,
        "max_completion_length": 512,
        "learning_rate": 1.5e-4,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }


def quarters(rewards: list[float]) -> tuple[float, float]:
    """Mean reward of the first and of the last quarter of the updates."""
    part = max(1, len(rewards) // 4)
    return sum(rewards[:part]) / part, sum(rewards[-part:]) / part


def proof(run_dir: Path) -> Result:
    with Ledger(run_dir) as ledger:
        violations = [str(violation) for violation in verify_ledger(ledger).violations]
    counts = json.loads((run_dir / "summary.json").read_text())["ledger"]
    return {"lost": counts["lost"], "duplicated": counts["duplicated"], "violations": violations}


def watch_policies(trainer: Any) -> list[tuple[float, float]]:
    """Ratio and KL of the trained policy to the one that sampled, of each update: mean over its tokens."""
    found: list[tuple[float, float]] = []
    compute_loss, compute_logps = trainer._compute_loss, trainer._get_per_token_logps_and_entropies
    seen: list[torch.Tensor] = []

    def logps(*arguments: Any, **named: Any) -> Any:
        result = compute_logps(*arguments, **named)
        seen.append(result[0].detach())
        return result

    def loss(model: Any, inputs: Any) -> Any:
        seen.clear()
        result = compute_loss(model, inputs)
        difference = (seen[-1] - inputs["sampling_per_token_logps"])[inputs["completion_mask"].bool()].double()
        ratio = difference.exp()
        found.append((ratio.mean().item(), (ratio - 1 - difference).mean().item()))
        return result

    trainer._compute_loss, trainer._get_per_token_logps_and_entropies = loss, logps
    return found


def train_grpo(name: str, rollouts: Any, steps: int, seed: int, folder: str) -> Result:
    """A GRPOTrainer script. `rollout_func` is the one argument that makes the difference."""
    prompts: Counter[str] = Counter()

    def right(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        return [*verify(prompts, completions, answer)]

    torch.manual_seed(seed)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        reward_funcs=right,
        args=GRPOConfig(**settings(folder, steps, seed), per_device_train_batch_size=BATCH),
        train_dataset=rows_of(seed, steps * BATCH // GROUP),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        rollout_func=rollouts,
    )
    calculate = trainer._calculate_rewards

    def count(inputs: Any, asked: list[str], *rest: Any) -> Any:
        found = calculate(inputs, asked, *rest)
        if rollouts is None:
            prompts.update(asked)
        return found

    trainer._calculate_rewards = count
    policies = [] if rollouts is None else watch_policies(trainer)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    first, last = quarters([entry["reward"] for entry in logs])
    result: Result = {
        "name": name,
        "updates": len(logs),
        "seconds": round(seconds, 1),
        "reward_first": round(first, 3),
        "reward_last": round(last, 3),
        "decode_steps": int(sum(entry["completions/max_length"] for entry in logs)),
        "prompts": prompts,
    }
    if rollouts is not None:
        run_dir = Path(folder) / "sortedrl"
        with Ledger(run_dir) as ledger:
            taken = ledger.rows(
                "SELECT content FROM trained JOIN samples ON samples.id = sample JOIN prompts ON prompts.id = prompt"
            )
            prompts.update(json.loads(content) for (content,) in taken)
        result |= {
            "decode_steps": rollouts.summary.decode_steps,
            "staleness_max": rollouts.summary.staleness_max,
            "ratio": max((ratio for ratio, _ in policies), key=lambda value: abs(value - 1)),
            "kl": max(abs(kl) for _, kl in policies),
            **proof(run_dir),
        }
    return result


def train_async(strategy: str, steps: int, seed: int, folder: str) -> Result:
    """An AsyncGRPOTrainer script on a CPU."""
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    args = AsyncGRPOConfig(
        **settings(folder, steps, seed),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=BATCH // 4,
        token_budget=0,
        max_staleness=99,
        dtype="float32",
    )
    rows = rows_of(seed, steps * BATCH // GROUP)
    worker = sorted_worker(strategy, model=MODEL, reward_funcs=verify, args=args, train_dataset=rows, **ASYNC[strategy])
    trainer = AsyncGRPOTrainer(MODEL, args=args, train_dataset=rows, rollout_worker=worker, weight_transfer=worker)
    worker.attach(trainer)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    logs = [entry for entry in trainer.state.log_history if "ratio" in entry]
    first, last = quarters([entry["reward"] for entry in logs])
    ratio = max((entry["ratio"] for entry in logs), key=lambda value: abs(value - 1))
    assert worker.summary is not None, "training ended, so the run has a summary"
    return {
        "name": strategy,
        "seed": seed,
        "updates": worker.summary.updates,
        "seconds": round(seconds, 1),
        "reward_first": round(first, 3),
        "reward_last": round(last, 3),
        "decode_steps": worker.summary.decode_steps,
        "staleness_max": worker.summary.staleness_max,
        "ratio": ratio,
        "kl": max(abs(entry["kl"]) for entry in logs),
        **proof(Path(folder) / "sortedrl"),
    }


def misses_of(stock: Result, ours: Result) -> list[str]:
    """The promises that were not kept."""
    checks = {
        "the number of updates differs": stock["updates"] == ours["updates"],
        "the data differ": stock["prompts"] == ours["prompts"],
        "an answer is stale": ours["staleness_max"] == 0,
        "the ratio is not 1": abs(ours["ratio"] - 1) < 1e-5,
        "the KL is not 0": ours["kl"] < 1e-6,
        "more than .6 of the decode steps": ours["decode_steps"] <= 0.6 * stock["decode_steps"],
        "the reward does not rise": ours["reward_last"] > ours["reward_first"],
        "samples are lost or trained twice": ours["lost"] == ours["duplicated"] == 0 and not ours["violations"],
    }
    return [what for what, kept in checks.items() if not kept]


def async_misses(result: Result) -> list[str]:
    name = f"{result['name']}, seed {result['seed']}"
    is_on_policy = result["name"] in ("sync", "sorted-replay", "async-on-policy")
    checks = {
        "samples are lost or trained twice": not result["lost"] + result["duplicated"] + len(result["violations"]),
        "an answer is stale": not is_on_policy or result["staleness_max"] == 0,
        "the ratio is not 1": not is_on_policy or abs(result["ratio"] - 1) < 1e-5,
        "the KL is not 0": not is_on_policy or result["kl"] < 1e-6,
        "the reward does not rise": result["reward_last"] > result["reward_first"],
    }
    return [f"{name}: {what}" for what, kept in checks.items() if not kept]


def show(results: list[Result]) -> None:
    columns = [key for key in results[-1] if key not in ("prompts", "violations")]
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for result in results:
        cells = [result.get(key, "") for key in columns]
        print("| " + " | ".join(f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=64, help="updates")
    parser.add_argument("--seeds", type=int, default=1, help="seeds, for --async")
    parser.add_argument("--strategy", default="sorted-replay", help="for GRPOTrainer")
    parser.add_argument("--async", dest="is_async", action="store_true", help="AsyncGRPOTrainer with six strategies")
    parser.add_argument("--json", dest="as_json", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # the trainers print their logs
        if chosen.is_async:
            with trl_on_cpu():
                for strategy in ASYNC:
                    for seed in range(chosen.seeds):
                        results.append(train_async(strategy, chosen.steps, seed, f"{folder}/{strategy}{seed}"))
            misses = [miss for result in results for miss in async_misses(result)]
        else:
            stock = train_grpo("stock TRL", None, chosen.steps, 0, f"{folder}/stock")
            rollouts = sorted_rollouts(chosen.strategy, lookahead=2)
            ours = train_grpo(chosen.strategy, rollouts, chosen.steps, 0, f"{folder}/ours")
            misses = misses_of(stock, ours)
            results = [stock, ours]
    for result in results:
        result.pop("prompts", None)
    if chosen.as_json:
        print(json.dumps({"results": results, "misses": misses}))
    else:
        show(results)
        print("missed: " + "; ".join(misses) if misses else "every promise is kept")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
