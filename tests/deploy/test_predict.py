"""`cclnet predict`: from files of every kind to one table, with what cannot be read named in it."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from shipped_run import CLASSES, write_images, write_run
from typer.testing import CliRunner

import cclnet
from cclnet import InputError
from cclnet.cli import app
from cclnet.deploy import predict as predicting
from cclnet.deploy.engines import TorchEngine
from cclnet.deploy.export import export
from cclnet.deploy.predict import gather, predict, write_csv
from cclnet.deploy.predictor import Model
from cclnet.deploy.shipped import read_shipped
from cclnet.evaluation.evaluate import evaluate
from cclnet.runs.folder import RunFolder
from cclnet.runs.out_of_distribution import fit_statistics
from cclnet.runs.predictions import read_predictions
from cclnet.settings import make_settings
from cclnet.training.loop import train


@pytest.fixture(scope="module")
def run(sound_run: Path) -> Path:
    return sound_run


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    return cclnet.load(run, device="cpu")


def command(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["predict", *map(str, arguments), "--quiet"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stderr


def test_the_table(run: Path, model: Model, tmp_path: Path) -> None:
    paths = write_images(tmp_path / "images", 21)
    code, said = command(run, tmp_path / "images", "--out", tmp_path / "out.csv", "--coverage", 0.5, "--batch-size", 4)
    assert code == 0 and "21 of 21 images predicted" in said
    table = pd.read_csv(tmp_path / "out.csv", keep_default_na=False)
    assert list(table) == ["image", "prediction", "rule", "confidence", "score", "abstain", "top", "similar", "problem",
                           *(f"p_{name}" for name in CLASSES)]  # fmt: skip
    assert table["image"].tolist() == [path.name for path in sorted(paths)]
    expected = model.predict(sorted(paths), threshold=model.threshold(coverage=0.5))
    np.testing.assert_allclose(table[[f"p_{n}" for n in CLASSES]], [p.probabilities for p in expected], atol=1e-6)
    assert table["prediction"].tolist() == [p.label for p in expected]
    assert table["abstain"].tolist() == ["yes" if p.abstain else "no" for p in expected]
    assert 0 < (table["abstain"] == "yes").sum() < 21
    first = expected[0]
    assert table["top"][0] == "|".join(f"{name}={p:.4f}" for name, p in first.top(3))
    assert table["similar"][0] == "|".join(f"{name}={p:.4f}" for name, p in first.similar)


def test_sets_and_decision_rules(tmp_path: Path) -> None:
    """The commands evaluate, predict and export with a rule: labels and sets follow from the probabilities."""
    folder, images = write_run(tmp_path / "run"), tmp_path / "images"
    write_images(images, 9)
    with pytest.raises(InputError, match="cclnet evaluate"):
        command(folder, images, "--out", tmp_path / "out.csv", "--sets", "0.9")
    evaluate(folder, draws=2, cost="ant|bee|cat:dog=30")
    exported = export(folder, "safetensors", tmp_path / "export")
    tables = {}
    for name, place, more in (
        ("run", folder, ()),
        ("export", exported, ()),
        ("other", folder, ("--decision", "balanced")),
    ):
        assert command(place, images, "--out", tmp_path / "out.csv", "--sets", "aps:0.9", *more)[0] == 0
        tables[name] = pd.read_csv(tmp_path / "out.csv", keep_default_na=False)
    pd.testing.assert_frame_equal(tables["run"], tables["export"])
    p = tables["run"][[f"p_{name}" for name in CLASSES]].to_numpy()
    costs = 1 - np.eye(4)
    costs[:3, 3] = 30
    assert tables["run"]["prediction"].tolist() == [CLASSES[k] for k in (p @ costs).argmin(axis=1)]
    assert tables["other"]["prediction"].tolist() == [CLASSES[k] for k in (p / [40, 30, 20, 10]).argmax(axis=1)]
    assert (set(tables["run"]["rule"]), set(tables["other"]["rule"])) == ({"costs"}, {"balanced"})
    thresholds = RunFolder(folder).read_calibration().sets
    assert thresholds is not None
    for row, listed in zip(p, tables["run"]["set"], strict=True):
        order = np.argsort(-row)
        scores = np.cumsum(row[order]) - row[order] / 2
        expected = [CLASSES[k] for k, score in zip(order, scores, strict=True) if score <= thresholds.at(0.9, "aps")]
        assert listed.split("|") == (expected or [CLASSES[order[0]]])
    with pytest.raises(InputError, match="export it again"):
        cclnet.load(exported, decision="balanced").threshold(coverage=0.5)


def test_what_cannot_be_read_is_listed_and_the_rest_goes_on(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    (whole, *_) = write_images(folder, 5, "jpg")
    (folder / "empty.jpg").touch()
    (folder / "text.png").write_text("not an image")
    (folder / "cut.jpg").write_bytes(whole.read_bytes()[:200])
    (folder / "notes.txt").write_text("passed over: not named as an image")
    code, said = command(run, folder, "--out", tmp_path / "out.csv", "--workers", 2, "--batch-size", 2)
    assert code == 1 and "5 of 8 images predicted" in said and "unreadable" in said
    table = pd.read_csv(tmp_path / "out.csv", keep_default_na=False).set_index("image")
    assert len(table) == 8
    assert table.loc["text.png", "problem"].startswith("not an image in a supported format")
    assert "truncated" in table.loc["cut.jpg", "problem"]
    broken = table[table["problem"] != ""]
    assert sorted(broken.index) == ["cut.jpg", "empty.jpg", "text.png"]
    assert (broken[["prediction", "confidence", "top", "similar", "p_ant"]] == "").all(axis=None)
    assert (table[table["problem"] == ""]["prediction"] != "").all()


def test_only_unreadable_images_still_make_a_table(run: Path, tmp_path: Path) -> None:
    code, _ = command(run, tmp_path / "missing.jpg", "--out", tmp_path / "out.csv")
    table = pd.read_csv(tmp_path / "out.csv", keep_default_na=False)
    assert code == 1 and table["problem"].tolist() == ["No such file or directory"]


def test_maps_are_written(run: Path, model: Model, tmp_path: Path) -> None:
    paths = write_images(tmp_path / "images", 2)
    code, _ = command(run, *paths, "--out", tmp_path / "out.csv", "--explain", tmp_path / "maps")
    assert code == 0
    table = pd.read_csv(tmp_path / "out.csv")
    assert table["overlay"].tolist() == ["000001_picture0.png", "000002_picture1.png"]
    for path, name in zip(paths, table["overlay"], strict=True):
        heat = np.load(tmp_path / "maps" / name.replace(".png", ".npy"), allow_pickle=False)
        expected = model.predict(path, explain=True).heat
        np.testing.assert_allclose(heat, expected, atol=1e-5)
        overlay = np.asarray(Image.open(tmp_path / "maps" / name))
        assert overlay.shape == (32, 32, 3)
        np.testing.assert_array_equal(overlay[heat == 0], model.prepare(path)[heat == 0])


def test_two_images_of_one_name_do_not_meet(run: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "a", 1)
    write_images(tmp_path / "b", 1)
    inputs = gather([tmp_path])
    assert inputs.names == ["a/picture0.png", "b/picture0.png"]
    predict(cclnet.load(run), inputs, explain=tmp_path / "maps", progress=False)
    assert len(list((tmp_path / "maps").glob("*.png"))) == 2


def test_files_and_folders_in_any_number(tmp_path: Path) -> None:
    paths = write_images(tmp_path / "a", 2)
    write_images(tmp_path / "b" / "deep", 1)
    inputs = gather([paths[1], tmp_path / "b", paths[1], tmp_path / "a"])
    assert inputs.images == [paths[1], tmp_path / "b" / "deep" / "picture0.png", paths[0]]
    assert inputs.names == [str(path) for path in inputs.images]


def test_a_table_names_images_and_its_labels_go_along(run: Path, tmp_path: Path) -> None:
    paths = write_images(tmp_path / "images", 12)
    rows = [f"{p.stem},{CLASSES[i % 4]},lesion{i // 2}" for i, p in enumerate(paths)]
    (tmp_path / "list.csv").write_text(
        "image_id,label,group\n" + "\n".join([*rows, "nowhere,ant,lesion9", ",bee,x"]) + "\n"
    )
    inputs = gather([tmp_path / "list.csv"])
    assert inputs.problems == {12: f"no such file in {tmp_path} or below", 13: "row 15 of list.csv names no image"}
    code, _ = command(run, tmp_path / "list.csv", "--out", tmp_path / "out.csv")
    assert code == 1
    table = pd.read_csv(tmp_path / "out.csv", keep_default_na=False)
    assert table["label"].tolist()[:4] == list(CLASSES) and table["group"][2] == "lesion1"
    table[table["problem"] == ""].to_csv(tmp_path / "readable.csv", index=False)
    scores = evaluate(tmp_path / "readable.csv", draws=10)  # predictions of labelled images can be evaluated
    assert scores.split.images == 12
    right = (table["label"] == table["prediction"])[:12].mean()
    assert scores.overall["accuracy"].value == pytest.approx(right)


@pytest.mark.parametrize(
    ("header", "cells", "label", "group"),
    [("image_id,dx,lesion_id", "{},bee,L1", "bee", "L1"),
     ("image,Patient ID,lesion_id,diagnosis", "{},P7,L1,cat", "cat", "P7"),  # the patient is the wider group
     ("image,label,diagnosis", "{},ant,carcinoma", "ant", None),
     ("image,MEL,NV,patient", "{},0,1,P1", "NV", "P1"),
     ("image,finding_labels", "{},bee ; cat", "bee|cat", None),
     ("image,class,diagnosis,group", "{},ant,bee,G", None, "G"),  # either may be the label
     ("image,label,age", "{},,40", None, None), ("image,age", "{},40", None, None)],
)  # fmt: skip
def test_labels_and_groups_are_found_as_in_training(
    header: str, cells: str, label: str | None, group: str | None, tmp_path: Path
) -> None:
    (path,) = write_images(tmp_path, 1)
    (tmp_path / "list.csv").write_text(f"{header}\n{cells.format(path.name)}\n")
    columns = gather([tmp_path / "list.csv"]).columns
    assert columns == {name: [value] for name, value in (("label", label), ("group", group)) if value is not None}


def test_a_row_without_a_label_has_none(tmp_path: Path) -> None:
    first, second = write_images(tmp_path, 2)
    for header, known, unknown in (("dx", "bee", ""), ("MEL,NV", "0,1", ",")):
        (tmp_path / "list.csv").write_text(f"image,{header}\n{first.name},{known}\n{second.name},{unknown}\n")
        assert gather([tmp_path / "list.csv"]).columns["label"] == [known if header == "dx" else "NV", ""]


def test_drawn_images_with_several_labels(tmp_path: Path) -> None:
    inputs = gather(["synthetic-multilabel:images=8"])
    assert len(inputs) == 8 and any("|" in label for label in inputs.columns["label"])


def test_a_table_with_a_column_of_another_name(tmp_path: Path) -> None:
    (path,) = write_images(tmp_path, 1)
    (tmp_path / "list.tsv").write_text(f"photo\tage\n{path.name}\t40\n")
    assert gather([tmp_path / "list.tsv"], "photo").images == [path]
    assert gather([tmp_path / "list.tsv"]).images == [path]  # by the file that it names
    (tmp_path / "list.tsv").write_text("photo\tage\nelsewhere.png\t40\n")
    with pytest.raises(InputError, match=r"no image column"):
        gather([tmp_path / "list.tsv"])


def test_what_cannot_be_gathered(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("image\n")
    (tmp_path / "empty").mkdir()
    for places, message in (
        ([], "no images: give image files"),
        ([tmp_path / "list.csv"], "names no images: it has a header only"),
        ([tmp_path / "empty"], "holds no image files"),
        ([tmp_path / "empty", tmp_path / "empty"], "no image files in"),
        ([tmp_path / "list.csv", tmp_path / "x.png"], r"neither an image nor a folder: .*list.csv"),
        ([tmp_path / "typo"], r"neither an image nor a folder: .*typo"),
    ):
        with pytest.raises(InputError, match=message):
            gather(places)


def test_predicting_what_a_run_was_tested_on_gives_what_it_said(tmp_path: Path) -> None:
    """From training to the exported table: the probabilities of testing, at the run's temperature."""
    settings = make_settings(
        {"data": "synthetic:images=210,size=36", "short_side": 36, "backbone": "test_resnet", "epochs": 1,
         "batch_size": 32, "augment": {"crop": 32}}
    )  # fmt: skip
    run = train(settings, tmp_path / "run", accelerator="cpu", progress=False)
    evaluate(run, draws=10)
    model = cclnet.load(run, device="cpu")
    inputs = gather(["synthetic:images=210,size=36"])
    found = predict(model, inputs, progress=False)
    write_csv(tmp_path / "out.csv", model, found)
    tested = read_predictions(run / "predictions.csv")
    said = read_predictions(tmp_path / "out.csv")
    at = [said.images.tolist().index(name) for name in tested.images]
    np.testing.assert_array_equal(said.labels[at], tested.labels)
    powered = tested.probabilities ** (1 / (model.temperature or 1))
    np.testing.assert_allclose(said.probabilities[at], powered / powered.sum(axis=1, keepdims=True), atol=1e-5)
    # The features of the shipped network are those of the training: the scores of its held-out images are the stored.
    table, statistics = pd.read_csv(tmp_path / "out.csv"), RunFolder(run).read_feature_statistics()
    assert statistics is not None and statistics.noise_auroc is not None
    np.testing.assert_allclose(np.sort(table["ood"].to_numpy()[at]), statistics.held_out, rtol=1e-3)


