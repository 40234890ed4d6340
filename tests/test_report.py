"""The report, on a made-up run that is consistent in itself; its bookkeeping checks the metrics once more."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from sortedrl.engine.base import EngineStats
from sortedrl.errors import RunDirError
from sortedrl.telemetry import charts, report
from sortedrl.telemetry.events import (
    AttemptEnded,
    AttemptStarted,
    AttemptVerified,
    BatchTaken,
    CohortLoaded,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    SampleRequeued,
    SampleScored,
    UpdateDone,
    WeightsPublished,
)
from sortedrl.telemetry.history import mean_overlap, read_history
from sortedrl.telemetry.metrics import RunMetrics, Timing
from sortedrl.telemetry.report import write_report
from sortedrl.telemetry.sinks import Fanout, JsonlSink, MetricsSink
from sortedrl.telemetry.summary import summarize

STEP_S, UPDATE_S, PUBLISH_S = 0.01, 0.12, 0.02


@dataclass(slots=True, kw_only=True)
class Answer:
    """A sample of the made-up run: how long it will get, how far it is, and which versions wrote it."""

    id: int
    length: int
    tokens: int = 0
    attempt: int = 0
    slot: int = -1
    mode: str = "fresh"
    versions: list[int] = field(default_factory=list)  # one per token


class MadeUpRun:
    """A toy of the real loop: one token a step and slot, answers of heavy-tailed length, no model behind it.

    `interrupted` is what becomes of interrupted answers; `drain` waits for the whole cohort instead of interrupting.
    """

    def __init__(
        self, strategy: str, *, interrupted: str = "replay", drain: bool = False, updates: int = 60, seed: int = 0
    ) -> None:
        self.strategy, self.interrupted, self.drain, self.num_updates = strategy, interrupted, drain, updates
        self.slots, self.update_batch, self.cohort_batches = 16, 16, 1 if drain else 4
        self.random = random.Random(seed)
        self.t, self.version = 0.0, 0
        self.stats = EngineStats()
        self.rollout_s = self.update_s = self.publish_s = 0.0
        self.pending: list[Answer] = []
        self.running: dict[int, Answer] = {}
        self.done: list[Answer] = []
        self.num_loaded = self.num_cohorts = self.num_trained = 0

    def events(self) -> Iterator[Event]:
        total = self.num_updates * self.update_batch
        yield RunStarted(
            t=0.0, strategy=self.strategy, seed=1, slots=self.slots, update_batch=self.update_batch, total_samples=total
        )
        yield self.evaluated()
        while self.version < self.num_updates:
            if not (self.pending or self.running or self.done):
                yield self.load()
            for slot in range(self.slots):
                if slot not in self.running and self.pending:
                    yield from self.start(slot)
            yield from self.decode()
            is_empty = not self.running and not self.pending
            if is_empty or (len(self.done) >= self.update_batch and not self.drain):
                yield from self.harvest()
                if self.version % 20 == 0:
                    yield self.evaluated()
        yield RunEnded(t=self.t, reason="complete")

    def held(self) -> list[int]:
        return [answer.id for answer in (*self.pending, *self.running.values(), *self.done)]

    def timing(self) -> Timing:
        return Timing(rollout_s=self.rollout_s, update_s=self.update_s, publish_s=self.publish_s, wall_s=self.t)

    def load(self) -> CohortLoaded:
        ids = list(range(self.num_loaded, self.num_loaded + self.update_batch * self.cohort_batches))
        self.num_loaded += len(ids)
        self.num_cohorts += 1
        self.pending = [Answer(id=sample, length=self.draw_length()) for sample in ids]
        return CohortLoaded(t=self.t, cohort=self.num_cohorts - 1, update=self.version, samples=ids)

    def draw_length(self) -> int:
        median = 30 + 40 * self.version / self.num_updates
        return min(max(int(self.random.lognormvariate(np.log(median), 0.9)), 4), 400)

    def start(self, slot: int) -> Iterator[Event]:
        answer = self.pending.pop(0)
        answer.attempt += 1
        answer.slot = slot
        self.running[slot] = answer
        key = {"t": self.t, "sample": answer.id, "attempt": answer.attempt}
        yield AttemptStarted(**key, mode=answer.mode, cached=answer.tokens, slot=slot, version=self.version)
        if answer.mode == "replay":
            cached = answer.tokens
            if self.random.random() < 0.25:
                answer.tokens = self.random.randrange(cached)
                answer.length = max(answer.tokens + 1, self.draw_length())
            answer.versions = [self.version] * answer.tokens
            self.stats.recomputed_tokens += cached
            yield AttemptVerified(**key, cached=cached, accepted=answer.tokens)

    def decode(self) -> Iterator[Event]:
        """Until the next answers are complete."""
        steps = min(answer.length - answer.tokens for answer in self.running.values())
        self.t += steps * STEP_S
        self.rollout_s += steps * STEP_S
        self.stats.decode_steps += steps
        self.stats.decoded_tokens += steps * len(self.running)
        self.stats.busy_slot_s += steps * STEP_S * len(self.running)
        for answer in list(self.running.values()):
            answer.tokens += steps
            answer.versions += [self.version] * steps
            if answer.tokens == answer.length:
                yield self.end(answer, "length" if answer.length == 400 else "stop")
                reward = float(self.random.random() < 0.25 + 0.5 * self.version / self.num_updates)
                yield SampleScored(t=self.t, sample=answer.id, attempt=answer.attempt, reward=reward)
                self.done.append(answer)

    def end(self, answer: Answer, outcome: str) -> AttemptEnded:
        del self.running[answer.slot]
        key = {"t": self.t, "sample": answer.id, "attempt": answer.attempt}
        return AttemptEnded(**key, outcome=outcome, num_tokens=answer.tokens, slot=answer.slot)

    def harvest(self) -> Iterator[Event]:
        batch, self.done = self.done, []
        cut = list(self.running.values())
        for answer in cut:
            yield self.end(answer, "interrupted")
        yield BatchTaken(
            t=self.t,
            update=self.version,
            version=self.version,
            samples=[answer.id for answer in batch],
            lengths=[answer.tokens for answer in batch],
            rewards=[
                float(self.random.random() < 0.25 + 0.5 * self.version / self.num_updates) for _ in range(len(batch))
            ],
            staleness=[self.version - min(answer.versions) for answer in batch],
            staleness_token_sum=[sum(self.version - version for version in answer.versions) for answer in batch],
            truncated=sum(answer.length == 400 for answer in batch),
            num_interrupted=len(cut),
            slot_s=sum(answer.tokens for answer in batch) * STEP_S,
        )
        for answer in cut:
            answer.mode = "fresh" if self.interrupted == "restart" else self.interrupted
            discarded = answer.tokens if answer.mode == "fresh" else 0
            yield SampleRequeued(t=self.t, sample=answer.id, decision=self.interrupted, discarded=discarded)
            if discarded:
                answer.tokens, answer.length = 0, self.draw_length()
                answer.versions.clear()
        self.pending = self.pending + cut if self.interrupted == "restart" else cut + self.pending
        self.num_trained += len(batch)
        self.version += 1
        self.t += UPDATE_S
        self.update_s += UPDATE_S
        loss = self.random.gauss(0.0, 0.1)
        yield UpdateDone(
            t=self.t,
            update=self.version - 1,
            version=self.version,
            optimizer_steps=1,
            seconds=UPDATE_S,
            metrics={"loss": loss},
        )
        self.t += PUBLISH_S
        self.publish_s += PUBLISH_S
        yield WeightsPublished(t=self.t, version=self.version, seconds=PUBLISH_S)

    def evaluated(self) -> Evaluated:
        share = self.version / self.num_updates
        return Evaluated(
            t=self.t,
            version=self.version,
            samples_trained=self.num_trained,
            sampled_accuracy=0.27 + 0.5 * share,
            greedy_accuracy=0.2 + 0.6 * share,
            mean_length=35 + 40 * share,
            by_group={"2": {"sampled_accuracy": 0.5 + 0.4 * share}, "5": {"sampled_accuracy": 0.1 + 0.2 * share}},
        )


def write_run(run_dir: Path, run: MadeUpRun, *, has_summary: bool = True) -> RunMetrics:
    run_dir.mkdir(parents=True)
    metrics = RunMetrics(probe=lambda: (run.stats, run.timing()))
    emit = Fanout([metrics, JsonlSink(run_dir / "events.jsonl"), MetricsSink(run_dir / "metrics.jsonl", metrics)])
    for event in run.events():
        emit(event)
    emit.close()
    assert not emit.num_failures
    if has_summary:
        summary = summarize(
            metrics,
            stats=run.stats,
            timing=run.timing(),
            held=run.held(),
            cohort_batches=run.cohort_batches,
            lookahead=0,
        )
        summary.write(run_dir / "summary.json")
    return metrics


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the five megabytes of plotly's own script, which take seconds to parse."""
    monkeypatch.setattr(report, "get_plotlyjs", lambda: "/* plotly */")


