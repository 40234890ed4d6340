"""Make the pictures of report, comparison and live dashboard in docs/images anew, from two finished quickstart runs.

    sortedrl train quickstart run.samples=512 run.name=replay schedule.strategy=sorted-replay
    sortedrl train quickstart run.samples=512 run.name=partial schedule.strategy=sorted-partial
    python -m tools.pictures runs/replay runs/partial

A third run, which trains meanwhile, is the live one; it is written to a temporary folder next to links to the two. It
needs playwright, pillow, the extra `dashboard` and a chromium on the path. Look at the pictures before you commit them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from sortedrl.cli.inspect import answer_decoder
from sortedrl.telemetry.report.report import write_report
from tests.support.dashboard_process import COMMAND, dashboard

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
MIN_LIVE_UPDATES = 24
COLOURS = 192  # of a picture, which keeps its file small


@dataclass(slots=True, kw_only=True, frozen=True)
class Picture:
    name: str
    size: tuple[int, int]
    is_dark: bool = False


def four(name: str, *, tall: int, narrow_tall: int) -> tuple[Picture, ...]:
    """A page on a desk and on a phone, light and dark."""
    return tuple(
        Picture(name=f"{name}-{width}{'-dark' * is_dark}", size=(width, height), is_dark=is_dark)
        for width, height in ((1440, tall), (390, narrow_tall))
        for is_dark in (False, True)
    )


REPORT = (
    *four("report", tall=1500, narrow_tall=1900),
    Picture(name="report-top", size=(1200, 1250)),
)
COMPARISON = four("compare", tall=1700, narrow_tall=1900)
DASHBOARD = four("dashboard", tall=1300, narrow_tall=1900)
SAMPLE = Picture(name="dashboard-sample", size=(1300, 1000))
COMPLETIONS = Picture(name="dashboard-completions", size=(1440, 760), is_dark=True)


def take(browser: Browser, address: str, picture: Picture, prepare: Callable[[Page], None] | None = None) -> None:
    """Save what a window of this size shows."""
    width, height = picture.size
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if picture.is_dark else "light"
    )
    page.goto(address)
    page.wait_for_selector("html[data-drawn]")
    if prepare is not None:
        prepare(page)
    page.wait_for_timeout(1500)  # until all charts are drawn
    shot = Image.open(BytesIO(page.screenshot()))
    shot.convert("RGB").quantize(COLOURS).save(IMAGES / f"{picture.name}.png", optimize=True)
    page.close()


def scroll_to_completions(page: Page) -> None:
    page.wait_for_selector(".completions tbody tr")
    page.locator("#contents").get_by_role("button", name="Completions").click()


def open_sample(page: Page) -> None:
    scroll_to_completions(page)
    page.locator(".completions tbody tr").nth(4).click()
    page.wait_for_selector("text=History")


@contextmanager
def live_run(folder: Path) -> Iterator[None]:
    """A run that trains until the block ends; the block begins when it has done some updates."""
    settings = ["run.samples=20000", f"run.dir={folder}", "run.name=live"]
    with subprocess.Popen([*COMMAND, "train", "quickstart", *settings, "--json"], stdout=subprocess.DEVNULL) as running:
        metrics = folder / "live" / "metrics.jsonl"
        while not metrics.is_file() or metrics.read_text().count("\n") < MIN_LIVE_UPDATES:
            assert running.poll() is None, "the live run has ended"
            time.sleep(0.2)
        try:
            yield
        finally:
            os.kill(running.pid, signal.SIGINT)
            running.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs=2)
    runs: list[Path] = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        folder = Path(scratch)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
        report = write_report(runs[:1], folder / "report.html", find_decode=answer_decoder)
        for picture in REPORT:
            take(browser, report.as_uri(), picture)
        comparison = write_report(runs, folder / "compare.html", find_decode=answer_decoder)
        for picture in COMPARISON:
            take(browser, comparison.as_uri(), picture)
        for run in runs:
            (folder / run.name).symlink_to(run.resolve())
        with dashboard(folder) as address:
            take(browser, f"{address}?run={runs[1].name}", SAMPLE, open_sample)
            take(browser, f"{address}?run={runs[0].name}", COMPLETIONS, scroll_to_completions)
            with live_run(folder):
                for picture in DASHBOARD:
                    take(browser, f"{address}?run=live", picture)
        browser.close()


if __name__ == "__main__":
    main()
