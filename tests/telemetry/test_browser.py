"""Report and dashboard in a headless browser: what they draw, what a click does, and that they load nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("starlette", reason="the extra `dashboard` is not installed")

from playwright.sync_api import Browser, Page, sync_playwright

from sortedrl.config.shipped import shipped_path
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.sample_history import read_history
from sortedrl.telemetry.report.report import write_report
from sortedrl.telemetry.view import MAX_BARS
from tests.support.dashboard_process import dashboard_address
from tests.support.forked_process import ForkedProcess, forked_command
from tests.support.ledgers import TOOL_OUTPUT, WITH_TOOL, write_ledger
from tests.support.synthetic_runs import SyntheticRun, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_MS = 240_000  # a shared machine may be slow
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM)
        yield running
        running.close()


class WatchedPage:
    """A page, with its errors and warnings and the hosts that it sends requests to."""

    def __init__(self, browser: Browser, *, width: int = 1440, is_dark: bool = False) -> None:
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if is_dark else "light"
        )
        self.page.set_default_timeout(WAIT_MS)
        self.errors: list[str] = []
        self.hosts: set[str | None] = set()
        self.page.on("console", lambda message: self._record(message.type, message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname))

    def _record(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def open(self, address: str) -> Page:
        self.page.goto(address)
        self.page.wait_for_selector("html[data-drawn]")
        return self.page

    def check(self, *, hosts: set[str | None]) -> None:
        assert self.errors == []
        assert self.hosts <= hosts
        overflow = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, "wider than the window"


def wait_until(page: Page, expression: str) -> None:
    """Poll until the expression is true. Playwright's own wait evaluates text in the page, which its policy forbids."""
    until = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < until, f"not in time: {expression}"
        page.wait_for_timeout(200)


def num_bars(page: Page, chart: str) -> int:
    return page.locator(f"#chart-{chart} .bars .point").count()


def count_bars(run_dir: Path) -> int:
    """Count the stays of samples in slots; a change of weights begins a new one."""
    running: dict[int, int] = {}  # sample, version
    count = 0
    for line in (run_dir / "events.jsonl").read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        match event["kind"]:
            case "AttemptStarted":
                running[event["sample"]] = event["version"]
                count += 1
            case "AttemptEnded":
                del running[event["sample"]]
            case "WeightsPublished":
                count += sum(version != event["version"] for version in running.values())
                running = dict.fromkeys(running, event["version"])
    return count


def click_a_bar(page: Page, chart: str) -> int:
    """Click a bar that can be seen, and return its sample."""
    box = page.locator(f"#chart-{chart} .nsewdrag").first
    box.scroll_into_view_if_needed()
    # By plotly's own account of where its bars are: the middle of the first one that lies well inside.
    place = page.evaluate(
        """name => {
            const chart = document.getElementById("chart-" + name), axis = chart._fullLayout.xaxis;
            const bars = chart.data.find(trace => trace.type === "bar");
            const [low, high] = axis.range, seen = high - low;
            const at = bars.base.findIndex((base, i) => base > low + seen / 5 && bars.x[i] > seen / 100
                && base + bars.x[i] < high - seen / 5);
            const y = chart._fullLayout.yaxis;
            return [axis.d2p(bars.base[at] + bars.x[at] / 2), y.d2p(bars.y[at]), bars.customdata[at][0]];
        }""",
        chart,
    )
    # Twice: a chart learns what it is above from the movement.
    box.hover(position={"x": place[0] - 1, "y": place[1]})
    box.click(position={"x": place[0], "y": place[1]})
    return place[2]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    write_run(folder / "replay", SyntheticRun("sorted-replay", updates=30))
    write_run(folder / "partial", SyntheticRun("sorted-partial", interrupted="resume", updates=8))
    return folder


