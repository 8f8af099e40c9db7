"""Both pages in a real browser: no error, nothing fetched, readable on a phone, in light and dark, and on paper."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_run import write_run

from cclnet.evaluation.compare import compare
from cclnet.evaluation.evaluate import evaluate
from cclnet.report import write_comparison, write_report
from cclnet.report.text import minus_signs, value_text

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
NAMES = (
    "Melanoma", "Melanocytic nevus", "Basal cell carcinoma", "Actinic keratosis", "Benign keratosis-like lesion",
    "Dermatofibroma", "Vascular lesion",
)  # fmt: skip
# Words that a line break divides: the rectangles of a word are then on two lines.
BROKEN = """() => {
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), found = [];
  const range = document.createRange();
  while (walker.nextNode()) {
    if (walker.currentNode.parentElement.closest(".name, .values td, svg")) continue;  // file names and paths
    for (const word of walker.currentNode.data.matchAll(/[\\p{L}]+/gu)) {
      range.setStart(walker.currentNode, word.index);
      range.setEnd(walker.currentNode, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map((r) => Math.round(r.top)));
      const lefts = new Set([...range.getClientRects()].map((r) => Math.round(r.left)));
      if (tops.size > 1 && lefts.size > 1) found.push(word[0]);
    }
  }
  return found;
}"""
SIZE = "(name) => parseFloat(getComputedStyle(document.querySelector(name)).fontSize)"
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the reports with")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright to open the reports with")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    """The two pages, each with words that must be read on it."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {
        m: [write_run(folder / f"{m}-{s}", NAMES, method=m, seed=s, images=200) for s in range(2)]
        for m in ("ccl", "hard", "lsr")
    }
    scores, compared = evaluate(runs["ccl"][0], draws=50), compare(runs, draws=50)
    headline = [value_text(number.value, name) for name, number in scores.overall.items()]
    return {
        "report": (write_report(runs["ccl"][0], scores), headline),
        "comparison": (write_comparison(folder / "out", compared), [minus_signs(compared.comparisons[0].verdict)]),
    }


@pytest.mark.parametrize("name", ["report", "comparison"])
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 400)])
def test_a_page_opens(
    browser: Browser, pages: dict[str, tuple[Path, list[str]]], tmp_path: Path, name: str, scheme: str, width: int
) -> None:
    path, words = pages[name]
    heard: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page = context.new_page()
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    assert heard == [] or all(line.startswith("data:") for line in heard)
    text = page.inner_text("body")
    assert all(word in text for word in words)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.evaluate("[...document.querySelectorAll('.box')].map(b => b.getBoundingClientRect().right)")
    assert boxes and max(boxes) <= width
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    clipped = "[...document.querySelectorAll('.box')].filter(b => b.scrollWidth > b.clientWidth + 1).length"
    assert page.evaluate(clipped) == 0  # all columns are in view
    assert page.evaluate(BROKEN) == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 28)" if scheme == "dark" else "rgb(255, 255, 255)")
    page.screenshot(path=str(tmp_path / f"{name}_{scheme}_{width}.png"), full_page=True)
    assert (tmp_path / f"{name}_{scheme}_{width}.png").stat().st_size > 20_000
    context.close()


def test_paper_is_white_and_shows_what_the_screen_folds_away(
    browser: Browser, pages: dict[str, tuple[Path, list[str]]]
) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(pages["report"][0].as_uri())
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    sizes = {name: page.evaluate(SIZE, name) for name in ("main p", "caption", "figcaption", ".tight td", "td")}
    assert max(sizes.values()) == sizes["main p"]  # captions and tables are not larger than the text
    rows = page.locator("details table tr")
    assert rows.first.bounding_box() is not None and rows.first.bounding_box()["height"] > 5  # type: ignore[index]
    page.close()
