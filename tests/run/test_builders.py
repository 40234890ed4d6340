"""`build_parts` passes settings of the configuration on to the parts that need them."""

from __future__ import annotations

from pathlib import Path

from sortedrl.config import SortedConfig
from sortedrl.run.builders.parts import build_parts


def test_the_learner_saves_broken_batches_in_the_run_directory(tmp_path: Path) -> None:
    config = SortedConfig(run={"dir": str(tmp_path), "name": "mine"}, eval={"prompts": 0})
    parts = build_parts(config)
    try:
        assert parts.learner.inspect_dir == tmp_path / "mine"
    finally:
        parts.close()
    assert not (tmp_path / "mine").exists(), "building the parts must not touch the run directory"
