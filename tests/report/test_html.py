"""The report of a run: content, text, pictures and style sheet."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_run import CLASSES, MakeRun
from jinja2 import UndefinedError
from page_check import read_page
from PIL import Image

from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.evaluation.evaluate import evaluate
from cclnet.report import write_report
from cclnet.report.html import (
    data_uri,
    flat_settings,
    markdown_text,
    method_hints,
    pixels,
    render,
    report_content,
    thumbnails,
)
from cclnet.report.text import interval_text, value_text
from cclnet.runs.folder import RunFolder


def test_the_page_has_every_number_of_the_headline(make_run: MakeRun) -> None:
    run = make_run()
    scores = evaluate(run, draws=50)
    path = write_report(run, scores)
    assert path == run / "report.html"
    page, markdown = read_page(path), (run / "report.md").read_text()
    assert page.problems == []
    for name, number in scores.overall.items():
        for text in (page.text, markdown):
            assert value_text(number.value, name) in text and interval_text(number, name) in text
    assert path.stat().st_size < 1_500_000
    assert page.tags.count("svg") > 8 and "script" not in page.tags
    assert f"{scores.leak.images} of {scores.split.images}" in page.text  # the leak audit
    assert "frozen at epoch 25" in page.text and "split.by group" in page.text


def test_names_of_classes_and_images_are_text_and_nothing_else(make_run: MakeRun, tmp_path: Path) -> None:
    classes = ("<script>alert(1)</script>", 'a"b', "x|y & <b>", "`*_plain_*`")
    names = [f"<img src=x onerror=alert({i})>" for i in range(80)]
    run = make_run('run <i>"', classes=classes, names=names, images=80, data="<u>nowhere</u>", groups=False)
    page = read_page(write_report(run, evaluate(run, draws=50)))
    assert page.problems == [] and not {"script", "img", "i", "u"} & set(page.tags[page.tags.index("body") :]) - {"i"}
    assert "<script>alert(1)</script>" in page.text and "x|y & <b>" in page.text and "<u>nowhere</u>" in page.text
    markdown = (run / "report.md").read_text()
    assert "<" not in markdown.replace("< 0.001", "")
    rows = [line for line in markdown.splitlines() if line.startswith(r"| x\|y &amp; &lt;b&gt; |")]
    assert len(rows) == 5  # per class, fixed specificity, confusion, decisions, soft labels


@pytest.mark.parametrize(
    ("method", "classes", "skill", "fewest", "named"),
    [
        ("hard", CLASSES, 4.0, 500, []),
        ("hard", CLASSES, 0.3, 500, ["ccl-forward"]),
        ("ccl-forward", CLASSES, 0.3, 500, []),
        ("ccl", CLASSES, 4.0, 12, ["12 training images"]),
        ("hard", CLASSES, 4.0, 12, []),
        ("hard", ("0", "1", "2", "3"), 4.0, 500, ["ordinal"]),
        ("ordinal", ("0", "1", "2", "3"), 4.0, 500, []),
    ],
)
def test_hints_are_for_data_where_another_method_may_be_better(
    make_run: MakeRun, method: str, classes: tuple[str, ...], skill: float, fewest: int, named: list[str]
) -> None:
    run = make_run(classes=classes, skill=skill, method=method)
    model = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(model | {"class_counts": [fewest, *[600] * (len(classes) - 1)]}))
    found = method_hints(run, evaluate(run, draws=20))
    assert len(found) == len(named) and all(word in text for word, text in zip(named, found, strict=True))


def test_thumbnails_of_the_worst_mistakes(make_run: MakeRun, tmp_path: Path) -> None:
    images = tmp_path / "images"
    rng = np.random.default_rng(0)
    names = []
    for i in range(60):
        folder = images / CLASSES[i % 7]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    from cclnet.data.sources import open_data

    names = list(open_data(images).names)
    run = make_run(names=names, images=60, data=str(images), skill=0.5)
    scores = evaluate(run, draws=50)
    page = read_page(write_report(run, scores))
    assert page.tags.count("img") == len(scores.mistakes) > 5 and page.problems == []
    shutil.rmtree(images)
    page = read_page(write_report(run, scores))
    assert page.tags.count("img") == 0 and "The pictures are left out" in page.text


def test_several_labels_an_image(make_run: MakeRun) -> None:
    run = make_run(multilabel=True, classes=("oedema", "nodule", "mass"), images=200)
    page = read_page(write_report(run, evaluate(run, draws=50)))
    assert (
        page.problems == []
        and "Mean average precision" in page.text
        and "Every class of every image is one decision" in page.text
    )
    assert "Most frequent confusions" not in page.text and "an image may carry several labels" in page.text


def test_predictions_from_elsewhere_are_enough(make_run: MakeRun, tmp_path: Path) -> None:
    frame = pd.read_csv(make_run() / "predictions.csv").drop(columns=["split", "group"])
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    frame.to_csv(folder / "theirs.csv", index=False)
    path = write_report(folder / "theirs.csv", evaluate(folder / "theirs.csv", draws=50))
    page = read_page(path)
    assert path.parent == folder and page.problems == []
    assert "no metrics.jsonl" in page.text and "no soft_labels.csv" in page.text and "no settings.toml" in page.text
    assert "cannot be checked" in page.text  # leaks


def test_the_report_can_be_written_elsewhere(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    path = write_report(run, evaluate(run, draws=50), out=tmp_path / "new" / "folder")
    assert path.parent == tmp_path / "new" / "folder" and (path.parent / "report.md").exists()
    assert not (run / "report.html").exists()


def test_hard_labels_leave_the_soft_labels_out(make_run: MakeRun) -> None:
    run = make_run(method="hard")
    page = read_page(write_report(run, evaluate(run, draws=50)))
    assert page.problems == [] and "Soft labels" not in page.text and "Rank in soft labels" not in page.text
    classes = json.loads((run / "model.json").read_text())["classes"]
    size = len(classes)
    for matrix in (
        np.eye(size),
        np.full((size, size), 0.1 / (size - 1)) + np.eye(size) * 0.9,
    ):  # as training writes them
        RunFolder(run).write_soft_labels(classes, matrix)
        page = read_page(write_report(run, evaluate(run, draws=50)))
        assert "Soft labels:" not in page.text and "most similar pairs" not in page.text


def test_removed_soft_labels_are_reported(make_run: MakeRun) -> None:
    run = make_run()
    model = json.loads((run / "model.json").read_text())
    size = len(model["classes"])
    assert "removed from the probabilities" not in read_page(write_report(run, evaluate(run, draws=50))).text
    model["target"] = np.full((size, size), 1 / size).tolist()
    (run / "model.json").write_text(json.dumps(model))
    assert "removed from the probabilities" in read_page(write_report(run, evaluate(run, draws=50))).text


def test_a_class_without_images_is_named(make_run: MakeRun) -> None:
    run = make_run()
    frame = pd.read_csv(run / "predictions.csv")
    frame[frame["label"] != "DF"].to_csv(run / "predictions.csv", index=False)
    page = read_page(write_report(run, evaluate(run, draws=50)))
    assert page.problems == [] and "No image of this split is of class DF" in page.text


def test_a_single_image_is_reported_without_intervals(make_run: MakeRun, tmp_path: Path) -> None:
    frame = pd.read_csv(make_run() / "predictions.csv").drop(columns=["split", "group"])
    frame.head(1).to_csv(tmp_path / "one.csv", index=False)
    page = read_page(write_report(tmp_path / "one.csv", evaluate(tmp_path / "one.csv"), out=tmp_path / "out"))
    assert page.problems == [] and "no interval" in page.text


def test_a_perfect_model(make_run: MakeRun) -> None:
    run = make_run()
    frame = pd.read_csv(run / "predictions.csv")
    for name in CLASSES:
        frame[f"p_{name}"] = (frame["label"] == name).astype(float)
    frame.to_csv(run / "predictions.csv", index=False)
    page = read_page(write_report(run, evaluate(run, draws=50)))
    assert page.problems == [] and "No two classes were confused." in page.text and "Worst mistakes" not in page.text


@pytest.mark.parametrize("count", [2, 20, 45])
def test_any_number_of_classes(make_run: MakeRun, count: int) -> None:
    run = make_run(classes=[f"class {k}" for k in range(count)], images=6 * count)
    path = write_report(run, evaluate(run, draws=10))
    page, markdown = read_page(path), (run / "report.md").read_text()
    assert page.problems == [] and path.stat().st_size < 1_500_000
    assert page.tags.count("img") == (2 if count > 30 else 0)  # the squares, once they are too large to write out
    assert ("The full matrix is in scores.json" in markdown) == (count > 30)


STYLE = files("cclnet.report").joinpath("templates/page.css").read_text(encoding="utf-8")
LIGHT, DARK = (dict(re.findall(r"--([\w-]+): ([^;]+);", block)) for block in re.findall(r":root {(.*?)}", STYLE, re.S))


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it, of ``#rrggbb`` or ``r g b``."""
    numbers = [int(colour[i : i + 2], 16) for i in (1, 3, 5)] if colour[0] == "#" else map(int, colour.split())
    linear = [c / 12.92 if (c := n / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for n in numbers]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_contrast(theme: dict[str, str]) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for text in ("ink", "muted", "link"):
        for ground in ("paper", "card"):
            assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
    for ground in ("hit", "miss", "warn"):  # cells at full strength; weaker ones are nearer to the paper
        assert contrast(theme["ink"], theme[ground]) >= 4.5, ground
    for mark in ("s1", "s2", "s3", "s4", "s5", "s6", "warn-edge"):
        assert contrast(theme[mark], theme["paper"]) >= 3, mark
        assert contrast(theme[mark], theme["card"]) >= 3, mark


def test_both_themes_define_the_same_colours() -> None:
    assert LIGHT.keys() - {"color-scheme"} == DARK.keys() and len(DARK) > 10


def test_the_style_sheet_fetches_nothing() -> None:
    assert not re.search(r"url\(|@import|https?:", STYLE)


def test_markdown_shows_names_as_they_are() -> None:
    assert markdown_text("ISIC_0024306") == "ISIC_0024306"
    assert markdown_text("a|b <script> *x*\n2") == r"a\|b &lt;script&gt; \*x\* 2"
    assert markdown_text("_a_ [x](y) `c`\t\n<b>&") == r"\_a\_ \[x\](y) \`c\` &lt;b&gt;&amp;"


def test_a_template_that_misses_something_does_not_pass_over_it() -> None:
    with pytest.raises(UndefinedError):
        render("report.md")


def test_a_run_folder_has_settings_and_epochs(make_run: MakeRun) -> None:
    run = make_run()
    content = report_content(run, evaluate(run, draws=10))
    assert content["training_sentence"].startswith("40 epochs in 20 minutes, ")
    assert {("split.by", "group"), ("split.val", "0.2")} <= set(content["settings"])


def test_a_file_alone_has_neither(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    shutil.copy(run / "predictions.csv", tmp_path)
    for alone in (run / "predictions.csv", tmp_path):  # the file, and a folder with nothing else
        content = report_content(alone, evaluate(alone, draws=10))
        assert content["settings"] == [] and content["training_figures"] == []


def test_broken_files_are_named(make_run: MakeRun) -> None:
    run = make_run()
    scores = evaluate(run, draws=10)
    (run / "metrics.jsonl").write_text('{"epoch": 1, "loss": 1.0}\n{"epoch": 2, "lo')
    with pytest.raises(InputError, match=r"metrics.jsonl, line 2 is not JSON"):
        write_report(run, scores)
    (run / "metrics.jsonl").write_text("[1, 2]\n")
    with pytest.raises(InputError, match=r"line 1: expected an object with an 'epoch', got '\[1, 2\]'"):
        write_report(run, scores)
    (run / "settings.toml").write_text("lr = = 1")
    with pytest.raises(InputError, match=r"settings.toml is not valid TOML"):
        write_report(run, scores)


def test_settings_are_listed_as_they_would_be_given() -> None:
    settings = {"deterministic": True, "drops": [0.5, 0.75], "split": {"by": "group"}}
    assert list(flat_settings(settings)) == [("deterministic", "true"), ("drops", "0.5, 0.75"), ("split.by", "group")]
    assert list(flat_settings({"lr": 0.1})) == [("lr", "0.1")]


def opened(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/jpeg;base64,"))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for kind, colour in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
        (tmp_path / kind).mkdir()
        for i in range(3):
            Image.new("RGB", (300, 200), colour).save(tmp_path / kind / f"{kind}{i}.png")
    return tmp_path


def test_pictures_are_small_and_of_the_right_image(folder: Path) -> None:
    from cclnet.data.sources import open_data

    names = [name for name in open_data(folder).names if "red" in name][:2]
    pictures, note = thumbnails(names, {"data": str(folder)})
    assert list(pictures) == names and note == ""
    picture = opened(pictures[names[0]])
    assert picture.size == (160, 107) and picture.getpixel((80, 53))[0] > 150  # type: ignore[index]


def test_data_that_has_moved_is_found_where_it_is_said_to_be(folder: Path) -> None:
    from cclnet.data.sources import open_data

    name = open_data(folder).names[0]
    assert thumbnails([name], {"data": "gone"}, data=str(folder))[0]
    pictures, note = thumbnails([name], {"data": "gone"})
    assert pictures == {} and note == (
        "The pictures are left out, because the data cannot be opened here: gone does not exist."
    )


def test_images_that_are_gone_or_broken_are_counted(folder: Path) -> None:
    from cclnet.data.sources import open_data

    names = list(open_data(folder).names)
    broken = next(path for path in folder.rglob("*0.png"))
    broken.write_bytes(broken.read_bytes()[:60])
    pictures, note = thumbnails([*names, "elsewhere"], {"data": str(folder)})
    assert len(pictures) == 5
    assert f"1 of these images are not in {folder}" in note and "1 of these images cannot be read: cannot read" in note


def test_a_run_that_does_not_say_where_its_images_are() -> None:
    assert thumbnails(["a"], {}) == ({}, "The pictures are left out: the run does not say where its images are.")
    assert thumbnails([], {"data": "gone"}) == ({}, "")


@pytest.mark.parametrize("shape", [(2, 30, 20), (2, 30, 20, 1), (2, 30, 20, 3)])
def test_images_held_in_an_array(shape: tuple[int, ...]) -> None:
    images = np.zeros(shape, np.uint8)
    images[1] = 255
    table = ImageTable("array", Path(), ["a", "b"], images, np.array([0, 1]), ("x", "y"))
    picture = opened(data_uri(pixels(table, 1)))
    assert picture.size == (20, 30) and picture.getpixel((5, 5)) == (255, 255, 255)