def test_a_report_of_one_run(browser: Browser, run_folder: Path, tmp_path: Path):
    report = write_report([run_folder / "replay"], tmp_path / "report.html")
    watched = WatchedPage(browser)
    page = watched.open(report.as_uri())
    assert num_bars(page, "timeline-0") == count_bars(run_folder / "replay")
    view = "document.getElementById('chart-timeline-0').layout.xaxis.range[0]"
    assert page.evaluate(view) > 0
    page.get_by_role("button", name="whole run").click()
    wait_until(page, view + " === 0")
    page.get_by_role("button", name="start").click()
    sample = click_a_bar(page, "timeline-0")
    assert f"Sample {sample}. attempt 1 (fresh)" in page.locator(".picked").inner_text()
    watched.check(hosts={None, ""})
    page.close()


def test_a_report_of_two_runs_on_a_phone(browser: Browser, run_folder: Path, tmp_path: Path):
    report = write_report([run_folder / "replay", run_folder / "partial"], tmp_path / "report.html")
    watched = WatchedPage(browser, width=390)
    page = watched.open(report.as_uri())
    assert page.locator("h1").inner_text() == "2 runs compared"
    for place, name in enumerate(("replay", "partial")):
        assert num_bars(page, f"timeline-{place}") == count_bars(run_folder / name)
    assert page.locator("#chart-samples .scatterlayer .trace").count() == 2 * (2 + 2 + 2)
    assert page.locator("#chart-learner-loss .scatterlayer .trace").count() == 2 * 2, "both runs on the same axes"
    assert page.locator("#chart-ages-1 .hm").count() == 1, "only the second has old tokens"
    assert page.locator("#chart-ages-0").count() == 0
    watched.check(hosts={None, ""})
    page.close()


HOSTILE = "<img src=x onerror=alert(1)>\u202e"


def colour(page: Page, selector: str, name: str = "background-color") -> str:
    return page.evaluate(
        "([selector, name]) => getComputedStyle(document.querySelector(selector)).getPropertyValue(name)",
        [selector, name],
    )


def test_completions_of_a_report_are_searched_sorted_and_opened(browser: Browser, run_folder: Path, tmp_path: Path):
    shutil.copytree(run_folder / "partial", tmp_path / HOSTILE[:-1])
    write_ledger(tmp_path / HOSTILE[:-1] / "ledger.sqlite", WITH_TOOL)
    words = {15: HOSTILE, 10: "wanted", TOOL_OUTPUT: f"</span>{HOSTILE}"}

    def decode(tokens: list[int]) -> str:
        return " ".join(words.get(token, str(token)) for token in tokens)

    report = write_report([tmp_path / HOSTILE[:-1]], tmp_path / "report.html", find_decode=lambda _: decode)
    watched = WatchedPage(browser)
    page = watched.open(report.as_uri())
    rows = page.locator(".completions tbody tr")

    def samples() -> list[str]:
        return page.locator(".completions tbody th").all_inner_texts()

    assert samples() == ["3", "2", "1", "0"], "the newest first"
    page.get_by_role("button", name="tokens", exact=True).click()
    assert samples() == ["3", "2", "0", "1"], "4, 3, 2 and 1 tokens"
    page.get_by_role("button", name="reward", exact=True).click()
    page.get_by_role("button", name="reward ↓", exact=True).click()
    assert samples() == ["1", "3", "2", "0"], "rewards 0, 0.25, 0.5 and 1"
    page.get_by_label("search completions").fill("WANTED")
    assert samples() == ["0"]
    assert page.locator(".count").inner_text() == "1 of 4"
    page.get_by_label("search completions").fill("u202e")
    rows.first.click()
    page.wait_for_selector("#sample[open] .token")
    assert page.locator("#sample .token").count() == 4
    assert "<img src=x onerror=alert(1)>\\u202e" in page.locator("#sample .answer").inner_text()
    assert page.locator("#sample img, .completions img").count() == 0
    page.get_by_role("button", name="colour by log-prob").click()
    assert "log-prob -0.5 (60.7 %)" in (page.locator("#sample .token").first.get_attribute("title") or "")
    page.get_by_role("button", name="Close").click()

    # What a tool put into an answer is text too, and marked in both views.
    page.get_by_label("search completions").fill("wanted")
    rows.first.click()
    assert page.locator("#sample .token.fed").all_inner_texts() == [f" </span>{HOSTILE[:-1]}\\u202e"]
    page.get_by_role("button", name="colour by version").click()
    assert page.locator("#sample .token.fed").count() == 1
    assert "not sampled" in (page.locator("#sample .token.fed").get_attribute("title") or "")
    assert page.locator("#sample img").count() == 0
    page.get_by_role("button", name="Close").click()
    watched.check(hosts={None, ""})
    page.close()


