"""The documentation site builds without a broken link or reference, and its generated pages are complete."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import cclnet
from cclnet.cli import app
from cclnet.data.table import ImageTable
from cclnet.deploy.predictor import Prediction
from cclnet.evaluation.metrics import Metric
from cclnet.methods import METHODS, method_class
from cclnet.runs.folder import RunFolder
from cclnet.settings import Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("mkdocstrings", reason="mkdocs-material and mkdocstrings are not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "docs" / "reference_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_builds_strictly(site: Path) -> None:
    assert (site / "index.html").exists() and (site / "search" / "search_index.json").exists()
    cards = {path.name for path in (site / "methods").iterdir() if path.is_dir()}
    own = {Path(method_class(name).card or "").stem for name in METHODS} - {""}
    assert own <= cards and "ccl_centroid" in cards


def test_the_site_loads_nothing_from_other_servers(site: Path) -> None:
    loads = ('src="http', 'rel="stylesheet" href="http', "url(http", "@import")
    for page in ("index.html", "data/index.html", "reference/api/index.html"):
        text = (site / page).read_text(encoding="utf-8")
        assert not [part for part in loads if part in text]


def test_docstrings_are_shown_without_marks_of_restructuredtext(site: Path) -> None:
    page = (site / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    assert "cclnet.open_data</code>" in page  # written as :func:`cclnet.open_data`
    assert not re.findall(r":[a-z]+:<code>.*?</code>|::</p>", page)


def test_the_api_page_has_the_fields_of_what_functions_return(site: Path) -> None:
    page = (site / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    for kind in (Prediction, ImageTable, Metric):
        table = page.partition(f"Fields of <code>{kind.__name__}</code>")[2].partition("</table>")[0]
        names = re.findall(r"<tr>\s*<td><code>(\w+)</code></td>", table)
        assert names == [field.name for field in dataclasses.fields(kind)]


def test_intervals_and_options_are_not_broken_across_lines(site: Path) -> None:
    [start] = re.findall(r"<article.*</article>", (site / "index.html").read_text(encoding="utf-8"), re.DOTALL)
    intervals = re.findall(r'(<span class="whole">)?\[[\d.]+, [\d.]+\]', start)
    assert len(intervals) >= 8 and all(intervals)
    questions = (site / "faq" / "index.html").read_text(encoding="utf-8")
    assert '<code><span class="whole">--set</span> split.by=group</code>' in questions


def test_every_setting_command_and_file_is_in_the_reference(generated: ModuleType) -> None:
    settings, commands, files = generated.settings(), generated.commands(), generated.run_folder()
    for field in dataclasses.fields(Settings):
        assert f"`{field.name}`" in settings or f"`{field.name}." in settings
    group = typer.main.get_command(app)
    assert all(f"## cclnet {name}" in commands for name in group.commands)  # type: ignore[attr-defined]
    assert "--group-regex" in commands and "`split.val`" in settings
    own = [path.name for name, path in vars(RunFolder("run")).items() if name != "path" and not name.startswith("_")]
    assert all(f"`{name}`" in files for name in own)


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    public = set(cclnet.__all__) - {"__version__", "METHODS"}
    assert public <= shown
    assert all(getattr(cclnet, name).__doc__ for name in public)


def test_comments_of_fields_are_their_descriptions(generated: ModuleType) -> None:
    page = generated.run_folder()
    assert "| `backbone` | `str` | name of the timm model |" in page


def search(index: dict[str, Any]) -> Any:
    """The search of Material for MkDocs: a function from a query to the sections of each page, best first.

    lunr with the fields and boosts of the index and a prefix search for every word that is no separator. A section that
    has all words counts twice, and so does the head of a page. The site does this in JavaScript with another tokenizer,
    so the order of pages with close scores may differ.
    """
    lunr = pytest.importorskip("lunr", reason="lunr is not installed")
    config, documents = index["config"], {section["location"]: section for section in index["docs"]}
    pipeline = {"trimmer", "stopWordFilter", "stemmer"} - set(config["pipeline"])
    builder = lunr.get_default_builder("en")
    for step in list(builder.pipeline._stack):
        if step.label.removesuffix("-en") in pipeline:
            builder.pipeline.remove(step)
    for step in list(builder.search_pipeline._stack):
        builder.search_pipeline.remove(step)
    fields = [{"field_name": name, "boost": config["fields"][name]["boost"]} for name in ("title", "text")]
    sections = [(_plain(section), {"boost": section.get("boost", 1)}) for section in documents.values()]
    found = lunr.lunr("location", fields, sections, builder=builder)

    def ask(query: str) -> list[list[dict[str, Any]]]:
        words = [word for word in re.split(config["separator"], query.lower()) if word]
        pages: dict[str, list[tuple[float, dict[str, Any]]]] = {}
        for match in found.search(" ".join(f"{word}*" for word in words)):
            section = documents[match["ref"]]
            hits = match["match_data"].metadata
            has_all = all(any(hit.startswith(word) for hit in hits) for word in words)
            is_page = "#" not in section["location"]
            score = match["score"] * (1 + has_all + is_page)
            pages.setdefault(section["location"].partition("#")[0], []).append((score, section))
        best = [sorted(own, key=lambda pair: -pair[0]) for own in pages.values()]
        return [[section for _, section in own] for own in sorted(best, key=lambda own: -own[0][0])]

    return ask


def _plain(section: dict[str, Any]) -> dict[str, str]:
    """A section without HTML tags, as the search reads it."""
    return {key: re.sub(r"<[^>]+>", " ", section[key]) for key in ("location", "title", "text")}


def test_the_first_page_that_the_search_returns_has_the_answer(site: Path) -> None:
    ask = search(json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8")))
    questions = tomllib.loads((ROOT / "docs" / "questions.toml").read_text(encoding="utf-8"))["question"]
    assert len(questions) >= 10
    for question in questions:
        pages = ask(question["ask"])
        first, answer = pages[0][0]["location"], _plain(pages[0][0])["text"]
        assert first.partition("#")[0] == question["page"], (question["ask"], [own[0]["location"] for own in pages[:3]])
        assert question["answer"] in " ".join(answer.split()), (question["ask"], first)
