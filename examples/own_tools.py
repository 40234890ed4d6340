"""Your own tools: a class whose public methods the model may call between its turns.

    python examples/own_tools.py [--samples 256] [--out runs]

The class has the shape of TRL's `environment_factory` and works there unchanged. Rows, prompts and reward are below it.
"""

from __future__ import annotations

import argparse

from sortedrl import SortedConfig, SortedTrainer


class Signposts:
    """One object per answer: signs that say whom each person points to, and how many signs were read."""

    environment_kind = "repeatable"  # the same calls in a fresh object give the same state

    def reset(self, signs: dict[str, str], goal: str, **row: object) -> None:
        self.signs, self.goal, self.reached, self.num_read = signs, goal, "", 0

    def lookup(self, who: str) -> str:
        """
        Reads the sign of a person.

        Args:
            who: Name of the person.
        """
        self.num_read += 1
        self.reached = self.signs[who]
        return self.reached

    def get_reward(self) -> float:
        """1 for reaching the goal, less a little for every sign."""
        return float(self.reached == self.goal) - 0.01 * self.num_read


SIGNS = {"Ann": "Bob", "Bob": "Cid", "Cid": "Dan", "Dan": "Eve", "Eve": "Fay", "Fay": "Ann"}
ROWS = [
    {"prompt": [{"role": "user", "content": "Ann two ?"}], "signs": SIGNS, "goal": "Cid"},
    {"prompt": [{"role": "user", "content": "Dan three ?"}], "signs": SIGNS, "goal": "Ann"},
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--out", default="runs")
    options = parser.parse_args()
    config = SortedConfig(
        run={"name": "example-own-tools", "dir": options.out, "samples": options.samples},
        schedule={"update_batch": 32},
        engine={"slots": 16, "max_new_tokens": 96},
        eval={"prompts": 0},
    )
    trainer = SortedTrainer("tools-tiny", None, config, ROWS, environment_factory=Signposts)
    summary = trainer.train()
    calls, counts = (summary.tools or {}).get("calls", 0), summary.ledger
    print(f"{calls:.0f} tool calls in {summary.samples} answers; lost: {counts.lost if counts else 'unknown'}")


if __name__ == "__main__":
    main()
