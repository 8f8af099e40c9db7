"""Exported models: the same answers as PyTorch, a description that suffices, and nothing left of a failure."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from shipped_run import CLASSES, write_images, write_run
from typer.testing import CliRunner

import cclnet
from cclnet import InputError
from cclnet.cli import app
from cclnet.deploy import export as exporting
from cclnet.deploy.engines import OnnxEngine
from cclnet.deploy.export import check_images, export
from cclnet.evaluation.evaluate import evaluate
from cclnet.runs.checksums import accept_folder
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import Calibration, FittedTemperature, Member

PAPER = ("resnet18", "mobilenetv2_100", "efficientnet_b0")


@pytest.mark.parametrize("backbone", PAPER)
def test_onnx_agrees_with_torch_for_the_paper_s_networks(backbone: str, tmp_path: Path) -> None:
    """1e-4 in probability, one image at a time and 32 at once; the maps too."""
    pytest.importorskip("onnxruntime")
    run = write_run(tmp_path / "run", backbone, crop=64, short_side=72)
    onnx, torch_ = cclnet.load(export(run, "onnx")), cclnet.load(run, device="cpu")
    images = check_images((64, 64), 32)
    expected, heat = torch_.run(images, explain=True)
    assert np.ptp(expected, axis=0).max() > 0.05  # images are told apart, so that agreeing means something
    given, given_heat = onnx.run(images, explain=True)
    np.testing.assert_allclose(given, expected, atol=1e-4)
    np.testing.assert_allclose(given_heat, heat, atol=1e-2)
    by_one = np.concatenate([onnx.run(image[None])[0] for image in images])
    np.testing.assert_allclose(by_one, expected, atol=1e-4)


def test_several_labels_in_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    run = write_run(tmp_path / "run", multilabel=True)
    onnx, torch_ = cclnet.load(export(run, "onnx")), cclnet.load(run, device="cpu")
    images = check_images((32, 32), 9)
    np.testing.assert_allclose(onnx.run(images)[0], torch_.run(images)[0], atol=1e-5)
    assert onnx.multilabel and onnx.info["label_threshold"] == 0.5


def test_soft_labels_are_taken_out_in_onnx_too(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    target = [[0.85, 0.05, 0.05, 0.05], [0.1, 0.7, 0.1, 0.1], [0.0, 0.25, 0.75, 0.0], [0.1, 0.1, 0.1, 0.7]]
    run = write_run(tmp_path / "run", target=target)
    out = export(run, "onnx")
    onnx, torch_ = cclnet.load(out), cclnet.load(run, device="cpu")
    images = check_images((32, 32), 9)
    np.testing.assert_allclose(onnx.run(images)[0], torch_.run(images)[0], atol=1e-5)
    assert onnx.info["done_by_the_file"] == ["normalise", "target", "temperature"]
    assert "inverse of target" in onnx.info["output"]
    assert "removed from the probabilities" in (out / "README.md").read_text()
    told = json.loads((out / "model.json").read_text()) | {"target": None}
    (out / "model.json").write_text(json.dumps(told))
    accept_folder(out)
    with pytest.raises(InputError, match="whose target differ"):
        cclnet.load(out)


def test_a_network_without_closed_form_has_one_output(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out = export(write_run(tmp_path / "run", "test_convnext"), "onnx")
    model = cclnet.load(out)
    images = check_images((32, 32), 3)
    assert model.info["maps"] is False and model.run(images)[0].shape == (3, 4)
    with pytest.raises(InputError, match="no class activation maps"):
        model.run(images, explain=True)


def test_onnx_by_itself(sound_run: Path, sound_onnx: Path) -> None:
    """What someone without cclnet has: a file that takes uint8 images and says what it is."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(sound_onnx / "model.onnx")
    (images,) = session.get_inputs()
    assert (images.name, images.type, images.shape[1:]) == ("images", "tensor(uint8)", [32, 32, 3])
    assert isinstance(images.shape[0], str)  # any number of images
    assert [output.name for output in session.get_outputs()] == ["probabilities", "maps"]
    told = json.loads(session.get_modelmeta().custom_metadata_map["cclnet"])
    assert (told["classes"], told["temperature"]) == (list(CLASSES), 1.5)
    batch = check_images((32, 32), 5)
    (probabilities,) = session.run(["probabilities"], {"images": batch})
    np.testing.assert_allclose(probabilities, cclnet.load(sound_run).run(batch)[0], atol=1e-5)


