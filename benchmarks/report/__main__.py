"""The thresholds of the HTML report.

python -m benchmarks.report [--rows FILE]    # results/report.csv; needs Chromium
python -m benchmarks.report --picture        # docs/report.png
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.report.browser import Browser
from benchmarks.report.snapshots import damaged, malicious
from benchmarks.report.traces import hostile, page, trained
from benchmarks.rows import Threshold, write_thresholds
from oomph.errors import UserError
from oomph.report.html import Page, html_report
from oomph.report.recording import read_snapshot
from oomph.report.terminal import report_console, report_text

MiB = 2**20


def rows(folder: Path) -> Iterator[Threshold]:
    with Browser() as browser:
        run = trained(steps=3, layers=200, temporaries=1250)
        name = f"trace of {len(run.events):,} events"
        yield from _page(browser, folder / "large.html", name, page(run), 5, 3)
        yield from _page(browser, folder / "4b.html", "longctx, 4B, 1 x 32,768 tokens", _four_billion(), 5, 2)
        file = folder / "hostile.html"
        file.write_text(html_report(hostile()))
        before = len(browser.errors)
        browser.open(file)
        for view in ("modules", "lines", "tensors"):
            browser.click(f'[data-value="{view}"]')
        acted = not browser.value(
            "window.hacked === undefined && document.querySelector('main img') === null"
        )
        yield "hostile strings", "acted or failed in HTML", acted + len(browser.errors) - before, 0
        yield "hostile strings", "requests to a network", _network(browser), 0
        shown = report_text(hostile().runs[0][1], report_console())
        yield "hostile strings", "escape sequences in the terminal", shown.count("\x1b"), 0
    yield from _snapshots(folder)


def _snapshots(folder: Path) -> Iterator[Threshold]:
    sentinel = folder / "executed"
    unclear, slowest = 0, 0.0
    files = [*malicious(str(sentinel)), *damaged(1000, seed=1)]
    for data in files:
        began = time.perf_counter()
        try:
            read_snapshot(data, "x.pickle")
        except UserError as error:
            unclear += "\n" in str(error) or len(str(error)) > 300
        except Exception:
            unclear += 1
        slowest = max(slowest, time.perf_counter() - began)
    name = f"{len(files):,} damaged and malicious snapshots"
    yield name, "executed", sentinel.exists(), 0
    yield name, "not refused in one line", unclear, 0
    yield name, "slowest, s", slowest, 1


def _page(
    browser: Browser, file: Path, name: str, given: Page, make: float, usable: float
) -> Iterator[Threshold]:
    began = time.perf_counter()
    file.write_text(html_report(given))
    yield name, "report made, s", time.perf_counter() - began, make
    yield name, "size, MiB", file.stat().st_size / MiB, 8
    opened = max(browser.open(file) for _ in range(5))
    yield name, "page usable, s, slowest of 5", opened / 1000, usable
    began = time.perf_counter()
    browser.click("#memory-chart", x=0.3)
    browser.click('[data-value="modules"]')
    yield name, "a click in the chart, then the map of modules, s", time.perf_counter() - began, 3


def _network(browser: Browser) -> int:
    return sum(not address.startswith(("file:", "data:", "about:")) for address in browser.requests)


def _four_billion() -> Page:
    from oomph.cli.predict import PredictOptions, predict_target
    from oomph.cli.targets import find_target

    options = PredictOptions("longctx_4b.yaml", ("form=naive", "data.source=stdlib"), gpu="h200")
    return page(predict_target(find_target(options, "predict")))


def picture(file: Path) -> None:
    """GPT-2 on an RTX 3090, as `oomph diagnose --html` shows it."""
    from oomph.cli.main import run

    with tempfile.TemporaryDirectory() as folder, Browser(1200, 1240) as browser:
        html = Path(folder) / "gpt2.html"
        run(["diagnose", "examples/gpt2.py:workload", "--gpu", "rtx3090", "--html", str(html)])
        browser.prefer("light")
        browser.open(html)
        # Without the causes, which are words; the picture shows the chart and what is alive.
        browser.value(
            "document.getElementById('findings').remove(); document.getElementById('notes')?.remove()"
        )
        browser.click('[data-value="modules"]')
        browser.value("scrollTo(0, 0)")
        browser.screenshot(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=RESULTS / "report.csv")
    parser.add_argument("--picture", action="store_true")
    options = parser.parse_args()
    if options.picture:
        return picture(Path("docs/report.png"))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if write_thresholds(options.rows, rows(Path(folder))) else 1)


if __name__ == "__main__":
    main()