def test_colours_contents_smoothing_and_csv_of_a_report(browser: Browser, run_folder: Path, tmp_path: Path):
    report = write_report([run_folder / "replay"], tmp_path / "report.html")
    watched = WatchedPage(browser, is_dark=True)
    page = watched.open(report.as_uri())
    dark = colour(page, "body")
    assert dark == "rgb(13, 18, 24)", "as the system wishes"
    assert colour(page, "#chart-samples .ytick text", "fill") == "rgb(220, 227, 236)"
    page.get_by_role("button", name="auto").click()
    page.get_by_role("button", name="light").wait_for()
    assert colour(page, "body") == "rgb(245, 246, 248)"
    ticks = "[...document.querySelectorAll('#chart-samples .ytick text')]"  # none while the chart is drawn again
    wait_until(page, f"{ticks}.some(tick => getComputedStyle(tick).fill === 'rgb(27, 36, 48)')")

    thick = "document.getElementById('chart-learner-loss').data.at(-1).y"
    values = page.evaluate("document.getElementById('chart-learner-loss').data[0].y")
    assert page.evaluate(thick)[5] == pytest.approx(sum(values[2:6]) / 4), "a mean of four points"
    page.locator("#section-learner .smoothing input").fill("0")
    wait_until(page, "document.getElementById('chart-learner-loss').data.length === 1")
    assert page.evaluate(thick) == values

    page.locator("#contents").get_by_role("button", name="Staleness").click()
    wait_until(page, "document.querySelector('#contents [aria-current]')?.textContent === 'Staleness'")
    assert page.locator("#contents ul").is_visible()

    with page.expect_download() as saving:
        page.locator(".tools:has(+ #chart-learner-loss) .csv").click()
    lines = Path(saving.value.path()).read_text().splitlines()
    assert lines[0] == "series,x,y,z,base,more"
    assert len(lines) == 1 + len(values)
    assert float(lines[1].split(",")[2]) == values[0]
    watched.check(hosts={None, ""})
    page.close()