def test_the_torch_program(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    out = export(run, "torch")
    with zipfile.ZipFile(out / "model.pt2") as archive:  # JSON and raw numbers, no pickle
        for name in archive.namelist():
            assert '"use_pickle": true' not in archive.read(name).decode("latin-1")
            assert "sample_inputs" not in name or archive.getinfo(name).file_size == 0
    program = torch.export.load(out / "model.pt2").module()  # ours, made just now
    batch = check_images((32, 32), 5)
    expected = cclnet.load(run).run(batch)[0]
    for count in (1, 5):
        probabilities, maps = program(torch.from_numpy(batch[:count]))
        np.testing.assert_allclose(probabilities.detach(), expected[:count], atol=1e-5)
        assert maps.shape[:2] == (count, 4)


def test_the_weights_are_those_of_timm(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    out = export(run, "safetensors")
    timm.create_model("test_resnet", num_classes=4).load_state_dict(load_file(out / "model.safetensors"))
    images = write_images(tmp_path / "images", 2)
    for a, b in zip(cclnet.load(out).predict(images), cclnet.load(run).predict(images), strict=True):
        np.testing.assert_array_equal(a.probabilities, b.probabilities)


def test_the_description_suffices(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", temperature=2.0)
    out = export(run, "safetensors", tmp_path / "deep" / "out")
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "SHA256SUMS",
        "calibration.json",
        "model.json",
        "model.safetensors",
        "soft_labels.csv",
    ]
    info = json.loads((out / "model.json").read_text())
    for name in ("backbone", "classes", "short_side", "crop", "mean", "std", "class_counts"):
        assert info[name] == json.loads((run / "model.json").read_text())[name]
    calibration = json.loads((out / "calibration.json").read_text())
    assert calibration["temperature"]["value"] == 2.0 and "temperature" not in info
    assert info["preprocessing"][1].startswith("resize to a short side of 36 pixels, bicubic")
    assert info["preprocessing"][2] == "crop the centre, 32 x 32 (height x width)"
    assert info["trained"]["data"] == "insects"  # without the place where it lay
    assert info["exported"]["checked"]["probability"] == 0.0
    assert all(len((out / name).read_text().splitlines()) < 250 for name in ("model.json", "calibration.json"))
    model = cclnet.load(out)
    assert model.threshold(coverage=0.8) == pytest.approx(cclnet.load(run).threshold(coverage=0.8), rel=1e-8)


def test_a_run_without_predictions_has_no_thresholds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "predictions.csv").unlink()
    out = export(run, "safetensors")
    assert "abstention" not in json.loads((out / "calibration.json").read_text())
    with pytest.raises(InputError, match=r"no abstention curve"):
        cclnet.load(out).threshold(coverage=0.9)


@pytest.mark.parametrize("format", ["onnx", "torch", "safetensors"])
def test_a_model_that_differs_is_not_kept(
    format: str, sound_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run")
    before = sorted(path.name for path in run.iterdir())
    monkeypatch.setattr(exporting, "onnx_program", lambda *_: (sound_onnx / "model.onnx").read_bytes())
    monkeypatch.setattr(exporting, "MAX_DIFFERENCE", -1.0)
    with pytest.raises(InputError, match=r"differs from PyTorch by .* It was discarded"):
        export(run, format)
    assert sorted(path.name for path in run.iterdir()) == before


def test_the_check_sees_a_difference(tmp_path: Path) -> None:
    shipped = cclnet.load(write_run(tmp_path / "run"), device="cpu")._engine.shipped
    images = check_images((32, 32))

    def run(batch: np.ndarray, shift: float = 0.0, scale: float = 1.0) -> list[np.ndarray]:
        with torch.no_grad():
            probabilities, maps = (output.numpy() for output in shipped(torch.from_numpy(batch)))
        return [probabilities + shift, maps * scale]

    assert exporting.check(shipped, images, run, "it")["probability"] == 0
    for odd in ({"shift": 2e-4}, {"scale": 1.01}, {"shift": float("nan")}):
        with pytest.raises(InputError, match="it differs from PyTorch"):
            exporting.check(shipped, images, lambda batch, odd=odd: run(batch, **odd), "it")
    with pytest.raises(InputError, match="it has 1 outputs instead of 2"):
        exporting.check(shipped, images, lambda batch: run(batch)[:1], "it")
    with pytest.raises(InputError, match="it differs from PyTorch by inf"):
        exporting.check(shipped, images, lambda batch: [p[:1] for p in run(batch)], "it")


def test_a_model_json_of_another_model_is_refused(sound_onnx: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(sound_onnx, tmp_path / "out"))
    info = json.loads((out / "model.json").read_text())
    (out / "model.json").write_text(json.dumps(info | {"mean": [0.1, 0.1, 0.1]}))
    RunFolder(out).write_calibration(Calibration(FittedTemperature(3.0)))
    accept_folder(out)
    with pytest.raises(InputError, match=r"not the model that .* describe, whose mean, temperature differ"):
        cclnet.load(out)


OFFSETS = (0.9, -0.4, -0.7, 0.2)


def with_offsets(run: Path, offsets: tuple[float, ...] = OFFSETS, temperature: float = 1.5) -> Path:
    RunFolder(run).write_calibration(Calibration(FittedTemperature(temperature, "val", 150, None, offsets)))
    return run


def test_offsets_are_added_to_the_scaled_logits_in_every_format(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    run, plain = with_offsets(write_run(tmp_path / "run")), write_run(tmp_path / "plain")
    images = check_images((32, 32), 9)
    before, model = cclnet.load(plain, device="cpu").run(images)[0], cclnet.load(run, device="cpu")
    expected = before * np.exp(OFFSETS)
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(model.run(images)[0], expected, atol=1e-6)
    assert (expected.argmax(axis=1) != before.argmax(axis=1)).any() and model.map.offsets == OFFSETS
    for format in ("onnx", "safetensors", "timm"):
        out = export(run, format)
        given = cclnet.load(out, device="cpu")
        np.testing.assert_allclose(given.run(images)[0], expected, atol=1e-5)
        assert given.map.offsets == OFFSETS and "offsets" in given.info["output"]
        assert ("offsets" in given.info["done_by_the_file"]) == (format == "onnx")
        assert "| Offsets | -0.7 to +0.9" in (out / "README.md").read_text()
    card = (run / "export-timm" / "README.md").read_text()
    code = card.split("Without cclnet:")[1].split("```python")[1].split("```")[0]
    compile(code, "card", "exec")
    assert 'torch.tensor(calibration["offsets"])' in code and "import torch" in code
    program = torch.export.load(export(run, "torch") / "model.pt2").module()  # ours, made just now
    np.testing.assert_allclose(program(torch.from_numpy(images))[0].detach(), expected, atol=1e-5)
    np.testing.assert_allclose(cclnet.load(run, engine="onnx").run(images)[0], expected, atol=1e-5)


def test_fitted_offsets_are_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    """All digits: the program is compared with the file beside it."""
    pytest.importorskip("onnxruntime")
    run = write_run(tmp_path / "run")
    scores = evaluate(run, draws=2, calibration="offsets", decision="balanced")
    onnx, images = cclnet.load(export(run, "onnx")), check_images((32, 32), 9)
    assert onnx.map == scores.calibration.temperature.map and onnx.map.offsets is not None
    np.testing.assert_allclose(onnx.run(images)[0], cclnet.load(run, device="cpu").run(images)[0], atol=1e-5)
    assert onnx.rule == RunFolder(run).read_calibration().decision
    assert scores.calibration.temperature.in_words in (run / "export-onnx" / "README.md").read_text()


def test_offsets_after_soft_labels_are_taken_out(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    target = [[0.85, 0.05, 0.05, 0.05], [0.1, 0.7, 0.1, 0.1], [0.0, 0.25, 0.75, 0.0], [0.1, 0.1, 0.1, 0.7]]
    run = with_offsets(write_run(tmp_path / "run", target=target))
    onnx, torch_ = cclnet.load(export(run, "onnx")), cclnet.load(run, device="cpu")
    images = check_images((32, 32), 9)
    np.testing.assert_allclose(onnx.run(images)[0], torch_.run(images)[0], atol=1e-5)
    assert onnx.info["done_by_the_file"] == ["normalise", "target", "temperature", "offsets"]


@pytest.mark.parametrize("beside", [None, (0.2, -0.4, -0.7, 0.9)], ids=["none", "others"])
def test_a_program_with_other_offsets_is_refused(tmp_path: Path, beside: tuple[float, ...] | None) -> None:
    pytest.importorskip("onnxruntime")
    out = export(with_offsets(write_run(tmp_path / "run")), "onnx")
    calibration = RunFolder(out).read_calibration()
    changed = replace(calibration.temperature, offsets=beside)
    RunFolder(out).write_calibration(replace(calibration, temperature=changed))
    with pytest.raises(InputError, match=r"not the model that .* describe, whose offsets differ"):
        cclnet.load(out)


def test_a_program_without_offsets_is_refused_beside_some(sound_onnx: Path, tmp_path: Path) -> None:
    out = with_offsets(Path(shutil.copytree(sound_onnx, tmp_path / "out")))
    with pytest.raises(InputError, match=r"not the model that .* describe, whose offsets differ"):
        cclnet.load(out)
    with pytest.raises(InputError, match=r"calibration\.json is refused: .*3 offsets, but 4 are needed"):
        cclnet.load(with_offsets(out, (0.5, 0.0, -0.5)))


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(InputError, match="unknown format 'onyx'; did you mean 'onnx'"):
        export(run, "onyx")
    with pytest.raises(InputError, match=r"holds no model.safetensors"):
        export(tmp_path, "onnx")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(InputError, match=r"full exists already"):
        export(run, "safetensors", tmp_path / "full")
    (tmp_path / "empty").mkdir()
    assert export(run, "safetensors", tmp_path / "empty") == tmp_path / "empty"


def test_the_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    done = CliRunner().invoke(
        app, ["export", str(run), "--format", "safetensors", "--licence", "CC0", "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    assert "has not been evaluated" in done.stderr
    assert "model.safetensors, model.json, calibration.json, README.md" in done.stderr
    assert "CC0" in (tmp_path / "out" / "README.md").read_text()


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match=r"pip install 'cclnet\[export\]'"):
        export(run, "onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"ONNX models need onnxruntime: pip install 'cclnet\[export\]'"):
        OnnxEngine(b"", cclnet.load(run).description)


@pytest.mark.parametrize("name", ["model.onnx", "model.json", "calibration.json", "soft_labels.csv"])
def test_a_flipped_bit_in_an_export_is_refused(sound_onnx: Path, tmp_path: Path, name: str) -> None:
    """Wherever it is: most of the bytes of model.onnx are weights, in which any value could be right."""
    out = Path(shutil.copytree(sound_onnx, tmp_path / "out"))
    content, generator = (out / name).read_bytes(), np.random.default_rng(0)
    for bit in generator.integers(0, 8 * len(content), 6):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (out / name).write_bytes(flipped)
        with pytest.raises(InputError, match=rf"{name} is refused.*SHA-256"):
            cclnet.load(out)
    (out / name).write_bytes(content)
    cclnet.load(out)


def test_a_flipped_bit_in_weights_is_refused(sound_run: Path, tmp_path: Path) -> None:
    out = export(sound_run, "safetensors", tmp_path / "out")
    weights = out / "model.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[-100] ^= 1
    weights.write_bytes(flipped)
    with pytest.raises(InputError, match=r"model\.safetensors is refused.*SHA-256"):
        cclnet.load(out)


@pytest.mark.parametrize("backbone", ["test_resnet", "test_vit", "tf_efficientnet_lite0"])
def test_timm_loads_an_export_to_the_same_logits(backbone: str, tmp_path: Path) -> None:
    """By timm alone: the network, its labels, and the transform that prepares an image."""
    from timm.data import create_transform, resolve_data_config

    run = write_run(tmp_path / "run", backbone, crop=64, short_side=75,
                    backbone_settings={"img_size": 64} if "vit" in backbone else None)  # fmt: skip
    out = export(run, "timm", tmp_path / "out")
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    description = RunFolder(run).read_model()
    images = torch.from_numpy(check_images((64, 64))).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (description.mean, description.std))
    shipped = exporting.read_shipped(run / "model.safetensors", description, None, False)
    with torch.no_grad():
        given, expected = model((images - mean) / std), shipped.model((images - mean) / std)
    assert torch.equal(given, expected) and np.ptp(expected.numpy(), axis=0).max() > 0.01
    assert model.pretrained_cfg["label_names"] == list(CLASSES)
    data = resolve_data_config({}, model=model)
    assert list(data["input_size"]) == [3, 64, 64] and data["interpolation"] == "bicubic"
    assert list(data["mean"]) == [0.5, 0.4, 0.6] and list(data["std"]) == [0.2, 0.25, 0.3]
    assert create_transform(**data).transforms[0].size == 75  # the short side, not one less
    assert (out / "README.md").read_text().startswith("---\nlibrary_name: timm\n")
    loaded = cclnet.load(out, device="cpu")
    np.testing.assert_allclose(loaded.run(check_images((64, 64)))[0], cclnet.load(run, device="cpu").run(
        check_images((64, 64)))[0], atol=1e-6)  # fmt: skip


def test_what_timm_has_no_field_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"turns.*--tta none"):
        export(write_run(tmp_path / "views", tta="turns"), "timm")
    assert export(tmp_path / "views", "timm", tmp_path / "plain", tta="none").is_dir()
    description = RunFolder(tmp_path / "plain").read_model()
    with pytest.raises(InputError, match="32 x 48 pixels"):
        exporting.timm_config(replace(description, crop=(32, 48)))


def test_an_ensemble_is_no_timm_model(tmp_path: Path) -> None:
    description = RunFolder(write_run(tmp_path / "run")).read_model()
    names = ("backbone", "short_side", "crop", "mean", "std")
    member = Member(**{name: getattr(description, name) for name in names})
    with pytest.raises(InputError, match="ensemble"):
        exporting.timm_config(replace(description, members=(member, member)))


def test_a_changed_input_layer_is_refused_by_name(tmp_path: Path) -> None:
    out = export(write_run(tmp_path / "run"), "timm", tmp_path / "out")
    weights = load_file(out / "model.safetensors")
    first = next(name for name, value in weights.items() if value.dim() == 4)
    weights[first] = weights[first][..., :1, :1].clone()  # another kernel
    save_file(weights, out / "model.safetensors")
    with pytest.raises(InputError, match="input layer"):
        exporting.read_timm(out, RunFolder(out).read_model())
