"""Loading a model and asking it: the same pixels and the same probabilities as when the run was tested."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from shipped_run import CLASSES, write_images, write_run

import cclnet
from cclnet import InputError
from cclnet.data.augment import normalise
from cclnet.data.cache import decode
from cclnet.data.image_io import UnreadableImage
from cclnet.data.loader import Loader
from cclnet.data.table import ImageTable
from cclnet.deploy.engines import central
from cclnet.deploy.predictor import Model, Prediction, enlarge, heat_of, overlay
from cclnet.functional import unsoften
from cclnet.network import TimmClassifier
from cclnet.runs.model import write_soft_labels


@pytest.fixture(scope="module")
def run(sound_run: Path) -> Path:
    return sound_run


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    return cclnet.load(run, device="cpu")


def crops_of_testing(paths: list[Path], short_side: int, crop: int, cache: Path) -> torch.Tensor:
    """What the tests of a run cut out of its decoded images."""
    labels = np.zeros(len(paths), np.int64)
    table = ImageTable("made", paths[0].parent, [p.name for p in paths], paths, labels, ("a", "b"))
    images = decode(table, short_side, cache_dir=cache, workers=1, progress=False)
    loader = Loader(images, labels, np.arange(len(paths)), batch_size=64, crop=crop)
    (batch,) = loader.epoch()
    return batch.crops


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_prepared_pixels_are_those_of_testing(model: Model, tmp_path: Path, suffix: str) -> None:
    paths = write_images(tmp_path / "images", 8, suffix)
    large = tmp_path / "images" / f"large.{suffix}"  # a JPEG of this size is shrunk while it is decoded
    Image.open(paths[0]).resize((700, 500), Image.Resampling.BICUBIC).save(large)
    crops = crops_of_testing([*paths, large], 36, 32, tmp_path / "cache")
    for path, crop in zip([*paths, large], crops, strict=True):
        np.testing.assert_array_equal(model.prepare(path), crop)
        np.testing.assert_array_equal(model.prepare(str(path)), crop)
        np.testing.assert_array_equal(model.prepare(path.read_bytes()), crop)


def test_probabilities_are_those_of_the_network_at_the_temperature(model: Model, run: Path, tmp_path: Path) -> None:
    paths = write_images(tmp_path / "images")
    net = TimmClassifier("test_resnet", 4).eval()
    net.shipped.load_state_dict(load_file(run / "model.safetensors"))
    crops = crops_of_testing(paths, 36, 32, tmp_path / "cache")
    with torch.no_grad():
        images = normalise(crops, torch.tensor([0.5, 0.4, 0.6]), torch.tensor([0.2, 0.25, 0.3]))
        logits = net.logits(net.features(images)).double()
    expected = torch.softmax(logits / 1.5, dim=1).numpy()
    found = model.predict(paths)
    np.testing.assert_allclose([p.probabilities for p in found], expected, atol=1e-5)
    assert [p.label for p in found] == [CLASSES[k] for k in expected.argmax(axis=1)]
    np.testing.assert_allclose([p.confidence for p in found], expected.max(axis=1), atol=1e-5)


TARGET = [[0.85, 0.05, 0.05, 0.05], [0.1, 0.7, 0.1, 0.1], [0.0, 0.25, 0.75, 0.0], [0.1, 0.1, 0.1, 0.7]]


def test_soft_labels_are_taken_out_before_the_temperature(model: Model, tmp_path: Path) -> None:
    paths = write_images(tmp_path / "images")
    plain = np.array([p.probabilities for p in model.predict(paths)]) ** 1.5  # as trained, the temperature undone
    said = torch.tensor(plain / plain.sum(axis=1, keepdims=True))
    left = unsoften(said, torch.tensor(TARGET, dtype=torch.float64)) ** (1 / 1.5)
    expected = (left / left.sum(dim=1, keepdim=True)).numpy()
    found = cclnet.load(write_run(tmp_path / "run", target=TARGET), device="cpu").predict(paths)
    np.testing.assert_allclose([p.probabilities for p in found], expected, atol=1e-5)
    assert not np.allclose(expected, [p.probabilities for p in model.predict(paths)], atol=1e-3)


@pytest.mark.parametrize("target", [TARGET[:3], [row[:3] for row in TARGET], [[0.5, 0.2, 0.2, 0.2]] * 4, [[]]])
def test_a_target_that_is_none_is_refused(tmp_path: Path, target: object) -> None:
    with pytest.raises(InputError, match="target must be null, or for each class"):
        cclnet.load(write_run(tmp_path / "run", target=target))


@pytest.mark.parametrize("target", [[["1", 0, 0, 0]] * 4, "none", [[-0.1, 0.1, 0.5, 0.5]] * 4])
def test_a_target_of_other_values_is_refused(tmp_path: Path, target: object) -> None:
    with pytest.raises(InputError, match=r"target.* must be .*(a number|at least 0 and at most 1), got"):
        cclnet.load(write_run(tmp_path / "run", target=target))


def test_a_target_that_cannot_be_taken_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="singular"):
        cclnet.load(write_run(tmp_path / "run", target=[[0.25] * 4] * 4), device="cpu")


def test_several_labels_are_those_over_half(tmp_path: Path) -> None:
    model = cclnet.load(write_run(tmp_path / "run", multilabel=True, temperature=None), device="cpu")
    found = model.predict(write_images(tmp_path / "images", 12))
    for prediction in found:
        over = [name for name, p in zip(CLASSES, prediction.probabilities, strict=True) if p >= 0.5]
        assert prediction.label == "|".join(over)
        assert prediction.confidence == np.maximum(prediction.probabilities, 1 - prediction.probabilities).min()
    sums = np.array([p.probabilities.sum() for p in found])
    assert (np.abs(sums - 1) > 1e-3).any()


def test_one_image_in_every_form(model: Model, tmp_path: Path) -> None:
    (path,) = write_images(tmp_path, 1)
    opened = Image.open(path)
    expected = model.predict(path).probabilities
    for image in (str(path), path.read_bytes(), opened, np.asarray(opened.convert("RGB"))):
        found = model.predict(image)
        assert isinstance(found, Prediction)
        np.testing.assert_array_equal(found.probabilities, expected)
    grey = np.asarray(opened.convert("L"))
    in_colour = np.repeat(grey[:, :, None], 3, axis=2)
    for image in (grey, grey[:, :, None], Image.fromarray(grey)):
        np.testing.assert_array_equal(model.prepare(image), model.prepare(in_colour))


def test_a_pillow_image_is_set_upright(model: Model, tmp_path: Path) -> None:
    (path,) = write_images(tmp_path, 1)
    upright = Image.open(path).convert("RGB")
    exif = Image.Exif()
    exif[274] = 6  # to be turned by 90 degrees
    file = io.BytesIO()
    upright.transpose(Image.Transpose.ROTATE_90).save(file, "PNG", exif=exif)
    np.testing.assert_array_equal(model.prepare(Image.open(file)), model.prepare(upright))
    np.testing.assert_array_equal(model.prepare(file.getvalue()), model.prepare(upright))


def test_lists_of_any_length(model: Model, tmp_path: Path) -> None:
    paths = write_images(tmp_path, 5)
    assert model.predict([]) == []
    by_one = [model.predict(path).probabilities for path in paths]
    np.testing.assert_allclose([p.probabilities for p in model.predict(paths, batch_size=2)], by_one, atol=1e-5)


def test_what_a_prediction_says(model: Model, tmp_path: Path) -> None:
    prediction = model.predict(write_images(tmp_path, 1)[0])
    order = np.argsort(-prediction.probabilities)
    assert prediction.top(2) == [(CLASSES[k], prediction.probabilities[k]) for k in order[:2]]
    assert len(prediction.top(99)) == len(CLASSES)
    assert prediction.abstain is None and prediction.heat is None
    assert model.similar(0) == (("bee", 0.2), ("cat", 0.15), ("dog", 0.05))  # row 0 of soft_labels.csv, without itself
    assert prediction.similar == model.similar(int(order[0]))


def test_abstaining_is_being_less_sure_than_the_threshold(model: Model, tmp_path: Path) -> None:
    paths = write_images(tmp_path, 8)
    sure = sorted(p.confidence for p in model.predict(paths))
    middle = (sure[3] + sure[4]) / 2
    assert sum(bool(p.abstain) for p in model.predict(paths, threshold=middle)) == 4


def test_the_order_of_classes_is_that_of_the_model(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "run", classes=["dog", "cat", "bee", "ant"])
    straight, turned = cclnet.load(run).soft_labels, cclnet.load(other).soft_labels
    assert straight is not None and turned is not None
    np.testing.assert_array_equal(turned, straight[::-1, ::-1])


def test_onnx_says_what_torch_says(model: Model, sound_onnx: Path, tmp_path: Path) -> None:
    paths = write_images(tmp_path, 7)
    onnx = cclnet.load(sound_onnx)
    assert (onnx.engine, onnx.device, model.engine) == ("onnx", "cpu", "torch")
    threshold = model.threshold(coverage=0.5)
    assert onnx.threshold(coverage=0.5) == pytest.approx(threshold, rel=1e-8)
    for a, b in zip(onnx.predict(paths, True, threshold), model.predict(paths, True, threshold), strict=True):
        np.testing.assert_allclose(a.probabilities, b.probabilities, atol=1e-5)
        assert (a.label, a.abstain, a.similar) == (b.label, b.abstain, b.similar)
        assert a.heat is not None and b.heat is not None
        np.testing.assert_allclose(a.heat, b.heat, atol=1e-3)


def test_a_run_is_converted_for_the_engine_asked_for(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    paths = write_images(tmp_path, 2)
    converted = cclnet.load(run, engine="onnx")
    assert converted.engine == "onnx"
    for a, b in zip(converted.predict(paths), cclnet.load(run, engine="torch").predict(paths), strict=True):
        np.testing.assert_allclose(a.probabilities, b.probabilities, atol=1e-5)


def test_a_file_can_be_given_instead_of_its_folder(run: Path, sound_onnx: Path) -> None:
    assert cclnet.load(run / "model.safetensors").engine == "torch"
    assert cclnet.load(sound_onnx / "model.onnx").engine == "onnx"


WITHOUT_TORCH = """
import sys
import cclnet
model = cclnet.load(sys.argv[1])
prediction = model.predict(sys.argv[2], explain=True)
print(prediction.label, prediction.heat.shape, prediction.similar[0][0])
print(sorted({"torch", "timm", "lightning", "matplotlib", "onnx"} & set(sys.modules)))
"""


def test_onnx_needs_no_torch(model: Model, sound_onnx: Path, tmp_path: Path) -> None:
    (path,) = write_images(tmp_path, 1)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(sound_onnx), str(path)],
                          capture_output=True, text=True, check=True)  # fmt: skip
    said = model.predict(path)
    assert done.stdout.splitlines() == [f"{said.label} (32, 32) {said.similar[0][0]}", "[]"]


def test_what_cannot_be_loaded(run: Path, sound_onnx: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist"):
        cclnet.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"holds no model: neither model.safetensors nor model.onnx"):
        cclnet.load(tmp_path)
    with pytest.raises(InputError, match="unknown engine 'onx'; did you mean 'onnx'"):
        cclnet.load(run, engine="onx")
    with pytest.raises(InputError, match="runs only in the engine onnx"):
        cclnet.load(sound_onnx, engine="torch")
    with pytest.raises(InputError, match="device 'tpu' cannot be used"):
        cclnet.load(run, device="tpu")
    with pytest.raises(InputError, match="unknown device for ONNX Runtime 'tpu'"):
        cclnet.load(sound_onnx, device="tpu")


def test_a_run_that_is_not_finished_says_what_its_checkpoints_are_for(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match="cclnet train --resume"):
        cclnet.load(tmp_path)


def test_what_is_no_image(model: Model, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(UnreadableImage, match=r"text.jpg: not an image"):
        model.predict(tmp_path / "text.jpg")
    for odd in (np.zeros((4, 4, 3)), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8), 7):
        with pytest.raises(InputError, match=r"an image is a path, the bytes of a file"):
            model.predict(odd)
    with pytest.raises(UnreadableImage, match="more than the limit of 100"):
        model.prepare(write_images(tmp_path, 1)[0], max_pixels=100)
    with pytest.raises(InputError, match=r"a batch is uint8 \[N, 32, 32, 3\]"):
        model.run(np.zeros((1, 30, 32, 3), np.uint8))


@pytest.mark.parametrize("off", [np.zeros(4), np.full(4, 0.1), np.array([0.3, 0.05, 0.02, 0.03])])
def test_labels_that_were_not_learned_name_no_similar_classes(tmp_path: Path, off: np.ndarray) -> None:
    """Hard labels, and label smoothing, uniform or by class frequency: no class is nearer to one than to another."""
    run = write_run(tmp_path / "run")
    matrix = np.tile(off, (4, 1))
    np.fill_diagonal(matrix, 0.0)
    np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
    write_soft_labels(run / "soft_labels.csv", CLASSES, matrix)
    assert cclnet.load(run, engine="torch").soft_labels is None


def test_no_soft_labels_no_similar_classes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "soft_labels.csv").unlink()
    model = cclnet.load(folder)
    assert model.soft_labels is None and model.similar(0) == ()


def test_soft_labels_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", classes=["ant", "bee", "cat", "eel"])
    with pytest.raises(InputError, match=r"soft_labels.csv has the classes .*dog, the other files have .*eel"):
        cclnet.load(folder)


def test_plain_import_brings_no_heavy_package() -> None:
    code = "import cclnet, sys; print(sorted({'torch', 'pandas', 'scipy', 'matplotlib', 'timm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert {"load", "CCLHead", "CCLNet"} <= set(dir(cclnet))
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = cclnet.lod


def test_the_temperature_is_that_of_calibration_json(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", temperature=None)
    assert cclnet.load(run, device="cpu").temperature is None
    fitted = {"value": 2.5, "fitted_on": "val", "images": 50, "halves": None}
    (run / "calibration.json").write_text(json.dumps({"format": 1, "temperature": fitted}))
    model = cclnet.load(run, device="cpu")
    assert model.temperature == 2.5 == model.calibration.temperature.value
    for wrong, message in (("{", "is not JSON"), ("{}", "format"), ('{"format": 1}', "temperature"),
                           ('{"format": 1, "temperature": 2.5}', "temperature"),
                           ('{"format": 1, "temperature": {"value": -1}}', "temperature.value")):  # fmt: skip
        (run / "calibration.json").write_text(wrong)
        with pytest.raises(InputError, match=message):
            cclnet.load(run, device="cpu")


def test_a_threshold_needs_a_held_out_split(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    text = (folder / "predictions.csv").read_text().replace(",val,", ",train,").replace(",test,", ",train,")
    (folder / "predictions.csv").write_text(text)
    with pytest.raises(InputError, match="names no held-out split"):
        cclnet.load(folder).threshold(coverage=0.9)
    (folder / "predictions.csv").unlink()
    with pytest.raises(InputError, match=r"holds no predictions.csv"):
        cclnet.load(folder).threshold(coverage=0.9)


def test_the_central_crop() -> None:
    pixels = np.arange(5, dtype=np.uint8)[:, None, None].repeat(3, 2)
    assert central(pixels, (2, 1))[:, 0, 0].tolist() == [2, 3]


def test_heat_is_what_speaks_for_a_class() -> None:
    maps = np.array([[[-4.0, 2.0], [1.0, 0.0]], [[-1.0, -2.0], [-3.0, -4.0]]])
    assert heat_of(np.array([[[-1.0, 2.0, 4.0]]])).tolist() == [[[0.0, 0.5, 1.0]]]
    assert heat_of(maps).tolist() == [[[0.0, 1.0], [0.5, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]


def test_enlarging_keeps_the_range_and_the_place() -> None:
    heat = np.zeros((4, 4), np.float32)
    heat[3, 0] = 1
    large = enlarge(heat, (64, 96))
    assert large.shape == (64, 96) and large.dtype == np.float32 and large.min() >= 0 and large.max() <= 1
    assert large[60, 5] > 0.9 and large[5, 90] == 0


def test_an_overlay_covers_nothing_where_there_is_no_heat() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    heat = np.zeros((8, 8), np.float32)
    heat[:, 4:] = 1
    laid = overlay(pixels, heat, strength=1.0)
    np.testing.assert_array_equal(laid[:, :4], pixels[:, :4])
    assert (laid[:, 4:] == (253, 231, 37)).all()
