"""Measure the lists of slides in the viewer and in the run report with many rows, in a browser.

    python benchmarks/long_lists.py runs/first
    python benchmarks/long_lists.py runs/first --rows 1000

The rows are those of a small run, repeated under other names. A time is from the action until the
browser has drawn the list.
"""

import argparse
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from caprmil.report import run_report
from caprmil.runs.run import Run
from caprmil.viewer import Library, create
from caprmil.viewer.server import listen, make_server

DRAWN = "await new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
SCROLL = """async () => {
  const list = document.querySelector("#list, .slides"), gaps = [];
  for (let n = 0, last = performance.now(); n < 120; n++) {
    list.scrollTop += 400;
    const now = await new Promise(requestAnimationFrame);
    gaps.push(now - last), (last = now);
  }
  return gaps.sort((a, b) => a - b)[114];
}"""
TYPE = "search.value = '{}', search.dispatchEvent(new Event('input'))"
CHOOSE = "{0}.value = '{1}', {0}.dispatchEvent(new Event('change'))"

VIEWER = {
    "search, all match": TYPE.format("slide"),
    "search, one matches": TYPE.format("slide_00012"),
    "search, cleared": TYPE.format(""),
    "sort by certainty": CHOOSE.format("sort", "uncertain"),
    "filter": CHOOSE.format("filter", "mistakes"),
    "no filter": CHOOSE.format("filter", "all"),
}
REPORT = {
    "search, all match": TYPE.format("slide"),
    "search, one matches": TYPE.format("slide_00012"),
    "search, cleared": TYPE.format(""),
    "sort by name": "document.querySelector('#slides th button').click()",
}


def repeat_slides(page: Any, rows: int) -> None:
    """Have the viewer in a page list so many slides. Those that the run lacks cannot be opened."""

    def answer(route: Any) -> None:
        own = route.fetch().json()["slides"]
        names = [f"slide_{n:05d}" for n in range(rows)]
        ids = [own[n]["id"] if n < len(own) else f"{n:012x}" for n in range(rows)]
        pairs = enumerate(zip(ids, names, strict=True))
        slides = [{**own[n % len(own)], "id": key, "name": name} for n, (key, name) in pairs]
        route.fulfill(json={"slides": slides})

    page.route("**/api/slides", answer)


def repeat_rows(report: str, rows: int) -> str:
    """Return a run report whose table has so many rows."""
    first = report.index("<tbody>", report.index('id="slides"')) + len("<tbody>")
    end = report.index("</tbody>", first)
    own = re.findall(r"<tr.*?</tr>", report[first:end], re.DOTALL)
    named = (
        re.sub(r'(<th scope="row">)[^<]*', rf"\1slide_{n:05d}", own[n % len(own)])
        for n in range(rows)
    )
    return report[:first] + "\n".join(named) + report[end:]


def times(page: Any, actions: dict[str, str]) -> Iterator[tuple[str, float]]:
    """Yield the milliseconds of each action, and of the slowest but 5 % of frames in scrolling."""
    for name, action in actions.items():
        timed = f"const start = performance.now(); {action}; {DRAWN}"
        yield name, page.evaluate(f"async () => {{ {timed}; return performance.now() - start; }}")
    yield "scroll, 95th percentile of frames", page.evaluate(SCROLL)


@contextmanager
def served(run: Run) -> Iterator[str]:
    with listen("127.0.0.1", None) as sock:
        server = make_server(create(Library(run, device="cpu")))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
        server.should_exit = True
        thread.join(timeout=20)


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=10_000)
    options = parser.parse_args()
    run, program = Run(options.run), shutil.which("chromium") or shutil.which("chromium-browser")
    print(f"| {options.rows:,} slides | ms |\n| --- | --: |")
    with sync_playwright() as driver, served(run) as address, tempfile.TemporaryDirectory() as out:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        repeat_slides(page, options.rows)
        page.goto(address)
        page.wait_for_selector("body[data-state=ready]")
        for name, value in times(page, VIEWER):
            print(f"| viewer: {name} | {value:.0f} |")
        path = Path(out) / "index.html"
        path.write_text(repeat_rows(run_report(run), options.rows))
        page.goto(path.as_uri())
        for name, value in times(page, REPORT):
            print(f"| report: {name} | {value:.0f} |")
        browser.close()


if __name__ == "__main__":
    main()
