"""The loader makes samples from prompts up to the run's total and continues from a saved state."""

from __future__ import annotations

from sortedrl.learner.model import load_tokenizer
from sortedrl.records import Sample, sample_seed
from sortedrl.tasks.base import DatasetTask, PromptStream
from sortedrl.tasks.loader import SampleLoader
from sortedrl.tasks.tiny import knights_tiny_path

ROWS = [{"prompt": f"Ann says Bob-{kind} . ?"} for kind in ("knave", "knight")] + [{"prompt": "Bob says Ann-knave . ?"}]


def make_loader(total_samples: int = 14) -> SampleLoader:
    task = DatasetTask(rows=ROWS, reward_funcs=[lambda **columns: [0.0]])
    stream = PromptStream(task=task, tokenizer=load_tokenizer(knights_tiny_path()), seed=3, max_prompt_tokens=64)
    return SampleLoader(stream=stream, seed=3, total_samples=total_samples, siblings=2, max_new_tokens=40)


def identity(sample: Sample) -> tuple[object, ...]:
    return sample.id, sample.prompt.id, sample.index, sample.epoch, sample.seed


def test_samples_are_siblings_in_cohorts_up_to_the_total() -> None:
    loader = make_loader()
    cohorts = [loader.load(0, 8), loader.load(1, 8), loader.load(2, 8)]
    assert [len(samples) for samples in cohorts] == [8, 6, 0]
    samples = [sample for cohort in cohorts for sample in cohort]
    assert [sample.id for sample in samples] == list(range(14))
    assert [sample.index for sample in samples] == [0, 1] * 7
    assert [sample.cohort for sample in samples] == [0] * 8 + [1] * 6
    assert [sample.epoch for sample in samples] == [0] * 6 + [1] * 6 + [2] * 2  # three prompts of two siblings each
    assert {sample.budget for sample in samples} == {40}
    for sample in samples:
        assert sample.seed == sample_seed(3, sample.epoch, sample.prompt.id, sample.index)


def test_a_loader_continues_from_a_saved_state() -> None:
    whole, first = make_loader(), make_loader()
    expected = whole.load(0, 14)
    first.load(0, 6)
    second = make_loader()
    second.load_state_dict(first.state_dict())
    assert [identity(sample) for sample in second.load(1, 8)] == [identity(sample) for sample in expected[6:]]
    smaller = make_loader(total_samples=4)
    smaller.load_state_dict(first.state_dict())
    assert smaller.load(1, 8) == []
