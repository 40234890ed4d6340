"""What pages show besides the schedule: learner curves, completions, configuration, alarms and the machine."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from sortedrl.run.machine_load import MachineSink, measure
from sortedrl.telemetry.alarms import Alarms
from sortedrl.telemetry.curves import MAX_METRICS, KnownNames
from sortedrl.telemetry.dashboard.run_list import run_line
from sortedrl.telemetry.events import (
    BatchTaken,
    CohortLoaded,
    Event,
    FunctionsScored,
    MachineMeasured,
    RunStarted,
    UpdateDone,
)
from sortedrl.telemetry.report import report
from sortedrl.telemetry.report.completions import embedded_completions, list_completions
from sortedrl.telemetry.report.configuration import configuration_html, read_configuration
from sortedrl.telemetry.report.learner_charts import learner_charts, machine_charts
from sortedrl.telemetry.report.page import page_parts
from sortedrl.telemetry.report.report import write_report
from sortedrl.telemetry.report.sample_page import describe_sample
from sortedrl.telemetry.report.style import Chart
from sortedrl.telemetry.run_reader import RunReader
from sortedrl.telemetry.sinks import Fanout, JsonlSink
from sortedrl.telemetry.view import RunView
from tests.support.ledgers import GOOD, LINEAGES, TOOL_OUTPUT, WITH_TOOL, Row, write_ledger
from tests.support.synthetic_runs import SyntheticRun, write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x1b[31m\x00\u200f"


@pytest.fixture(autouse=True)
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the five megabytes of plotly's own script."""
    monkeypatch.setattr(report, "get_plotlyjs", lambda: "/* plotly */")


def started(**more: Any) -> RunStarted:
    return RunStarted(t=0.0, strategy="sorted", seed=0, slots=4, update_batch=2, total_samples=8, **more)


def taken(update: int, samples: list[int], *, staleness: int = 0, truncated: int = 0) -> BatchTaken:
    count = len(samples)
    return BatchTaken(
        t=float(update + 1),
        update=update,
        version=update,
        samples=samples,
        lengths=[4] * count,
        rewards=[1.0] * count,
        staleness=[staleness] * count,
        staleness_token_sum=[0] * count,
        truncated=truncated,
        num_interrupted=0,
        slot_s=1.0,
    )


def done(update: int, steps: int = 1, **metrics: float) -> UpdateDone:
    return UpdateDone(
        t=update + 1.5, update=update, version=update + 1, optimizer_steps=steps, seconds=0.5, metrics=metrics
    )


def view_of(events: list[Event]) -> RunView:
    view = RunView("run")
    for event in events:
        view.emit(event)
    return view


# ---- alarms ---------------------------------------------------------------------------------------------------------


def test_alarms_come_and_go_with_their_causes():
    alarms = Alarms()

    def messages(num_unscored: int = 0, bound: int | None = None) -> list[str]:
        return alarms.messages(num_unscored=num_unscored, bound=bound)

    assert messages() == []
    assert messages(num_unscored=3) == ["the reward of 3 samples could not be computed"]
    alarms.finish_update(done(0, steps=0))
    assert messages() == [], "one batch of equal rewards is no alarm"
    alarms.finish_update(done(1, steps=0))
    assert messages() == ["the last 2 updates took no optimizer step"]
    alarms.finish_update(done(2))
    alarms.take_batch(taken(3, [1, 2], truncated=2), None)
    assert messages() == ["every answer of the last 1 batch was truncated"]
    alarms.take_batch(taken(4, [1, 2], truncated=1), None)
    alarms.measure(MachineMeasured(t=1.0, cores_used=1.0, disk_free_bytes=1_500_000_000))
    assert messages() == ["only 1.5 GB are free on the disk of the run"]
    alarms.measure(MachineMeasured(t=2.0, cores_used=1.0, disk_free_bytes=None))
    assert messages() == []


def test_staleness_at_its_bound_is_an_alarm_unless_the_bound_is_zero():
    for bound, expected in ((0, []), (2, ["67% of the samples trained last are at the staleness bound of 2"])):
        alarms = Alarms()
        alarms.take_batch(taken(0, [1, 2, 3, 4], staleness=bound), bound)
        alarms.take_batch(taken(1, [5, 6], staleness=0), bound)
        assert alarms.messages(num_unscored=0, bound=bound) == expected


