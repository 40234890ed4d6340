"""LoRA through peft: the trained weights, the weights that engines sample from, checkpoints, and resuming."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.errors import ConfigError, ModelError
from sortedrl.learner.lora import ADAPTER_FOLDER, adapt, check_peft_config, import_peft, peft_config_of
from sortedrl.run.checkpoint_folder import Checkpoints, load_model
from sortedrl.run.memory_formulas import adapter_params
from sortedrl.simulate.costs import load_model_shape
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.weights import ModuleWeights, merged_copy

ROWS = [
    {"prompt": "Ann says Bob-knave . Bob says Ann-knight . ?"},
    {"prompt": "Cid says Dan-knight . Dan says Cid-knave . ?"},
    {"prompt": "Eve says Fay-knave . Fay says Eve-knave . ?"},
]
TOKENS = torch.arange(24).reshape(2, 12)


def make_config(folder: Path, rank: int = 4, **sections: dict[str, Any]) -> SortedConfig:
    return SortedConfig(
        run={"dir": str(folder), "samples": 64, "report": False, **sections.pop("run", {})},
        lora={"rank": rank, "alpha": 8.0},
        schedule={"update_batch": 16, **sections.pop("schedule", {})},
        engine={"slots": 16, "max_new_tokens": 24},
        reward={"grace_s": 60.0},
        learner={"lr": 1e-2, "group_size": 4},
        eval={"prompts": 0},
        checkpoint={"every_updates": 1, "keep": 9},
        **sections,
    )


def make_trainer(config: SortedConfig, **arguments: Any) -> SortedTrainer:
    def brief(completions: list[str]) -> list[float]:
        return [1 - len(text.split()) / 100 for text in completions]

    return SortedTrainer(reward_funcs=brief, args=config, train_dataset=ROWS, quiet=True, **arguments)


def newest(trainer: SortedTrainer) -> Path:
    folder = Checkpoints(trainer.run_dir / "checkpoints").latest()
    assert folder is not None
    return folder


def base_model() -> Any:
    return load_model(knights_tiny_path())[0]


def adapted_model(seed: int = 0, **changes: Any) -> Any:
    """A model with random adapters, because new adapters add nothing to the base."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": "all-linear", **changes})
    model = adapt(base_model(), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(
    "changes", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "none", "r": 1}]
)
def test_engines_get_base_and_adapters_together_and_change_neither(changes: dict[str, Any]) -> None:
    model = adapted_model(**changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = ModuleWeights(model)
    merged = source.module
    assert type(merged).__name__ == "LlamaForCausalLM"
    assert torch.allclose(logits(merged), logits(model), atol=1e-3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
                before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not torch.allclose(logits(merged), logits(model), atol=1e-3)
    frozen = source.snapshot()
    assert source.module is merged
    assert torch.allclose(logits(merged), logits(model), atol=1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(frozen.module.parameters(), merged.parameters(), strict=True))
    assert not any(parameter.requires_grad for parameter in merged.parameters())


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_a_snapshot_has_the_weights_of_pefts_own_merge_and_does_not_follow_training(changes: dict[str, Any]) -> None:
    model = adapted_model(**changes)
    source = ModuleWeights(model)
    for _ in range(2):  # the second one is made from what the first one has kept
        expected, snapshot = merged_copy(model), source.snapshot().module
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(-1.5)
        found = snapshot.state_dict()
        assert found.keys() == expected.state_dict().keys()
        assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
        assert not any(parameter.requires_grad for parameter in snapshot.parameters())


def test_a_run_trains_adapters_only_and_both_forms_load(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    config = make_config(tmp_path)
    trainer = make_trainer(config)
    assert trainer.train().status == "complete"
    folder = newest(trainer)
    state = load_file(folder / "optimizer.safetensors")
    assert state
    assert all("lora_" in name for name in state)
    merged, _ = load_model(folder)
    again = peft.PeftModel.from_pretrained(base_model(), str(folder / ADAPTER_FOLDER))
    assert torch.allclose(logits(merged), logits(again), atol=1e-3)
    assert not torch.allclose(logits(merged), logits(base_model()), atol=1e-3)
    assert sorted(path.suffix for path in (folder / ADAPTER_FOLDER).iterdir()) == [".json", ".md", ".safetensors"]


def test_adapters_in_the_last_layers_only(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    config = make_config(tmp_path).replaced(lora={"last_layers": 1})
    trainer = make_trainer(config)
    assert trainer.train().status == "complete"
    names = load_file(newest(trainer) / ADAPTER_FOLDER / "adapter_model.safetensors")
    last = base_model().config.num_hidden_layers - 1
    assert last > 0
    assert all(f".layers.{last}." in name for name in names)
    found, base = load_model(newest(trainer))[0].model.layers, base_model().model.layers
    changed = [
        number
        for number in range(last + 1)
        if any(
            not torch.equal(a, b) for a, b in zip(found[number].parameters(), base[number].parameters(), strict=True)
        )
    ]
    assert changed == [last]
    longer = config.replaced(run={"samples": 2 * config.run.samples})
    assert make_trainer(longer).train(resume=True).updates == 8
    shape = load_model_shape("qwen2.5-7b")
    assert adapter_params(config, shape) * shape.layers == adapter_params(make_config(tmp_path), shape)
    with pytest.raises(ConfigError, match=rf"lora\.last_layers is 9, and the model has {last + 1} layers: lower it"):
        make_trainer(config.replaced(lora={"last_layers": 9}, run={"name": "other"})).train()


def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    whole = make_trainer(make_config(tmp_path / "whole"))
    whole.train()
    config = make_config(tmp_path / "halves")
    first = make_trainer(config, sinks=[Stopper(after=2)])
    first.sinks[0].trainer = first
    assert first.train().updates == 2
    second = make_trainer(config)
    assert second.train(resume=True).status == "complete"
    for name in ("model.safetensors", f"{ADAPTER_FOLDER}/adapter_model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(newest(trainer) / name) for trainer in (second, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items()), name


def test_a_run_goes_on_with_its_own_base_model_only(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    settings = make_config(tmp_path, rank=0, run={"samples": 32})
    model, tokenizer = load_model(knights_tiny_path())
    make_trainer(settings, model=model, processing_class=tokenizer, peft_config=config).train()
    longer = make_config(tmp_path, rank=0, run={"samples": 48})
    other = base_model()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.add_(0.01)
    with pytest.raises(ModelError, match=r"base model and adapters do not give the weights .*layers\.1\.mlp\.up_proj"):
        make_trainer(longer, model=other, processing_class=tokenizer, peft_config=config).train(resume=True)
    again = make_trainer(longer, model=base_model(), processing_class=tokenizer, peft_config=config)
    assert again.train(resume=True).samples == 48
    # A model that already has adapters gets those of the checkpoint.
    longest = make_config(tmp_path, rank=0, run={"samples": 64})
    wrapped = adapt(base_model(), config)
    summary = make_trainer(longest, model=wrapped, processing_class=tokenizer).train(resume=True)
    assert summary.samples == 64


class Stopper:
    def __init__(self, after: int) -> None:
        self.after = after
        self.trainer: SortedTrainer | None = None

    def emit(self, event: Any) -> None:
        if event.kind == "UpdateDone" and event.update + 1 == self.after:
            self.trainer.stop()

    def close(self) -> None: ...


def test_peft_config_and_a_model_that_has_adapters_work_too(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    _, tokenizer = load_model(knights_tiny_path())
    model = adapted_model()
    given = make_trainer(make_config(tmp_path / "a", rank=0), model=model, processing_class=tokenizer)
    assert given.train().status == "complete"
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    overlapped = make_config(tmp_path / "b", rank=0, schedule={"strategy": "async"})
    trainer = make_trainer(overlapped, peft_config=config)
    assert trainer.train().status == "complete"
    longer = overlapped.replaced(run={"samples": 2 * overlapped.run.samples})
    with pytest.raises(ConfigError, match="belongs to a run with adapters: pass its peft_config again"):
        make_trainer(longer).train(resume=True)
    saved = peft.PeftModel.from_pretrained(base_model(), str(newest(trainer) / ADAPTER_FOLDER))
    assert torch.allclose(logits(saved), logits(load_model(newest(trainer))[0]), atol=1e-3)


def test_mistakes_are_named(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"lora\.rank and peft_config both ask for adapters"):
        make_trainer(make_config(tmp_path), peft_config=peft.LoraConfig(r=2)).train()
    with pytest.raises(ConfigError, match="peft_config is a dict"):
        make_trainer(make_config(tmp_path, rank=0), peft_config={"r": 2}).train()
    with pytest.raises(ConfigError, match="adds prompts, which cannot be merged"):
        check_peft_config(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ModelError, match=r"do not fit the model.*correct lora\.target_modules"):
        adapt(base_model(), peft.LoraConfig(r=2, target_modules=["nothing"]))
    with pytest.raises(ConfigError, match="the model has adapters"):
        adapt(adapted_model(), peft.LoraConfig(r=2))


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # makes the import fail, as if peft were not installed
    with pytest.raises(ConfigError, match=r"pip install 'sortedrl\[lora\]'"):
        import_peft()
    settings = SortedConfig().lora
    assert settings.rank == 0
    assert peft_config_of(settings) is None
