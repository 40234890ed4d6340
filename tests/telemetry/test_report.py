"""The report, on a synthetic run whose own counts check the metrics."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sortedrl.errors import RunDirError
from sortedrl.ledger.run_lock import RunLock
from sortedrl.telemetry import view
from sortedrl.telemetry.events import (
    SCHEMA_VERSION,
    AttemptEnded,
    AttemptStarted,
    CohortLoaded,
    RunResumed,
    RunStarted,
    ToolsCalled,
    ToolsReturned,
)
from sortedrl.telemetry.report import report
from sortedrl.telemetry.report.report import write_report
from sortedrl.telemetry.report.timeline import lives_chart, timeline_chart
from sortedrl.telemetry.run_reader import RunReader
from sortedrl.telemetry.sinks import JsonlSink
from tests.support.synthetic_runs import STEP_S, SyntheticRun, write_run


@pytest.fixture
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the five megabytes of plotly's own script, which take seconds to parse."""
    monkeypatch.setattr(report, "get_plotlyjs", lambda: "/* plotly */")


@pytest.mark.parametrize(
    ("interrupted", "drain"), [("replay", False), ("resume", False), ("restart", False), ("restart", True)]
)
def test_metrics_agree_with_the_counts_of_a_synthetic_run(tmp_path: Path, interrupted: str, drain: bool):
    run = SyntheticRun("toy", interrupted=interrupted, drain=drain, updates=30)
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


@pytest.mark.usefixtures("without_plotly")
def test_report_of_one_run_has_its_sections(tmp_path: Path):
    run = SyntheticRun("sorted-replay", updates=20)
    write_run(tmp_path / "mine", run)
    out = write_report([tmp_path / "mine"], tmp_path / "report.html")
    page = Page(out.read_text())
    lives = ["lives-0", "waits-0"]
    slots = ["causes", "occupancy", "timeline-0"]
    learner = ["learner-loss", "learner-lengths"]
    assert page.charts == ["samples", "wall", *learner, *slots, *lives, "lengths", "staleness", "replay"]
    for word in ("mine", "Summary", "Learning", "What the slots did", "Slot timeline", "Life of cohorts", "Staleness"):
        assert word in page.text, word
    assert "0.270 → 0.770" in page.text
    assert "All " in page.text
    assert "estimated" not in page.text
    assert write_report([tmp_path / "mine"], tmp_path / "again.html").read_bytes() == out.read_bytes()


def test_report_loads_nothing_from_elsewhere(tmp_path: Path):
    write_run(tmp_path / "mine", SyntheticRun("sorted-replay", updates=4))
    page = Page(write_report([tmp_path / "mine"], tmp_path / "report.html").read_text())
    for tag, attrs in page.tags:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base"}, tag
        assert not {"src", "href", "srcset", "action"} & attrs.keys(), (tag, attrs)
    policies = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert len(policies) == 1
    assert "default-src 'none'" in (policies[0] or "")
    assert "http" not in (policies[0] or "")


@pytest.mark.usefixtures("without_plotly")
def test_report_compares_runs(tmp_path: Path):
    write_run(tmp_path / "a" / "run", SyntheticRun("sync", drain=True, updates=8))
    write_run(tmp_path / "b" / "run", SyntheticRun("sorted-on-policy", interrupted="restart", updates=8))
    page = Page(write_report([tmp_path / "a" / "run", tmp_path / "b" / "run"], tmp_path / "r.html").read_text())
    assert "2 runs compared" in page.text
    assert "a/run" in page.text
    assert "b/run" in page.text
    assert "replay" not in page.charts
    assert {"timeline-0", "timeline-1"} <= set(page.charts)


@pytest.mark.usefixtures("without_plotly")
def test_report_escapes_what_comes_from_a_run(tmp_path: Path):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    name = "<b onmouseover=alert(3)>&"
    write_run(tmp_path / name, SyntheticRun(hostile, updates=4))
    write_run(tmp_path / "other", SyntheticRun("sync", drain=True, updates=4))
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
        figures = text.partition('id="figures">')[2].partition("</script>")[0]
        assert "\\u003cb onmouseover" not in figures


@pytest.mark.usefixtures("without_plotly")
def test_report_of_a_run_without_summary_says_so(tmp_path: Path):
    run = SyntheticRun("sorted-replay", updates=6)
    write_run(tmp_path / "crashed", run, has_summary=False)
    events = tmp_path / "crashed" / "events.jsonl"
    events.write_bytes(events.read_bytes()[:-40])
    (tmp_path / "crashed" / "metrics.jsonl").unlink()  # what the run measured itself would be taken from there
    reader = RunReader(tmp_path / "crashed")
    summary = reader.read_all().summary
    assert summary.ledger is None
    assert summary.bubble_ratio == pytest.approx(1 - run.stats.busy_slot_s / (run.slots * run.rollout_s))
    text = Page(write_report([tmp_path / "crashed"], tmp_path / "r.html").read_text()).text
    assert "crashed left no summary.json: its figures are estimated from the events that were written" in text
    assert "crashed has an incomplete last line of events, which is left out" in text


@pytest.mark.usefixtures("without_plotly")
def test_report_before_the_first_update(tmp_path: Path):
    (tmp_path / "young").mkdir()
    sink = JsonlSink(tmp_path / "young" / "events.jsonl")
    for event, _ in zip(SyntheticRun("sorted-replay").events(), range(12), strict=False):
        sink.emit(event)
    sink.close()
    page = Page(write_report([tmp_path / "young"], tmp_path / "r.html").read_text())
    assert "No update is done yet" in page.text
    assert page.charts == ["timeline-0", "lives-0"]


