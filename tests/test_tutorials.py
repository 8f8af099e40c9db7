"""The tutorials run as they stand, and print what they show."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
TUTORIALS = ROOT / "docs" / "tutorials"
NEEDS = {"folder_to_classifier": ("onnxruntime", "onnxscript", "uvicorn"), "dicom": ("pydicom",)}


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


pages = _module("tutorial_pages")


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_and_prints_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDS.get(page.stem, ()):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    pages.run_page(page)


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)
def test_a_tutorial_is_short_and_listed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160 and text.startswith("# ")
    title = text.splitlines()[0].removeprefix("# ")
    assert f"[{title}]({page.name})" in (TUTORIALS / "index.md").read_text(encoding="utf-8")
    assert f"tutorials/{page.name}" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "```text\n```" not in text  # every output is shown


def test_other_output_is_noticed() -> None:
    printed = "epoch 1  loss 0.91\naccuracy 0.83\nreport: run/report.html\n"
    assert pages.shown_lines("epoch 1 loss 0.5\n…\nreport: run/report.html", printed) == [
        "epoch 1  loss 0.91", "…", "report: run/report.html"
    ]  # fmt: skip
    for other in ("accuracy of 0.83", "report: run/report.html\naccuracy 0.83"):
        with pytest.raises(ValueError, match="no line like"):
            pages.shown_lines(other, printed)


def test_code_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 / 0)\n```\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"page\.md, line 1 failed"):
        pages.run_page(page)
    for line in ("ls /no/such/folder", "cclnet verify missing", "cclnet data show missing"):
        page.write_text(f"```sh\n{line}\n```\n", encoding="utf-8")
        with pytest.raises(RuntimeError, match=r"page\.md, line 1 failed"):
            pages.run_page(page)


def test_screenshots_are_small() -> None:
    assert {"report.png", "page.png"} <= {path.name for path in ASSETS.glob("*.png")}
    assert all(path.stat().st_size <= 150_000 for path in ASSETS.glob("*.png"))
