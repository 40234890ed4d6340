"""Checkpoints: the round trip through transformers, exact optimiser state, and folders that are not checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sortedrl.errors import LearnerError, ModelError, RunDirError
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch, Prompt, Sample, Segment
from sortedrl.run.checkpoint_folder import OPTIMIZER_FILE, STATE_FILE, load_model, load_state, save_checkpoint

SETTINGS: Any = SimpleNamespace(
    algorithm="reinforce++",
    group_size=1,
    advantage_scope="running",
    lr=1e-2,
    lr_final=0.05,
    warmup_samples=0,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    clip_low=0.2,
    clip_high=0.28,
    grad_clip=1.0,
    inner_steps=1,
    inner_epochs=1,
    micro_tokens=1024,
    recompute=False,
    dtype="auto",
    device="cpu",
    fp32_head=False,
    offload=False,
    importance_mask="none",
)


def make_model(hidden_size: int = 16) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=hidden_size,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).eval()


def make_tokenizer() -> Any:
    words = {word: index for index, word in enumerate("?abcdefgh")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="?")), unk_token="?")


def make_batch(update: int) -> Batch:
    samples = [
        Sample(
            id=index,
            prompt=Prompt(id=str(index), tokens=(1, 2), content=""),
            index=0,
            epoch=0,
            cohort=0,
            seed=index,
            budget=4,
            segments=[Segment(version=0, tokens=[index % 9, 3, update % 9], logprobs=[-2.0, -2.1, -2.2])],
            reward=float((index + update) % 3 == 0),
        )
        for index in range(4)
    ]
    return Batch(update=update, version=update, samples=tuple(samples))


def equal_weights(first: Any, second: Any) -> bool:
    theirs = second.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in first.state_dict().items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model folder, for tests to damage."""
    return save_checkpoint(tmp_path / "model", make_model(), make_tokenizer())


def test_training_goes_on_exactly_where_it_was(tmp_path: Path) -> None:
    model = make_model()
    learner = TorchLearner(model, SETTINGS, temperature=1.0)
    for update in range(3):
        learner.start(make_batch(update))
    path = save_checkpoint(
        tmp_path / "checkpoints" / "3", model, make_tokenizer(), learner=learner, extra={"cursor": 12}
    )

    twin_model, tokenizer = load_model(path)
    assert tokenizer.convert_tokens_to_ids(["c", "h"]) == [3, 8]
    assert equal_weights(twin_model, model)
    twin = TorchLearner(twin_model, SETTINGS, temperature=1.0)
    assert load_state(path, twin) == {"cursor": 12}
    saved, loaded = learner.state_dict(), twin.state_dict()
    assert saved["optimizer"].keys() == loaded["optimizer"].keys()
    assert all(torch.equal(tensor, loaded["optimizer"][name]) for name, tensor in saved["optimizer"].items())
    assert (saved["advantage"], saved["counters"]) == (loaded["advantage"], loaded["counters"])
    for update in range(3, 6):
        assert learner.start(make_batch(update)).result() == twin.start(make_batch(update)).result()
    assert equal_weights(twin_model, model)


def test_transformers_loads_it(folder: Path) -> None:
    assert equal_weights(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), make_model())


def test_the_dtype_is_as_asked(folder: Path) -> None:
    assert load_model(folder)[0].dtype == torch.float32
    assert load_model(folder, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_a_checkpoint_is_replaced_and_nothing_is_left_aside(folder: Path) -> None:
    (folder / "stale.txt").write_text("old")
    save_checkpoint(folder, make_model(), make_tokenizer(), extra={"turn": 2})
    assert load_state(folder) == {"turn": 2}
    assert not (folder / "stale.txt").exists()
    assert [entry.name for entry in folder.parent.iterdir()] == ["model"]


def test_a_failed_save_leaves_the_old_one(folder: Path) -> None:
    with pytest.raises(TypeError):
        save_checkpoint(folder, make_model(), make_tokenizer(), extra={"no json": object()})
    assert load_state(folder) == {}
    assert [entry.name for entry in folder.parent.iterdir()] == ["model"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="cannot be written"):
        save_checkpoint(tmp_path / "file" / "1", make_model(), make_tokenizer())


def test_state_that_is_missing_or_damaged_is_named(folder: Path) -> None:
    learner = TorchLearner(make_model(), SETTINGS, temperature=1.0)
    with pytest.raises(RunDirError, match="wrote for a learner"):
        load_state(folder, learner)
    save_checkpoint(folder, make_model(), make_tokenizer(), learner=learner)
    (folder / OPTIMIZER_FILE).write_bytes(b"not tensors")
    with pytest.raises(RunDirError, match="damaged"):
        load_state(folder, learner)
    (folder / OPTIMIZER_FILE).unlink()
    with pytest.raises(RunDirError, match=OPTIMIZER_FILE):
        load_state(folder, learner)
    (folder / STATE_FILE).write_text("{")
    with pytest.raises(RunDirError, match="damaged"):
        load_state(folder)
    (folder / STATE_FILE).unlink()
    with pytest.raises(RunDirError, match=STATE_FILE):
        load_state(folder)


def test_optimiser_state_of_another_model_is_refused(tmp_path: Path) -> None:
    model = make_model(hidden_size=32)
    learner = TorchLearner(model, SETTINGS, temperature=1.0)
    learner.start(make_batch(0))
    path = save_checkpoint(tmp_path / "other", model, make_tokenizer(), learner=learner)
    with pytest.raises(LearnerError, match="another shape"):
        load_state(path, TorchLearner(make_model(), SETTINGS, temperature=1.0))


def test_a_folder_that_is_no_model_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        load_model(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer"):
        load_model(folder)


def test_weights_that_are_missing_or_unreadable_are_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder)
    weights.unlink()
    with pytest.raises(ModelError, match="no safetensors weights"):
        load_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="convert"):
        load_model(folder)


def test_a_config_that_the_weights_do_not_fit_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ModelError, match="do not fit"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    with pytest.raises(ModelError):
        load_model(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        load_model(folder)


def test_code_in_a_model_folder_is_never_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    with pytest.raises(ModelError):
        load_model(folder)
    assert not (folder / "ran").exists()
