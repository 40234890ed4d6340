"""The dashboard over HTTP, as the shipped command serves it, and the parts that answer."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

pytest.importorskip("starlette", reason="the extra `dashboard` is not installed")
pytest.importorskip("uvicorn", reason="the extra `dashboard` is not installed")

from starlette.requests import Request

from sortedrl.errors import ConfigError, RunDirError
from sortedrl.telemetry.dashboard.app import Dashboard, RunViews, check_address, open_port
from sortedrl.telemetry.dashboard.run_list import find_runs, run_line
from sortedrl.telemetry.report.report import write_report
from sortedrl.telemetry.report.sample_page import spell
from tests.support.dashboard_process import COMMAND, dashboard
from tests.support.ledgers import GOOD, LINEAGES, write_ledger
from tests.support.synthetic_runs import SyntheticRun, write_run

HOSTILE = "<img src=x onerror=alert(1)>&"
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one", SyntheticRun("sorted-replay", updates=6))
    write_run(folder / HOSTILE, SyntheticRun(HOSTILE, interrupted="resume", updates=4))
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with dashboard(runs) as found:
        yield found


def get(address: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(address + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def first_message(address: str, query: str) -> dict[str, Any]:
    """The first page that a follower is sent."""
    with urllib.request.urlopen(f"{address}api/follow?{query}", timeout=60) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                message = json.loads(line[6:])
                if "frame" in message or message.get("problem"):
                    return message
    raise AssertionError("the stream has ended")


def test_the_list_tells_of_every_run(address: str, runs: Path):
    status, _, body = get(address, "api/runs")
    lines = {line["key"]: line for line in json.loads(body)["runs"]}
    assert status == 200
    assert lines.keys() == {"one", HOSTILE}
    assert {key: lines["one"][key] for key in ("state", "strategy", "updates", "samples")} == {
        "state": "complete",
        "strategy": "sorted-replay",
        "updates": 6,
        "samples": 6 * 16,
    }


def test_a_follower_gets_the_page_and_its_figures(address: str):
    message = first_message(address, "run=one")
    assert message["title"] == "one"
    assert {"samples", "wall", "occupancy", "timeline-0", "lives-0"} <= message["figures"].keys()
    assert message["captions"].keys() == message["figures"].keys()
    both = first_message(address, f"run=one&run={quote(HOSTILE)}")
    assert "timeline-1" in both["figures"]
    assert "<img" not in both["head"] + both["frame"]
    assert "&lt;img src=x" in both["head"]
    assert "<img" not in json.dumps(both["figures"])


def test_every_answer_forbids_what_a_page_must_not_do(address: str):
    for path in ("", "assets/page.js", "api/runs", "nowhere"):
        _, headers, _ = get(address, path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "connect-src 'self'" in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_nothing_can_be_written_and_nothing_else_be_read(address: str):
    host = urlsplit(address).netloc
    for method in ("POST", "PUT", "DELETE"):
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request(method, "/api/runs")
        assert connection.getresponse().status == 405
    for path in (
        "assets/..%2fpage.py",
        "assets/nothing",
        "api/follow?run=..",
        "api/follow",
        "api/sample?run=..&sample=1",
        "api/completions?run=..&before=1",
    ):
        assert get(address, path)[0] == 404, path


def test_a_name_that_is_not_loopback_is_refused(address: str):
    """What a page elsewhere that has its own name point here would send."""
    assert get(address, "api/runs", Host="evil.example")[0] == 400
    assert get(address, "api/runs", Host="localhost")[0] == 200


def test_a_sample_that_cannot_be_told_says_why(address: str):
    _, _, body = get(address, "api/sample?run=one&sample=3")
    assert "no ledger at" in json.loads(body)["problem"]
    _, _, body = get(address, "api/sample?run=one&sample=x")
    assert "is not a sample number" in json.loads(body)["problem"]


def test_completions_are_listed_up_to_an_update(address: str, runs: Path):
    write_ledger(runs / HOSTILE / "ledger.sqlite", GOOD, lineages=LINEAGES)
    _, _, body = get(address, f"api/completions?run={quote(HOSTILE)}&before=1")
    assert [row["sample"] for row in json.loads(body)["rows"]] == [1, 0]
    assert json.loads(get(address, "api/completions?run=one&before=9")[2]) == {"rows": []}, "it has no ledger"
    _, _, body = get(address, "api/completions?run=one&before=x")
    assert "is not the number of an update" in json.loads(body)["problem"]


def test_beyond_loopback_nothing_is_told_without_the_token(runs: Path):
    with dashboard(runs, "--host", "0.0.0.0", SORTEDRL_DASHBOARD_TOKEN=TOKEN) as address:
        for path in ("", "api/runs", "assets/page.js", "api/runs?token=wrong"):
            assert get(address, path)[0] == 401, path
        assert get(address, "api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
        connection.request("GET", f"/?token={TOKEN}")
        answer = connection.getresponse()
        cookie = answer.headers["set-cookie"]
        assert (answer.status, answer.headers["location"]) == (303, "/")
        assert TOKEN not in cookie
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert get(address, "api/runs", Cookie=cookie.split(";")[0])[0] == 200


def test_an_address_needs_a_token_that_cannot_be_guessed():
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        check_address(host, None)
    check_address("0.0.0.0", TOKEN)
    with pytest.raises(ConfigError, match="a token is needed: set SORTEDRL_DASHBOARD_TOKEN"):
        check_address("0.0.0.0", None)
    with pytest.raises(ConfigError, match="can be guessed"):
        check_address("example.org", "short")


def test_mistakes_are_one_line(tmp_path: Path):
    with pytest.raises(RunDirError, match="is not a directory"):
        Dashboard([tmp_path / "none"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot serve at 127\.0\.0\.1:{port}: .*in use; choose another"):
            open_port("127.0.0.1", port)
        done = subprocess.run(
            [*COMMAND, "dashboard", str(tmp_path), "--port", str(port)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot serve")
    assert "Traceback" not in done.stderr


def test_runs_are_found_and_told_apart(tmp_path: Path):
    for name in ("a/run", "b/run", "b/other"):
        write_run(tmp_path / name, SyntheticRun("sync", drain=True, updates=1), has_summary=name != "b/other")
    found = find_runs([tmp_path / "a", tmp_path / "b", tmp_path / "b" / "run"])
    assert list(found) == ["a/run", "other", "b/run"]
    assert run_line("other", found["other"]).state == "ended"
    (found["other"] / "summary.json").write_text("{}")
    assert "is not the summary of a run" in run_line("other", found["other"]).problem


IMPOSSIBLE = ("Infinity", "-Infinity", "NaN", "1e999", "9" * 400)


def list_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The runs that the dashboard lists, by key."""
    answer = asyncio.run(Dashboard([folder]).runs(Request({"type": "http"})))
    return {line["key"]: line for line in json.loads(bytes(answer.body))["runs"]}


