"""Shards that four gloo ranks write in the background, loaded by two ranks and by one process; HSDP; host memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sortedrl.errors import ModelError
from sortedrl.learner.model import load_model
from sortedrl.learner.sharded.shard_files import OPTIMIZER, SHARDS_FOLDER, WEIGHTS, read_shards
from sortedrl.learner.torch import TorchLearner
from tests.support.forked_process import ForkedProcess
from tests.support.learners import make_model
from tests.support.rank_cases import read_state, run_updates, use_sgd
from tests.support.shard_cases import NUM_UPDATES, PPO, SGD, load_on_two, save_on_four


def run(call: Callable[..., object], folder: Path, size: int) -> None:
    ranks = [ForkedProcess(folder / f"{size}-{rank}", call, rank, folder) for rank in range(size)]
    try:
        for rank in ranks:
            assert rank.wait() == 0, rank.err
    finally:
        for rank in ranks:
            rank.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    run(save_on_four, folder, 4)
    run(load_on_two, folder, 2)
    return folder


def check_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


def state_of(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    weights, state, _ = read_state(folder)
    return weights, state["optimizer"]


def test_two_ranks_load_what_four_saved(folder: Path) -> None:
    for found, expected in zip(state_of(folder / "on-two"), state_of(folder / "expected"), strict=True):
        check_same(found, expected)
    counters = [read_state(folder / name)[1]["counters"] for name in ("on-two", "expected")]
    assert counters[0] == counters[1]


def test_one_process_loads_what_four_saved(folder: Path) -> None:
    weights, optimizer = state_of(folder / "expected")
    check_same(read_shards(folder / "shards", WEIGHTS), weights)
    check_same(read_shards(folder / "shards", OPTIMIZER), optimizer)
    state: dict[str, Any] = json.loads((folder / "files-0.json").read_text())["state"]
    learner = TorchLearner(make_model(), PPO, temperature=1.0)
    learner.load_state_dict({**state, "optimizer": read_shards(folder / "shards", OPTIMIZER)})
    check_same(learner.state_dict()["optimizer"], optimizer)


def test_an_update_while_files_are_written_does_not_change_them(folder: Path) -> None:
    """The weights moved meanwhile, so a file that followed them would differ from what was expected above."""
    before, after = state_of(folder / "expected")[0], state_of(folder / "later")[0]
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_each_rank_writes_its_rows_once_and_knows_its_files(folder: Path) -> None:
    listed = [json.loads((folder / f"files-{rank}.json").read_text())["files"] for rank in range(4)]
    assert sorted(name for files in listed for name in files) == sorted(p.name for p in (folder / "shards").iterdir())
    rows = 0
    for files in listed:
        for name, entry in files.items():
            data = (folder / "shards" / name).read_bytes()
            assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            rows += load_file(folder / "shards" / name)[f"{WEIGHTS}model.embed_tokens.weight"].shape[0]
    assert rows == make_model().model.embed_tokens.weight.shape[0]


def test_two_copies_of_the_model_learn_what_one_process_learns(folder: Path) -> None:
    check_updates(folder / "copies")
    check_same(read_shards(folder / "copied-shards", WEIGHTS), state_of(folder / "copies")[0])


def test_states_in_host_memory_change_no_update(folder: Path) -> None:
    check_updates(folder / "on-host")


def check_updates(saved: Path) -> None:
    learner = TorchLearner(make_model(), SGD, temperature=1.0)
    use_sgd(learner)
    expected = run_updates(learner, 0, NUM_UPDATES)
    weights, _, metrics = read_state(saved)
    for name, parameter in learner.model.named_parameters():
        wanted = parameter.detach()
        assert float((weights[name] - wanted).norm()) <= 1e-6 * float(wanted.norm()), name
    assert [row["loss"] for row in metrics] == pytest.approx([row["loss"] for row in expected], rel=1e-6, abs=1e-6)


def test_a_model_is_loaded_from_shards(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sortedrl.learner.model.load_tokenizer", lambda folder: None)
    model = make_model()
    model.config.save_pretrained(tmp_path)
    (tmp_path / SHARDS_FOLDER).symlink_to(folder / "shards")
    loaded = load_model(tmp_path)[0]
    weights = state_of(folder / "expected")[0]
    model.load_state_dict(weights, strict=False)
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    model.config.num_hidden_layers = 3
    model.config.layer_types = None
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"others are in only one of shards and model"):
        load_model(tmp_path)
