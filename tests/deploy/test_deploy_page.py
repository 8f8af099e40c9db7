"""docs/export.md says what results/deploy.json says, and the Python of docs/deploy.md runs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from shipped_run import write_images, write_run

from cclnet.deploy.predict import write_csv

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_results() -> None:
    results = ROOT / "results" / "deploy.json"
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    told = page.partition("<!-- deploy -->")[2].partition("<!-- /deploy -->")[0].strip()
    if not results.exists():
        assert told == "Not measured yet: `python benchmarks/deploy.py` does."
        return
    pytest.importorskip("onnxruntime")
    spec = importlib.util.spec_from_file_location("deploy_benchmark", ROOT / "benchmarks" / "deploy.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    assert told == benchmark.in_words(json.loads(results.read_text(encoding="utf-8")))


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs" / "mine")
    write_images(tmp_path, 1, "jpg")[0].rename(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(import cclnet.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["prediction"].abstain in (True, False) and names["probabilities"].shape == (1, 4)  # type: ignore[attr-defined]


def test_every_column_is_told() -> None:
    written = set(re.findall(r'columns\["(\w+)"\]', Path(write_csv.__code__.co_filename).read_text())) | {"image"}
    table = PAGE.partition("| column | |")[2].partition("\n\n")[0]
    assert written <= set(re.findall(r"`(\w+)`", table))
