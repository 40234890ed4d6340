"""Whole runs with tools on the real engine: what is recorded, what a replay keeps, and what a resume brings back."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.buffer import Buffer
from sortedrl.clock import WallClock
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.environment.dialect import turns_of
from sortedrl.environment.objects import EnvironmentObjects
from sortedrl.errors import DataError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.sample_history import conversation, read_history
from sortedrl.ledger.verdict import proven_line
from sortedrl.ledger.verify import verify
from sortedrl.records import Batch, Sample
from sortedrl.schedule import resolve_knobs
from sortedrl.telemetry.events import ignore
from tests.environment.sample_environments import Counter, Hostile

ROWS = [{"prompt": f"{name} three ?"} for name in ("Ann", "Bob", "Cid", "Dan")]


class Follow(Counter):
    """A tool for the embedded model, whose calls leave lines in a file."""

    environment_kind = "snapshot"

    def reset(self, log: str = "", **row: object) -> None:
        self.names, self.log = ["Ann", "Bob", "Cid", "Dan", "Eve", "Fay"], log

    def lookup(self, who: str) -> str:
        """
        Looks up the next name, and leaves it out from then on.

        Args:
            who: Name of the person.
        """
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{who}\n")
        self.names.remove(who)
        return self.names[0]

    def add(self, number: int) -> int:
        """
        Adds nothing.

        Args:
            number: What to add.
        """
        return number

    def get_reward(self) -> float:
        return 1.0 - 0.1 * len(self.names)

    def _snapshot(self) -> list[str]:  # type: ignore[override]
        return self.names

    def _restore(self, state: list[str]) -> None:  # type: ignore[override]
        self.names = state


def config(folder: Path, name: str, **sections: Any) -> SortedConfig:
    return SortedConfig(
        **{
            "run": {"name": name, "dir": str(folder), "samples": 64, "report": False},
            "model": {"path": "tools-tiny"},
            "schedule": {"strategy": "sorted-replay", "update_batch": 8, "lookahead": 1},
            "engine": {"slots": 8, "max_new_tokens": 96},
            "environment": {"run_in": "thread", "max_turns": 4},
            "learner": {"algorithm": "reinforce++", "group_size": 1, "lr": 3e-3},
            "eval": {"prompts": 4},
            **sections,
        }
    )


class FollowAgain(Follow):
    environment_kind = "repeatable"


def lose_objects_after_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn needs a new object, as after a replay that loses turns, which depends on the moment tools return."""
    close = EnvironmentObjects._close

    def close_and_lose(objects: EnvironmentObjects, held: Any) -> dict[str, Any]:
        reply = close(objects, held)
        with objects._lock:
            for sample in [sample for sample, other in objects._held.items() if other is held]:
                del objects._held[sample]
        return reply

    monkeypatch.setattr(EnvironmentObjects, "_close", close_and_lose)


