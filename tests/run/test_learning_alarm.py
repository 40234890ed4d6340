"""A run that cannot learn is stopped and saved: its answers cannot be scored, or its updates move no weight."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.errors import NothingLearnedError
from sortedrl.learner.base import UpdateResult
from sortedrl.reward.pool import RewardScore
from sortedrl.reward.worker import FailureKind
from sortedrl.run.learning_alarm import LearningAlarm
from sortedrl.telemetry.summary import Summary

ROWS = [{"prompt": "Ann says Bob-knave . Bob says Ann-knight . ?"}, {"prompt": "Eve says Fay-knave . ?"}]
FLAT = {"degenerate_all_wrong": 1.0, "reward_mean": 0.0}
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def score(error: str | None = None, kind: FailureKind = FailureKind.RAISED, reward: float = 0.0) -> RewardScore:
    return RewardScore(key=(0, 1), reward=reward, error=error, kind=None if error is None else kind)


def watch(alarm: LearningAlarm, count: int, *errors: str | None) -> None:
    for number in range(count):
        alarm.watch_answer(score(errors[number % len(errors)]))


def update(steps: int, **metrics: float) -> UpdateResult:
    return UpdateResult(optimizer_steps=steps, metrics=metrics)


def test_two_update_batches_of_answers_without_a_score_raise_the_alarm_with_the_commonest_error() -> None:
    alarm = LearningAlarm(update_batch=3)
    watch(alarm, 5, "f raised A", "f raised B", "f raised B")
    assert alarm.error is None
    watch(alarm, 1, "f raised C")
    message = str(alarm.error)
    assert message.startswith("none of the first 6 answers could be scored: f raised B (3 times); or set run.on_no_")


def test_a_reward_of_0_is_a_score() -> None:
    alarm = LearningAlarm(update_batch=3)
    watch(alarm, 5, "f raised A")
    alarm.watch_answer(score(reward=0.0))
    watch(alarm, 100, "f raised A")
    assert alarm.error is None


def test_answers_that_time_out_raise_the_alarm_after_four() -> None:
    alarm, late = LearningAlarm(update_batch=64), score("f took longer than 10 s", FailureKind.TIMEOUT)
    for _ in range(3):
        alarm.watch_answer(late)
    watch(alarm, 10, "f raised A")
    assert alarm.error is None
    alarm.watch_answer(late)
    assert "none of the first 14 answers could be scored: f raised A (10 times)" in str(alarm.error)
    small = LearningAlarm(update_batch=1)
    small.watch_answer(late)
    small.watch_answer(late)
    assert small.error is not None


def test_held_out_answers_count_apart_and_end_the_evaluation() -> None:
    alarm = LearningAlarm(update_batch=2)
    watch(alarm, 3, "f raised A")
    for _ in range(3):
        alarm.watch_heldout_answer(score("f raised A"))
    with pytest.raises(NothingLearnedError, match="none of the first 4 held-out answers could be scored"):
        alarm.watch_heldout_answer(score("f raised A"))


def test_eight_updates_without_a_step_raise_the_alarm_with_the_cause() -> None:
    alarm = LearningAlarm(update_batch=2, reward_functions="mine.score")
    for _ in range(7):
        alarm.watch_update(update(0, **FLAT))
    assert alarm.error is None
    alarm.watch_update(update(0, **FLAT))
    assert "no optimizer step was taken in the first 8 updates" in str(alarm.error)
    assert "same reward, at last 0, from mine.score;" in str(alarm.error)


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        ({"skipped_steps": 1.0, **FLAT}, "the loss or gradient of 8 was not finite; lower learner.lr"),
        ({"degenerate_all_truncated": 1.0}, "raise engine.max_new_tokens"),
        ({"degenerate_groups": 4.0}, "got equal rewards from mine.score"),
    ],
)
def test_causes_of_updates_without_a_step(metrics: dict[str, float], cause: str) -> None:
    alarm = LearningAlarm(update_batch=2, reward_functions="mine.score")
    for _ in range(8):
        alarm.watch_update(update(0, **metrics))
    assert cause in str(alarm.error)


def test_a_run_that_has_learned_is_warned_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    alarm = LearningAlarm(update_batch=2)
    alarm.watch_update(update(1))
    for _ in range(100):
        alarm.watch_update(update(0, **FLAT))
    alarm.watch_answer(score(reward=1.0))
    watch(alarm, 100, "f raised A")
    assert (alarm.error, alarm.message) == (None, None)
    told = [record.getMessage().split(":")[0] for record in caplog.records]
    stretches = [8, 16, 32, 64]
    assert told[:4] == [f"no optimizer step was taken in the last {number} updates" for number in stretches]
    assert [text.split(",")[0] for text in told[4:]] == [
        f"the last {number} answers could not be scored" for number in (4, 9, 19, 39, 79)
    ]


def test_warn_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    alarm = LearningAlarm(update_batch=1, is_fatal=False)
    watch(alarm, 50, "f raised A")
    assert alarm.error is None
    assert [record.getMessage() for record in caplog.records] == [alarm.message]


def test_counts_go_on_after_a_resume_and_start_afresh_after_an_alarm() -> None:
    first = LearningAlarm(update_batch=2)
    watch(first, 3, "f raised A")
    second = LearningAlarm(update_batch=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.watch_answer(score("f raised B"))
    assert "none of the first 4 answers could be scored: f raised B" in str(second.error)

    mended = LearningAlarm(update_batch=2)
    mended.load_state_dict(second.state_dict())
    watch(mended, 3, "f raised A")
    assert mended.error is None
    mended.watch_answer(score(reward=1.0))
    had_signal = LearningAlarm(update_batch=2)
    had_signal.load_state_dict(mended.state_dict())
    watch(had_signal, 50, "f raised A")
    assert had_signal.error is None


def test_a_checkpoint_without_counts_is_taken_for_a_run_that_has_learned() -> None:
    alarm = LearningAlarm(update_batch=1)
    alarm.load_state_dict(None)
    watch(alarm, 10, "f raised A")
    for _ in range(10):
        alarm.watch_update(update(0, **FLAT))
    assert alarm.error is None


def test_a_short_run_without_any_score_is_an_alarm_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    alarm = LearningAlarm(update_batch=32)
    watch(alarm, 32, "f raised A")
    alarm.watch_end()
    assert "none of the first 32 answers" in str(alarm.error)

    flat = LearningAlarm(update_batch=32)
    watch(flat, 32, None)
    flat.watch_update(update(0, **FLAT))
    flat.watch_end()
    assert flat.error is None
    assert "no optimizer step was taken in 1 updates" in caplog.text


# ---- whole runs ------------------------------------------------------------------------------------------------------


def make_config(folder: Path, prompts: int, **run: Any) -> SortedConfig:
    return SortedConfig(
        run={"dir": str(folder), "samples": 80, "report": False, **run},
        schedule={"update_batch": 8},
        engine={"slots": 8, "max_new_tokens": 8},
        learner={"algorithm": "reinforce++", "group_size": 1},
        eval={"prompts": prompts},
    )


def make_trainer(config: SortedConfig, function: Any) -> SortedTrainer:
    return SortedTrainer(reward_funcs=function, args=config, train_dataset=ROWS, eval_dataset=ROWS * 8, quiet=True)


@pytest.mark.parametrize("prompts", [0, 16])
def test_the_run_is_saved_and_goes_on_once_the_function_is_mended(prompts: int, tmp_path: Path) -> None:
    is_broken = True

    def function(completions: list[str]) -> list[float]:
        if is_broken:
            raise ValueError("no judge")
        return [float(len(text)) for text in completions]

    config = make_config(tmp_path, prompts)
    with pytest.raises(
        NothingLearnedError, match=r"could be scored: reward function .* raised ValueError: no"
    ) as raised:
        make_trainer(config, function).train()
    assert any("sortedrl train --resume" in note for note in raised.value.__notes__)
    stopped = Summary.read(config.run_dir / "summary.json")
    assert (stopped.status, stopped.accuracy_before) == ("stopped", None)
    assert stopped.alarm is not None
    assert stopped.alarm in str(raised.value)
    assert stopped.samples < 80
    if not prompts:
        assert stopped.unscored_samples is not None
        assert 16 <= stopped.unscored_samples <= stopped.samples + 8  # those that wait are at most a batch
    is_broken = False
    summary = make_trainer(config, function).train(resume=True)
    assert (summary.status, summary.samples, summary.alarm) == ("complete", 80, None)
    assert (summary.accuracy_before is not None) == bool(prompts), "the evaluation before training was made up for"


def test_flat_rewards_stop_a_run_after_eight_updates_unless_it_only_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def flat(completions: list[str]) -> list[float]:
        return [0.25] * len(completions)

    with pytest.raises(NothingLearnedError, match=r"first 8 updates.* at last 0\.25, from .*flat"):
        make_trainer(make_config(tmp_path, 0), flat).train()
    with caplog.at_level(logging.WARNING):
        summary = make_trainer(make_config(tmp_path, 0, on_no_signal="warn"), flat).train(resume=True)
    assert (summary.status, summary.samples, summary.optimizer_steps) == ("complete", 80, 0)


def test_the_command_exits_with_3_and_one_line(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_reward.py").write_text("def always_raises(**columns):\n    raise ValueError('no judge')\n")
    options = ["engine.max_new_tokens=8", f"run.dir={tmp_path}"]
    code, out, err = call("train", str(QUICKSTART), "task.reward=broken_reward:always_raises", *options, "--json")
    assert code == 3
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert "none of the first 32 held-out answers could be scored: reward function" in line
    assert "always_raises raised ValueError: no judge" in line
    assert 'set run.on_no_signal = "warn"' in line
    (run,) = json.loads(out)["runs"]
    assert run["status"] == "stopped"
    assert run["alarm"] in line
    report = (tmp_path / "quickstart" / "report.html").read_text(encoding="utf-8")
    assert "Alarm: could not learn: none of the first 32 held-out answers could be scored" in report