def test_alarms_are_on_the_page_and_in_the_list(tmp_path: Path):
    write_run(tmp_path / "run", SyntheticRun("sync", drain=True, updates=2))
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[-1]["alarms"] = [HOSTILE, 7, "x" * 10_000]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run_line("run", tmp_path / "run").alarms
    assert [len(text) for text in found] == [len(found[0]), 500]
    assert found[0].endswith("\\u202e\\x1b[31m\\x00\\u200f")

    events = tmp_path / "run" / "events.jsonl"
    full = {"kind": "MachineMeasured", "t": 0.0, "cores_used": 1.0, "disk_free_bytes": 0}
    events.write_text(events.read_text() + json.dumps(full) + "\n")
    reader = RunReader(tmp_path / "run")
    reader.read_all()
    parts = page_parts([reader])
    assert "Alarm: only 0.0 GB are free on the disk of the run" in parts.head
    assert parts.facts[0].alarms == ["only 0.0 GB are free on the disk of the run"]


def traces(chart: Chart) -> list[dict[str, Any]]:
    assert isinstance(chart.figure, dict)
    return chart.figure["data"]


# ---- curves ---------------------------------------------------------------------------------------------------------


def test_learner_metrics_and_rewards_by_function_are_means_of_their_updates():
    view = view_of(
        [
            started(),
            CohortLoaded(t=0.0, cohort=0, update=0, samples=[1, 2, 3, 4]),
            FunctionsScored(t=0.5, sample=1, attempt=1, rewards={"right": 1.0, "short": 0.5}),
            FunctionsScored(t=0.5, sample=2, attempt=1, rewards={"right": 0.0}),
            FunctionsScored(t=0.5, sample=9, attempt=1, rewards={"right": 5.0}),  # of no sample that is waiting
            taken(0, [1, 2]),
            done(0, loss=2.0, mine=1.0),
            taken(1, [3, 4]),
            done(1, loss=float("nan"), mine=3.0),
        ]
    )
    first, second = view.updates.points
    assert first.rewards == {"right": (1.0, 2), "short": (0.5, 1)}
    assert (first.metrics, second.metrics) == ({"loss": (2.0, 1), "mine": (1.0, 1)}, {"mine": (3.0, 1)})
    charts = {chart.name: chart for chart in learner_charts([view])}
    assert {"learner-loss", "learner-lengths", "function-0", "function-1", "learner-other-0"} == charts.keys()
    assert charts["learner-other-0"].title == "mine"
    assert charts["function-0"].title == "reward by right"
    (curve,) = traces(charts["learner-other-0"])
    assert (curve["x"], curve["y"]) == ([2, 4], [1.0, 3.0])
    (curve,) = traces(charts["function-0"])
    assert curve["y"] == [0.5]


def test_runs_are_on_the_same_axes():
    runs = [view_of([started(), taken(0, [1]), done(0, loss=1.0), taken(1, [2]), done(1, loss=2.0)]) for _ in "ab"]
    runs[1].position, runs[1].name = 1, "<b>other"
    chart = next(chart for chart in learner_charts(runs) if chart.name == "learner-loss")
    assert [trace["name"] for trace in traces(chart)] == ["run", "&lt;b&gt;other"]


def test_hostile_names_of_metrics_and_functions_stay_text(tmp_path: Path):
    (tmp_path / "run").mkdir()
    sink = JsonlSink(tmp_path / "run" / "events.jsonl")
    for event in (
        started(),
        CohortLoaded(t=0.0, cohort=0, update=0, samples=[1]),
        FunctionsScored(t=0.5, sample=1, attempt=1, rewards={HOSTILE: 1.0}),
        taken(0, [1]),
        done(0, **{HOSTILE: 1.0, "m" * 2_000_000: 1.0}),
    ):
        sink.emit(event)
    sink.close()
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert len(page) < 500_000
    assert page.count("&lt;/script&gt;&lt;script&gt;alert(1)") == 2, "the titles of two charts"
    assert "<img src=x" not in page
    assert "\u202e" not in page


def test_ever_new_names_of_metrics_do_not_fill_the_memory():
    names = KnownNames()
    found = [names.sums({f"metric {number}": 1.0}) for number in range(MAX_METRICS + 10)]
    assert sum(map(len, found)) == MAX_METRICS
    assert names.sums({"metric 0": 2.0}) == {"metric 0": (2.0, 1)}