def test_report_refuses_what_is_no_run(tmp_path: Path):
    with pytest.raises(RunDirError, match="at least one"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(RunDirError, match="not a directory"):
        write_report([tmp_path / "none"], tmp_path / "r.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirError, match=r"it has no events\.jsonl"):
        write_report([tmp_path / "empty"], tmp_path / "r.html")
    (tmp_path / "empty" / "events.jsonl").write_text("")
    with pytest.raises(RunDirError, match="has no RunStarted"):
        write_report([tmp_path / "empty"], tmp_path / "r.html")


def test_timeline_draws_the_ends_of_a_long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path / "long", SyntheticRun("sorted-replay", updates=20))
    whole = RunReader(tmp_path / "long").read_all()
    num_started = (tmp_path / "long" / "events.jsonl").read_text().count('"AttemptStarted"')
    assert len(bars(whole)) == num_started
    monkeypatch.setattr(view, "MAX_BARS", 50)
    ends = RunReader(tmp_path / "long").read_all()
    assert bars(ends) == bars(whole)[:50] + bars(whole)[-50:]
    assert f"Of {num_started:,} bars the first and the last 50 are drawn" in timeline_chart(ends).caption


def bars(run: view.RunView) -> list[tuple[int, float]]:
    """Slot and beginning of every bar of the timeline."""
    bar = next(trace for trace in timeline_chart(run).figure.data if trace.type == "bar")
    return list(zip(bar.y, bar.base, strict=True))


def test_timeline_draws_the_time_in_tools_between_turns():
    run = view.RunView("<b>run</b>")
    run.emit(RunStarted(0.0, "sync", 0, 2, 2, 3))
    run.emit(CohortLoaded(0.0, 0, 0, [0, 1, 2]))
    run.emit(AttemptStarted(0.0, 0, 1, "fresh", 0, 0, 0))
    run.emit(AttemptEnded(1.0, 0, 1, "stop", 5, 0))
    run.emit(ToolsCalled(1.0, 0, 1, 0, 2))
    run.emit(ToolsCalled(1.5, 1, 1, 0, 1))
    run.emit(ToolsReturned(2.0, 0, 1, 0, 1.0, "fed", 3, 1))
    run.emit(AttemptStarted(2.5, 0, 2, "resume", 8, 1, 0))
    run.emit(ToolsCalled(3.0, 2, 1, 0, 1))  # takes the row of sample 0, which is free again
    run.emit(ToolsReturned(4.0, 2, 1, 0, 1.0, "<script>"))
    run.emit(RunResumed(5.0, 0, 0))
    chart = timeline_chart(run)
    turns, tools = (trace for trace in chart.figure.data if trace.type == "bar")
    assert [list(turns.y), list(turns.base)] == [[0, 1], [0.0, 2.5]]
    assert list(zip(tools.y, tools.base, tools.x, strict=True)) == [(3, 1.0, 1.0), (4, 1.5, 3.5), (3, 3.0, 1.0)]
    assert [data[4] for data in tools.customdata] == ["fed", "cut", "&lt;script&gt;"]
    assert list(tools.customdata[0]) == [0, 1, 2, 1, "fed", 1.0]
    assert "all of 3 are drawn" in chart.caption
    assert "its tools work" in lives_chart(run).caption


@pytest.mark.usefixtures("without_plotly")
def test_report_shows_where_slot_time_went(tmp_path: Path):
    write_run(tmp_path / "mine", SyntheticRun("sorted-replay", updates=4))
    path = tmp_path / "mine" / "summary.json"
    record = {**json.loads(path.read_text()), "slot_time": {"trained": 0.6, "tail": 0.3, "a new cause": 0.1}}
    path.write_text(json.dumps(record))
    text = write_report([tmp_path / "mine"], tmp_path / "r.html").read_text()
    assert "causes" in Page(text).charts
    assert "idle: tail of the harvest" in Page(text).text
    assert "a new cause" in text


@pytest.mark.usefixtures("without_plotly")
def test_report_of_an_older_schema_says_what_it_is(tmp_path: Path):
    write_run(tmp_path / "old", SyntheticRun("sorted-replay", updates=4))
    events = tmp_path / "old" / "events.jsonl"
    now = f'"schema_version":{SCHEMA_VERSION}'
    events.write_text(events.read_text().replace(now, '"schema_version":0'))
    page = Page(write_report([tmp_path / "old"], tmp_path / "r.html").read_text())
    assert f"old has event schema version 0, older than {SCHEMA_VERSION}" in page.text
    events.write_text(events.read_text().replace('"schema_version":0', '"schema_version":99'))
    with pytest.raises(RunDirError, match=r"schema version 99.*upgrade"):
        write_report([tmp_path / "old"], tmp_path / "r.html")


@pytest.mark.usefixtures("without_plotly")
def test_report_of_a_run_that_is_being_written_says_so(tmp_path: Path):
    write_run(tmp_path / "live", SyntheticRun("sorted-replay", updates=4), has_summary=False)
    with RunLock(tmp_path / "live"):
        page = Page(write_report([tmp_path / "live"], tmp_path / "r.html").read_text())
    assert "live is still being written" in page.text
    assert "left no summary" not in page.text
