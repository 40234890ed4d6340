"""Supervised fine-tuning: batches, loss mask, Muon, and that a short run learns."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from sortedrl.errors import DataError
from sortedrl.learner.sft import GroupedMuon, SftRates, answer_loss, length_batches, orthogonalise, pad_batch
from sortedrl.tasks.tiny import LESSONS, demonstrations, make_model, make_tokenizer, rebuild


def test_batches_hold_every_example_once_within_the_token_limit() -> None:
    examples = [([1] * (1 + n % 5), [2] * (1 + n % 37)) for n in range(300)]
    batches = list(length_batches(examples, batch_tokens=100, seed=0))
    assert sorted(map(str, examples)) == sorted(str(example) for batch in batches for example in batch)
    for batch in batches:
        lengths = [len(prompt) + len(answer) for prompt, answer in batch]
        assert max(lengths) * len(lengths) <= 100
    assert batches == list(length_batches(examples, batch_tokens=100, seed=0))


def test_an_example_longer_than_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match="has 11 tokens, more than a batch of 10"):
        list(length_batches([([1], [2] * 10)], batch_tokens=10, seed=0))


def test_loss_covers_the_answer_only() -> None:
    model = make_model(seed=0)
    batch = [([5, 6, 7], [8, 9]), ([5, 6], [7])]
    tokens_nl, labels_nl = pad_batch(batch)
    assert labels_nl.tolist() == [[-100, -100, -100, 8, 9], [-100, -100, 7, -100, -100]]
    wanted = []
    for prompt, answer in batch:  # one sequence at a time, without padding
        logprobs_lv = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
        wanted += [-logprobs_lv[len(prompt) + k - 1, token] for k, token in enumerate(answer)]
    torch.testing.assert_close(answer_loss(model, tokens_nl, labels_nl), torch.stack(wanted).mean())


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    matrices_grc = torch.randn(3, 16, 48)
    values_gr = torch.linalg.svdvals(orthogonalise(matrices_grc))
    assert values_gr.min() > 0.6
    assert values_gr.max() < 1.3
    left_grr, _, right_grc = torch.linalg.svd(matrices_grc, full_matrices=False)
    overlap_gr = (left_grr.mT @ orthogonalise(matrices_grc) @ right_grc.mT).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(overlap_gr, values_gr.mean() * torch.ones_like(overlap_gr), atol=0.4, rtol=0)


def test_grouped_muon_agrees_with_torch() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((16, 16), (32, 16), (16, 32), (16, 16))]
    theirs = [torch.nn.Parameter(matrix.detach().clone()) for matrix in ours]
    muon = GroupedMuon(ours)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    start = [matrix.detach().clone() for matrix in ours]
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        muon.step(0.02)
        reference.step()
    for one, other, before in zip(ours, theirs, start, strict=True):  # torch orthogonalises in bfloat16
        assert (one - other).norm() < 0.03 * (other - before).norm()


def test_rates_rise_then_fall_to_the_final_share() -> None:
    rates = SftRates(warmup_steps=10, final_share=0.05)
    assert rates.scale(0, 1000) == pytest.approx(0.1)
    assert rates.scale(500, 1000) == pytest.approx(0.525)
    assert rates.scale(1000, 1000) == pytest.approx(0.05)


def test_demonstrations_are_deterministic_and_follow_the_lessons() -> None:
    tokenizer = make_tokenizer()
    first = list(islice(demonstrations(tokenizer, seed=1), 50))
    assert first == list(islice(demonstrations(tokenizer, seed=1), 50))
    assert first != list(islice(demonstrations(tokenizer, seed=2), 50))
    (says,) = tokenizer.encode("says")
    assert {prompt.count(says) for prompt, _ in first} == set(LESSONS[0].people)
    assert all(answer[-1] == tokenizer.eos_token_id for _, answer in first)


def test_thirty_steps_lower_the_loss_and_save_a_loadable_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses: list[float] = []
    result = rebuild(tmp_path / "model", seed=0, steps=30, on_step=lambda step, loss: losses.append(loss))
    assert len(losses) == result.steps == 30
    assert sum(losses[-5:]) / 5 < 0.85 * losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokens_nl, labels_nl = pad_batch(list(islice(demonstrations(tokenizer, seed=5), 16)))
    assert answer_loss(model, tokens_nl, labels_nl).item() < 0.85 * losses[0]


def test_running_out_of_examples_is_an_error(tmp_path: Path) -> None:
    from sortedrl.learner.sft import cold_start

    with pytest.raises(DataError, match="lasted for 1 of 5 steps"):
        cold_start(
            tmp_path, model=make_model(0), tokenizer=make_tokenizer(), examples=[([5], [6, 7])] * 4, steps=5, seed=0
        )
