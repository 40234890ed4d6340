"""A script as a user of TRL writes it, with our scheduler inside: `GRPOTrainer` on the embedded model.

It continues from TRL's newest complete checkpoint if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BATCH, GROUP, BUDGET, NUM_ROWS = 4, 2, 24, 24


def num_samples(settings: Sequence[str]) -> int:
    return BATCH * int(_read(settings)["max_steps"])


def _read(settings: Sequence[str]) -> dict[str, str]:
    """Defaults are for a scenario that was made smaller."""
    defaults = {"strategy": "sync", "max_steps": "3", "save_steps": "1", "seed": "0"}
    return defaults | dict(setting.split("=", 1) for setting in settings)


def newest_checkpoint(folder: Path) -> str | None:
    """TRL writes `trainer_state.json` last."""
    found = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if path.stat().st_size]
    return str(max(found, key=lambda path: int(path.name.partition("-")[2]))) if found else None


def reward(prompts: Any, completions: Any, **columns: Any) -> Any:
    return [len(text) / 100 + text.count("a") for text in completions]


def warm_up() -> None:
    """Import what the script needs, so that forked processes start quickly."""
    import datasets  # noqa: F401
    import trl.trainer.grpo_trainer  # noqa: F401

    import sortedrl.adapters.trl  # noqa: F401


def main(folder: Path, settings: Sequence[str]) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from sortedrl.adapters.trl import sorted_rollouts
    from sortedrl.tasks.knights import DEFAULT_PEOPLE, KnightsRows
    from sortedrl.tasks.tiny import knights_tiny_path

    given, checkpoint = _read(settings), newest_checkpoint(folder)
    if checkpoint is not None and int(checkpoint.rpartition("-")[2]) >= int(given["max_steps"]):
        return  # a script that starts again when all is done: TRL would train one more step
    source = KnightsRows(seed=0, people=dict(DEFAULT_PEOPLE))
    torch.manual_seed(0)
    arguments = GRPOConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        num_generations=GROUP,
        per_device_train_batch_size=BATCH,
        max_completion_length=BUDGET,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        max_steps=int(given["max_steps"]),
        save_strategy="steps",
        save_steps=int(given["save_steps"]),
        save_total_limit=2,
        disable_tqdm=True,
        temperature=1.0,
        seed=int(given["seed"]),
    )
    knobs: dict[str, Any] = {"lookahead": int(given["lookahead"])} if "lookahead" in given else {}
    engine = {"slots": int(given["slots"])} if "slots" in given else {}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(knights_tiny_path(), dtype=torch.float32),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([source.row(number) for number in range(NUM_ROWS)]),
        processing_class=AutoTokenizer.from_pretrained(knights_tiny_path()),
        rollout_func=sorted_rollouts(given["strategy"], engine=engine, **knobs),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