@pytest.mark.parametrize(
    ("interrupted", "drain"), [("replay", False), ("resume", False), ("restart", False), ("restart", True)]
)
def test_metrics_agree_with_the_books_of_a_made_up_run(tmp_path: Path, interrupted: str, drain: bool):
    run = MadeUpRun("toy", interrupted=interrupted, drain=drain, updates=30)
    metrics = write_run(tmp_path / "run", run)
    assert metrics.generated_tokens == run.stats.decoded_tokens
    ledger = metrics.ledger(run.held())
    assert (ledger.loaded, ledger.trained) == (run.num_loaded, run.num_trained)
    assert (ledger.lost, ledger.duplicated) == (0, 0)
    # What the events' clock shows is what the engine says of itself, since the toy never waits with free slots.
    assert metrics.occupancy.busy_slot_s == pytest.approx(run.stats.busy_slot_s)
    assert metrics.occupancy.rollout_s == pytest.approx(run.rollout_s)
    bubble, goodput = metrics.bubble_ratio(run.stats, run.timing()), metrics.goodput(run.timing())
    assert bubble is not None
    assert goodput is not None
    wasted = (metrics.discarded_tokens + metrics.in_flight_tokens) * STEP_S / (run.slots * run.rollout_s)
    assert bubble + goodput + wasted == pytest.approx(1.0)
    assert (metrics.staleness_max == 0) == (interrupted != "resume")
    assert (metrics.accepted_prefix is not None) == (interrupted == "replay")