def test_unlike_images_are_refused_the_same_in_every_engine(tmp_path: Path) -> None:
    """Statistics of smooth pictures of low contrast: white noise is far from all of them, in PyTorch and in the
    exported file. (From pictures of all colours and contrasts it is not, for a network with random weights.)"""
    folder, images = write_run(tmp_path / "run"), tmp_path / "images"
    write_images(images, 80, values=(100, 160))
    with pytest.raises(InputError, match=r"features\.safetensors"):
        command(folder, images, "--out", tmp_path / "out.csv", "--refuse", "0.1")
    shipped = read_shipped(folder / "model.safetensors", RunFolder(folder).read_model(), with_features=True)
    model = cclnet.load(folder, device="cpu")
    crops = np.stack([model.prepare(path) for path in sorted(images.iterdir())])
    *_, features = TorchEngine(shipped, "cpu").run(crops, maps=False)
    assert features is not None
    found = fit_statistics(features[::2], None)
    assert found is not None
    RunFolder(folder).write_feature_statistics(replace(found, held_out=np.sort(found.score(features[1::2]))))
    places = [folder]
    if find_spec("onnxruntime"):
        places.append(export(folder, "onnx", tmp_path / "export"))
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(images / "noise.png")
    scores = []
    for place in places:
        code, said = command(place, images, "--out", tmp_path / "out.csv", "--refuse", "0.05")
        table = pd.read_csv(tmp_path / "out.csv").set_index("image")
        assert code == 0 and "refused as unlike" in said and table.loc["noise.png", "refused"] == "yes"
        assert table.loc["noise.png", "ood"] > 1.5 * table["ood"].drop("noise.png").max()
        assert 1 <= (table["refused"] == "yes").sum() <= 12
        scores.append(table["ood"].to_numpy())
        assert command(place, images, "--out", tmp_path / "out.csv", "--refuse", "0")[0] == 0
        assert "refused" not in pd.read_csv(tmp_path / "out.csv")
    np.testing.assert_allclose(scores[0], scores[-1], rtol=1e-3)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are threads elsewhere")