@pytest.mark.parametrize("made", [Follow, FollowAgain])
def test_a_run_with_its_own_class_records_every_call(
    tmp_path: Path, made: type[Follow], monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_objects_after_turns(monkeypatch)
    log = tmp_path / "calls"
    rows = [{**row, "log": str(log)} for row in ROWS]
    run = {"name": "own", "dir": str(tmp_path), "samples": 128, "report": False}
    args = config(tmp_path, "own", run=run)
    trainer = SortedTrainer(args=args, train_dataset=rows, environment_factory=made, quiet=True)
    summary = trainer.train()
    assert summary.tools is not None
    assert (summary.ledger.lost, summary.ledger.duplicated, summary.ledger.trained) == (0, 0, 128)
    with Ledger(tmp_path / "own") as ledger:
        verdict = verify(ledger)
        assert verdict.violations == []
        assert f"{verdict.counts['calls']:,} tool calls recorded" in proven_line(ledger, verdict)
        query = "SELECT arguments FROM calls WHERE error != 'malformed'"
        told = [json.loads(row[0])["who"] for row in ledger.rows(query)]
        assert sorted(told) == sorted(log.read_text().split())  # neither a call without a row nor a row without a call
        assert (verdict.counts["repeated_calls"] > 0) == (made is FollowAgain)
        assert summary.tools["repeated"] <= verdict.counts["repeated_calls"]  # those for rewards are in the ledger only
        sample = ledger.one("SELECT sample FROM calls LIMIT 1")
        history = read_history(ledger, sample)
        assert any(moment.step == "tool" and moment.note.startswith("lookup(") for moment in history.moments)
        roles = [role for role, _ in conversation(history, lambda tokens: " ".join(map(str, tokens)))]
        assert roles[:2] == ["model", "tool"]


def test_the_embedded_task_trains_and_its_reward_is_right(tmp_path: Path) -> None:
    changed = {
        "task": {"name": "tools"},
        "schedule": {"strategy": "async-on-policy", "update_batch": 8},
        "environment": {"max_turns": 6},
    }
    summary = SortedTrainer(args=config(tmp_path, "embedded", **changed), quiet=True).train()
    assert summary.tools is not None
    assert summary.tools["calls"] >= 64  # every row needs one or more
    assert (summary.ledger.lost, summary.ledger.trained, summary.staleness_max) == (0, 64, 0)
    with Ledger(tmp_path / "embedded") as ledger:
        assert verify(ledger).violations == []


class _Kept:
    """A learner that keeps batches and changes nothing."""

    source = None

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def start(self, batch: Batch) -> Any:
        from sortedrl.learner.base import UpdateResult

        self.batches.append(batch)
        done = type("Done", (), {"done": lambda _: True, "result": lambda _: UpdateResult(optimizer_steps=0)})
        return done()


def replayed_and_restarted(folder: Path, samples: int) -> tuple[list[Sample], dict[int, list[int]], int]:
    """Train with real updates, then write every trajectory again from scratch with the weights that trained it."""
    from sortedrl.run.builders.loop import build_loop
    from sortedrl.run.builders.parts import build_parts

    settings = config(
        folder, "replay", task={"name": "tools"}, run={"name": "replay", "dir": str(folder), "samples": samples}
    )
    parts, clock, buffer = build_parts(settings), WallClock(), Buffer()
    events: list[Any] = []
    controller = build_loop(settings, parts, buffer, emit=events.append, clock=clock)
    weights = [copy.deepcopy(parts.model.state_dict())]
    controller.on_update = lambda result: weights.append(copy.deepcopy(parts.model.state_dict()))
    trained: list[Sample] = []
    start = parts.learner.start
    parts.learner.start = lambda batch: (trained.extend(copy.deepcopy(batch.samples)), start(batch))[1]  # type: ignore[method-assign]
    assert controller.run()
    again: dict[int, list[int]] = {}
    for version in sorted({sample.trained_version or 0 for sample in trained}):
        parts.model.load_state_dict(weights[version])
        parts.engine.publish(10_000 + version, parts.learner.source).wait()
        batch = [sample for sample in trained if sample.trained_version == version]
        kept = _Kept()
        fresh = Buffer()
        fresh.version = 10_000 + version
        turns = parts.environment.turns(fresh, settings, clock=clock, emit=ignore)
        waiting = [
            Sample(id=s.id, prompt=s.prompt, index=0, epoch=0, cohort=0, seed=s.seed, budget=s.budget) for s in batch
        ]
        scorer = controller.scorer
        loop = Controller(
            fresh,
            LoopParts(
                engine=_NoPublication(parts.engine),
                learner=kept,
                scorer=scorer,
                load_samples=lambda cohort, count, waiting=waiting: waiting if cohort == 0 else [],
                turns=turns,
            ),
            LoopSettings(knobs=resolve_knobs("sync", len(batch)), total_samples=len(batch), sampling=parts.sampling),
            clock=clock,
        )
        assert loop.run()
        again.update({s.id: s.tokens for b in kept.batches for s in b.samples})
    parts.close()
    num_replayed = len({e.sample for e in events if type(e).__name__ == "AttemptVerified" and e.cached > 0})
    return trained, again, num_replayed


class _NoPublication:
    """The engine without publications, so that the weights under test stay."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def publish(self, *arguments: Any, **options: Any) -> Any:
        from sortedrl.engine.base import CompletedHandle

        return CompletedHandle()


@pytest.mark.parametrize(
    ("samples", "least"), [(96, 15), pytest.param(1024, 300, marks=pytest.mark.slow, id="1024 samples")]
)
def test_a_replayed_trajectory_is_the_one_that_a_restart_writes(tmp_path: Path, samples: int, least: int) -> None:
    trained, again, num_replayed = replayed_and_restarted(tmp_path, samples)
    assert len(trained) == samples
    assert num_replayed >= least
    assert sum(sample.num_turns for sample in trained) > samples  # several turns each
    for sample in trained:
        assert again[sample.id] == sample.tokens, f"sample {sample.id}: {turns_of(sample)}"


class Troubled(Follow):
    """Answers a call as the row says, badly."""

    def reset(self, what: str, **row: object) -> None:
        super().reset()
        self.hostile, self.what = Hostile(), what

    def lookup(self, who: str) -> str:
        """
        Looks up a name, or does something bad.

        Args:
            who: Name of the person.
        """
        if self.what == "name":
            return "Ann"  # so that the model asks on
        if self.what == "hang":
            time.sleep(3.0)
        return self.hostile.act(self.what)


TROUBLES = {"raise": "exception", "itself": "exception", "hang": "timeout", "megabytes": "", "control": "", "name": ""}


@pytest.mark.parametrize("max_new_tokens", [96, 24])  # with 24 most answers end in the middle of a turn
def test_bad_tools_and_models_without_end_lose_nothing(tmp_path: Path, max_new_tokens: int) -> None:
    rows = [{"prompt": "Ann six ?", "what": what} for what in TROUBLES]
    changed = {
        "run": {"name": "bad", "dir": str(tmp_path), "samples": 18, "report": False},
        "schedule": {"strategy": "sorted-partial", "update_batch": 6},
        "engine": {"slots": 8, "max_new_tokens": max_new_tokens},
        "environment": {"run_in": "thread", "workers": 8, "max_turns": 2, "timeout_s": 0.3, "max_output_chars": 40},
        "eval": {"prompts": 0},
    }
    args = config(tmp_path, "bad", **changed)
    summary = SortedTrainer(args=args, train_dataset=rows, environment_factory=Troubled, quiet=True).train()
    assert (summary.ledger.lost, summary.ledger.duplicated, summary.ledger.trained) == (0, 0, 18)
    assert summary.tools is not None
    assert summary.tools["turns"] <= 2 * 18  # a model that calls for ever is stopped
    with Ledger(tmp_path / "bad") as ledger:
        assert verify(ledger).violations == []
        joined = "calls JOIN samples ON samples.id = sample JOIN prompts ON prompt = prompts.id"
        query = f"SELECT columns, error, num_chars FROM {joined}"
        calls = [(json.loads(columns)["what"], error, chars) for columns, error, chars in ledger.rows(query)]
        found = {what: {error for made, error, _ in calls if made == what} - {"malformed"} for what in TROUBLES}
        assert found == {what: {error} for what, error in TROUBLES.items()}
        assert summary.tools["failed"] == sum(bool(error) for _, error, _ in calls)
        assert max(chars for _, _, chars in calls) < 200  # also of megabytes


def test_a_row_without_what_reset_needs_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    rows = [{"prompt": "Ann six ?", "what": "name"}, {"prompt": "Bob six ?"}]
    with pytest.raises(DataError, match="has no column 'what', which reset of Troubled needs") as caught:
        SortedTrainer(
            args=config(tmp_path, "bad"), train_dataset=rows, environment_factory=Troubled, quiet=True
        ).train()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "bad").exists()
