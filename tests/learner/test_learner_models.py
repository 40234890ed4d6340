"""The learner on models other than the tiny Llama: PPO on other architectures, adapters, a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.learner.lora import ADAPTER_FOLDER, adapt
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Sample
from sortedrl.run.checkpoint_folder import Checkpoints, load_model
from sortedrl.trainer import SortedTrainer
from tests.support.learners import Settings, logprobs_of, make_batch, make_model, weights
from tests.support.tiny_models import tiny_model


def plain_values(model: Any, head: torch.nn.Linear, sample: Sample) -> list[float]:
    """The critic's values before each answer token, from one answer at a time and without packing."""
    tokens = torch.tensor([[*sample.prompt.tokens, *sample.tokens]])
    with torch.no_grad():
        hidden = model(tokens, output_hidden_states=True, use_cache=False).hidden_states[-1][0]
        return head(hidden)[len(sample.prompt.tokens) - 1 : -1, 0].tolist()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gpt-neox"])
def test_ppo_on_other_architectures(kind: str) -> None:
    model = tiny_model(kind)
    settings = Settings(algorithm="ppo", lr=1e-4, critic_lr=3e-3, value_clip=10.0)
    learner = TorchLearner(model, settings, temperature=1.0)
    batch = make_batch(model)
    assert learner.critic is not None
    torch.nn.init.normal_(learner.critic.head.weight, generator=torch.Generator().manual_seed(0))
    expected = [plain_values(model, learner.critic.head, sample) for sample in batch.samples]
    seen: list[Any] = []
    inner = learner._score

    def score(*args: Any, **options: Any) -> Any:
        found = inner(*args, **options)
        seen.append(found[1])
        return found

    learner._score = score
    before = weights(model)
    losses = [learner.start(batch).result().metrics["value_loss"] for _ in range(20)]
    for place, values in seen[0].items():
        assert values.tolist() == pytest.approx(expected[place], rel=1e-3, abs=1e-3)
    assert len(seen[0]) == len(batch.samples)
    assert losses[-1] < 0.7 * losses[0]
    assert any(not torch.equal(value, before[name]) for name, value in weights(model).items())


def test_a_model_with_adapters_is_its_own_reference() -> None:
    peft = pytest.importorskip("peft")
    base = make_model()
    batch = make_batch(base)
    model = adapt(make_model(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    frozen = {name: value for name, value in weights(model).items() if "lora_" not in name}
    total = count = 0.0
    with torch.no_grad():
        for sample in batch.samples:  # k3 by hand, from the log-probs of the base and of the adapted model
            prompt = list(sample.prompt.tokens)
            gap = logprobs_of(base, prompt, sample.tokens) - logprobs_of(model, prompt, sample.tokens)
            total += float((gap.exp() - 1 - gap).sum())
            count += len(gap)
    learner = TorchLearner(model, Settings(algorithm="grpo", kl_coef=0.5), temperature=1.0)
    assert not any("reference" in name for name in learner.state_dict()["optimizer"])
    metrics = learner.start(batch).result().metrics
    assert total / count > 1e-3
    assert metrics["kl_reference"] == pytest.approx(total / count, rel=1e-4)
    assert metrics["grad_norm"] > 0
    assert all(torch.equal(value, weights(model)[name]) for name, value in frozen.items())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_adapters_on_a_real_model(tmp_path: Path) -> None:
    """One small cohort on SmolLM2-135M: adapters are trained, saved, loaded again, and give the same log-probs."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("gguf")
    from sortedrl.learner.smollm2 import smollm2_path

    def brief(completions: list[Any], **_: Any) -> list[float]:
        return [1 - len(messages[0]["content"]) / 200 for messages in completions]

    questions = ("What is 3 + 4?", "Name a colour.")
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
    config = SortedConfig(
        run={"dir": str(tmp_path), "samples": 8, "report": False},
        model={"path": "smollm2-135m"},
        lora={"rank": 4, "alpha": 8.0},
        engine={"slots": 4, "max_new_tokens": 16},
        schedule={"strategy": "sorted-replay", "update_batch": 4, "cohort_batches": 2},
        learner={"algorithm": "grpo", "group_size": 4, "lr": 1e-3},
        reward={"grace_s": 60.0},
        eval={"prompts": 0},
    )
    trainer = SortedTrainer(reward_funcs=brief, args=config, train_dataset=rows, quiet=True)
    summary = trainer.train()
    assert (summary.status, summary.samples) == ("complete", 8)
    assert summary.optimizer_steps
    assert summary.ledger is not None
    assert (summary.ledger.lost, summary.ledger.duplicated) == (0, 0)
    folder = Checkpoints(trainer.run_dir / "checkpoints").latest()
    assert folder is not None
    merged, tokenizer = load_model(folder)
    base, _ = load_model(smollm2_path())
    prompt, answer = (tokenizer(text)["input_ids"] for text in ("The capital of France is", " Paris, and it is old."))
    with torch.no_grad():
        before = logprobs_of(base, prompt, answer)
        ours = logprobs_of(merged, prompt, answer)
        again = logprobs_of(peft.PeftModel.from_pretrained(base, str(folder / ADAPTER_FOLDER)), prompt, answer)
    torch.testing.assert_close(again, ours, rtol=0, atol=1e-4)
    assert float((ours - before).abs().max()) > 1e-3
