"""Ledgers that real runs have written: every preset, random schedules, and processes that end at any moment."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import InFlight, Sampling
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.sample_history import read_history
from sortedrl.ledger.store import DurableBuffer, Store
from sortedrl.ledger.verify import verify
from sortedrl.records import Sample, State
from sortedrl.schedule import Strategy, resolve_knobs
from tests.properties.test_guarantees import runs
from tests.support.scripted_runs import DelayedScorer, ScriptedPolicy, ScriptedRun, scripted_run

SOME = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # memory: these tests do not depend on syncs to disk


class Ended(Exception):
    """Stands for the end of the process at this point."""


class Session:
    """Runs a scripted run on a ledger file, and ends it at a given point."""

    def __init__(self, run: ScriptedRun, path: Path) -> None:
        self.run = run
        self.path = path
        self.total = run.controller.settings.total_samples
        self.pool = run.controller.load_samples(0, self.total)
        self.checkpoint = 0

    def controller(self, buffer: DurableBuffer, rounds_left: int) -> Controller:
        store, old = buffer.store, self.run.controller
        engine = SimEngine(self.run.engine.script, slots=old.slots, clock=self.run.clock, fails=self.run.engine.fails)
        if buffer.version:
            engine.publish(buffer.version, None, InFlight.ABORT).wait()

        def load_samples(cohort: int, count: int) -> list[Sample]:
            chosen = self.pool[buffer.num_loaded : buffer.num_loaded + count]
            return [replace(sample, cohort=cohort, segments=[]) for sample in chosen]

        def should_stop() -> bool:
            nonlocal rounds_left
            rounds_left -= 1
            if controller.update is None and rounds_left % 3 == 0:
                store.commit(durable=True)
                self.checkpoint = store.seq
                self.compare(buffer)
            if rounds_left == 0:
                raise Ended
            return False

        controller = Controller(
            buffer,
            LoopParts(
                engine=engine,
                learner=self.run.learner,
                scorer=DelayedScorer(lag=self.run.controller.scorer.lag),
                load_samples=load_samples,
            ),
            LoopSettings(knobs=old.knobs, total_samples=self.total, sampling=Sampling()),
            clock=self.run.clock,
            should_stop=should_stop,
        )
        return controller

    def compare(self, buffer: DurableBuffer) -> None:
        """Check that the file and the buffer hold the same."""
        with Ledger(self.path) as ledger:
            overview = ledger.overview()
            by_state = {state: len(held) for state, held in buffer.in_state.items()}
            assert overview.by_state == {**by_state, State.TRAINED: buffer.num_trained}
            assert (overview.version, overview.num_updates) == (buffer.version, buffer.num_updates)
            assert {c.id: c.num_samples - c.by_state["trained"] for c in overview.cohorts} == {
                cohort.id: cohort.num_left for cohort in buffer.cohorts.values()
            }
            for sample in list(buffer.samples.values())[:3]:
                life = read_history(ledger, sample.id)
                assert (life.state, life.tokens) == (sample.state, sample.tokens)
                assert [version for version, count in life.runs for _ in range(count)] == sample.versions

    def prove(self) -> int:
        with Ledger(self.path) as ledger:
            verdict = verify(ledger)
        assert [str(violation) for violation in verdict.violations] == []
        return verdict.counts["trained"]


@pytest.mark.parametrize("strategy", list(Strategy))
def test_ledgers_of_runs_are_proven(strategy: Strategy) -> None:
    @SOME
    @given(run=runs(strategy), ends=st.lists(st.integers(1, 30), max_size=3))
    def check(run: ScriptedRun, ends: list[int]) -> None:
        with TemporaryDirectory(dir=MEMORY) as folder:
            session = Session(run, Path(folder) / "ledger.sqlite")
            store = Store.create(
                session.path, grouped=run.controller.buffer.grouped, knobs=asdict(run.controller.knobs)
            )
            for rounds in ends:
                with suppress(Ended):
                    session.controller(store.restore(), rounds).run()
                store.close(commit=False)
                session.prove()
                store = Store.open(session.path)
                store.truncate(min(session.checkpoint, store.seq))
                store.begin_lineage()
                session.prove()
            assert session.controller(store.restore(), -1).run()
            store.close()
            assert session.prove() == session.total

    check()


def test_a_checkpoint_copy_is_proven(tmp_path: Path) -> None:
    knobs = resolve_knobs(Strategy.SORTED_REPLAY, 4)
    policy = ScriptedPolicy(longest=30, length_change=0.2, divergence=0.05)
    run = scripted_run(knobs, policy=policy, slots=6, num_samples=64)
    session = Session(run, tmp_path / "ledger.sqlite")
    store = Store.create(session.path, grouped=False, knobs=asdict(knobs))
    with pytest.raises(Ended):
        session.controller(store.restore(), 25).run()
    store.snapshot(tmp_path / "copy.sqlite")
    store.close()
    counts = []
    for path in (session.path, tmp_path / "copy.sqlite"):
        with Ledger(path) as ledger:
            verdict = verify(ledger)
            assert verdict.violations == []
            counts.append(verdict.counts)
    whole, copy = counts
    assert 0 < whole["trained"] < whole["samples"]
    assert whole["blank"] == 0
    assert 0 < copy["blank"] < copy["segments"]
    assert {**whole, "blank": 0} == {**copy, "blank": 0}