class Page(HTMLParser):
    """The tags of a page, and the text that a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._inside):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def charts(self) -> list[str]:
        ids = (attrs.get("id") or "" for _, attrs in self.tags)
        return [name.removeprefix("chart-") for name in ids if name.startswith("chart-")]


@pytest.mark.usefixtures("light")
def test_report_of_one_run_has_its_sections(tmp_path: Path):
    run = MadeUpRun("sorted-replay", updates=20)
    write_run(tmp_path / "mine", run)
    out = write_report([tmp_path / "mine"], tmp_path / "report.html")
    page = Page(out.read_text())
    assert page.charts == ["samples", "wall", "occupancy", "timeline-0", "lengths", "staleness", "replay"]
    for word in ("mine", "Summary", "Learning", "What the slots did", "Slot timeline", "Trained lengths", "Staleness"):
        assert word in page.text, word
    assert "0.270 → 0.770" in page.text
    assert "All " in page.text
    assert "estimated" not in page.text
    assert write_report([tmp_path / "mine"], tmp_path / "again.html").read_bytes() == out.read_bytes()


def test_report_loads_nothing_from_elsewhere(tmp_path: Path):
    write_run(tmp_path / "mine", MadeUpRun("sorted-replay", updates=4))
    page = Page(write_report([tmp_path / "mine"], tmp_path / "report.html").read_text())
    for tag, attrs in page.tags:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base"}, tag
        assert not {"src", "href", "srcset", "action"} & attrs.keys(), (tag, attrs)
    policies = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert len(policies) == 1
    assert "default-src 'none'" in (policies[0] or "")
    assert "http" not in (policies[0] or "")


@pytest.mark.usefixtures("light")
def test_report_compares_runs(tmp_path: Path):
    write_run(tmp_path / "a" / "run", MadeUpRun("sync", drain=True, updates=8))
    write_run(tmp_path / "b" / "run", MadeUpRun("sorted-on-policy", interrupted="restart", updates=8))
    page = Page(write_report([tmp_path / "a" / "run", tmp_path / "b" / "run"], tmp_path / "r.html").read_text())
    assert "2 runs compared" in page.text
    assert "a/run" in page.text
    assert "b/run" in page.text
    assert "replay" not in page.charts
    assert {"timeline-0", "timeline-1"} <= set(page.charts)


@pytest.mark.usefixtures("light")
def test_report_escapes_what_comes_from_a_run(tmp_path: Path):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    name = "<b onmouseover=alert(3)>&"
    write_run(tmp_path / name, MadeUpRun(hostile, updates=4))
    write_run(tmp_path / "other", MadeUpRun("sync", drain=True, updates=4))
    for number, run_dirs in enumerate(([tmp_path / name], [tmp_path / name, tmp_path / "other"])):
        text = write_report(run_dirs, tmp_path / f"{number}.html").read_text()
        page = Page(text)
        assert hostile in page.text, "a reader sees it as it is"
        assert name in page.text
        assert "alert(1)</script>" not in text
        assert "<img" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
        assert not any("onmouseover" in attrs for _, attrs in page.tags)
        # Inside figures too: plotly would take tags in a name for markup.
        assert "<b onmouseover" not in text
        assert "\\u003cb onmouseover" not in text


@pytest.mark.usefixtures("light")
def test_report_of_a_run_without_summary_says_so(tmp_path: Path):
    run = MadeUpRun("sorted-replay", updates=6)
    write_run(tmp_path / "crashed", run, has_summary=False)
    events = tmp_path / "crashed" / "events.jsonl"
    events.write_bytes(events.read_bytes()[:-40])
    history = read_history(tmp_path / "crashed")
    assert history.is_estimate
    assert history.summary.ledger is None
    assert history.summary.bubble_ratio == pytest.approx(1 - run.stats.busy_slot_s / (run.slots * run.rollout_s))
    assert (
        "estimated from its events" in Page(write_report([tmp_path / "crashed"], tmp_path / "r.html").read_text()).text
    )


@pytest.mark.usefixtures("light")
def test_report_before_the_first_update(tmp_path: Path):
    (tmp_path / "young").mkdir()
    sink = JsonlSink(tmp_path / "young" / "events.jsonl")
    for event, _ in zip(MadeUpRun("sorted-replay").events(), range(12), strict=False):
        sink.emit(event)
    sink.close()
    page = Page(write_report([tmp_path / "young"], tmp_path / "r.html").read_text())
    assert "No update was done" in page.text
    assert page.charts == []


def test_report_refuses_what_is_no_run(tmp_path: Path):
    with pytest.raises(RunDirError, match="at least one"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(RunDirError, match="not a directory"):
        write_report([tmp_path / "none"], tmp_path / "r.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirError, match=r"events\.jsonl is not a file"):
        write_report([tmp_path / "empty"], tmp_path / "r.html")
    (tmp_path / "empty" / "events.jsonl").write_text("")
    with pytest.raises(RunDirError, match="lacks RunStarted"):
        write_report([tmp_path / "empty"], tmp_path / "r.html")


def test_timeline_draws_a_window_of_a_long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path / "long", MadeUpRun("sorted-replay", updates=20))
    history = read_history(tmp_path / "long")
    monkeypatch.setattr(charts, "MAX_ATTEMPTS", 100)
    chart = charts.timeline_chart(history)
    assert len(chart.figure.data[0].y) == 100
    assert f"100 of {len(history.attempts):,} attempts are drawn" in chart.caption


def test_mean_overlap_of_spans():
    # Open: one from 0 to 4, another from 1 to 3. Means over [0, 2], [2, 4], [4, 8].
    result = mean_overlap([(0.0, 4.0), (1.0, 3.0)], np.array([0.0, 2.0, 4.0, 8.0]))
    assert result == pytest.approx([1.5, 1.5, 0.0])
    assert mean_overlap([], np.array([0.0, 1.0])) == pytest.approx([0.0])
    # A span that begins inside an interval counts for its part of it.
    assert mean_overlap([(0.5, 2.0)], np.array([0.0, 1.0, 2.0])) == pytest.approx([0.5, 1.0])
