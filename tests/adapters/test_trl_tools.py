"""The class of examples/own_tools.py in TRL's own trainer, unchanged: TRL calls its tools and takes its reward."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from sortedrl.tasks.tools_model import tools_tiny_path

trl = pytest.importorskip("trl", reason="TRL is an optional package: pip install 'sortedrl[trl]'")
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_tools.py"


@pytest.mark.filterwarnings("ignore")
def test_the_class_of_the_example_runs_in_trl(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sortedrl.adapters.trl.on_cpu import trl_on_cpu

    example = runpy.run_path(str(EXAMPLE))
    made: type[Any] = example["Signposts"]
    calls: list[str] = []

    class Watched(made):  # only notes the calls
        def lookup(self, who: str) -> str:
            """
            Reads the sign of a person.

            Args:
                who: Name of the person.
            """
            calls.append(who)
            return super().lookup(who)

    settings = trl.GRPOConfig(
        output_dir=str(tmp_path),
        report_to=[],
        use_cpu=True,
        bf16=False,
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=60,
        gradient_checkpointing=False,
        max_steps=1,
        save_strategy="no",
    )
    with trl_on_cpu():
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(tools_tiny_path()),
            args=settings,
            train_dataset=Dataset.from_list(example["ROWS"]),
            processing_class=AutoTokenizer.from_pretrained(tools_tiny_path()),
            environment_factory=Watched,
        )
        trainer.train()
    assert calls
    assert set(calls) <= set(example["SIGNS"])
    assert "rewards/Watched/mean" in trainer.state.log_history[0]
