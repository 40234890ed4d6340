"""Your own reward: two functions with weights. One of them reads a column of the dataset.

    python examples/own_reward.py [--samples 256] [--out runs]

A reward function has TRL's signature: it gets prompts and completions as lists, further columns by name, and returns
one number per completion. Functions that Python can import run in worker processes; those of a script run in a thread.
"""

from __future__ import annotations

import argparse
from typing import Any

from sortedrl import SortedConfig, SortedTrainer

ROWS = [
    {"prompt": "Ann says Bob-knave . Bob says Ann-knight . ?", "name": "Ann"},
    {"prompt": "Ann says Bob-knight . Bob says Ann-knave . ?", "name": "Bob"},
]


def brief(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """More for shorter answers."""
    return [1 - len(completion.split()) / 100 for completion in completions]


def mentions(prompts: list[str], completions: list[str], name: list[str], **columns: Any) -> list[float]:
    """1 for answers that mention the person in the column `name`. A parameter without default is a required column."""
    return [float(person in completion) for completion, person in zip(completions, name, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--out", default="runs")
    options = parser.parse_args()
    config = SortedConfig(
        run={"name": "example-own-reward", "dir": options.out, "samples": options.samples},
        schedule={"update_batch": 32},
        engine={"slots": 16, "max_new_tokens": 128},
        learner={"algorithm": "grpo", "group_size": 8, "lr": 1e-4},
        reward={"weights": [1.0, 0.5]},
        eval={"prompts": 0},
    )
    trainer = SortedTrainer("knights-tiny", [brief, mentions], config, ROWS * 32)
    summary = trainer.train()
    print(f"mean answer length {summary.mean_length:.1f} over {summary.samples} samples")


if __name__ == "__main__":
    main()
