"""`SortedTrainer` as Python users call it: datasets, rewards, models, learning, reproducibility, every preset.

torch is imported where it is used: a worker process imports this module for its reward function.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.errors import ConfigError, DataError, ModelError, RewardError, RunDirError
from sortedrl.ledger.run_lock import RunLock
from sortedrl.ledger.store import Store
from sortedrl.schedule import Strategy
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.telemetry import events
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.summary import Summary

ROWS = [
    {"prompt": "Ann says Bob-knave . Bob says Ann-knight . ?", "least": 3},
    {"prompt": "Cid says Dan-knight . Dan says Cid-knave . ?", "least": 3},
    {"prompt": "Eve says Fay-knave . Fay says Eve-knave . ?", "least": 3},
    {"prompt": "Bob says either Ann-knave Bob-knight . Ann says Bob-knight . ?", "least": 3},
]


def says_yes(prompts: Sequence[str], completions: Sequence[str], least: Sequence[int], **columns: Any) -> list[float]:
    """1 for an answer that says `yes` often enough; before training few do."""
    return [float(text.split().count("yes") >= wanted) for text, wanted in zip(completions, least, strict=True)]


def make_config(folder: Path, **sections: dict[str, Any]) -> SortedConfig:
    return SortedConfig(
        run={"dir": str(folder), "samples": 128, "report": False, **sections.pop("run", {})},
        schedule={"update_batch": 16, **sections.pop("schedule", {})},
        engine={"slots": 16, "max_new_tokens": 64},
        reward={"grace_s": 60.0},  # on a busy machine too, batches do not depend on timing
        learner={"lr": 2e-3, "group_size": 4, **sections.pop("learner", {})},
        eval={"prompts": 0, **sections.pop("eval", {})},
        **sections,
    )


def happened(folder: Path, kind: type[Any]) -> list[Any]:
    return [event for event in read_events(folder / "events.jsonl") if isinstance(event, kind)]


def check_ledger(summary: Summary, samples: int) -> None:
    assert summary.status == "complete"
    assert summary.ledger is not None
    assert summary.ledger.model_dump() == {"loaded": samples, "trained": samples, "lost": 0, "duplicated": 0}


# ---- data, rewards, models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_local", [False, True])
def test_it_learns_from_a_dataset_and_a_reward_function(is_local: bool, tmp_path: Path) -> None:
    """A function of a module is called in a worker process, a closure in a thread; both see the columns."""
    seen: list[str] = []

    def closure(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        seen.extend(prompts)
        return says_yes(prompts, completions, **columns)

    config = make_config(
        tmp_path,
        run={"samples": 256},
        schedule={"update_batch": 32, "cohort_batches": 2},
        learner={"lr": 3e-3, "group_size": 8},
        eval={"prompts": 4, "samples": 4},
    )
    trainer = SortedTrainer(
        reward_funcs=closure if is_local else says_yes,
        args=config,
        train_dataset=ROWS,
        eval_dataset=ROWS,
        quiet=True,
    )
    summary = trainer.train()
    check_ledger(summary, 256)
    rewards = [reward for batch in happened(trainer.run_dir, events.BatchTaken) for reward in batch.rewards]
    first, last = rewards[:64], rewards[-64:]  # whole cohorts: within one, batches differ by length
    assert sum(last) / 64 > sum(first) / 64 + 0.3
    assert summary.accuracy_before is not None
    assert summary.accuracy_after is not None
    assert summary.accuracy_after > summary.accuracy_before + 0.3
    assert set(seen) == ({row["prompt"] for row in ROWS} if is_local else set())


def test_a_model_object_is_trained_in_place(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from sortedrl.run.checkpoint_folder import load_model

    model, tokenizer = load_model(knights_tiny_path())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = make_config(tmp_path, run={"samples": 32})
    trainer = SortedTrainer(
        model,
        [says_yes, lambda prompts, completions, **columns: [0.5] * len(prompts)],  # rewards of several are summed
        config,
        ROWS,
        processing_class=tokenizer,
        quiet=True,
    )
    summary = trainer.train()
    check_ledger(summary, 32)
    rewards = {reward for batch in happened(trainer.run_dir, events.BatchTaken) for reward in batch.rewards}
    assert rewards <= {0.5, 1.5}
    after = model.state_dict()
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    saved = load_file(trainer.run_dir / "checkpoints" / str(summary.updates) / "model.safetensors")
    assert saved
    assert all(torch.equal(tensor, after[name]) for name, tensor in saved.items())
    assert summary.accuracy_before is None


@pytest.mark.parametrize("as_text", [False, True])
def test_a_model_folder_may_be_a_path_or_text(as_text: bool, tmp_path: Path) -> None:
    folder = str(knights_tiny_path()) if as_text else knights_tiny_path()
    config = make_config(tmp_path, run={"samples": 16}, checkpoint={"save": False})
    trainer = SortedTrainer(folder, args=config, quiet=True)
    assert trainer.config.model.path == str(knights_tiny_path())
    check_ledger(trainer.train(), 16)
    assert not (trainer.run_dir / "checkpoints").exists()
    assert not (trainer.run_dir / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"train_dataset": ROWS}, ConfigError, "a dataset needs reward functions"),
        ({"reward_funcs": says_yes}, ConfigError, "reward functions need a dataset"),
        ({"eval_dataset": ROWS}, ConfigError, "pass both or neither"),
        ({"train_dataset": [], "reward_funcs": says_yes}, DataError, "is empty"),
        ({"train_dataset": ROWS, "reward_funcs": []}, DataError, "no reward function"),
        ({"train_dataset": [{"question": "x"}], "reward_funcs": says_yes}, DataError, "no column 'prompt'.*'question'"),
        ({"train_dataset": [{"prompt": ""}], "reward_funcs": says_yes}, DataError, "must be text that is not empty"),
        (
            {"train_dataset": ROWS, "reward_funcs": says_yes, "eval_dataset": [{"q": "x"}]},
            DataError,
            "row dataset-eval/0 has no column 'prompt'",
        ),
    ],
)
def test_datasets_and_rewards_that_cannot_be(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        SortedTrainer(args=make_config(tmp_path), quiet=True, **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": object()}, ConfigError, "pass processing_class"),
        ({"model": "nowhere"}, ModelError, "'nowhere' is not a folder"),
        ({"train_dataset": ROWS, "reward_funcs": [3]}, RewardError, "cannot be called"),
        ({"train_dataset": ROWS, "reward_funcs": ["says_yes"]}, ModelError, "reward model 'says_yes' is not a folder"),
        (
            {"train_dataset": [{"prompt": "who is who among these"}], "reward_funcs": says_yes},
            DataError,
            "unknown to the tokenizer",
        ),
        (
            {"train_dataset": ROWS, "eval_dataset": [{"prompt": "who is who among these"}], "reward_funcs": says_yes},
            DataError,
            "row heldout/0 are unknown",
        ),
    ],
)
def test_mistakes_that_show_when_training_starts(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    before = set(threading.enumerate())  # other tests may have abandoned calls that hang
    trainer = SortedTrainer(args=make_config(tmp_path, eval={"prompts": 1}), quiet=True, **arguments)
    with pytest.raises(error, match=message):
        trainer.train()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("reward")]


# ---- the run directory ----------------------------------------------------------------------------------------------


def test_earlier_runs_are_moved_aside(tmp_path: Path) -> None:
    from sortedrl.trainer import prepare_run_dir

    folder = tmp_path / "runs" / "a.b"
    for number in range(3):
        prepare_run_dir(folder)
        assert not list(folder.iterdir())
        (folder / "mark").write_text(str(number))
    marks = {path.parent.name: path.read_text() for path in (tmp_path / "runs").glob("*/mark")}
    assert marks == {"a.b.1": "0", "a.b.2": "1", "a.b": "2"}


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        trainer = SortedTrainer(args=make_config(folder.parent, run={"name": folder.name}), quiet=True)
        with pytest.raises(RunDirError, match=r"cannot write the run directory .*; choose another with run\.dir="):
            trainer.train()
    assert (tmp_path / "file").is_file()


# ---- stopping -------------------------------------------------------------------------------------------------------


def test_a_run_under_nohup_does_not_stop_when_the_terminal_closes(tmp_path: Path) -> None:
    def hanging_up(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        os.kill(os.getpid(), signal.SIGHUP)
        return says_yes(prompts, completions, **columns)

    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        config = make_config(tmp_path, run={"samples": 16})
        trainer = SortedTrainer(args=config, train_dataset=ROWS, reward_funcs=hanging_up, quiet=True)
        assert trainer.train().status == "complete"
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert trainer.stop_signal is None


def test_ctrl_c_stops_between_two_steps(tmp_path: Path) -> None:
    num_calls = 0

    def interrupting(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return says_yes(prompts, completions, **columns)

    handler = signal.getsignal(signal.SIGINT)
    config = make_config(tmp_path, run={"samples": 100_000}, eval={"prompts": 4})
    trainer = SortedTrainer(args=config, train_dataset=ROWS, reward_funcs=interrupting, eval_dataset=ROWS, quiet=True)
    summary = trainer.train()
    assert signal.getsignal(signal.SIGINT) is handler
    assert (summary.status, trainer.stop_requested, trainer.stop_signal) == ("stopped", True, signal.SIGINT)
    assert summary.ledger is not None
    assert (summary.ledger.lost, summary.ledger.duplicated) == (0, 0)
    assert summary.ledger.trained == summary.samples <= summary.ledger.loaded < 100_000
    assert summary.accuracy_after is None
    assert Summary.read(trainer.run_dir / "summary.json") == summary
    assert (trainer.run_dir / "checkpoints" / str(summary.updates) / "model.safetensors").is_file()
    assert happened(trainer.run_dir, events.RunEnded)[0].reason == "stopped"


@pytest.mark.parametrize("resume", [False, True])
def test_a_signal_at_the_end_of_starting_closes_what_is_open(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if resume:
        SortedTrainer(args=make_config(tmp_path, run={"samples": 16}), quiet=True).train()
    trainer = SortedTrainer(args=make_config(tmp_path, run={"samples": 32}), quiet=True)
    closed: list[Store] = []
    close = Store.close

    def note_and_close(store: Store, *, commit: bool = True) -> None:
        closed.append(store)
        close(store, commit=commit)

    def end(number: int, frame: object) -> None:
        raise AssertionError("the signal would have killed the process")

    monkeypatch.setattr(SortedTrainer, "_add_sinks", lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(Store, "close", note_and_close)
    # Reward functions that hang on purpose, in tests before this one, keep their threads.
    threads = set(threading.enumerate())
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit) as raised:
            trainer.train(resume=resume)
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.code == 143
    assert [store.path for store in closed] == [trainer.run_dir / "ledger.sqlite"]
    rewarding = [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("reward")]
    for thread in rewarding:
        thread.join(timeout=60)  # a thread that was told to end may not have ended yet
    assert not [thread for thread in rewarding if thread.is_alive()]
    with RunLock(trainer.run_dir):
        pass  # it is free
    monkeypatch.undo()
    check_ledger(trainer.train(resume=True), 32)


def test_outside_the_main_thread_it_trains_too(tmp_path: Path) -> None:
    summaries: list[Summary] = []
    trainer = SortedTrainer(args=make_config(tmp_path, run={"samples": 16}), quiet=True)
    thread = threading.Thread(target=lambda: summaries.append(trainer.train()))
    thread.start()
    thread.join()
    check_ledger(summaries[0], 16)


# ---- every preset, and the same again -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", list(Strategy))
def test_every_preset_trains(strategy: Strategy, tmp_path: Path) -> None:
    config = make_config(tmp_path, schedule={"strategy": strategy}, eval={"prompts": 8, "every_samples": 48})
    trainer = SortedTrainer(args=config, quiet=True)
    summary = trainer.train()
    check_ledger(summary, 128)
    knobs = config.knobs
    assert summary.staleness_max is not None
    assert knobs.max_staleness is None or summary.staleness_max <= knobs.max_staleness
    taken = happened(trainer.run_dir, events.BatchTaken)
    assert sorted(sample for batch in taken for sample in batch.samples) == list(range(128))
    assert summary.updates == len(taken)
    assert 0 < (summary.optimizer_steps or 0) <= summary.updates  # a batch without signal makes no step
    if knobs.cohort_updates is not None:
        loaded = {s: e.update for e in happened(trainer.run_dir, events.CohortLoaded) for s in e.samples}
        assert all(b.update < loaded[sample] + knobs.cohort_updates for b in taken for sample in b.samples)
    # Evaluations stand apart: before, once 48 more samples are trained, after; and none of their tokens are counted.
    assert [e.samples_trained for e in happened(trainer.run_dir, events.Evaluated)] == evaluations(taken, every=48)
    assert summary.generated_tokens == summary.trained_tokens + summary.discarded_tokens
    assert summary.trained_tokens == sum(sum(batch.lengths) for batch in taken)
    assert 0 < summary.goodput <= 1
    assert 0 <= summary.bubble_ratio < 1
    parts_s = summary.rollout_s + summary.publish_s + (0 if knobs.overlap else summary.update_s)
    assert parts_s == pytest.approx(summary.wall_s)


def evaluations(taken: list[events.BatchTaken], *, every: int) -> list[int]:
    """The numbers of trained samples at which a run with these batches evaluates."""
    due, num_trained = [0], 0
    for batch in taken:
        num_trained += len(batch.samples)
        if num_trained >= due[-1] + every:
            due.append(num_trained)
    return due if due[-1] == num_trained else [*due, num_trained]


TIMES = {"t", "seconds", "slot_s", "busy_s", "prefill_s"}
DECIDED = (events.CohortLoaded, events.AttemptStarted, events.AttemptVerified, events.AttemptEnded)


def decisions(folder: Path) -> dict[str, list[Any]]:
    """What a run decided and computed, without times. Scores of one step may come in any order."""
    records: dict[str, list[Any]] = {}
    for event in read_events(folder / "events.jsonl"):
        if isinstance(event, (*DECIDED, events.BatchTaken, events.UpdateDone, events.SampleRequeued)):
            plain = {name: value for name, value in event.as_dict().items() if name not in TIMES}
            records.setdefault(event.kind, []).append(plain)
    records.get("SampleRequeued", []).sort(key=repr)
    return records


@pytest.mark.parametrize("strategy", ["sync", "sorted-partial", "sorted-replay"])
def test_the_same_configuration_gives_the_same_run(strategy: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    folders = []
    for name in ("first", "second"):
        config = make_config(tmp_path, run={"name": name, "seed": 3}, schedule={"strategy": strategy})
        trainer = SortedTrainer(args=config, quiet=True)
        check_ledger(trainer.train(), 128)
        folders.append(trainer.run_dir)
    first, second = (decisions(folder) for folder in folders)
    assert first.keys() == second.keys()
    for kind, records in first.items():
        assert records == second[kind], kind
    assert len(first["BatchTaken"]) >= 4
    assert {len(set(batch["rewards"])) for batch in first["BatchTaken"]} != {1}, "no reward differs: nothing is learned"
    weights = [load_file(next((folder / "checkpoints").iterdir()) / "model.safetensors") for folder in folders]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
