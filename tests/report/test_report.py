from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_run import CLASSES, MakeRun
from page_check import read_page
from PIL import Image

from cclnet.evaluation.evaluate import evaluate
from cclnet.report import write_report
from cclnet.report.text import interval_text, value_text


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
    assert len(rows) == 3  # per class, confusion, soft labels


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
    assert page.problems == [] and "Mean average precision" in page.text and "is a decision of its own" in page.text
    assert "What is taken for what" not in page.text and "an image may carry several labels" in page.text


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


def test_soft_labels_that_are_taken_out_are_told(make_run: MakeRun) -> None:
    run = make_run()
    model = json.loads((run / "model.json").read_text())
    size = len(model["classes"])
    assert "taken out of the probabilities" not in read_page(write_report(run, evaluate(run, draws=50))).text
    model["target"] = np.full((size, size), 1 / size).tolist()
    (run / "model.json").write_text(json.dumps(model))
    assert "taken out of the probabilities" in read_page(write_report(run, evaluate(run, draws=50))).text


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
    assert page.tags.count("img") == (2 if count > 40 else 0)  # the squares, once they are too large to write out
    assert ("The full matrix is in scores.json" in markdown) == (count > 40)
