"""Rewards as TRL's users write them, and what becomes of answers that cannot be scored.

torch is imported where it is used: a worker process imports this module for its reward functions.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.errors import DataError, ModelError, RewardError
from sortedrl.reward.pool import RewardPool, RewardScore
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.telemetry import events
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.summary import Summary

ROWS = [{"prompt": "Ann says Bob-knave . Bob says Ann-knight . ?"}, {"prompt": "Eve says Fay-knave . ?"}]
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


# ---- functions as TRL calls them ------------------------------------------------------------------------------------


def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, **kwargs):
    """Has every argument that TRL passes."""
    log_extra("answer", answer)
    log_metric("seen", 1.0)
    return [10 * len(ids) + trainer_state.global_step for ids in completion_ids]


def by_kind(completions, trainer_state, **kwargs):
    assert kwargs["completion_ids"] == [[1, 2]]
    return [float(len(text)) if trainer_state.epoch < 1 else -1.0 for text in completions]


def even_only(completions, **kwargs):
    return [1.0 if len(text) % 2 == 0 else None for text in completions]


def odd_only(completions, **kwargs):
    return [None if len(text) % 2 == 0 else 1.0 for text in completions]


def never(completions, **kwargs):
    return [None] * len(completions)


async def judged(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [0.5] * len(completions)


def score(pool: RewardPool, *texts: str, tokens: tuple[int, ...] = (1, 2)) -> list[RewardScore]:
    for index, text in enumerate(texts):
        pool.submit((index, 1), "prompt", text, {"answer": "yes"}, tokens)
    scores: dict[int, RewardScore] = {}
    while pool.num_waiting:
        scores |= {got.key[0]: got for got in pool.poll(20)}
    return [scores[index] for index in sorted(scores)]


@pytest.mark.parametrize("is_local", [False, True])
def test_functions_get_what_trl_gives_them(is_local: bool) -> None:
    function = (lambda **kwargs: everything(**kwargs)) if is_local else everything
    with RewardPool(function, timeout_s=60, workers=1) as pool:
        pool.progress.update(global_step=3, max_steps=9, epoch=0.5)
        assert [got.reward for got in score(pool, "a")] == [23.0]
    with RewardPool(by_kind, timeout_s=60, workers=1) as pool:
        pool.progress.update(epoch=0.5)
        assert [got.reward for got in score(pool, "abc")] == [3.0]


def test_none_is_no_say_and_weights_count() -> None:
    with RewardPool([even_only, odd_only, judged], timeout_s=60, workers=1, weights=[2, 3, 4]) as pool:
        assert [got.reward for got in score(pool, "ab", "abc")] == [2 + 2, 3 + 2]
        assert pool.errors == {}
    with RewardPool([even_only, never], timeout_s=60, workers=1) as pool:
        assert [(got.reward, got.error is None) for got in score(pool, "ab", "abc")] == [(1.0, True), (0.0, False)]
        assert [name.endswith("never: no reward") for name in pool.errors] == [True]


# ---- answers that cannot be scored ----------------------------------------------------------------------------------


def naughty(completions, **kwargs):
    if "raise" in completions:
        raise ValueError("bad answer")
    if "hang" in completions:
        time.sleep(60)
    values = {"none": None, "nan": float("nan"), "text": "1.0", "huge": -1e308}
    rewards = [values.get(text, 1.0) for text in completions]
    return [*rewards, 1.0] if "count" in completions else rewards


@pytest.mark.parametrize("on_error", ["zero", "skip", "stop"])
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("count", "malformed result"),
        ("none", "no reward"),
        ("nan", "not a number"),
        ("text", "not a number"),
        ("huge", "out of range"),
        ("raise", "exception"),
        ("hang", "timeout"),
    ],
)
def test_each_kind_of_error_is_counted_and_dealt_with(on_error: Any, text: str, kind: str) -> None:
    def function(completions: list[str]) -> list[Any]:  # called in a thread: quicker than a process
        return naughty(completions)

    with RewardPool(function, timeout_s=1 if text == "hang" else 60, workers=1, on_error=on_error) as pool:
        scores = score(pool, "good", text)
        assert list(pool.errors.values()) == [1]
        assert next(iter(pool.errors)).endswith(f": {kind}")
        if on_error == "stop":
            assert [(got.key[0], got.reward) for got in scores] == [(0, 1.0)]
            with pytest.raises(RewardError, match=r"reward function .*; set reward\.on_error to zero or skip"):
                raise pool.failure
        else:
            assert [got.reward for got in scores] == [1.0, 0.0]
            assert [got.is_skipped for got in scores] == [False, on_error == "skip"]
            assert pool.failure is None


def test_a_weighted_sum_that_is_out_of_range_is_no_reward() -> None:
    def large(completions: list[str]) -> list[float]:
        return [1e38 for _ in completions]

    with RewardPool([large, large], timeout_s=60, workers=1, weights=[3.0, 3.0]) as pool:
        (got,) = score(pool, "answer")
        assert got.reward == 0.0
        assert "reward.weights" in (got.error or "")
        assert [name.endswith(": out of range") for name in pool.errors] == [True]
    with RewardPool(large, timeout_s=60, workers=1) as pool:
        assert [got.reward for got in score(pool, "answer")] == [1e38]


def make_config(folder: Path, on_error: str, **reward: Any) -> SortedConfig:
    return SortedConfig(
        run={"dir": str(folder), "samples": 32, "report": False, "on_no_signal": "warn"},
        schedule={"update_batch": 16},
        engine={"slots": 16, "max_new_tokens": 16},
        reward={"grace_s": 60.0, "on_error": on_error, **reward},
        learner={"lr": 1e-2, "group_size": 4},
        eval={"prompts": 0},
    )


def make_trainer(config: SortedConfig, function: Any, rows: Any = ROWS, **arguments: Any) -> SortedTrainer:
    return SortedTrainer(reward_funcs=function, args=config, train_dataset=rows, quiet=True, **arguments)


def test_a_run_that_cannot_score_at_all_learns_nothing_under_skip(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from sortedrl.run.checkpoint_folder import load_model

    model, tokenizer = load_model(knights_tiny_path())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = make_trainer(
        make_config(tmp_path, "skip"), lambda completions: [None] * len(completions), model=model,
        processing_class=tokenizer,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        summary = trainer.train()
    assert (summary.status, summary.samples, summary.optimizer_steps) == ("complete", 32, 0)
    assert summary.ledger.lost == summary.ledger.duplicated == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    counted = re.search(r"kind of error: .*<lambda>: no reward (\d+)", caplog.text)
    assert counted is not None
    assert int(counted[1]) >= 32  # more where an answer was scored, replayed and scored again
    ((name, count),) = Summary.read(trainer.run_dir / "summary.json").reward_errors.items()
    assert name.endswith("<lambda>: no reward")
    assert count == int(counted[1])
    assert summary.unscored_samples == 32  # samples count once
    assert summary.alarm is not None
    assert summary.alarm.startswith("none of the first 32 answers could be scored: reward function")
    assert summary.alarm in caplog.text


def test_skipped_samples_have_no_say_in_what_others_learn() -> None:
    """A batch with two answers that could not be scored moves the weights as the others alone would."""
    import torch

    from sortedrl.learner.unscored import SkippingLearner
    from sortedrl.records import Batch, Prompt, Sample, Segment
    from sortedrl.run.checkpoint_folder import load_model

    def samples() -> list[Sample]:
        prompt = Prompt(id="p", tokens=(5, 6, 7), content="p")
        return [
            Sample(
                id=n,
                prompt=prompt,
                index=n,
                epoch=0,
                cohort=0,
                seed=n,
                budget=8,
                attempt=2,
                reward=float(n % 3),
                reward_attempt=1,  # attempt 2 verified the answer and changed no token
                segments=[Segment(version=0, tokens=[8 + n, 9, 10], logprobs=[-1.0, -2.0, -0.5])],
            )
            for n in range(6)
        ]

    settings = SortedConfig(learner={"group_size": 8}).learner
    weights = []
    for is_skipped in (True, False):
        model, _ = load_model(knights_tiny_path())
        learner = SkippingLearner(model, settings, temperature=1.0)
        batch = samples()
        learner.skip(1, 0)  # of an attempt that is over: this one counts
        if is_skipped:
            learner.skip(2, 1)
            learner.skip(5, 1)
            saved = learner.state_dict()
            assert saved["left_out"] == [[1, 0], [2, 1], [5, 1]]
            learner = SkippingLearner(model, settings, temperature=1.0)
            learner.load_state_dict(saved)
        else:
            batch = [sample for sample in batch if sample.id not in (2, 5)]
        learner.start(Batch(update=0, version=0, samples=tuple(batch))).result()
        weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_stop_saves_the_run_which_goes_on_once_the_function_is_mended(tmp_path: Path) -> None:
    calls: list[int] = []

    def breaks(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        if sum(calls) > 16:
            raise ValueError("no judge")
        return [float(len(text)) for text in completions]

    config = make_config(tmp_path, "stop")
    with pytest.raises(RewardError, match=r"raised ValueError: no judge.*set reward\.on_error") as raised:
        make_trainer(config, breaks).train()
    assert any("--resume" in note for note in raised.value.__notes__)
    calls.append(-(10**6))
    trainer = make_trainer(config, breaks)
    summary = trainer.train(resume=True)
    assert (summary.status, summary.samples) == ("complete", 32)
    assert summary.reward_errors is not None  # those from before it was resumed are not forgotten
    assert [name.split(": ")[-1] for name in summary.reward_errors] == ["exception"]
    rewards = [e.reward for e in read_events(trainer.run_dir / "events.jsonl") if isinstance(e, events.SampleScored)]
    assert all(reward > 0 for reward in rewards)


# ---- mistakes that are found before a model is loaded ---------------------------------------------------------------


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("sortedrl.run.builders.parts.load_model", load)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("rows", "sections", "error", "message"),
    [
        ([{"prompt": [{"role": "user", "content": "Ann"}]}], {}, DataError, "the tokenizer has no chat template"),
        (
            [*ROWS, {"prompt": "Ann says Bob-knave . " * 90}],
            {},
            DataError,
            r"has \d+ tokens, more than the limit of 256",
        ),
        ([*ROWS, {"question": "?"}], {}, DataError, "row dataset/2 has no column 'prompt'"),
        (ROWS, {"engine": {"max_new_tokens": 10**6}}, ModelError, r"more than the \d+ positions of the model"),
        (ROWS, {"reward": {"weights": [1.0, 2.0]}}, RewardError, "must be 1 finite numbers, one per function"),
    ],
)
def test_bad_input_is_named_before_any_model_is_loaded(
    rows: Any, sections: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    config = SortedConfig(run={"dir": str(tmp_path), "samples": 64}, learner={"group_size": 8}, **sections)
    with pytest.raises(error, match=message):
        make_trainer(config, lambda completions: [0.0] * len(completions), rows).train()
    assert not list(tmp_path.iterdir())


def test_chat_rows_reach_functions_as_messages(tmp_path: Path) -> None:
    from sortedrl.run.checkpoint_folder import load_model

    model, tokenizer = load_model(knights_tiny_path())
    tokenizer.chat_template = CHAT
    seen: list[Any] = []

    def chatty(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [float(len(completion[0]["content"])) for completion in completions]

    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    trainer = make_trainer(make_config(tmp_path, "stop"), chatty, rows, model=model, processing_class=tokenizer)
    assert trainer.train().status == "complete"
    prompt, completion = seen[0]
    assert prompt[0]["role"] == "user"
    assert set(completion[0]) == {"role", "content"}
    assert completion[0]["role"] == "assistant"


def test_a_pool_whose_threads_cannot_start_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for a thread's stack: the error must be that, and not another one from closing."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = RewardPool(judged, timeout_s=60, workers=1)
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"), pool:
        pool.submit((0, 1), "prompt", "text", {})
