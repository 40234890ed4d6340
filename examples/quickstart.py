"""A run in a few lines: the embedded task under a sorted schedule, and the figures that it returns.

    python examples/quickstart.py [--samples 256] [--out runs]

Needs no GPU and no download.
"""

from __future__ import annotations

import argparse

from sortedrl import SortedConfig, SortedTrainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--out", default="runs")
    options = parser.parse_args()
    config = SortedConfig(
        run={"name": "example-quickstart", "dir": options.out, "samples": options.samples},
        schedule={"strategy": "sorted-replay", "update_batch": 16, "lookahead": 2},
        engine={"slots": 16, "max_new_tokens": 512},
        learner={"algorithm": "reinforce++", "group_size": 1, "lr": 3e-4},
        eval={"prompts": 64},
    )
    summary = SortedTrainer(args=config).train()
    print(f"held-out accuracy {summary.accuracy_before:.2f} -> {summary.accuracy_after:.2f}")
    print(f"engine steps {summary.decode_steps} for {summary.trained_tokens} trained tokens")
    print(f"largest staleness {summary.staleness_max}")
    print(f"open {config.run_dir / 'report.html'}")


if __name__ == "__main__":
    main()
