"""The store: the rows that it writes, the buffer that it restores, and failures of disks and processes."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sortedrl.buffer import Buffer
from sortedrl.controller import Controller, LoopParts
from sortedrl.errors import DamagedLedgerError, DataError, LedgerError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.store import DurableBuffer, Store
from sortedrl.ledger.verdict import proven_line
from sortedrl.ledger.verify import verify
from sortedrl.records import IGNORED, CallRecord, FinishReason, Mode, Prompt, Sample, Segment, State
from sortedrl.schedule import Strategy
from sortedrl.telemetry.events import SampleRequeued, WeightsPublished
from tests.properties.test_guarantees import runs
from tests.support.scripted_runs import ScriptedRun
from tests.support.small_disk import mount_small_disk

BUDGET = 2000
SHM = Path("/dev/shm")  # in memory, where syncs are fast


def make_sample(number: int, *, cohort: int = 0, siblings: int = 1, prompt: Prompt | None = None) -> Sample:
    prompt = prompt or Prompt(
        id=f"p{number // siblings}", tokens=(1, 2, 70_000), content="Wer lügt?", columns={"answer": "Zoey", "level": 3}
    )
    return Sample(
        id=number, prompt=prompt, index=number % siblings, epoch=0, cohort=cohort, seed=2**63 - 1, budget=BUDGET
    )


def create_ledger(folder: Path, *, grouped: bool = False) -> tuple[Store, DurableBuffer]:
    store = Store.create(folder / "ledger.sqlite", grouped=grouped, knobs={"update_batch": 2, "max_staleness": None})
    return store, store.restore()


def write(buffer: Buffer, sample: Sample, tokens: list[int], *, start: int | None = None, verified: int = 0) -> None:
    segment = Segment(buffer.version, list(tokens), [-0.1 * token for token in tokens], 0.3 * len(tokens))
    buffer.append(sample, segment, start=sample.num_tokens if start is None else start, verified=verified)


def bring_to_score(buffer: Buffer, sample: Sample, tokens: list[int]) -> None:
    buffer.start(sample)
    write(buffer, sample, tokens)
    buffer.finish(sample, FinishReason.STOP)
    buffer.score(sample.id, sample.attempt, 0.5)


def as_read_back(buffer: Buffer) -> dict[str, object]:
    """The expected state after a restore, computed without the store: the buffer's state with nothing running."""
    return Buffer.from_state_dict(buffer.state_dict()).state_dict()