def test_figures_of_a_live_run_are_of_one_moment(tmp_path: Path):
    """The last line of metrics.jsonl is newer than the events that were read."""
    write_run(tmp_path / "run", SyntheticRun("sync", drain=True, updates=4), has_summary=False)
    events = tmp_path / "run" / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    third = [at for at, line in enumerate(lines) if '"UpdateDone"' in line][2]
    events.write_text("".join(lines[: third + 1]))
    reader = RunReader(tmp_path / "run")
    reader.read_all()
    reader.read_summary()
    assert reader.num_updates_done == 3
    assert reader.view.latest["update"] == 2


# ---- the machine ----------------------------------------------------------------------------------------------------


def test_the_machine_is_measured_after_an_update_and_not_too_often(tmp_path: Path):
    fanout = Fanout([JsonlSink(tmp_path / "events.jsonl")])
    fanout.add(MachineSink(emit_measured=fanout, run_dir=tmp_path))
    for event in (started(), taken(0, [1]), done(0), taken(1, [2]), done(1)):
        fanout(event)
    fanout.close()
    assert not fanout.num_failures
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kinds == ["RunStarted", "BatchTaken", "UpdateDone", "MachineMeasured", "BatchTaken", "UpdateDone"]


def test_what_the_machine_does_not_tell_is_left_out():
    found = measure(3.0, 0.5, Path("/no/such/folder"))
    assert (found.t, found.cores_used, found.disk_free_bytes) == (3.0, 0.5, None)
    view = view_of([started(), CohortLoaded(t=0.0, cohort=0, update=0, samples=[1]), found])
    assert "machine-cores" in [chart.name for chart in machine_charts([view])]
    assert "machine-disk" not in [chart.name for chart in machine_charts([view])]


# ---- configuration --------------------------------------------------------------------------------------------------


