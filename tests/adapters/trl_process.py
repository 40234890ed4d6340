"""A GRPO script with checkpoints, run as a process of its own by test_trl_kill.py: it can be killed.

python -m tests.adapters.trl_process FOLDER [CHECKPOINT]
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoTokenizer

from sortedrl.adapters.trl import sorted_rollouts
from sortedrl.tasks.tiny import knights_tiny_path
from tests.adapters.test_trl import grpo

STEPS, SAVE_STEPS = 24, 3


def main() -> None:
    folder = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(knights_tiny_path())
    trainer = grpo(
        folder,
        tokenizer,
        sorted_rollouts("sorted-replay", lookahead=1),
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
    )
    trainer.train(resume_from_checkpoint=sys.argv[2] if len(sys.argv) > 2 else None)


if __name__ == "__main__":
    main()
