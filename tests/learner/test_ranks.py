"""Gloo ranks against one process: losses, weights, metrics and states, in processes without Ray."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sortedrl.errors import LearnerError
from sortedrl.learner.pack import MicroBatch, pack
from sortedrl.learner.sharded.balance import attention_weight, plan_rounds
from sortedrl.learner.sharded.rank import RankLearner
from sortedrl.learner.sharded.shards import skeleton_of, weights_of
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Segment
from tests.support.forked_process import ForkedProcess
from tests.support.learners import make_model
from tests.support.rank_cases import (
    ALL_LOW_CASES,
    CASES,
    EVERY_CASE,
    FIVE_LOW_UPDATES,
    LOW_CASES,
    NUM_RANKS,
    NUM_UPDATES,
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
    "short-ppo": 1e-4,
}  # relative, after all updates
SAME = 1e-6  # relative: what float32 gives over five updates of SGD


def one_process(name: str, model: Any = None, dtype: str | None = None) -> TorchLearner:
    case = EVERY_CASE[name]
    settings = case.settings if dtype is None else replace(case.settings, dtype=dtype)
    learner = TorchLearner(model or model_of(name), settings, temperature=1.0)
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
    return run_ranks(folder, NUM_RANKS, (*CASES, *LOW_CASES))


def run_ranks(folder: Path, size: int, names: tuple[str, ...]) -> Path:
    ranks = [ForkedProcess(folder / f"rank-{rank}", run_rank, rank, folder, size, names) for rank in range(size)]
    try:
        for rank in ranks:
            assert rank.wait() == 0, rank.err
    finally:
        for rank in ranks:
            rank.end()
    return folder


def check_as_near(folder: Path, name: str) -> None:
    """Ranks in bfloat16 are about as near to float32 as one process in bfloat16 is: losses and weights."""
    found, _, metrics = read_state(folder / name)
    exact, low = one_process(name, dtype="float32"), one_process(name)
    start = {key: value.clone() for key, value in weights(exact).items()}
    num_updates = EVERY_CASE[name].num_updates
    exact_metrics, low_metrics = run_updates(exact, 0, num_updates), run_updates(low, 0, num_updates)
    moved = distance(weights(exact), start)
    assert distance(found, start) > 0.5 * moved > 0
    assert distance(found, weights(exact)) <= 3 * distance(weights(low), weights(exact)) + 0.01 * moved
    for key, close in (("loss", 0.02), ("grad_norm", 0.05), ("kl_behaviour", 0.02)):
        for ours, theirs, other in zip(metrics, exact_metrics, low_metrics, strict=True):
            assert abs(ours[key] - theirs[key]) <= 3 * abs(other[key] - theirs[key]) + close * (1 + abs(theirs[key]))


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return math.sqrt(sum(float((ours[key] - theirs[key]).square().sum()) for key in ours))


@pytest.mark.parametrize("name", LOW_CASES)
def test_ranks_learn_in_bfloat16(ranks: Path, name: str) -> None:
    check_as_near(ranks, name)


def test_five_updates_are_those_of_one_process(ranks: Path) -> None:
    check_five_updates(ranks)


def check_five_updates(folder: Path) -> None:
    found, _, metrics = read_state(folder / "sgd")
    learner = one_process("sgd")
    expected = run_updates(learner, 0, NUM_UPDATES)
    check_equal(found, weights(learner), SAME)
    assert [row["loss"] for row in metrics] == pytest.approx([row["loss"] for row in expected], rel=SAME, abs=SAME)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks(tmp_path: Path) -> None:
    low = (*LOW_CASES, *FIVE_LOW_UPDATES)
    run_ranks(tmp_path, 4, ("sgd", "one-by-one", "short-ppo", *low))
    check_five_updates(tmp_path)
    for name in low:
        check_as_near(tmp_path, name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_algorithm_learns_in_bfloat16(tmp_path: Path) -> None:
    names = (*FIVE_LOW_UPDATES, *ALL_LOW_CASES)
    run_ranks(tmp_path, 2, names)
    for name in names:
        check_as_near(tmp_path, name)


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


def test_micro_batches_are_balanced_by_cost() -> None:
    samples = batch_of(0).samples
    indices = range(len(samples))
    (all_in_one,) = pack(samples, indices, 1000)
    ((first, second),) = plan_rounds(samples, indices, 1000, 2, 0.0)
    assert first is not None
    assert second is not None
    assert max(first.num_tokens, second.num_tokens) <= 0.7 * all_in_one.num_tokens
    found = [index for plan in (first, second) for group in plan.groups for index in group.indices]
    assert sorted(found) == list(indices)
    assert plan_rounds(samples, [], 1000, 2, 0.0) == []


def test_the_cost_of_attention_counts() -> None:
    """One answer of 100 tokens and eight of 25: by tokens they mix, but attention makes the long one expensive."""
    samples = [
        replace(sample, segments=[Segment(version=0, tokens=[1] * length, logprobs=[0.0] * length)])
        for sample, length in zip((*batch_of(0).samples, batch_of(0).samples[0]), [100] + [25] * 8, strict=True)
    ]
    samples = [replace(s, prompt=replace(s.prompt, tokens=(number,))) for number, s in enumerate(samples)]
    ((first, second),) = plan_rounds(samples, range(9), 1000, 2, 0.0)
    assert {first.num_tokens, second.num_tokens} == {100 + 2 * 25, 6 * 25}
    ((first, second),) = plan_rounds(samples, range(9), 1000, 2, 0.1)
    # 100 + .1 * 10,000 = 1,100 against 25 + .1 * 625 = 87.5 for each of the others.
    assert (first.num_tokens, first.cost) == (100, 1100)
    assert (second.num_tokens, second.cost) == (8 * 25, 8 * 87.5)


def test_more_rounds_where_the_budget_is_small() -> None:
    samples = batch_of(0).samples
    rounds = plan_rounds(samples, range(8), 20, 3, 0.0)
    plans = [plan for members in rounds for plan in members if plan is not None]
    assert all(len(members) == 3 for members in rounds)
    assert max(plan.num_tokens for plan in plans) <= 20
    assert sorted(i for plan in plans for group in plan.groups for i in group.indices) == list(range(8))
    # A sample that exceeds the budget is alone.
    longest = plan_rounds(samples, range(8), 5, 3, 0.0)
    assert max(len(plan.groups) for members in longest for plan in members if plan and plan.num_tokens > 5) == 1


def test_attention_weight_of_a_model() -> None:
    model = make_model()  # 2 layers of 16
    assert attention_weight(model) == 32 / sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture
def single_rank() -> Iterator[DeviceMesh]:
    """A group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_one_sample_that_does_not_fit_stops_a_rank(single_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(CASES["adam"].settings, micro_tokens=1)
    learner = RankLearner(make_model(), settings, temperature=1.0, mesh=single_rank)

    def no_room(micro: MicroBatch, *_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nand more lines")

    monkeypatch.setattr(learner, "_backward", no_room)
    with pytest.raises(LearnerError, match=r"one sample at a time \(\d+ tokens: .*20 GiB\): .* learner.ranks"):
        learner.start(batch_of(0))


def test_a_rank_out_of_memory_tries_again_with_the_others(ranks: Path) -> None:
    """Rank 1 ran out of memory in "short-ppo", once forward and once backward; the results are compared above."""
    warned = [(ranks / f"rank-{rank}" / "err-0.txt").read_text() for rank in range(NUM_RANKS)]
    for when in ("forward", "backward"):
        assert warned[1].count(f"CUDA out of memory ({when})") == 1
    assert warned[0].count("(on another rank): continuing with learner.micro_tokens") == 2


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_step_that_is_not_finite_is_not_taken(single_rank: DeviceMesh) -> None:
    learner = RankLearner(make_model(), CASES["adam"].settings, temperature=1.0, mesh=single_rank)
    start = learner.trained_weights()
    batch = batch_of(0)
    batch.samples[0].reward = math.inf
    result = learner.start(batch).result()
    assert (result.optimizer_steps, result.metrics["skipped_steps"]) == (0, 1)
    assert all((array == start[name]).all() for name, array in learner.trained_weights().items())
