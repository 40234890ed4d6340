"""Your own dataset: rows in JSONL files, a reward in a module, and a configuration in TOML.

    python examples/own_dataset/train.py [--samples 256] [--out runs]

The same on the command line, from this folder: sortedrl train run.toml
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sortedrl import SortedConfig, SortedTrainer

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--out", default="runs")
    options = parser.parse_args()
    out = Path(options.out).resolve()
    os.chdir(FOLDER)  # the reward's module and the paths of run.toml are relative to it
    config = SortedConfig.load(Path("run.toml"), [f"run.samples={options.samples}", f"run.dir={out}"])
    summary = SortedTrainer(args=config).train()
    print(f"held-out reward {summary.heldout_reward_before:.2f} -> {summary.heldout_reward_after:.2f}")


if __name__ == "__main__":
    main()
