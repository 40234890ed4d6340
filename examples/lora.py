"""LoRA: only adapters are trained, and the base model stays as it is.

    pip install 'sortedrl[lora]'
    python examples/lora.py [--samples 256] [--out runs]

A checkpoint holds the merged model, which `from_pretrained` loads, and the adapters in its folder `adapter`.
"""

from __future__ import annotations

import argparse

from peft import LoraConfig

from sortedrl import SortedConfig, SortedTrainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--out", default="runs")
    options = parser.parse_args()
    config = SortedConfig(
        run={"name": "example-lora", "dir": options.out, "samples": options.samples},
        schedule={"strategy": "sorted-partial", "update_batch": 16, "lookahead": 2},
        engine={"slots": 16, "max_new_tokens": 256},
        learner={"algorithm": "reinforce++", "group_size": 1, "lr": 1e-3},
        eval={"prompts": 32},
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SortedTrainer(args=config, peft_config=adapters)
    summary = trainer.train()
    checkpoint = max((config.run_dir / "checkpoints").iterdir(), key=lambda folder: folder.stat().st_mtime)
    print(f"held-out accuracy {summary.accuracy_before:.2f} -> {summary.accuracy_after:.2f}")
    print(f"adapters: {checkpoint / 'adapter'}")


if __name__ == "__main__":
    main()