def test_the_dashboard_follows_a_live_run(browser: Browser, run_folder: Path, tmp_path: Path):
    runs = tmp_path / "runs"
    shutil.copytree(run_folder / "replay", runs / "other")
    settings = ["run.samples=20000", f"run.dir={runs}", "run.name=live", "schedule.strategy=sorted-partial"]
    config = shipped_path("quickstart")
    watched = WatchedPage(browser)
    page = watched.page
    with (
        forked_command(tmp_path, "dashboard", str(runs), "--port", "0", COLUMNS="500") as serving,
        forked_command(tmp_path / "train", "train", str(config), *settings, "eval.prompts=8", "--json") as training,
    ):
        page.goto(address_of(serving))
        page.wait_for_selector("#run-rows tr[data-run=live] .running")
        page.get_by_label("search runs").fill("other")
        assert page.locator("#run-rows tr").count() == 1
        page.get_by_label("search runs").fill("")
        page.get_by_label("filter runs").select_option("running")
        assert page.locator("#run-rows tr").get_attribute("data-run") == "live"
        page.get_by_label("filter runs").select_option("")
        page.locator("tr[data-run=live] input").check()
        page.locator("tr[data-run=other] input").uncheck()
        curve = "(document.getElementById('chart-samples')?.data?.[1].x.length ?? 0)"
        wait_until(page, f"document.title.startsWith('live') && {curve} > 0")
        before = page.evaluate(curve)
        wait_until(page, f"{curve} > {before}")
        assert "still being written" in page.locator("#head").inner_text()
        updates = "document.querySelector('tr[data-run=live] td:nth-child(7)').innerText.replace(',', '')"
        shown = "document.getElementById('head').innerText.match(/samples in ([0-9,]+) updates/)[1].replace(',', '')"
        assert page.evaluate(f"{updates} === {shown}"), "list and page are of one moment"
        page.wait_for_selector(".completions tbody tr")

        # A switch shows at once that it loads, and nothing of the run before.
        page.evaluate("document.querySelector('tr[data-run=live] input').click()")
        assert page.locator("#head, #frame").all_inner_texts() == ["", ""]
        assert page.locator("#state").inner_text() == "choose a run"
        page.evaluate("document.querySelector('tr[data-run=other] input').click()")
        wait_until(page, "document.title.startsWith('other')")
        assert page.locator("#completions").count() == 0, "it has no ledger"
        is_loading = """() => {
            document.querySelector('tr[data-run=other] input').click();
            document.querySelector('tr[data-run=live] input').click();
            return document.getElementById('head').innerText;
        }"""
        assert page.evaluate(is_loading).startswith("Loading live")
        wait_until(page, f"document.title.startsWith('live') && {curve} > 0")
        page.get_by_role("button", name="auto").click()
        page.get_by_role("button", name="light").click()
        assert colour(page, "body") == "rgb(13, 18, 24)"

        page.get_by_role("button", name="Pause").click()
        assert "paused" in page.locator("#state").inner_text()
        held = page.evaluate(curve)
        num_updates = (runs / "live" / "events.jsonl").read_text().count('"UpdateDone"')
        os.kill(training.pid, signal.SIGINT)  # far from its end: it stops as a user would stop it
        assert training.wait(WAIT_MS / 1000) == 130
        assert page.evaluate(curve) == held
        page.get_by_role("button", name="Continue").click()
        page.wait_for_selector("#run-rows tr[data-run=live] >> text=stopped")
        wait_until(page, "document.getElementById('head').innerText.includes('was stopped before it was complete')")
        final = (runs / "live" / "events.jsonl").read_text().count('"UpdateDone"')
        assert final >= num_updates
        wait_until(page, f"{curve} === {final}")
        expected = min(count_bars(runs / "live"), 2 * MAX_BARS)
        wait_until(page, f"document.querySelectorAll('#chart-timeline-0 .bars .point').length === {expected}")

        sample = click_a_bar(page, "timeline-0")
        page.wait_for_selector("#sample[open] .answer")
        with Ledger(runs / "live") as ledger:
            tokens = read_history(ledger, sample).tokens
        assert page.locator("#sample .token").count() == len(tokens or [])
        assert "says" in page.locator("#sample .prompt").inner_text()
        assert "update" in page.locator("#sample table").inner_text()
        page.get_by_role("button", name="Close").click()

        page.locator("tr[data-run=other] input").check()
        page.wait_for_selector("text=2 runs compared")
        others = count_bars(runs / "other")
        wait_until(page, f"document.querySelectorAll('#chart-timeline-1 .bars .point').length === {others}")
        watched.check(hosts={"127.0.0.1", None, ""})
        page.close()


def address_of(serving: ForkedProcess) -> str:
    until = time.monotonic() + WAIT_MS / 1000
    while (address := dashboard_address(serving.err)) is None:
        assert serving.is_running, serving.err
        assert time.monotonic() < until, "the dashboard printed no address"
        time.sleep(0.02)
    return address
