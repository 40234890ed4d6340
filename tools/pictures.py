"""Make the pictures of report and dashboard in docs/images anew, from a finished quickstart run.

    make quickstart && python -m tools.pictures [runs/quickstart]

It needs playwright, the extra `dashboard` and a chromium on the path. Look at the pictures before you commit them.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.support.dashboard_process import dashboard

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
SAMPLE = 40  # one that was interrupted, so that its answer has several attempts
REPORT = {"report-1440": (1440, 2700), "report-390": (390, 3000), "report-top": (1200, 1640)}
DASHBOARD = {"dashboard-1440": (1440, 2300), "dashboard-390": (390, 2600)}


def take(browser: Browser, address: str, name: str, size: tuple[int, int], sample: int | None = None) -> None:
    """Save what a window of this size shows."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.goto(address)
    page.wait_for_selector("svg")
    if sample is not None:
        page.get_by_placeholder("number").fill(str(sample))
        page.get_by_role("button", name="Show its tokens").click()
        page.wait_for_selector("text=History")
    page.wait_for_timeout(1500)  # until all charts are drawn
    page.screenshot(path=IMAGES / f"{name}.png")
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/quickstart"))
    run: Path = parser.parse_args().run
    with sync_playwright() as driver, dashboard(run.parent) as address:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
        for name, size in REPORT.items():
            take(browser, (run / "report.html").absolute().as_uri(), name, size)
        for name, size in DASHBOARD.items():
            take(browser, address, name, size)
        take(browser, address, "dashboard-sample", (1300, 1000), SAMPLE)
        browser.close()


if __name__ == "__main__":
    main()