def test_a_worker_that_is_killed_is_told(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_images(tmp_path, 8)
    monkeypatch.setattr(predicting, "prepare", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(InputError, match="was killed, most likely because the memory was full"):
        predict(model, gather(paths), batch_size=2, workers=2, progress=False)


def test_many_images_are_worth_converting_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    asked = []
    maps = {"onnx": False, "torch": True, "auto": True}

    def load(path: Path, device: str, engine: str) -> SimpleNamespace:
        asked.append(engine)
        return SimpleNamespace(has_maps=maps[engine])

    monkeypatch.setattr(predicting, "load", load)
    for images, engine in ((10, "auto"), (5000, "auto"), (5000, "torch")):
        predicting.open_model(run, images, "cpu", engine)
    assert asked == ["auto", "onnx", "torch"]
    assert predicting.open_model(run, 5000, "cpu", "auto", explain=True).has_maps  # only torch can


def test_what_could_not_be_read_does_not_keep_the_rest_from_being_judged(run: Path, tmp_path: Path) -> None:
    paths = write_images(tmp_path, 6)
    paths[2].write_bytes(paths[2].read_bytes()[:40])
    (tmp_path / "deep").mkdir()
    table = tmp_path / "deep" / "table.csv"
    rows = [f"{path.name},{CLASSES[i % len(CLASSES)]}" for i, path in enumerate(paths)]
    table.write_text("\n".join(["image,label", *rows]) + "\n")
    said = tmp_path / "said.csv"
    code, _ = command(run, table, "--image-folder", tmp_path, "--out", said)
    assert code == 1  # one is listed as unreadable
    with pytest.warns(UserWarning, match="1 image without a prediction"):
        kept = read_predictions(said)
    assert sorted(kept.images.tolist()) == sorted(path.name for i, path in enumerate(paths) if i != 2)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_no_text_are_written_down_all_the_same(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (path,) = write_images(tmp_path, 1)
    path.rename(os.fsdecode(os.fsencode(folder) + b"/L\xe4sion.png"))
    code, _ = command(run, folder, "--out", tmp_path / "said.csv")
    assert code == 0 and pd.read_csv(tmp_path / "said.csv")["image"].tolist() == ["L\\xe4sion.png"]


def test_notes_and_refusals_of_the_command(run: Path, tmp_path: Path) -> None:
    (path,) = write_images(tmp_path, 1)
    uncalibrated = write_run(tmp_path / "uncalibrated", temperature=None)
    code, said = command(uncalibrated, path, "--out", tmp_path / "new" / "out.csv", "--risk", 0.3)
    assert (tmp_path / "new" / "out.csv").is_file()
    assert code == 0 and "there is no temperature" in said and "abstains where the confidence is below" in said
    with pytest.raises(InputError, match="the run's own predictions"):
        command(run, path, "--out", run / "predictions.csv")
    with pytest.raises(InputError, match="the run's own predictions"):
        command(run / "model.safetensors", path, "--out", run / "predictions.csv")
    table = tmp_path / "table.csv"
    table.write_text(f"image\n{path.name}\n")
    with pytest.raises(InputError, match="is also an input: choose another"):
        command(run, table, "--out", table)
    with pytest.raises(InputError, match="is a folder: give --out the name of a table"):
        command(run, path, "--out", tmp_path)
    with pytest.raises(InputError, match="and not both"):
        command(run, path, "--out", tmp_path / "out.csv", "--risk", 0.3, "--coverage", 0.5)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights on Windows")
def test_links_out_of_the_folder_pipes_and_devices(run: Path, tmp_path: Path) -> None:
    (inside, outside), folder = write_images(tmp_path / "images", 2), tmp_path / "given"
    folder.mkdir()
    inside.rename(folder / "inside.png")
    (folder / "link.png").symlink_to(outside)
    (folder / "table.csv").write_text("image\ninside.png\nlink.png\n")
    os.mkfifo(folder / "pipe.png")
    for place in (folder, folder / "table.csv"):
        with pytest.raises(InputError, match=r"lead out of it.*link\.png"):
            gather([place])
        assert len(gather([place], follow_links=True)) == 2
    assert command(run, folder, "--out", tmp_path / "out.csv", "--follow-links")[0] == 0
    code, said = command(run, folder / "inside.png", folder / "pipe.png", "/dev/zero", "--out", tmp_path / "out.csv")
    assert code == 1 and "1 of 3 images predicted" in said
    assert pd.read_csv(tmp_path / "out.csv")["problem"].tolist()[1:] == ["it is a directory, a pipe or a device"] * 2


def test_large_crops_get_small_batches(tmp_path: Path) -> None:
    inputs = gather([str(path) for path in write_images(tmp_path / "images", 5)])
    for crop, sizes in ((1024, [4, 1]), (2048, [1] * 5), (512, [5])):
        description = SimpleNamespace(short_side=crop, crop=(crop, crop))
        batches = predicting.prepared(description, inputs, 16, 1)  # type: ignore[arg-type]
        assert [len(rows) for rows, _, _ in batches] == sizes


def test_a_link_to_itself_is_a_row_with_a_reason(run: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop.png"
    loop.symlink_to(loop.name)
    result = CliRunner().invoke(app, ["predict", str(run), str(loop), "--out", str(tmp_path / "p.csv"), "--quiet"])
    assert result.exit_code in (1, 2) and not isinstance(result.exception, (RuntimeError, OSError))
