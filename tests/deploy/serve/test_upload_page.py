"""The upload page in a real browser: drop, paste, keyboard, screen reader, downloads, sign-in."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from served import image_bytes, serving, unlike_statistics

from cclnet.runs.decision_rule import DecisionRule
from cclnet.runs.model import Calibration, ConformalThresholds

if TYPE_CHECKING:
    from playwright.sync_api import Browser, FileChooser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page with")

TOKEN = "k7Jq-4uPz_0aXw9Lm2Tr"
# What a browser does when a file is dropped, made by hand: {type} of each event in turn on the place to drop at.
DROP = """([name, type, content]) => {
  const bytes = Uint8Array.from(atob(content), (sign) => sign.charCodeAt(0));
  const carried = new DataTransfer();
  carried.items.add(new File([bytes], name, { type }));
  for (const event of ["dragenter", "dragover", "drop"]) {
    document.querySelector(".drop").dispatchEvent(
      new DragEvent(event, { dataTransfer: carried, bubbles: true, cancelable: true }));
  }
}"""
PASTE = """([name, type, content]) => {
  const bytes = Uint8Array.from(atob(content), (sign) => sign.charCodeAt(0));
  const carried = new DataTransfer();
  carried.items.add(new File([bytes], name, { type }));
  document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: carried, bubbles: true, cancelable: true }));
}"""
COVERED = "() => document.getElementById('heat').getContext('2d').getImageData(0, 0, 16, 16).data"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright to open the page with")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    small = "data:image/png;base64," + base64.b64encode(image_bytes(size=(8, 8))).decode()
    examples = {name: [small] * 3 for name in ("red", "green", "blue")}
    with serving(tmp_path_factory.mktemp("run"), examples=examples) as started:
        yield started


@contextmanager
def opened(browser: Browser, address: str, width: int = 1280, **how: Any) -> Iterator[tuple[Page, list[str]]]:
    """Open the page; yield it and a list of its console messages, errors and requests to other servers."""
    messages: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 800}, accept_downloads=True, **how)
    page = context.new_page()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on(
        "request", lambda one: None if one.url.startswith((address, "data:", "blob:")) else messages.append(one.url)
    )
    page.goto(address)
    yield page, messages
    context.close()


def give(page: Page, content: bytes, name: str = "lesion.png", kind: str = "image/png", how: str = DROP) -> None:
    page.evaluate(how, [name, kind, base64.b64encode(content).decode()])


def green_corner() -> bytes:
    pixels = np.full((30, 60, 3), 8, np.uint8)
    pixels[:15, :30, 1] = 250
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 375)])
def test_a_dropped_image_is_answered(browser: Browser, address: str, tmp_path: Path, scheme: str, width: int) -> None:
    with opened(browser, address, width, color_scheme=scheme) as (page, messages):
        assert "Not a medical device" in page.inner_text("header")
        give(page, green_corner())
        page.wait_for_selector("#result:not([hidden])")
        page.wait_for_selector(".thumbs img")
        assert page.inner_text("#prediction").startswith("green")
        assert page.inner_text("#status") == f"lesion.png: green, {page.inner_text('#sureness').lower()}."
        bars = page.locator("table.bars tbody tr")
        shares = [float(bars.nth(i).locator("td.n").inner_text().strip("%")) for i in range(bars.count())]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(100, abs=0.2)
        drawn = [bars.nth(i).locator("i").bounding_box()["width"] for i in range(3)]  # type: ignore[index]
        full = bars.first.locator(".track").bounding_box()["width"]  # type: ignore[index]
        assert [100 * one / full for one in drawn] == pytest.approx(shares, abs=1)
        covered = np.array(page.evaluate(COVERED), np.uint8).reshape(16, 16, 4)[..., 3]
        assert covered[3, 3] > 200 and covered[12, 12] < 40  # the heat lies on the green corner
        assert "The evidence for green is in the upper left" in page.inner_text("#caption")
        assert page.locator("#similar h3").all_inner_texts() == ["green", "red", "blue"]
        assert page.locator(".thumbs img").count() == 9
        assert messages == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(20, 23, 28)" if scheme == "dark" else "rgb(255, 255, 255)")


def test_a_text_file_is_refused_and_the_next_image_works(browser: Browser, address: str) -> None:
    with opened(browser, address) as (page, _):
        give(page, b"What is this?", "notes.txt", "text/plain")
        page.wait_for_selector("#error:not([hidden])")
        told = page.inner_text("[role=alert]")
        assert "notes.txt could not be processed." in told and "not an image in a supported format" in told
        assert page.is_hidden("#result")
        give(page, image_bytes())
        page.wait_for_selector("#result:not([hidden])")
        assert page.is_hidden("#error") and page.inner_text("#prediction").startswith("red")


def test_a_file_that_is_too_large_is_not_sent(browser: Browser, address: str) -> None:
    with opened(browser, address) as (page, _):
        sent: list[str] = []
        page.on("request", lambda one: sent.append(one.url))
        give(page, bytes(2**20 + 1))
        page.wait_for_selector("#error:not([hidden])")
        assert "larger than 1 MB" in page.inner_text("#error") and sent == []


def test_a_pasted_image_is_answered(browser: Browser, address: str) -> None:
    with opened(browser, address) as (page, _):
        give(page, image_bytes((0, 0, 200)), how=PASTE)
        page.wait_for_selector("#result:not([hidden])")
        assert page.inner_text("#prediction").startswith("blue")


def test_everything_works_from_the_keyboard(browser: Browser, address: str, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(image_bytes())
    with opened(browser, address) as (page, _):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "file"
        chosen: list[FileChooser] = []
        page.on("filechooser", lambda one: chosen.append(one))
        for _ in range(20):  # headless chromium, just opened, lets a first Enter on a file input pass
            page.keyboard.press("Enter")
            page.wait_for_timeout(500)
            if chosen:
                break
        chosen[0].set_files(tmp_path / "photo.png")
        page.wait_for_selector("#result:not([hidden])")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "strength"
        before = float(page.evaluate("getComputedStyle(document.getElementById('heat')).opacity"))
        page.keyboard.press("Home")
        assert page.evaluate("getComputedStyle(document.getElementById('heat')).opacity") == "0" and before == 0.6
        assert page.get_attribute("#strength", "aria-valuetext") == "off"
        order = []
        for _ in range(3):
            page.keyboard.press("Tab")
            order.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert order == ["download-json", "download-picture", "API"]


def test_screen_reader(browser: Browser, address: str) -> None:
    with opened(browser, address) as (page, _):
        give(page, green_corner())
        page.wait_for_selector(".thumbs img")
        read = page.locator("body").aria_snapshot()
        for words in ('heading "Try colours"', 'status: "lesion.png: green', 'img "Your image, lesion.png"',
                      'slider "Heat map"', "caption: Probability of each class", 'rowheader "green"',
                      'img "green, example 1"', 'button "Download the result (JSON)"'):  # fmt: skip
            assert words in read, read
        assert not re.search(r"- img$", read, re.MULTILINE)  # no picture without words
        assert page.evaluate("document.querySelectorAll('[id]').length") == page.evaluate(
            "new Set([...document.querySelectorAll('[id]')].map((one) => one.id)).size"
        )


def test_the_result_can_be_downloaded(browser: Browser, address: str) -> None:
    with opened(browser, address) as (page, _):
        give(page, green_corner(), "../my lesion.v2.png")
        page.wait_for_selector("#result:not([hidden])")
        with page.expect_download() as taken:
            page.click("#download-json")
        assert taken.value.suggested_filename == "_my_lesion_v2-result.json"
        result = json.loads(Path(taken.value.path()).read_text(encoding="utf-8"))
        assert result["label"] == "green" and result["heat"]["of"] == "green" and "picture" not in result
        with page.expect_download() as taken:
            page.click("#download-picture")
        picture = Image.open(taken.value.path())
        assert picture.format == "PNG" and picture.width == 720 and picture.height > 360
        # The corner, with the heat on it, is no longer the pure green of the image; the part not seen still is.
        colours = np.asarray(picture.convert("RGB"))
        assert abs(colours[180 // 2, 20].astype(int) - [8, 250, 8]).max() < 12
        assert colours[60, 240, 0] > 100


def test_sign_in(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path, token=TOKEN) as address, opened(browser, address) as (page, _):
        page.fill("#token", "not the token at all")
        with page.expect_navigation():
            page.keyboard.press("Enter")
        assert page.inner_text("[role=alert]") == "The token is wrong."
        page.fill("#token", TOKEN)
        with page.expect_navigation():
            page.keyboard.press("Enter")
        give(page, image_bytes())
        page.wait_for_selector("#result:not([hidden])")
        assert page.inner_text("#prediction").startswith("red")


def test_rule_set_and_refusal_are_shown(browser: Browser, tmp_path: Path) -> None:
    """A model of dark red images with costs: its set is shown, and a bright image is refused."""
    thresholds = ConformalThresholds("val", 50, "aps", (0.8, 0.9), {"aps": (0.4, 0.9)})
    rule = DecisionRule("costs", costs=((0.0, 1.0, 1.0), (50.0, 0.0, 50.0), (1.0, 1.0, 0.0)))
    model = {"calibration": Calibration(sets=thresholds), "rule": rule, "statistics": unlike_statistics()}
    with serving(tmp_path, model, sets="0.9") as address, opened(browser, address) as (page, messages):
        give(page, image_bytes((60, 5, 5)))
        page.wait_for_selector("#result:not([hidden])")
        predicted = page.inner_text("#prediction")
        assert predicted.startswith("green") and "by the rule costs" in predicted
        assert page.inner_text("#set").split() == ["Possible", "classes", "at", "90%:", "red", "green"]
        assert page.inner_text("tr.first th") == "green"
        give(page, image_bytes((250, 240, 255)), name="paper.png")
        page.wait_for_selector("#status:has-text('paper.png: ')")
        assert page.inner_text("#prediction") == "No prediction" and page.locator("#set").is_hidden()
        assert page.inner_text("#status") == "paper.png: No prediction, refused: unlike the training images."
        assert messages == []