def test_configurations_differ_in_what_is_shown_first(tmp_path: Path):
    for name, lr in (("a", "1e-4"), ("b", "2e-4")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(
            f'[run]\nname = "{name}"\nseed = 0\nstarted_in = "/somewhere"\n[learner]\nlr = {lr}\nstop = [1, 2]\n'
        )
    a, b = (read_configuration(tmp_path / name) for name in "ab")
    assert a == {"run.name": "a", "run.seed": "0", "learner.lr": "0.0001", "learner.stop": "[1, 2]"}
    shown, _, rest = configuration_html([("a", a), ("b", b)]).partition("<details>")
    assert "learner.lr" in shown
    assert "0.0002" in shown
    assert "run.name" not in shown
    assert "run.seed" not in shown
    assert "2 keys that are equal" in rest
    assert "All keys are equal" in configuration_html([("a", a), ("a", a)])


def test_a_configuration_stays_text_and_keeps_its_secrets(tmp_path: Path):
    text = json.dumps(HOSTILE)[1:-1].replace("\\u001b", "\\u001B")
    (tmp_path / "config.toml").write_text(f'api_key = "s3cr3t-value"\nx = "{text}"\nlong = "{"y" * 5000}"\n')
    shown = configuration_html([("run", read_configuration(tmp_path))])
    assert "s3cr3t" not in shown
    assert "<script" not in shown
    assert "<img" not in shown
    assert "\u202e" not in shown
    assert "y" * 201 not in shown
    (tmp_path / "config.toml").write_bytes(b"\xff")
    assert read_configuration(tmp_path) == {}
    assert configuration_html([("run", {})]) == ""


# ---- completions ----------------------------------------------------------------------------------------------------


def hostile_prompt(name: str, text: str) -> Row:
    packed, content = b"\1\0\0\0", json.dumps(text)
    crc = zlib.crc32(packed + content.encode() + b"{}")
    return "prompts", {"id": name, "tokens": packed, "content": content, "columns": "{}", "crc": crc}


def decode(given: list[int]) -> str:
    return "".join(HOSTILE if token == 10 else f"<{token}>" for token in given)


def test_completions_are_the_last_trained_samples_before_an_update(tmp_path: Path):
    write_ledger(tmp_path / "ledger.sqlite", GOOD, lineages=LINEAGES)
    found = list_completions(tmp_path, before_update=2)
    assert [row["sample"] for row in found] == [3, 2, 1, 0]
    assert [row["sample"] for row in list_completions(tmp_path, before_update=1)] == [1, 0]
    assert found[0] == {
        "sample": 3,
        "update": 1,
        "version": 1,
        "cohort": 0,
        "prompt": "What?",
        "answer": None,
        "reward": 0.25,
        "length": 4,
        "staleness": 0,
        "turns": 1,
        "ending": "length",
    }
    assert list_completions(tmp_path, before_update=2, decode=decode)[1]["answer"] == "<13><14><18>"
    assert list_completions(tmp_path / "none", before_update=9) == []


def test_tokens_have_their_version_and_log_prob_and_fed_tokens_have_none(tmp_path: Path):
    write_ledger(tmp_path / "ledger.sqlite", WITH_TOOL)
    (run,) = embedded_completions([("run", tmp_path, 2)], lambda _: decode)
    by_sample = {row["sample"]: row for row in run["rows"]}
    assert (by_sample[0]["turns"], by_sample[1]["turns"]) == (2, 1)
    assert [token[1:] for token in run["samples"]["0"]["tokens"]] == [
        [10, 0, -0.5],
        [11, 0, -0.5],
        [30, 0, None],
        [31, 0, -0.5],
    ]
    assert [token[1:] for token in run["samples"]["3"]["tokens"]] == [
        [15, 1, -0.5],
        [16, 1, -0.5],
        [19, 1, -0.5],
        [20, 1, -0.5],
    ]


def test_hostile_text_of_a_ledger_stays_text(tmp_path: Path):
    write_run(tmp_path / "run", SyntheticRun(HOSTILE, updates=4))
    long = HOSTILE + "z" * 3_000_000
    rows = [hostile_prompt(row[1]["id"], long) if row[0] == "prompts" else row for row in GOOD]  # type: ignore[arg-type]
    write_ledger(tmp_path / "run" / "ledger.sqlite", rows, lineages=LINEAGES)
    path = write_report([tmp_path / "run"], tmp_path / "report.html", find_decode=lambda _: decode)
    assert path.stat().st_size < 500_000, "megabytes of one prompt are cut"
    page = path.read_text()
    assert "alert(1)</script>" not in page
    assert "<img src=x" not in page
    (run,) = json.loads(page.partition('id="embedded">')[2].partition("</script>")[0])
    for character in ("\u202e", "\u200f", "\x1b", "\x00"):
        assert character not in page
        assert character not in json.dumps(run, ensure_ascii=False)
    assert run["rows"][0]["prompt"].startswith("</script><script>alert(1)")
    assert run["samples"]["0"]["tokens"][0][0] == HOSTILE[:-8] + "\\u202e\\x1b[31m\\x00\\u200f"


def test_a_hostile_tool_output_stays_text(tmp_path: Path):
    write_run(tmp_path / "run", SyntheticRun("sorted-replay", updates=4))
    write_ledger(tmp_path / "run" / "ledger.sqlite", WITH_TOOL)
    spelled = {TOOL_OUTPUT: HOSTILE + "z" * 3_000_000}

    def decode_tool(given: list[int]) -> str:
        return "".join(spelled.get(token, f"<{token}>") for token in given)

    path = write_report([tmp_path / "run"], tmp_path / "report.html", find_decode=lambda _: decode_tool)
    page = path.read_text()
    assert path.stat().st_size < 500_000, "megabytes of one output are cut"
    assert "alert(1)</script>" not in page
    assert "<img src=x" not in page
    described = describe_sample(tmp_path / "run", 0, lambda: decode_tool)  # what the dashboard sends
    for text in (page, json.dumps(described, ensure_ascii=False)):
        assert not {"\u202e", "\u200f", "\x1b", "\x00"} & set(text)
    fed = described["tokens"][2]
    assert fed[0].startswith(HOSTILE[:-8] + "\\u202e\\x1b[31m\\x00\\u200fzzz")
    assert len(fed[0]) < 500
    assert fed[3] is None


def test_a_damaged_ledger_is_a_line_on_the_page(tmp_path: Path):
    write_run(tmp_path / "run", SyntheticRun("sync", drain=True, updates=2))
    (tmp_path / "run" / "ledger.sqlite").write_bytes(b"not a ledger" * 100)
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    (run,) = json.loads(page.partition('id="embedded">')[2].partition("</script>")[0])
    assert "ledger.sqlite" in run["problem"]
    assert run["rows"] == []
