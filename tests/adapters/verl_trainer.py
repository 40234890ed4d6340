"""A trainer that only samples, run as a process of its own by test_verl.py: it can be killed.

    python -m tests.adapters.verl_trainer FOLDER FIRST_STEP LAST_STEP ADDRESS

It writes the uids of each step, and a checkpoint file with the step, as verl would.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq

from sortedrl.adapters.verl import SortedSampler

BATCH = 8


def make_sampler(folder: Path, **changes: Any) -> SortedSampler:
    options: dict[str, Any] = {
        "trainer_mode": "separate_async",
        "trainer_config": {},
        "max_off_policy_threshold": None,
        "max_off_policy_strategy": "wait",
        "sampler_kwargs": {"run_dir": str(folder / "run"), "poll_interval": 0.05},
        "refill_fn": lambda count: None,
    }
    return SortedSampler(**{**options, **changes})


def main() -> None:
    folder, first, last, address = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    ray.init(address=address, namespace="verl", log_to_driver=False)
    tq.init()
    sampler = make_sampler(folder)
    for step in range(first, last + 1):
        batch, _ = sampler.sample(step, "train", BATCH)
        uids = sorted({key.split("_")[0] for key in batch.keys})
        with (folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "uids": uids}) + "\n")
        tq.kv_clear(partition_id="train", keys=list(batch.keys))
    assert sampler.groups is not None
    sampler.groups.close()


if __name__ == "__main__":
    main()
