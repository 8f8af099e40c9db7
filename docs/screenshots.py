"""Make the screenshots in docs/assets/: ``make screenshots`` (minutes on a CPU, the first time).

The images are synthetic, and their classes are named by what is seen: they stand for no diagnosis. The comparison is
that of kept results on ISIC 2018. The run is kept in build/screenshots/ and made again if that folder is removed.
Pictures have a palette, which keeps them below 150 kB.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
WORK = ROOT / "build" / "screenshots"
MAX_BYTES = 150_000
COLOURS = 200
PORT = 8767
CLASSES = ("Plain brown", "Round with blue veil", "Red irregular", "Dotted with blue veil", "Pale network",
           "Brown network", "Dark irregular")  # fmt: skip
SHARES = (3, 5, 2, 2, 3, 2, 2)  # of the classes
NETWORK = ["--preset", "paper", "--backbone", "test_resnet", "--batch-size", "64", "--lr", "0.05"]
LARGE = ["--short-side", "104", "--set", "augment.crop=96", "--epochs", "20", "--set", "split.val=0.3"]
RESULTS = ROOT / "results" / "isic2018"
COMPARED = ("hard", "lsr-u5", "ccl-confusion")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip


def draw_images(folder: Path) -> None:
    """The demo set, one folder per class; file names begin with the lesion."""
    from cclnet.data.synthetic import SyntheticSettings, synthetic

    table = synthetic(SyntheticSettings(images=1000, size=128, overlap=0.1, imbalance=SHARES))
    for name, pixels, label in zip(table.names, table.images, table.labels, strict=True):
        path = folder / CLASSES[label] / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def draw_upload(path: Path) -> None:
    """A photograph to upload, of a lesion that is not in the demo set."""
    from cclnet.data.synthetic import SyntheticSettings, synthetic

    table = synthetic(SyntheticSettings(images=7, size=400, overlap=0.1, seed=5))
    Image.fromarray(table.images[1]).save(path)


def cclnet(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "cclnet", *words], cwd=WORK, env=_environment(), check=True)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1", "CUDA_VISIBLE_DEVICES": ""}


def make_runs() -> None:
    """What is shown: a run and an image to upload, as far as they are not there, a comparison, the site."""
    WORK.mkdir(parents=True, exist_ok=True)
    data = ["lesions", "--group-regex", "[A-Z]\\d+"]
    if not (WORK / "lesions").exists():
        draw_images(WORK / "lesions")
    if not (WORK / "upload.png").exists():
        draw_upload(WORK / "upload.png")
    if not (WORK / "skin-lesions" / "model.json").exists():
        if (WORK / "skin-lesions" / "settings.toml").exists():  # interrupted
            cclnet("train", "--resume", "skin-lesions")
        else:
            cclnet("train", *data, *NETWORK, *LARGE, "--method", "ccl-confusion", "--out", "skin-lesions")
    cclnet("evaluate", "skin-lesions")  # writes the report with the templates of today
    kept = [f"lesion-resnet18-{method}-seed{seed}.json" for method in COMPARED for seed in range(3)]
    cclnet("compare", *(str(RESULTS / name) for name in kept), "--against", COMPARED[0], "--out", "compared")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(WORK / "site")]
    subprocess.run(command, cwd=ROOT, env=_environment(), check=True)


@contextlib.contextmanager
def server(*words: str) -> Iterator[str]:
    started = subprocess.Popen([sys.executable, *words], cwd=WORK, env=_environment(), stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{PORT}"
    try:
        for _ in range(1200):  # five minutes: the machine may be busy
            with contextlib.suppress(OSError):
                urllib.request.urlopen(address, timeout=5).close()
                break
            sleep(0.25)
        else:
            raise SystemExit(f"{' '.join(words)} does not answer")
        yield address
    finally:
        started.terminate()
        started.wait(timeout=30)


def opened(browser: Browser, address: str, width: int, media: str = "screen") -> Page:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
    page.emulate_media(media=media)  # type: ignore[arg-type]
    page.goto(address)
    return page


def part(page: Page, selector: str, height: int) -> Image.Image:
    """A strip of a page as wide as the window, from the top of an element (empty: of the page)."""
    size = page.viewport_size
    assert size is not None
    top = page.locator(selector).first.bounding_box()["y"] - 16 if selector else 0  # type: ignore[index]
    clip = {"x": 0, "y": top, "width": size["width"], "height": height}
    content = page.screenshot(full_page=top + height > size["height"], clip=clip)  # type: ignore[arg-type]
    return Image.open(io.BytesIO(content)).convert("RGB")


def section(page: Page, selector: str) -> Image.Image:
    """A section of a page as a whole, so that no row and no card of it is cut."""
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    return part(page, selector, round(box["height"]) + 24)


def save(name: str, *parts: Image.Image) -> None:
    """Strips of a page below each other as a small PNG."""
    picture = Image.new("RGB", (parts[0].width, sum(strip.height for strip in parts)))
    top = 0
    for strip in parts:
        picture.paste(strip, (0, top))
        top += strip.height
    path = ASSETS / f"{name}.png"
    picture.quantize(COLOURS, kmeans=2, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {picture.width} x {picture.height}, {path.stat().st_size:,} bytes")
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{path.name} is larger than {MAX_BYTES:,} bytes: show less of the page")


def take_pictures(browser: Browser) -> None:
    report, comparison = ((WORK / name).as_uri() for name in ("skin-lesions/report.html", "compared/comparison.html"))
    page = opened(browser, report, 1200)
    save("report", part(page, "", 572), section(page, "#confusion"))
    save("soft_labels", section(page, "#soft-labels"))
    save("report_narrow", part(opened(browser, report, 400), "", 1100))
    page = opened(browser, report, 794, media="print")  # A4 at 96 dots per inch
    page.add_style_tag(content="body { padding: 14mm; }")  # the margins of the sheet
    save("report_print", part(page, "", 1123))
    save("comparison", part(opened(browser, comparison, 1200), "", 1238))  # ends with a row of the scores
    files = ["-m", "http.server", "--bind", "127.0.0.1", "--directory", "site", str(PORT)]
    with server(*files) as address:  # the search of the site needs a server
        save("site", part(opened(browser, address, 1280), "", 900))
    with server("-m", "cclnet", "serve", "skin-lesions", "--examples", "--port", str(PORT)) as address:
        page = opened(browser, address, 1200)
        page.set_input_files("#file", WORK / "upload.png")
        page.wait_for_selector("#result:not([hidden])")
        page.wait_for_selector(".thumbs img")
        save("page", part(page, "", 890))


def main() -> None:
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no chromium: install it, or run playwright install chromium")
    make_runs()
    ASSETS.mkdir(exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=FLAGS)
        take_pictures(browser)
        browser.close()


if __name__ == "__main__":
    main()
