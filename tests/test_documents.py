"""Documents say what the results say, and link to files that are there."""

from __future__ import annotations

import bz2
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from cclnet.training.benchmark import markdown_table

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def between(text: str, marker: str) -> str:
    return text.partition(f"<!-- {marker} -->")[2].partition(f"<!-- /{marker} -->")[0].strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_planted_table_is_that_of_the_results() -> None:
    page = (ROOT / "docs" / "tables_soft_labels.md").read_text(encoding="utf-8")
    assert between(page, "planted") == (ROOT / "results" / "planted.md").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize(
    ("page", "marker", "table", "without"),
    [
        ("tables_methods.md", "methods planted", "methods_planted/scores.md", "Not run yet."),
        ("tables_methods.md", "methods isic2018", "methods_isic2018/scores.md", "Not run yet."),
        ("multilabel.md", "multilabel", "multilabel.md", ""),
        ("pipeline.md", "decode", "data.md", "Not measured yet."),
        ("similarity.md", "structure", "structure.md", ""),
        ("tables_soft_labels.md", "uses planted", "uses_planted.md", ""),
        ("tables_soft_labels.md", "unsoftened", "unsoftened.md", ""),
        ("uncertainty.md", "uncertainty", "uncertainty.md", ""),
        ("tables_paper.md", "prior readings", "prior_readings.md", ""),
        ("using.md", "third plan summary", "soft_labels/third_plan/summary.md", ""),
        ("tables_label_noise.md", "soft labels summary", "soft_labels/summary.md", ""),
        ("hypotheses.md", "soft labels hypotheses", "soft_labels/hypotheses.md", ""),
        ("hypotheses.md", "third plan hypotheses", "soft_labels/third_plan/hypotheses.md", ""),
        ("tables_doubts.md", "soft labels doubts", "soft_labels/doubts.md", ""),
        ("tables_doubts.md", "soft labels natural_noise", "soft_labels/natural_noise.md", ""),
        *(
            ("tables_label_noise.md", f"{plan} {regime}", f"soft_labels/{folder}{regime}.md", "")
            for plan, folder in (("soft labels", ""), ("first plan", "first_plan/"))
            for regime in ("noise40", "clean", "noise20", "few20")
        ),
        *(
            ("tables_label_noise.md", f"third plan {regime}", f"soft_labels/third_plan/{regime}.md", "")
            for regime in ("noise40", "clean")
        ),
        ("tables_label_noise.md", "soft labels whole_networks", "soft_labels/whole_networks.md", ""),
        ("fine_tuning.md", "second screening", "finetune/second_screening/second_screening.md", ""),
        ("fine_tuning.md", "adopted", "finetune/adopted/scores.md", ""),
        ("fine_tuning.md", "screening", "finetune/screening/screening.md", ""),
        ("rotation.md", "resampling", "finetune/resampling.md", ""),
        ("tables_label_noise.md", "soft labels few80", "soft_labels/few80.md", ""),
    ],
)
def test_tables_are_those_of_the_results(page: str, marker: str, table: str, without: str) -> None:
    file = ROOT / "results" / table
    shown = between((ROOT / "docs" / page).read_text(encoding="utf-8"), marker)
    assert shown == (file.read_text(encoding="utf-8").strip() if file.exists() else without)


def test_the_page_of_questions_has_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|(.*?)\|", page.partition("| extra |")[2], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(extras) - {"docs", "dev"}


@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_the_speeds_are_those_of_the_results(device: str) -> None:
    measured = json.loads((ROOT / "results" / f"benchmark_{device}.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert between(page, f"benchmark {device}") == markdown_table(measured)


def test_the_table_of_the_gpu_is_that_of_the_results() -> None:
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert between(page, "gpu speed") == script("benchmarks/gpu_speed.py").tables()


def test_results_name_no_place_of_the_machine_they_were_made_on() -> None:
    for path in (ROOT / "results").rglob("*.json*"):
        content = bz2.decompress(path.read_bytes()) if path.suffix == ".bz2" else path.read_bytes()
        assert not re.search(r'"/(root|home|tmp|mnt)/', content.decode()), path.name
        if path.suffix != ".jsonl":
            json.loads(content)


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["images", "scale", "processes", "model"])
def test_the_tables_of_scale_are_those_of_the_results(name: str) -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert between(page, name) == script("benchmarks/scale.py").TABLES[name]()


def test_the_table_of_starts_is_that_of_the_results() -> None:
    page = (ROOT / "docs" / "fine_tuning.md").read_text(encoding="utf-8")
    assert between(page, "gpu start") == script("benchmarks/gpu_start.py").table()


def test_the_table_of_kept_memory_is_that_of_the_results() -> None:
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert between(page, "kept memory") == script("benchmarks/kept_memory.py").table()


def test_the_claims_are_those_of_the_results() -> None:
    module = script("docs/claims_table.py")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: python docs/claims_table.py"