def rows(store: Store, query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(store.path) as connection:
        found = connection.execute(query).fetchall()
    connection.close()
    return found


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_seconds_in_tools_are_restored_to_the_last_bit(tmp_path: Path) -> None:
    """The sum depends on the order of the additions: (0.1 + 0.2) + 0.3 is not 0.1 + (0.2 + 0.3)."""
    store, buffer = create_ledger(tmp_path)
    samples = [make_sample(number, siblings=2) for number in range(3)]
    buffer.load(samples)
    for number, turns in enumerate([[[0.1], [0.2, 0.3]], [[0.7], [0.1] * 9], [[0.1], [0.2, 0.3], [0.1] * 7]]):
        buffer.start(samples[number])
        write(buffer, samples[number], [5])
        for turn, seconds in enumerate(turns):
            buffer.finish(samples[number], FinishReason.STOP)
            buffer.call(samples[number], len(seconds))
            made = [CallRecord(tool="t", arguments="{}", digest="", num_chars=0, error="", seconds=s) for s in seconds]
            buffer.record_calls(samples[number], turn, [*made, replace(made[0], error=IGNORED, seconds=8.0)])
            buffer.feed(samples[number], [9])
            buffer.start(samples[number])
            write(buffer, samples[number], [5])
        buffer.finish(samples[number], FinishReason.STOP)
        buffer.score(number, samples[number].attempt, 0.5)
    assert samples[0].tool_s == 0.1 + 0.2 + 0.3 != 0.1 + (0.2 + 0.3)
    buffer.take([samples[1], samples[0]])
    restored = store.restore()
    assert restored.samples[2].tool_s == samples[2].tool_s
    assert restored.lengths.tool_s == buffer.lengths.tool_s
    assert restored.lengths.tool_s_sum == buffer.lengths.tool_s_sum
    store.close()


def test_seconds_in_tools_are_those_of_the_longest_way_from_the_start(tmp_path: Path) -> None:
    """As with tokens, a sample that started over is not expected to take as long as all of its attempts."""
    store, buffer = create_ledger(tmp_path)
    sample = make_sample(0)
    buffer.load([sample])
    for seconds in (3.0, 5.0, 2.0):
        if sample.segments:
            buffer.requeue(sample, Mode.FRESH)
        buffer.start(sample)
        write(buffer, sample, [5])
        buffer.finish(sample, FinishReason.STOP)
        buffer.call(sample, 1)
        made = CallRecord(tool="t", arguments="{}", digest="", num_chars=0, error="", seconds=seconds)
        buffer.record_calls(sample, 0, [made])
        buffer.feed(sample, [9])
    assert sample.tool_s == 5.0
    restored = store.restore().samples[0]
    assert (restored.tool_s, restored.tool_s_now) == (5.0, 2.0)
    assert restored == sample
    store.close()


def test_every_change_is_a_row(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    samples = [make_sample(number, siblings=2) for number in range(2)]
    buffer.load(samples)
    buffer.start(samples[0])
    write(buffer, samples[0], [5, 6])
    buffer.interrupt(samples[0])
    buffer.requeue(samples[0], Mode.REPLAY)
    buffer.start(samples[0])
    write(buffer, samples[0], [5, 7], start=0, verified=1)
    buffer.finish(samples[0], FinishReason.LENGTH)
    assert buffer.score(0, 1, 9.0) is None, "of the attempt before"
    buffer.score(0, 2, 1.0)
    buffer.take([samples[0]])
    buffer.publish(1)
    buffer.start(samples[1])
    buffer.fail(samples[1])
    buffer.start(samples[1])
    buffer.give_up(samples[1])
    store.commit()
    assert rows(store, "SELECT * FROM lineages") == [(0, 0, 0)]
    assert rows(store, "SELECT * FROM cohorts") == [(1, 0, 0, 2)]
    assert rows(store, "SELECT seq, id, hex(tokens), content, columns FROM prompts") == [
        (2, "p0", "010000000200000070110100", '"Wer l\\u00fcgt?"', '{"answer": "Zoey", "level": 3}')
    ]
    assert rows(store, "SELECT * FROM samples") == [
        (3, 0, 0, "p0", 0, 0, 2**63 - 1, BUDGET),
        (4, 1, 0, "p0", 0, 1, 2**63 - 1, BUDGET),
    ]
    assert rows(store, "SELECT * FROM steps") == [
        (5, 0, 1, "start", None),
        (7, 0, 1, "interrupt", None),
        (8, 0, 1, "requeue", "replay"),
        (9, 0, 2, "start", None),
        (11, 0, 2, "finish", "length"),
        (12, 0, 2, "score", 1.0),
        (16, 1, 1, "start", None),
        (17, 1, 1, "fail", None),
        (18, 1, 2, "start", None),
        (19, 1, 2, "give-up", None),
    ]
    assert rows(
        store, "SELECT seq, sample, attempt, start, verified, version, slot_s, num_tokens, hex(tokens) FROM segments"
    ) == [
        (6, 0, 1, 0, 0, 0, 0.6, 2, "0500000006000000"),
        (10, 0, 2, 0, 1, 0, 0.6, 2, "0500000007000000"),
    ]
    assert rows(store, "SELECT * FROM updates") == [(13, 0, 0, 1)]
    assert rows(store, "SELECT * FROM trained") == [(14, 0, 0, 0, 2, 1.0, 0)]
    assert rows(store, "SELECT * FROM versions") == [(15, 1, 0)]
    assert dict(rows(store, "SELECT key, value FROM meta WHERE key IN ('seq', 'grouped')")) == {
        "seq": "19",
        "grouped": "0",
    }
    assert store.seq == 19
    assert store.seconds > 0
    store.close()


def test_a_text_that_cannot_be_encoded_is_not_called_damage(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    sample = make_sample(0)
    buffer.load([sample])
    made = CallRecord(tool="\ud800", arguments="{}", digest="", num_chars=0, error="", seconds=0.1)
    buffer.record_calls(sample, 0, [made])
    with pytest.raises(LedgerError, match=r"cannot hold a text: .* surrogates not allowed") as caught:
        store.commit()
    assert not isinstance(caught.value, DamagedLedgerError)
    store.close(commit=False)


def test_a_refused_change_leaves_no_row(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    sample = make_sample(0)
    buffer.load([sample])
    seq = store.seq
    for refused in (
        lambda: buffer.finish(sample, FinishReason.STOP),
        lambda: write(buffer, sample, [1]),
        lambda: buffer.take([sample]),
        lambda: buffer.publish(0),
        lambda: buffer.load([]),
    ):
        with pytest.raises(AssertionError):
            refused()
    assert store.seq == seq
    store.close()


def test_what_is_read_back(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path, grouped=True)
    buffer.load([make_sample(number, siblings=2) for number in range(6)])
    trained, answer, cut = [buffer.samples[number] for number in (0, 2, 4)]
    for sample in (trained, buffer.samples[1]):
        bring_to_score(buffer, sample, [1, 2, 3])
    buffer.take([trained, buffer.samples[1]])
    buffer.publish(1)
    bring_to_score(buffer, answer, [4] * 500)
    buffer.start(cut)
    write(buffer, cut, [7, 8])
    store.close()
    store = Store.open(store.path)
    assert (store.grouped, store.knobs) == (True, {"update_batch": 2, "max_staleness": None})
    restored = store.restore()
    assert (restored.version, restored.num_updates, restored.num_trained, restored.num_loaded) == (1, 1, 2, 6)
    assert list(restored.samples) == [2, 3, 4, 5]
    assert [(c.id, c.loaded_update, c.num_samples, c.num_left) for c in restored.cohorts.values()] == [(0, 0, 6, 4)]
    assert restored.lengths.prompts == {"p0": (6, 2)}
    assert {state: list(held) for state, held in restored.in_state.items()} == {
        State.PENDING: [3, 4, 5],
        State.RUNNING: [],
        State.CALLING: [],
        State.FINISHED: [],
        State.SCORED: [2],
    }
    assert (list(restored.unstarted), list(restored.waiting)) == ([3, 5], [4])
    assert restored.samples[2] == answer
    again = restored.samples[4]
    assert (again.tokens, again.attempt, again.num_interrupts, again.known_length) == ([7, 8], 1, 0, 2)
    assert again.logprobs == [float(np.float32(-0.1 * 7)), float(np.float32(-0.1 * 8))]
    assert again.prompt == cut.prompt
    assert not restored.running
    store.close()


def test_the_buffer_holds_what_the_file_holds(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    prompt = Prompt(id="p", tokens=(1,), content="?", columns={"pair": (1, 2), "array": np.arange(2), "nan": math.nan})
    sample = make_sample(0, prompt=prompt)
    buffer.load([sample])
    assert sample.prompt.columns["pair"] == [1, 2], "before and after it is read back"
    assert sample.prompt.columns["array"] == [0, 1]
    buffer.start(sample)
    logprobs = [-0.1, -1.5, -math.inf]
    buffer.append(sample, Segment(0, [1, 2, 3], logprobs), start=0)
    assert sample.logprobs == [-0.10000000149011612, -1.5, -math.inf]
    buffer.finish(sample, FinishReason.STOP)
    buffer.score(0, 1, math.nan)
    restored = store.restore().samples[0]
    assert restored.logprobs == sample.logprobs
    assert restored.reward is not None
    assert math.isnan(restored.reward)
    store.close()


def test_groups_are_ready_in_load_order(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path, grouped=True)
    buffer.load([make_sample(number, prompt=make_sample(group).prompt) for number, group in enumerate([0, 1, 1, 0])])
    for sample in list(buffer.samples.values()):
        bring_to_score(buffer, sample, [1])
    restored = store.restore()
    assert list(restored.ready) == [(0, "p0"), (0, "p1")]
    assert restored.num_ready == 4
    store.close()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            Prompt(id="p", tokens=(1,), content="?", columns={"fine": 1, "thing": object()}),
            "column 'thing' of prompt 'p'",
        ),
        (Prompt(id="p", tokens=(1,), content="?", columns={"keys": {(1, 2): 3}}), "column 'keys' of prompt 'p'"),
        (Prompt(id="p", tokens=(1,), content=[{"role": b"user"}]), "the content of prompt 'p'"),  # type: ignore[list-item]
        (Prompt(id="\ud800", tokens=(1,), content="?"), "prompt id"),
        (Prompt(id="p1", tokens=(1,), content="another"), "two different prompts have the id 'p1'"),
    ],
)
def test_prompts_that_cannot_be_kept_are_refused(tmp_path: Path, prompt: Prompt, message: str) -> None:
    store, buffer = create_ledger(tmp_path)
    buffer.load([make_sample(1)])
    before = (store.seq, as_read_back(buffer))
    with pytest.raises(DataError, match=message):
        buffer.load([make_sample(2, cohort=1), make_sample(3, cohort=1, prompt=prompt)])
    assert (store.seq, as_read_back(buffer)) == before
    buffer.load([make_sample(2, cohort=1)])
    assert store.restore().state_dict() == as_read_back(buffer)
    store.close()


def test_a_prompt_is_kept_once(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    for epoch in range(3):
        sample = make_sample(epoch, cohort=epoch)
        sample.prompt, sample.epoch = make_sample(0).prompt, epoch
        buffer.load([sample])
        if epoch == 1:  # known prompts are known to the next process too
            store.close()
            store = Store.open(store.path)
            store.begin_lineage()
            buffer = store.restore()
    store.commit()
    assert rows(store, "SELECT id FROM prompts") == [("p0",)]
    assert store.restore().state_dict() == as_read_back(buffer)
    store.close()


# ---- any history ----------------------------------------------------------------------------------------------------


def attach_ledger(run: ScriptedRun, folder: Path) -> tuple[Store, list[tuple[int, dict[str, object], bool]]]:
    """Give a run a durable buffer. Returns its store and a list that fills while the run goes on.

    Each entry is a row number, the buffer's state there, and whether a run may be resumed from there: no checkpoint is
    made after new weights are published until it is decided how the samples in progress continue.
    """
    store = Store.create(folder / "ledger.sqlite", grouped=run.controller.buffer.grouped, knobs={})
    buffer = run.controller.buffer = store.restore()
    places: list[tuple[int, dict[str, object], bool]] = []

    def emit(event: object) -> None:
        run.events.append(event)  # type: ignore[arg-type]
        if len(run.events) % 7 == 0:
            is_decided = not isinstance(event, WeightsPublished | SampleRequeued)
            places.append((store.seq, as_read_back(buffer), is_decided))

    run.controller.emit = emit
    return store, places


@pytest.mark.parametrize("strategy", list(Strategy))
def test_any_run_is_read_back_at_any_place(strategy: Strategy) -> None:
    @settings(max_examples=12, suppress_health_check=list(HealthCheck))
    @given(run=runs(strategy))
    def check(run: ScriptedRun) -> None:
        folder = Path(tempfile.mkdtemp(prefix="test-store-", dir=SHM if SHM.is_dir() else None))
        store, places = attach_ledger(run, folder)
        assert run.controller.run()
        end = as_read_back(run.controller.buffer)
        store.close()
        store = Store.open(store.path)
        for seq, expected, _ in [(store.seq, end, True), *reversed(places)]:
            store.truncate(seq)
            restored = store.restore()
            assert restored.state_dict() == expected
            other = Buffer.from_state_dict(expected)
            for name in (
                "in_state",
                "waiting",
                "unstarted",
                "unverified",
                "groups",
                "ready",
                "num_ready",
                "cohorts",
                "lengths",
            ):
                assert getattr(restored, name) == getattr(other, name), name
            assert [list(held) for held in restored.in_state.values()] == [list(h) for h in other.in_state.values()]
            assert (list(restored.ready), list(restored.waiting)) == (list(other.ready), list(other.waiting))
            assert restored.num_started == 0
        store.close()
        shutil.rmtree(folder)

    check()


@pytest.mark.parametrize(
    "strategy", [Strategy.SORTED_REPLAY, Strategy.SORTED_PARTIAL, Strategy.ASYNC, Strategy.ASYNC_ON_POLICY]
)
def test_a_run_that_is_cut_goes_on_and_trains_all_once(strategy: Strategy) -> None:
    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    @given(run=runs(strategy), data=st.data())
    def check(run: ScriptedRun, data: st.DataObject) -> None:
        folder = Path(tempfile.mkdtemp(prefix="test-store-", dir=SHM if SHM.is_dir() else None))
        store, places = attach_ledger(run, folder)
        controller = run.controller
        total, load_samples = controller.settings.total_samples, controller.load_samples
        loaded: dict[int, list[Sample]] = {}
        controller.load_samples = lambda cohort, count: loaded.setdefault(cohort, load_samples(cohort, count))
        assert controller.run()
        seq = data.draw(st.sampled_from([0, *(seq for seq, _, is_decided in places if is_decided)]))
        store.close()
        store, buffer = Store.reopen(store.path, seq)
        assert store.lineage == 1
        assert rows(store, "SELECT * FROM lineages")[1][1] == seq
        assert store.restore().state_dict() == buffer.state_dict(), "what was read before the lineage began"
        version = buffer.version

        def load_again(cohort: int, count: int) -> list[Sample]:
            return [
                Sample(id=s.id, prompt=s.prompt, index=s.index, epoch=0, cohort=cohort, seed=s.seed, budget=s.budget)
                for s in loaded.get(cohort, [])
            ]

        second = Controller(
            buffer,
            LoopParts(
                engine=type(run.engine)(run.engine.script, slots=controller.slots, clock=run.clock),
                learner=run.learner,
                scorer=type(controller.scorer)(),
                load_samples=load_again,
            ),
            controller.settings,
            clock=run.clock,
        )
        second.engine.publish(version, None)
        second.has_data = buffer.num_loaded < total
        assert second.run()
        store.commit()
        assert [row[0] for row in rows(store, "SELECT sample FROM trained ORDER BY sample")] == list(range(total))
        assert rows(store, f"SELECT min(version), max(lineage) FROM versions WHERE seq > {seq}") in (
            [(version + 1, 1)],
            [(None, None)],
        )
        assert store.restore().state_dict() == as_read_back(buffer)
        store.close()
        shutil.rmtree(folder)

    check()


def test_a_sample_cannot_be_trained_twice(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    sample = make_sample(0)
    buffer.load([sample])
    bring_to_score(buffer, sample, [1])
    buffer.take([sample])
    store.add_batch(1, 0, [])
    with pytest.raises(AssertionError, match=r"UNIQUE constraint failed: trained\.sample"):
        store.add_batch(2, 0, [sample])
    store.close(commit=False)


# ---- commits --------------------------------------------------------------------------------------------------------


def test_rows_are_committed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sortedrl.ledger import store as module

    store, buffer = create_ledger(tmp_path)
    monkeypatch.setattr(module, "COMMIT_S", 1e9)
    samples = [make_sample(number) for number in range(3)]
    buffer.load(samples)
    assert rows(store, "SELECT count(*) FROM samples") == [(0,)]
    bring_to_score(buffer, samples[0], [1])
    buffer.take([samples[0]])  # an update is about to begin
    assert rows(store, "SELECT count(*) FROM samples") == [(3,)]
    buffer.start(samples[1])
    write(buffer, samples[1], [3] * 10)
    assert rows(store, "SELECT count(*) FROM segments") == [(1,)]
    monkeypatch.setattr(module, "COMMIT_BYTES", 160)
    write(buffer, samples[1], [4] * 10)
    assert rows(store, "SELECT count(*) FROM segments") == [(3,)]
    monkeypatch.setattr(module, "COMMIT_S", 0.0)
    buffer.interrupt(samples[1])
    assert rows(store, "SELECT max(seq) FROM steps") == [(store.seq,)]
    monkeypatch.setattr(module, "COMMIT_S", 1e9)
    buffer.start(samples[2])
    store.close(commit=False)
    store = Store.open(store.path)
    assert store.restore().samples[2].attempt == 0, "what was not committed is not there"
    store.close()


def test_nothing_is_written_before_a_lineage_begins(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    buffer.load([make_sample(0)])
    store.close()
    store = Store.open(store.path)
    with pytest.raises(AssertionError, match="begin_lineage"):
        store.restore().load([make_sample(1, cohort=1)])
    assert store.begin_lineage() == 1
    store.restore().load([make_sample(1, cohort=1)])
    store.close()


def test_what_ran_when_a_process_ended_is_cut(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    samples = [make_sample(number) for number in range(3)]
    buffer.load(samples)
    for sample in samples[:2]:
        buffer.start(sample)
        write(buffer, sample, [7, 8])
    buffer.interrupt(samples[0])
    store.close()
    for lineage in (1, 2):
        store = Store.open(store.path)
        assert store.begin_lineage() == lineage
        buffer = store.restore()
        assert buffer.num_running == 0
        assert buffer.samples[1].num_interrupts == 0
        assert store.restore().state_dict() == as_read_back(buffer)
        buffer.start(buffer.samples[1])
        store.close()
    cuts = rows(store, "SELECT seq, sample, attempt FROM steps WHERE step = 'cut'")
    assert [cut[1:] for cut in cuts] == [(1, 1), (1, 2)]
    assert rows(store, "SELECT lineage, cut_seq + 1 FROM lineages")[1:] == [(1, cuts[0][0]), (2, cuts[1][0])]


def test_settings_that_change_on_resume_are_recorded_also_in_a_ledger_of_before(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    buffer.load([make_sample(0)])
    store.close()
    with sqlite3.connect(store.path) as connection:
        connection.execute("DROP TABLE changes")  # as older versions wrote it
    connection.close()
    with Ledger(store.path) as ledger:
        assert [lineage.changes for lineage in ledger.lineages] == [()]
    store, _ = Store.reopen(
        store.path, store.seq, {"learner.lr": (0.5, 1e-3), "learner.betas": ([0.9, 0.95], [0.8, 0.9])}
    )
    store.snapshot(tmp_path / "copy.sqlite")
    store.close()
    for path in (store.path, tmp_path / "copy.sqlite"):
        with Ledger(path) as ledger:
            assert [[str(change) for change in lineage.changes] for lineage in ledger.lineages] == [
                [],
                ["learner.betas [0.9, 0.95] -> [0.8, 0.9]", "learner.lr 0.5 -> 0.001"],
            ]
            assert verify(ledger).violations == []


def test_one_process_writes(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    buffer.load([make_sample(0)])
    store.commit()
    second = Store.open(store.path)
    second.begin_lineage()
    buffer.start(buffer.samples[0])
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"another process writes .* \(it has lineage 1, this process 0\)"):
            store.commit()
    other = second.restore()
    other.start(other.samples[0])
    second.commit()  # not held up by the one that was refused
    store.close(commit=False)
    second.close()


def test_a_durable_commit_writes_even_if_nothing_is_pending(tmp_path: Path) -> None:
    store, _ = create_ledger(tmp_path)
    count = "SELECT value FROM meta WHERE key = 'num_durable'"
    assert rows(store, count) == [("1",)]
    store.commit()
    assert rows(store, count) == [("1",)]
    store.commit(durable=True)
    assert rows(store, count) == [("2",)]
    store.close()


def test_a_cut_beyond_the_end_is_refused(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    buffer.load([make_sample(0)])
    with pytest.raises(DamagedLedgerError, match="ends with row 3, but the checkpoint was made at row 4"):
        store.truncate(4)
    store.truncate(0)
    assert not store.restore().samples
    assert store.restore().next_cohort == 0
    store.close()


def test_calls_that_a_cut_forgets_are_counted(tmp_path: Path) -> None:
    def call(buffer: Buffer, sample: Sample, num_calls: int) -> None:
        buffer.start(sample)
        write(buffer, sample, [1])
        buffer.finish(sample, FinishReason.STOP)
        buffer.call(sample, num_calls)

    store, buffer = create_ledger(tmp_path)
    known, later, under_way = samples = [make_sample(number) for number in range(3)]
    buffer.load(samples)
    made = CallRecord(tool="lookup", arguments="{}", digest="", num_chars=0, error="", seconds=0.1)
    call(buffer, known, 1)
    buffer.record_calls(known, 0, [made])
    buffer.feed(known, [7])
    checkpoint = store.seq
    call(buffer, later, 2)
    buffer.record_calls(later, 0, [made, made])
    buffer.feed(later, [7])
    call(buffer, under_way, 3)  # of these nobody knows how many were made
    buffer.announce_calls(under_way, 1, [replace(made, is_repeated=True)] * 4)
    store.close(commit=False)  # as a kill: calls that are made again were counted before
    store, _ = Store.reopen(tmp_path / "ledger.sqlite", checkpoint)
    store.truncate(checkpoint)  # forgets nothing more
    store.close()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        verdict = verify(ledger)
        assert not verdict.violations
        assert (verdict.counts["calls"], verdict.counts["forgotten_calls"]) == (1, 5)
        assert (verdict.counts["repeated_calls"], verdict.counts["forgotten_repeats"]) == (0, 4)
        told = "1 tool call recorded, 4 of kept turns made again, 5 forgotten by resumes"
        assert told in proven_line(ledger, verdict)


@pytest.mark.parametrize(
    "moment",
    ["calling", "complete", "ended", "replayed", "never ran", "cut by a replay", "ended and was cut", "restarted"],
)
def test_a_repeated_call_needs_a_turn_that_is_kept(tmp_path: Path, moment: str) -> None:
    store, buffer = create_ledger(tmp_path)
    sample = make_sample(0)
    buffer.load([sample])
    made = CallRecord(tool="lookup", arguments="{}", digest="", num_chars=0, error="", seconds=0.1)
    if moment != "never ran":
        buffer.start(sample)
        write(buffer, sample, [1, 2])
        buffer.finish(sample, FinishReason.STOP)
        buffer.call(sample, 1)
    if moment in ("ended", "ended and was cut"):  # what the tool returned did not fit
        buffer.record_calls(sample, 0, [made])
        buffer.finish(sample, FinishReason.LENGTH)
    elif moment not in ("never ran", "calling"):
        buffer.record_calls(sample, 0, [made])
        buffer.feed(sample, [7])
        buffer.start(sample)
        write(buffer, sample, [3])
        buffer.finish(sample, FinishReason.STOP)
    if moment in ("replayed", "cut by a replay"):
        buffer.requeue(sample, Mode.REPLAY)
        buffer.start(sample)
        verified = 4 if moment == "replayed" else 1
        write(buffer, sample, [*[1, 2, 7, 3][:verified], 9], start=0, verified=verified)
    elif moment == "ended and was cut":
        buffer.requeue(sample, Mode.REPLAY)
        buffer.start(sample)
        write(buffer, sample, [1, 9], start=0, verified=1)
    elif moment == "restarted":
        buffer.requeue(sample, Mode.FRESH)
    buffer.announce_calls(sample, 1, [replace(made, is_repeated=True)])
    store.close()
    is_sound = moment in ("calling", "complete", "ended", "replayed")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        violations = [str(violation) for violation in verify(ledger).violations]
    assert len(violations) == (0 if is_sound else 1)
    assert all("but it keeps no turn with tools" in violation for violation in violations)


# ---- snapshots ------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_a_ledger_without_what_was_trained(tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    samples = [make_sample(number) for number in range(4)]
    buffer.load(samples)
    for sample in samples[:3]:
        bring_to_score(buffer, sample, [9] * BUDGET)
    before = store.seq
    buffer.take(samples[:2])
    path = tmp_path / "a copy's place?.sqlite"
    store.snapshot(path)
    assert os.listdir(tmp_path).count(path.name) == 1
    assert path.stat().st_size < store.path.stat().st_size or path.stat().st_size < 2**18
    copy = Store.open(path)
    assert copy.seq == store.seq
    assert copy.restore().state_dict() == as_read_back(buffer)
    assert rows(copy, "SELECT sample, num_tokens, tokens IS NULL, logprobs IS NULL FROM segments") == [
        (0, BUDGET, 1, 1),
        (1, BUDGET, 1, 1),
        (2, BUDGET, 0, 0),
    ]
    copy.begin_lineage()
    rest = copy.restore()
    rest.start(rest.samples[3])
    copy.truncate(before)
    with pytest.raises(LedgerError, match=r"sample 0, row .*its tokens are missing"):
        copy.restore()
    copy.close()
    with pytest.raises(LedgerError, match="exists already"):
        store.snapshot(path)
    buffer.start(samples[3])
    store.close()


# ---- files that are not what they should be -------------------------------------------------------------------------


def closed_ledger(folder: Path, num_samples: int = 3) -> tuple[Path, dict[str, object]]:
    store, buffer = create_ledger(folder)
    buffer.load([make_sample(number) for number in range(num_samples)])
    for sample in list(buffer.samples.values()):
        buffer.start(sample)
        write(buffer, sample, [1000 + sample.id] * 1000)
    buffer.interrupt(buffer.samples[0])
    store.close()
    return store.path, as_read_back(buffer)


def test_no_ledger_to_open(tmp_path: Path) -> None:
    with pytest.raises(DamagedLedgerError, match="there is no ledger"):
        Store.open(tmp_path / "ledger.sqlite")
    with pytest.raises(DamagedLedgerError, match="there is no ledger"):
        Store.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a database", b"SQLite format 3\0" + bytes(200)])
def test_other_files_are_no_ledgers(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(DamagedLedgerError, match=r"is damaged \(it "):
        Store.open(path)
    assert path.read_bytes() == content
    with pytest.raises(LedgerError, match="exists already"):
        Store.create(path, grouped=False, knobs={})


def test_databases_of_other_programs_are_no_ledgers(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE meta (key, value)")
    connection.close()
    with pytest.raises(DamagedLedgerError, match="it is a database but no ledger"):
        Store.open(path)


def edit(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize("version", [1, 2])
def test_a_ledger_of_an_earlier_schema_version_is_read_and_upgraded(version: int, tmp_path: Path) -> None:
    path, _ = closed_ledger(tmp_path)
    if version == 1:
        edit(path, "DROP TABLE calls")
    edit(path, f"UPDATE meta SET value = '{version}' WHERE key = 'schema_version'")
    with Ledger(path) as ledger:
        before = verify(ledger)
        assert (before.violations, ledger.has_calls, ledger.seq) == ([], version == 2, before.counts["rows"])
    store = Store.open(path)
    restored = store.restore().state_dict()
    store.begin_lineage()
    store.close()
    with Ledger(path) as ledger:
        assert (verify(ledger).violations, ledger.has_calls, ledger.meta["schema_version"]) == ([], True, "3")
    assert restored["num_loaded"] == before.counts["samples"]


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    path, _ = closed_ledger(tmp_path)
    edit(path, "UPDATE meta SET value = '4' WHERE key = 'schema_version'")
    with pytest.raises(LedgerError, match="schema version 4, this sortedrl knows 1 to 3"):
        Store.open(path)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM steps WHERE seq = 10", "last row is number 14, but it has 13 rows"),
        ("DELETE FROM meta WHERE key = 'seq'", "its meta table lacks seq"),
        ("DELETE FROM meta", "its meta table lacks"),
        ("DROP TABLE versions", "no such table: versions"),
    ],
)
def test_a_ledger_with_something_missing_is_refused(tmp_path: Path, statement: str, message: str) -> None:
    path, _ = closed_ledger(tmp_path)
    edit(path, statement)
    with pytest.raises(DamagedLedgerError, match=f"is damaged .*{message}"):
        Store.open(path)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "UPDATE segments SET tokens = zeroblob(4000) WHERE sample = 1",
            "sample 1, row .* do not match their checksum",
        ),
        ("UPDATE segments SET num_tokens = 999 WHERE sample = 1", "sample 1, row .* do not match their checksum"),
        ("UPDATE segments SET start = 5 WHERE sample = 2", "sample 2, row .* tokens at 5, but it holds 0"),
        ("UPDATE steps SET step = 'jump' WHERE step = 'interrupt'", "sample 0, row .* unknown step 'jump'"),
        ("UPDATE steps SET step = 'finish' WHERE step = 'interrupt'", "sample 0, row .* is not a valid FinishReason"),
        ("UPDATE steps SET attempt = 2 WHERE step = 'interrupt'", "sample 0, row .* attempt 2 follows 1"),
        (
            "UPDATE steps SET step = 'score', value = 1 WHERE step = 'interrupt'",
            "sample 0, row .* scored while running",
        ),
        ("UPDATE prompts SET content = '\"!\"' WHERE id = 'p1'", "prompt 'p1' does not match its checksum"),
        ("UPDATE samples SET prompt = 'p9' WHERE id = 1", "prompt 'p9'"),
        ("UPDATE samples SET cohort = 7 WHERE id = 1", "cohort 7"),
    ],
)
def test_rows_that_cannot_be_are_found_when_read(tmp_path: Path, statement: str, message: str) -> None:
    path, _ = closed_ledger(tmp_path)
    edit(path, statement)
    store = Store.open(path)
    with pytest.raises(DamagedLedgerError, match=f"is damaged .*{message}"):
        store.restore()
    store.close()


def test_a_damaged_ledger_is_not_reopened_and_gets_no_lineage(tmp_path: Path) -> None:
    path, _ = closed_ledger(tmp_path)
    edit(path, "UPDATE steps SET step = 'jump' WHERE step = 'interrupt'")
    store = Store.open(path)
    seq, lineages = store.seq, rows(store, "SELECT * FROM lineages")
    store.close()
    with pytest.raises(DamagedLedgerError, match="unknown step 'jump'"):
        Store.reopen(path, seq)
    store = Store.open(path)
    assert (store.seq, rows(store, "SELECT * FROM lineages")) == (seq, lineages)
    store.close()


def flip(path: Path, at: int, count: int = 1) -> None:
    content = bytearray(path.read_bytes())
    for position in range(at, at + count):
        content[position] ^= 0xFF
    path.write_bytes(content)


def test_flipped_bytes_in_tokens_are_found(tmp_path: Path) -> None:
    path, _ = closed_ledger(tmp_path)
    needle = (1001).to_bytes(4, "little") * 100
    flip(path, path.read_bytes().index(needle))
    store = Store.open(path)
    with pytest.raises(DamagedLedgerError, match="sample 1, row"):
        store.restore()
    store.close()


def test_flipped_bytes_anywhere_bring_no_wrong_token(tmp_path: Path) -> None:
    """Flip one byte in 499, one at a time: the file is refused, or every restored answer and prompt is as written."""
    path, _ = closed_ledger(tmp_path)
    whole = path.read_bytes()
    num_refused = 0
    for at in range(0, len(whole), 499):
        path.write_bytes(whole)
        flip(path, at)
        try:
            store = Store.open(path)
        except DamagedLedgerError:
            num_refused += 1
            continue
        try:
            for sample in store.restore().samples.values():
                assert sample.tokens in ([], [1000] * 1000, [1001] * 1000, [1002] * 1000), f"byte {at}"
                assert sample.prompt.content == "Wer lügt?", f"byte {at}"
        except DamagedLedgerError:
            num_refused += 1
        finally:
            store.close()
    assert num_refused > len(whole) // 499 // 10


def test_the_pages_of_a_small_file_are_all_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that a restore does not read, such as those of trained samples, are checked too."""
    from sortedrl.ledger import schema

    store, buffer = create_ledger(tmp_path)
    buffer.load([make_sample(0)])
    bring_to_score(buffer, buffer.samples[0], [1] * BUDGET)
    buffer.take([buffer.samples[0]])
    store.close()
    ((page,),) = rows(store, "SELECT rootpage FROM sqlite_master WHERE name = 'segments'")
    assert isinstance(page, int)
    flip(store.path, (page - 1) * schema.PAGE_BYTES)
    with pytest.raises(DamagedLedgerError, match="is damaged"):
        Store.open(store.path)
    monkeypatch.setattr(schema, "QUICK_CHECK_BYTES", 0)
    Store.open(store.path).close()


@pytest.mark.parametrize("share", [0.9, 0.5, 0.01])
def test_a_file_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    path, _ = closed_ledger(tmp_path)
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(DamagedLedgerError, match=r"damaged|no ledger"):
        Store.open(path)


def test_a_large_file_is_not_read_to_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sortedrl.ledger import schema

    monkeypatch.setattr(schema, "QUICK_CHECK_BYTES", 0)
    path, expected = closed_ledger(tmp_path)
    store = Store.open(path)
    assert store.restore().state_dict() == expected
    store.close()
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DamagedLedgerError, match="damaged"):
        Store.open(path)


# ---- disks and processes that fail ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    yield from mount_small_disk("2m", tmp_path)


def fill_up(folder: Path) -> Path:
    path = folder / "rest"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    return path


def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    store, buffer = create_ledger(small_disk)
    samples = [make_sample(number) for number in range(2)]
    buffer.load(samples)
    store.commit()
    committed = store.seq
    rest = fill_up(small_disk)
    buffer.start(samples[0])
    write(buffer, samples[0], [5] * BUDGET)
    for _ in range(2):
        with pytest.raises(LedgerError) as caught:
            store.commit()
        assert f"the disk of {store.path} is full (0.0 MB free)" in str(caught.value)
        assert f"free some space and run `sortedrl train --resume {small_disk}`" in str(caught.value)
    assert rows(store, "SELECT value FROM meta WHERE key = 'seq'") == [(str(committed),)]
    buffer.start(samples[1])
    rest.unlink()
    store.commit(durable=True)
    store.close()
    store = Store.open(store.path)
    assert store.restore().state_dict() == as_read_back(buffer)
    store.close()


def test_a_process_that_ends_on_a_full_disk_leaves_its_commits(small_disk: Path) -> None:
    store, buffer = create_ledger(small_disk)
    samples = [make_sample(number) for number in range(200)]
    buffer.load(samples)
    saved: list[int] = []

    def fill_the_disk() -> None:
        for sample in samples:
            store.commit()
            saved.append(store.seq)
            buffer.start(sample)
            write(buffer, sample, [5] * BUDGET)

    with pytest.raises(LedgerError, match=r"is full|fails"):
        fill_the_disk()
    with pytest.raises(LedgerError, match=r"is full|fails"):
        store.close()
    store = Store.open(store.path)
    assert store.seq == saved[-1]
    restored = store.restore().samples
    assert [s.tokens for s in restored.values()] == [[5] * BUDGET] * (len(saved) - 1) + [[]] * (201 - len(saved))
    store.close()


def test_a_snapshot_on_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    store, buffer = create_ledger(tmp_path)
    samples = [make_sample(number) for number in range(200)]
    buffer.load(samples)
    for sample in samples:
        buffer.start(sample)
        write(buffer, sample, [5] * BUDGET)
    with pytest.raises(LedgerError) as caught:
        store.snapshot(small_disk / "copy.sqlite")
    assert f"the disk of {small_disk / 'copy.sqlite'} is full" in str(caught.value)
    assert f"--resume {tmp_path}`" in str(caught.value)
    buffer.interrupt(samples[0])
    store.snapshot(tmp_path / "copy.sqlite")
    store.close()
    copy = Store.open(tmp_path / "copy.sqlite")
    assert [s.segments for s in copy.restore().samples.values()] == [s.segments for s in samples]
    copy.close()


def test_a_disk_that_cannot_be_written(small_disk: Path) -> None:
    path, _ = closed_ledger(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(LedgerError, match="cannot be written") as caught:
        Store.open(path)
    assert not isinstance(caught.value, DamagedLedgerError), "a copy would be no better"
    with pytest.raises(LedgerError, match="cannot be written"):
        Store.create(small_disk / "other.sqlite", grouped=False, knobs={})


def test_a_locked_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sortedrl.ledger import schema

    monkeypatch.setattr(schema, "BUSY_S", 0.01)
    path, _ = closed_ledger(tmp_path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="is in use") as caught:
        Store.open(path)
    assert not isinstance(caught.value, DamagedLedgerError), "a copy would be no better"
    holder.close()


CHILD = """
import sys
from tests.ledger.test_store import create_ledger, make_sample, write
from pathlib import Path
from sortedrl.records import FinishReason

store, buffer = create_ledger(Path(sys.argv[1]))
number = 0
while True:
    buffer.load([make_sample(number, cohort=number)])
    sample = buffer.samples[number]
    buffer.start(sample)
    write(buffer, sample, [number] * 500)
    buffer.finish(sample, FinishReason.STOP)
    buffer.score(number, 1, 1.0)
    if number % 3:
        buffer.take([sample])
        buffer.publish(buffer.version + 1)
    store.commit()
    print(store.seq, number, flush=True)
    number += 1
"""


@pytest.mark.parametrize("num_lines", [1, 40, 300])
def test_a_killed_process_leaves_its_commits(tmp_path: Path, num_lines: int) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None
        for _ in range(num_lines):
            seq, number = map(int, child.stdout.readline().split())
        child.send_signal(signal.SIGKILL)
        child.wait()
        for line in child.stdout.read().splitlines(keepends=True):  # printed before it died
            if line.endswith(b"\n"):  # the kill may cut the last line
                seq, number = map(int, line.split())
    assert (tmp_path / "ledger.sqlite-wal").exists()
    store = Store.open(tmp_path / "ledger.sqlite")
    assert store.seq >= seq
    store.truncate(seq)
    buffer = store.restore()
    assert buffer.num_loaded == number + 1
    assert list(buffer.samples) == list(range(0, number + 1, 3))
    assert all(sample.tokens == [sample.id] * 500 for sample in buffer.samples.values())
    store.close()
