"""The learner in a copy of this process: the same weights, the same state, errors that arrive, an end in time."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from sortedrl.channel import Numbers
from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError, LearnerError
from sortedrl.learner.forked import ForkedLearner, pack_batch, unpack_batch
from sortedrl.learner.unscored import SkippingLearner
from sortedrl.records import Batch, Segment
from sortedrl.run.builders import learner as builder
from tests.support.learners import Settings, make_batch, make_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux only")


def plain(seed: int = 0, **changes: Any) -> SkippingLearner:
    return SkippingLearner(make_model(seed), Settings(**changes), temperature=1.0)


@pytest.fixture
def forked() -> Iterator[Callable[[SkippingLearner], ForkedLearner]]:
    made: list[ForkedLearner] = []

    def fork(learner: SkippingLearner) -> ForkedLearner:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        made.append(ForkedLearner(learner))
        torch.set_num_threads(threads)
        return made[-1]

    yield fork
    for learner in made:
        learner.close()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


def test_updates_give_the_same_weights_metrics_and_state(
    forked: Callable[[SkippingLearner], ForkedLearner],
) -> None:
    here, there = plain(), forked(plain())
    before = weights(there.source.module)
    for number in range(2):
        batch = replace(make_batch(make_model(), off_policy=0.3), update=number, version=number)
        expected, found = here.start(batch).result(), there.start(batch).result()
        assert found.optimizer_steps == expected.optimizer_steps == 1
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-7)
        assert_equal(weights(there.source.module), weights(here.source.module))
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(there.model).items())
    own, other = here.state_dict(), there.state_dict()
    assert_equal(other.pop("optimizer"), own.pop("optimizer"))
    assert other == own
    assert there.optimizer.param_groups[0]["lr"] == pytest.approx(found.metrics["lr"])


def test_a_state_is_taken_up(forked: Callable[[SkippingLearner], ForkedLearner]) -> None:
    here = plain()
    batch = make_batch(make_model(), off_policy=0.3)
    here.start(batch).result()
    here.skip(5, 1)
    there = forked(plain())
    there.model.load_state_dict(here.model.state_dict())
    there.load_state_dict(here.state_dict())
    assert there.state_dict()["left_out"] == [[5, 1]]
    here.start(batch).result()
    there.start(batch).result()
    assert_equal(weights(there.model), weights(here.model))


def test_samples_without_a_score_are_left_out(forked: Callable[[SkippingLearner], ForkedLearner]) -> None:
    there = forked(plain())
    batch = make_batch(make_model())
    for sample in batch.samples:
        there.skip(sample.id, sample.reward_attempt)
    assert there.start(batch).result().optimizer_steps == 0


class Failing(SkippingLearner):
    error: Exception = LearnerError("three steps were not finite: lower learner.lr")

    def _update(self, batch: Batch) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LearnerError("three steps were not finite: lower learner.lr"), "^three steps were not finite: lower"),
        (ValueError("too short\nand more"), r"^the update failed \(ValueError: too short\)"),
    ],
)
def test_an_error_of_an_update_is_raised_here(
    error: Exception, text: str, forked: Callable[[SkippingLearner], ForkedLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "error", error)
    there = forked(Failing(make_model(), Settings(), temperature=1.0))
    update = there.start(make_batch(make_model()))
    with pytest.raises(LearnerError, match=text):
        update.result()


def test_a_killed_process_is_told(forked: Callable[[SkippingLearner], ForkedLearner]) -> None:
    there = forked(plain())
    os.kill(there._pid, signal.SIGKILL)
    with pytest.raises(LearnerError, match=r"process has ended \(signal 9\).*resume the run"):
        there.start(make_batch(make_model())).result()


def test_the_process_ends_with_close(forked: Callable[[SkippingLearner], ForkedLearner]) -> None:
    there = forked(plain())
    pid = there._pid
    there.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_batch_arrives_as_it_was() -> None:
    batch = make_batch(make_model(), progress=0.25)
    batch.samples[0].segments.append(Segment(1, [3], [0.0], 0.0, True))
    batch.samples[1].segments = []
    header, numbers = pack_batch(batch)
    found = unpack_batch(json.loads(json.dumps(header)), Numbers(bytes(numbers.data)))
    assert (found.update, found.version, found.progress) == (batch.update, batch.version, 0.25)
    for ours, theirs in zip(batch.samples, found.samples, strict=True):
        assert theirs.prompt == ours.prompt
        assert theirs.segments == ours.segments
        assert (theirs.id, theirs.reward, theirs.finish_reason) == (ours.id, ours.reward, ours.finish_reason)


@pytest.mark.parametrize(
    ("strategy", "changes", "processors", "expected"),
    [
        ("async-on-policy", {}, 2, True),
        ("async-on-policy", {}, 1, False),
        ("async-on-policy", {"learner": {"own_process": True}}, 1, True),
        ("async-on-policy", {"learner": {"own_process": False}}, 2, False),
        ("async-on-policy", {"engine": {"own_process": True}}, 2, False),
        ("async-on-policy", {"run": {"threads": 2}}, 2, False),
        ("sorted-replay", {}, 2, False),
    ],
)
def test_when_the_learner_gets_its_own_process(
    strategy: str, changes: dict[str, Any], processors: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "num_processors", lambda: processors)
    config = SortedConfig(schedule={"strategy": strategy}, **changes)
    assert builder.has_own_process(config, make_model()) is expected


@pytest.mark.parametrize(
    ("strategy", "changes", "text"),
    [("sync", {}, "needs schedule.overlap"), ("async", {"run": {"threads": 2}}, "set run.threads = 1")],
)
def test_a_process_that_cannot_be_had_is_refused(strategy: str, changes: dict[str, Any], text: str) -> None:
    config = SortedConfig(schedule={"strategy": strategy}, learner={"own_process": True}, **changes)
    with pytest.raises(ConfigError, match=text):
        builder.has_own_process(config, make_model())