def test_a_run_with_impossible_numbers_does_not_hide_the_others(tmp_path: Path):
    write_run(tmp_path / "good", SyntheticRun("sync", drain=True, updates=1))
    events, summary = (
        (tmp_path / "good" / name).read_text().split("\n", maxsplit=1) for name in ("events.jsonl", "summary.json")
    )
    for position, number in enumerate(IMPOSSIBLE):
        for name in ("events", "summary"):
            run = tmp_path / f"{name}-{position}"
            run.mkdir()
            is_in_events = name == "events"
            slots = f'"slots":{number}' if is_in_events else '"slots":16'
            (run / "events.jsonl").write_text("\n".join([events[0].replace('"slots":16', slots), events[1]]))
            figure = f'"tokens_per_s": {"1" if is_in_events else number},'
            (run / "summary.json").write_text(re.sub(r'"tokens_per_s": [^,]*,', figure, "\n".join(summary)))
    lines = list_of(tmp_path)
    assert len(lines) == 1 + 2 * len(IMPOSSIBLE)
    good = lines.pop("good")
    assert (good["problem"], good["updates"]) == ("", 1)
    for key, line in lines.items():
        number = IMPOSSIBLE[int(key.rpartition("-")[2])]
        assert f"{number[:12]}" in line["problem"], key
        assert "is not a number that a run can have" in line["problem"], key
        with pytest.raises(RunDirError, match="is not a number that a run can have"):
            write_report([tmp_path / key], tmp_path / "report.html")
        assert "is not a number that a run can have" in RunViews().poll([tmp_path / key]).problem


def test_a_name_that_is_not_text_does_not_hide_the_other_runs(tmp_path: Path):
    write_run(tmp_path / "good", SyntheticRun("sync", drain=True, updates=1))
    bad = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    write_run(bad, SyntheticRun("\ud800", drain=True, updates=1), has_summary=False)
    lines = list_of(tmp_path)
    assert lines.keys() == {"good", "bad\\udcff"}
    assert lines["bad\\udcff"]["strategy"] == "\\ud800"
    found = find_runs([tmp_path])["bad\\udcff"]
    assert write_report([found], tmp_path / "report.html").stat().st_size > 0


def test_a_run_that_grows_is_read_on(tmp_path: Path):
    write_run(tmp_path / "whole", SyntheticRun("sorted-replay", updates=4), has_summary=False)
    lines = (tmp_path / "whole" / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run").mkdir()
    events, views = tmp_path / "run" / "events.jsonl", RunViews()
    events.write_bytes(b"")
    assert "has no RunStarted yet" in views.poll([tmp_path / "run"]).problem
    events.write_bytes(b"".join(lines[:100]) + lines[100][:7])
    first = views.poll([tmp_path / "run"])
    assert views.poll([tmp_path / "run"]) is first, "nothing has changed"
    assert first.parts is not None
    events.write_bytes(b"".join(lines))
    last = views.poll([tmp_path / "run"])
    assert last.parts is not None
    assert views.readers[tmp_path / "run"].view.metrics.updates == 4
    assert last.parts.figures["samples"] != first.parts.figures.get("samples")


def test_tokens_are_spelled_one_by_one():
    letters = {0: b"a", 1: b" b", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"c"}

    def decode(tokens: list[int]) -> str:
        return b"".join(letters[token] for token in tokens).decode("utf-8", errors="replace")

    assert spell([0, 1, 2, 3, 4], decode) == ["a", " b", "", "é", "c"]
    assert "".join(spell([0, 1] * 20, decode)) == "a b" * 20
    assert spell([0, 2], decode) == ["a", "\ufffd"]
