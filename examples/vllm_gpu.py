"""GRPO with vLLM on a GPU. Needs a GPU, `pip install 'sortedrl[vllm,math,data]'`, a model folder and rows.

    python examples/vllm_gpu.py models/Qwen2.5-0.5B-Instruct data/gsm8k/train.parquet

Rows need the columns `question` and `answer`, as those of GSM8K. The engine runs in bfloat16, where replay is not
exact, so the strategy is `sorted-partial`; use `engine.dtype = "float32"` with `sorted-replay`. This project has not
been run on a GPU yet: run `make gpu-acceptance` first.
"""

from __future__ import annotations

import argparse
import sys

from sortedrl import SortedConfig, SortedTrainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a folder that from_pretrained loads")
    parser.add_argument("rows", help="a file with the columns question and answer")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--out", default="runs")
    options = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        sys.exit("this example needs a GPU; on a CPU start with examples/quickstart.py")
    config = SortedConfig(
        run={"name": "example-vllm", "dir": options.out, "samples": options.samples},
        task={"name": "math", "path": options.rows, "columns": {"prompt": "question"}, "chat": True},
        model={"path": options.model},
        schedule={"strategy": "sorted-partial", "update_batch": 128, "lookahead": 2},
        engine={"kind": "vllm", "slots": 128, "max_new_tokens": 1024, "dtype": "bfloat16"},
        learner={"algorithm": "grpo", "group_size": 8, "lr": 1e-6},
    )
    summary = SortedTrainer(args=config).train()
    print(f"held-out accuracy {summary.accuracy_before:.2f} -> {summary.accuracy_after:.2f}")


if __name__ == "__main__":
    main()
