"""The host core: another trainer's loop around the unchanged controller, on the simulated engine."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sortedrl.adapters.host import Answer, HostRun, HostSettings
from sortedrl.adapters.rows import RowStream, sampled, shuffled
from sortedrl.clock import VirtualClock
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.errors import ConfigError, DataError, LearnerError, RunDirError
from sortedrl.ledger.compare import check_rules
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify
from sortedrl.records import Batch
from sortedrl.schedule import Strategy, resolve_knobs
from sortedrl.telemetry.report.report import write_report
from sortedrl.telemetry.trace import trace_run
from tests.support.scripted_runs import ScriptedPolicy

ROWS = [{"prompt": f"question {number}", "answer": number} for number in range(10)]
SIBLINGS, UPDATE_BATCH, UPDATES = 2, 8, 6
ON_BOUND = {Strategy.ASYNC: {"on_bound": "replay"}}


def reward_of(answers: Sequence[Answer]) -> list[float]:
    return [float(sum(answer.tokens) % 3) for answer in answers]


def assert_proven(run_dir: Path) -> None:
    with Ledger(run_dir / "ledger.sqlite") as ledger:
        assert verify(ledger).violations == []


@dataclass
class Host:
    """A trainer that takes batches, and makes an update of each by doing nothing."""

    run: HostRun
    batches: list[Batch] = field(default_factory=list)

    def train(self, updates: int = 10**6) -> None:
        for _ in range(updates):
            batch = self.run.next_batch()
            if batch is None:
                return
            self.batches.append(batch)
            self.run.publish(metrics={"loss": 0.5})


def settings(strategy: Strategy = Strategy.SORTED_REPLAY, **changes: Any) -> HostSettings:
    knobs = resolve_knobs(strategy, UPDATE_BATCH, exact_batch=True, **{**ON_BOUND.get(strategy, {}), **changes})
    return HostSettings(
        strategy=strategy.value,
        knobs=knobs,
        total_samples=UPDATES * UPDATE_BATCH,
        siblings=SIBLINGS,
        max_new_tokens=40,
    )


def with_dir(given: HostSettings, run_dir: Path | None) -> HostSettings:
    fields = {name: getattr(given, name) for name in given.__slots__}
    return HostSettings(**{**fields, "run_dir": run_dir})


def make_run(given: HostSettings, *, score: Any = reward_of, encode: Any = None) -> HostRun:
    policy = ScriptedPolicy(longest=30, length_change=0.2, divergence=0.02)
    return HostRun(
        given,
        engine=SimEngine(policy, slots=6, clock=VirtualClock()),
        source=None,
        stream=RowStream(
            rows=ROWS,
            encode=encode or (lambda prompt: [len(prompt), 7]),
            order=shuffled(len(ROWS), seed=0),
            max_prompt_tokens=8,
        ),
        score=score,
    )


@pytest.mark.parametrize("strategy", list(Strategy))
def test_a_host_gets_exact_batches_within_the_bounds(strategy: Strategy, tmp_path: Path) -> None:
    host = Host(make_run(with_dir(settings(strategy), tmp_path / "run")))
    host.run.start()
    host.train()
    summary = host.run.close()
    assert summary is not None
    assert (summary.status, summary.updates, summary.samples) == ("complete", UPDATES, UPDATES * UPDATE_BATCH)
    assert summary.ledger is not None
    assert (summary.ledger.lost, summary.ledger.duplicated) == (0, 0)
    assert [len(batch.samples) for batch in host.batches] == [UPDATE_BATCH] * UPDATES
    trained = [sample for batch in host.batches for sample in batch.samples]
    assert sorted(sample.id for sample in trained) == list(range(UPDATES * UPDATE_BATCH))
    for batch in host.batches:
        for first, second in zip(batch.samples[::2], batch.samples[1::2], strict=True):
            assert first.group == second.group
        for sample in batch.samples:
            assert sample.reward == float(sum(sample.tokens) % 3)
            bound = host.run.settings.knobs.max_staleness
            assert bound is None or sample.staleness(batch.version) <= bound
    assert_proven(tmp_path / "run")


def test_events_ledger_and_summary_are_those_of_a_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    host = Host(make_run(with_dir(settings(), run_dir)))
    host.run.start()
    host.train()
    host.run.close()
    kinds = [json.loads(line)["kind"] for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert (kinds[0], kinds[-1]) == ("RunStarted", "RunEnded")
    assert kinds.count("UpdateDone") == kinds.count("WeightsPublished") == UPDATES
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == list(range(UPDATES))
    assert rows[0]["learner"] == {"loss": 0.5}
    assert_proven(run_dir)
    page = write_report([run_dir], run_dir / "report.html").read_text(encoding="utf-8")
    assert "sorted-replay" in page
    assert trace_run(run_dir).cohorts


@pytest.mark.parametrize("strategy", [Strategy.SORTED_REPLAY, Strategy.ASYNC_ON_POLICY, Strategy.SORTED_PARTIAL])
@pytest.mark.parametrize("done", [1, 3])
def test_a_host_that_goes_back_to_its_checkpoint_finds_the_ledger_there(
    strategy: Strategy, done: int, tmp_path: Path
) -> None:
    given = with_dir(settings(strategy), tmp_path / "run")
    first = Host(make_run(given))
    first.run.start()
    first.train(4)  # and dies, with a batch under way; its last checkpoint is after `done` updates
    first.run.next_batch()
    first.run.stop()
    assert first.run.close() is not None
    left = tmp_path / "run" / ".0123456789abcdef.part"  # as a kill leaves it while a file is written
    left.touch()
    second = Host(make_run(given))
    second.run.start(updates_done=done)
    second.train()
    assert not left.exists()
    summary = second.run.close()
    assert summary is not None
    assert summary.status == "complete"
    assert [batch.update for batch in second.batches] == list(range(done, UPDATES))
    lineage = [*first.batches[:done], *second.batches]
    trained = [sample.id for batch in lineage for sample in batch.samples]
    assert sorted(trained) == list(range(UPDATES * UPDATE_BATCH))
    assert_proven(tmp_path / "run")
    assert (summary.updates, summary.samples) == (UPDATES, UPDATES * UPDATE_BATCH)


def test_a_checkpoint_that_is_newer_than_the_ledger_is_refused(tmp_path: Path) -> None:
    given = with_dir(settings(), tmp_path / "run")
    first = Host(make_run(given))
    first.run.start()
    first.train(2)
    first.run.stop()
    first.run.close()
    run = make_run(given)
    run.start(updates_done=5)
    with pytest.raises(RunDirError, match=r"ends with update [12]: it is older than the checkpoint"):
        run.next_batch()
    run = make_run(with_dir(given, tmp_path / "other"))
    run.start(updates_done=2)
    with pytest.raises(RunDirError, match=r"there is no .*ledger\.sqlite: pass the run_dir"):
        run.next_batch()
    fields = {name: getattr(given, name) for name in given.__slots__}
    run = make_run(HostSettings(**{**fields, "knobs": resolve_knobs("sorted-replay", 4, exact_batch=True)}))
    run.start(updates_done=1)
    with pytest.raises(RunDirError, match="was begun with update_batch 8, and this process has 4: set it back"):
        run.next_batch()
    run = make_run(with_dir(given, None))
    run.start(updates_done=2)
    with pytest.raises(RunDirError, match="without a run directory"):
        run.next_batch()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lookahead": 2}, "lookahead 0, and this process has 2"),
        ({"cohort_batches": 2}, "cohort_batches 4, and this process has 2"),
        ({"max_staleness": "none"}, "max_staleness 0, and this process has none"),
    ],
)
def test_the_first_resume_with_another_bound_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = with_dir(settings(lookahead=0), tmp_path / "run")
    first = Host(make_run(given))
    first.run.start()
    first.train(2)
    first.run.stop()
    first.run.close()
    run = make_run(with_dir(settings(**{"lookahead": 0, **changes}), tmp_path / "run"))
    run.start(updates_done=2)
    with pytest.raises(RunDirError, match=rf"was begun with {message}: set it back, or start a new run"):
        run.next_batch()
    again = Host(make_run(given))
    again.run.start(updates_done=2)
    again.train()
    again.run.close()
    assert sum(len(batch.samples) for batch in again.batches) == (UPDATES - 2) * UPDATE_BATCH
    assert_proven(tmp_path / "run")


def test_a_ledger_past_its_bounds_is_not_damaged(tmp_path: Path) -> None:
    given = with_dir(settings(lookahead=2), tmp_path / "run")
    first = Host(make_run(given))
    first.run.start()
    first.train(5)
    first.run.stop()
    first.run.close()
    connection = sqlite3.connect(tmp_path / "run" / "ledger.sqlite")
    narrow = json.dumps(asdict(settings(lookahead=0, cohort_batches=1).knobs))  # as if it had been resumed with others
    connection.execute("UPDATE meta SET value = ? WHERE key = 'knobs'", (narrow,))
    connection.commit()
    connection.close()
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert {found.rule for found in verify(ledger).violations} == {"starvation"}
    check_rules(tmp_path / "run" / "ledger.sqlite")


def test_an_error_of_the_rollout_thread_reaches_the_host() -> None:
    run = make_run(settings(), encode=lambda prompt: [1] * 9)
    run.start()
    with pytest.raises(DataError, match="has 9 tokens, and between 1 and 8 are allowed"):
        run.next_batch()
    with pytest.raises(DataError):
        run.publish()
    with pytest.raises(DataError):
        run.close()


def test_an_error_of_the_host_ends_the_rollout_thread() -> None:
    def broken(answers: Sequence[Answer]) -> list[float]:
        raise ZeroDivisionError("the reward function is broken")

    run = make_run(settings(), score=broken)
    run.start()
    with pytest.raises(ZeroDivisionError, match="the reward function is broken"):
        run.next_batch()
    summary = run.close()
    assert summary is not None
    assert summary.status == "stopped"
    assert not any(thread.name == "sortedrl-rollout" for thread in threading.enumerate())


def test_stop_wakes_a_host_that_waits() -> None:
    run = make_run(settings())
    run.start()
    batch = run.next_batch()
    assert batch is not None
    waiter = threading.Thread(target=run.next_batch)  # it has not published, so no batch will come
    waiter.start()
    run.stop()
    waiter.join(30)
    assert not waiter.is_alive()
    summary = run.close()
    assert summary is not None
    assert summary.status == "stopped"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"knobs": resolve_knobs("sorted-replay", 8)}, "set exact_batch = true"),
        ({"siblings": 3}, "update_batch 8 must be a multiple of the 3 answers"),
        ({"total_samples": 20}, "total_samples 20 must be a multiple of update_batch 8"),
    ],
)
def test_settings_that_no_host_can_use_are_refused(changes: dict[str, Any], message: str) -> None:
    given = settings()
    fields = {name: getattr(given, name) for name in given.__slots__}
    with pytest.raises(ConfigError, match=message):
        HostSettings(**{**fields, **changes})


def test_publish_without_a_batch_is_refused() -> None:
    run = make_run(settings())
    with pytest.raises(LearnerError, match="call next_batch"):
        run.publish()
    run.close()


def test_the_order_of_a_hosts_sampler_is_kept() -> None:
    epochs = iter([[3, 1, 2], [2, 3, 1]])
    order = sampled(lambda: next(epochs))
    assert [order(position) for position in (4, 0, 5)] == [(1, 3), (0, 3), (1, 1)]
    with pytest.raises(DataError, match="smaller than one batch"):
        sampled(list)(0)


def test_every_epoch_has_every_row_once() -> None:
    order = shuffled(5, seed=3)
    epochs = [[order(5 * epoch + offset)[1] for offset in range(5)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [shuffled(5, seed=3)(position) for position in range(5)] == [(0, number) for number in epochs[0]]


def test_the_host_core_needs_no_torch() -> None:
    program = (
        "import sys, sortedrl.adapters.host, sortedrl.adapters.rows; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'trl') "
        "or m.startswith(('sortedrl.learner.torch', 'sortedrl.engine.local', 'sortedrl.engine.vllm'))]; "
        "sys.exit(', '.join(bad[:3]) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
