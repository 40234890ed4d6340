"""Every algorithm through a whole run: scheduled, trained, saved and resumed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sortedrl.config import SortedConfig
from sortedrl.learner.algorithms import ALGORITHMS
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import UpdateDone
from sortedrl.trainer import SortedTrainer


@pytest.mark.parametrize(("algorithm", "siblings"), [*((name, 4) for name in ALGORITHMS), ("rloo", 1)])
def test_every_algorithm_trains_saves_and_goes_on(algorithm: str, siblings: int, tmp_path: Path) -> None:
    def config(samples: int) -> SortedConfig:
        return SortedConfig(
            run={"dir": str(tmp_path), "samples": samples, "report": False},
            engine={"slots": 16, "max_new_tokens": 40},
            schedule={"strategy": "sorted-partial", "update_batch": 16},
            learner={"algorithm": algorithm, "group_size": siblings, "importance": "sequence", "kl_coef": 0.01},
            eval={"prompts": 0},
        )

    SortedTrainer(args=config(32), quiet=True).train()
    summary = SortedTrainer(args=config(64), quiet=True).train(resume=True)
    assert summary.status == "complete"
    assert summary.ledger is not None
    assert summary.ledger.model_dump() == {"loaded": 64, "trained": 64, "lost": 0, "duplicated": 0}
    updates = [event for event in read_events(config(64).run_dir / "events.jsonl") if isinstance(event, UpdateDone)]
    assert sum(event.optimizer_steps for event in updates) > 0
    assert all(math.isfinite(event.metrics["loss"]) for event in updates)
