"""Two gloo ranks against one process: losses, weights, metrics and states, in processes without Ray."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sortedrl.errors import LearnerError
from sortedrl.learner.pack import pack
from sortedrl.learner.sharded.rank import RankLearner, split_evenly
from sortedrl.learner.sharded.shards import skeleton_of, weights_of
from sortedrl.learner.torch import TorchLearner
from tests.support.forked_process import ForkedProcess
from tests.support.learners import make_model
from tests.support.rank_cases import (
    CASES,
    NUM_RANKS,
    SAVED_AFTER,
    batch_of,
    model_of,
    read_state,
    run_rank,
    run_updates,
    use_sgd,
)

CLOSE = {
    "sgd": 1e-5,
    "clipped": 1e-5,
    "one-by-one": 1e-5,
    "adam": 1e-3,
    "ppo": 1e-4,
    "adapters": 1e-5,
}  # relative, after all updates


def one_process(name: str, model: Any = None) -> TorchLearner:
    case = CASES[name]
    learner = TorchLearner(model or model_of(name), case.settings, temperature=1.0)
    if case.is_sgd:
        use_sgd(learner)
    return learner


def check_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], close: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        scale = float(theirs[name].norm())
        assert float((value - theirs[name]).norm()) <= close * scale + 1e-12, name


def weights(learner: TorchLearner) -> dict[str, Tensor]:
    """The trainable weights."""
    return {name: value.detach() for name, value in learner.model.named_parameters() if value.requires_grad}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of two ranks. One case of theirs resumes from a state of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    learner = one_process("adam")
    run_updates(learner, 0, SAVED_AFTER)
    half = folder / "adam-one"
    half.mkdir()
    state = learner.state_dict()
    save_file(weights(learner), half / "weights.safetensors")
    save_file(state.pop("optimizer"), half / "optimizer.safetensors")
    (half / "state.json").write_text(json.dumps({"metrics": [], "learner": state}))
    ranks = [ForkedProcess(folder / f"rank-{rank}", run_rank, rank, folder) for rank in range(NUM_RANKS)]
    try:
        for rank in ranks:
            assert rank.wait() == 0, rank.err
    finally:
        for rank in ranks:
            rank.end()
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ranks_learn_what_one_process_learns(ranks: Path, name: str) -> None:
    theirs, state, metrics = read_state(ranks / name)
    learner = one_process(name)
    expected = run_updates(learner, 0, CASES[name].num_updates)
    check_equal(theirs, weights(learner), CLOSE[name])
    assert len(metrics) == len(expected)
    for found, wanted in zip(metrics, expected, strict=True):
        # How many tokens are computed depends on how prompts that siblings share fall into micro-batches.
        assert found.pop("computed_tokens") >= wanted.pop("computed_tokens")
        assert found == pytest.approx(wanted, rel=CLOSE[name], abs=1e-6)
    assert state["counters"] == learner.state_dict()["counters"]


def test_the_weights_have_moved(ranks: Path) -> None:
    """So the weights compared above are not equal just because nothing was trained."""
    for name, case in CASES.items():
        moved, start = read_state(ranks / name)[0], weights(one_process(name))
        assert max(float((moved[key] - start[key]).abs().max()) for key in start) > 1e-3, case


@pytest.mark.parametrize("name", ["adam", "ppo"])
def test_one_process_goes_on_from_a_state_of_ranks(ranks: Path, name: str) -> None:
    half, state, _ = read_state(ranks / f"{name}-half")
    model = make_model()
    model.load_state_dict(half, strict=False)  # the tied head goes by another name
    learner = one_process(name, model)
    learner.load_state_dict(state)
    check_equal(learner.state_dict()["optimizer"], state["optimizer"], 0.0)
    run_updates(learner, SAVED_AFTER, CASES[name].num_updates)
    check_equal(weights(learner), read_state(ranks / name)[0], CLOSE[name])


def test_ranks_go_on_from_a_state_of_one_process(ranks: Path) -> None:
    half, state, _ = read_state(ranks / "adam-one")
    taken_weights, taken, _ = read_state(ranks / "adam-taken")
    check_equal(taken_weights, half, 0.0)
    check_equal(taken["optimizer"], state["optimizer"], 0.0)
    assert (taken["counters"], taken["advantage"]) == (state["counters"], state["advantage"])
    learner = one_process("adam")
    run_updates(learner, 0, CASES["adam"].num_updates)
    check_equal(read_state(ranks / "adam-gone-on")[0], weights(learner), CLOSE["adam"])


def test_a_skeleton_has_no_weights_and_keeps_ties() -> None:
    model = make_model()
    bare = skeleton_of(model)
    assert {parameter.device.type for parameter in bare.parameters()} == {"meta"}
    assert bare.lm_head.weight is bare.model.embed_tokens.weight
    assert {name: array.shape for name, array in weights_of(model).items()} == {
        name: tuple(parameter.shape) for name, parameter in bare.named_parameters()
    }
    assert all(buffer.device.type == "cpu" for buffer in bare.buffers())
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_micro_batches_are_split_evenly() -> None:
    samples = batch_of(0).samples
    indices = range(len(samples))
    (all_in_one,) = pack(samples, indices, 1000)
    micros = split_evenly(samples, indices, 1000, 2, "cpu")
    assert len(micros) == 2
    assert max(micro.num_tokens for micro in micros) <= 0.7 * all_in_one.num_tokens
    assert sorted(index for micro in micros for index in micro.indices) == list(indices)
    assert split_evenly(samples, [], 1000, 2, "cpu") == []


@pytest.fixture
def single_rank() -> Iterator[DeviceMesh]:
    """A group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_rank_out_of_memory_stops(single_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot try again alone, because the other ranks are exchanging weights with it."""
    learner = RankLearner(make_model(), CASES["adam"].settings, temperature=1.0, mesh=single_rank)

    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nand more lines")

    monkeypatch.setattr(RankLearner, "_forward", no_room)
    with pytest.raises(LearnerError, match=r"of \d+ tokens .*20 GiB\): lower learner.micro_tokens, or raise .* resume"):
        learner.start(batch_of(0))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_step_that_is_not_finite_is_not_taken(single_rank: DeviceMesh) -> None:
    learner = RankLearner(make_model(), CASES["adam"].settings, temperature=1.0, mesh=single_rank)
    start = learner.trained_weights()
    batch = batch_of(0)
    batch.samples[0].reward = math.inf
    result = learner.start(batch).result()
    assert (result.optimizer_steps, result.metrics["skipped_steps"]) == (0, 1)
    assert all((array == start[name]).all() for name, array in learner.trained_weights().items())
