"""Export of a run: the network in a file, how to prepare an image for it, and a model card.

The exported model is compared with PyTorch before it is kept.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from cclnet.deploy.card import model_card
from cclnet.deploy.engines import OnnxEngine, Pixels
from cclnet.deploy.shipped import Ensemble, Shipped, read_shipped
from cclnet.errors import InputError, first_line, unknown
from cclnet.evaluation.decision import curve_of_run, rule_of_run
from cclnet.files import make_folder, write_whole
from cclnet.functional import LEAST
from cclnet.network import image_size_settings, silent_exporters, to_onnx
from cclnet.pretrained import pretrained_config
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.checksums import write_covered
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import ExportInfo, ModelDescription
from cclnet.runs.provenance import package_versions

Run = Callable[[Pixels], Sequence[npt.NDArray[Any]]]

FORMATS = {
    "onnx": "model.onnx", "torch": "model.pt2", "safetensors": "model.safetensors", "timm": "model.safetensors",
}  # fmt: skip
TIMM_CONFIG = "config.json"
MAX_DIFFERENCE = 1e-4  # in probability
MAX_MAP_DIFFERENCE = 1e-3  # relative to the largest value of a map


def export(
    run: str | Path, format: str = "onnx", out: str | Path | None = None, licence: str = "",
    decision: str | None = None, cost: str | None = None, tta: str | None = None,
) -> Path:  # fmt: skip
    """Export the model of a run folder; returns the folder with the model, model.json, README.md (the model card) and,
    if the run has them, calibration.json and soft_labels.csv.

    If the exported model differs from PyTorch, or anything else fails, nothing is left.

    Args:
        format: "onnx", from a uint8 image to probabilities and maps, in ONNX Runtime and without cclnet; "torch", a
            torch.export program (.pt2) of the same; "safetensors", the weights alone, for ``cclnet.load``; "timm",
            the same with a config.json, for ``timm.create_model("local-dir:FOLDER", pretrained=True)`` and for the
            Hugging Face Hub.
        out: a folder that does not exist or is empty. Default: ``export-FORMAT`` in the run folder.
        decision, cost: the decision rule in calibration.json and its costs, as for ``cclnet.load``. It is not part of
            the exported program, whose output stays the probabilities.
        tta: test-time augmentation, part of the program. Default, and "auto": that of the run, which its scores
            belong to.
    """
    run = Path(run).expanduser()
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    files = RunFolder(run)
    if not files.weights.is_file():
        raise InputError(f"{run} holds no model.safetensors: give the folder of a finished run.")
    out = run / f"export-{format}" if out is None else Path(out).expanduser().resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out} exists already: choose another --out, or remove it first.")
    description, calibration = files.read_model(), files.read_calibration()
    description = description if tta in (None, "auto") else description.with_tta(tta)
    classes, multilabel = description.classes, description.multilabel
    rule = rule_of_run(files, classes, multilabel, description.class_counts, decision, cost)
    statistics = files.read_feature_statistics()
    shipped = read_shipped(files.weights, description, calibration.map, statistics is not None)
    with _written_whole(out) as partial:
        exported_run = _write_network(partial, format, shipped, description, calibration.map, files.weights)
        checked = check(shipped, check_images(description.crop), exported_run, f"the exported {FORMATS[format]}")
        has_curve = files.find_predictions() is not None
        curve = curve_of_run(run, calibration.map, rule, calibration.confidence) if has_curve else None
        calibration = replace(calibration, abstention=curve, decision=None if multilabel else rule)
        exported = exported_description(description, shipped, format, checked, calibration.map)
        written = RunFolder(partial)
        written.write_description(exported)
        written.write_calibration(calibration)
        if statistics is not None:
            written.write_feature_statistics(statistics)
        soft_labels = files.read_soft_labels(classes)
        if soft_labels is not None:
            written.write_soft_labels(classes, soft_labels)
        write_whole(partial / "README.md", model_card(run, exported, calibration, licence))
    return out


@contextmanager
def _written_whole(out: Path) -> Iterator[Path]:
    """A folder that is renamed to ``out`` at the end of the block; if anything fails, nothing is left."""
    make_folder(out.parent)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    make_folder(partial)
    try:
        yield partial
        if out.is_dir():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}. Nothing was exported.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_network(
    folder: Path, format: str, shipped: Shipped | Ensemble, description: ModelDescription, used: CalibrationMap,
    weights: Path,
) -> Run:  # fmt: skip
    """Write the network in one of FORMATS; returns the function that runs what was written."""
    path = folder / FORMATS[format]
    if format == "onnx":
        write_covered(path, onnx_program(shipped, description, used))
        return OnnxEngine(path, description, used, "cpu").run_all
    if format == "torch":
        content, program = torch_program(shipped, description)
        write_covered(path, content)
        return _numpy_outputs(program)
    write_covered(path, weights.read_bytes())
    if format == "safetensors":
        return _numpy_outputs(read_shipped(path, description, used, shipped.with_features))
    write_covered(folder / TIMM_CONFIG, timm_config(description))
    return _numpy_outputs(Shipped(read_timm(folder, description), description, used, shipped.with_features))


def _numpy_outputs(program: Callable[..., Any]) -> Run:
    @torch.no_grad()
    def run(batch: Pixels) -> list[Pixels]:
        return [output.numpy() for output in program(torch.from_numpy(batch))]

    return run


def exported_description(
    description: ModelDescription, shipped: Shipped | Ensemble, format: str, checked: dict[str, Any],
    used: CalibrationMap,
) -> ModelDescription:  # fmt: skip
    """model.json of an export: that of the run, how to prepare an image, and the result of the check."""
    height, width = description.crop
    trained, target = description.trained, description.target
    if trained.data is not None:  # the path is private
        trained = replace(trained, data=Path(trained.data).name)
    removed = ["target"] if target is not None else []
    added = "" if used.offsets is None else " + offsets (both in calibration.json)"
    if description.multilabel:
        output = "sigmoid of logits / temperature"
    elif target is None:
        output = f"softmax of logits / temperature{added}"
    else:
        output = (
            f"softmax of log(p) / temperature{added}, p = softmax of logits times the inverse of target, at least "
            f"{LEAST:g} each, normalised to sum to one"
        )
    if description.members:
        removed = ["crop and scale for each network", *removed]
        output = f"mean of the calibrated probabilities of {len(description.members)} networks, then temperature"
        output += "" if used.offsets is None else " and offsets: softmax of log(mean) / temperature + offsets"
    applied = ("temperature",) if used.offsets is None else ("temperature", "offsets")
    export = ExportInfo(
        format=format,
        file=FORMATS[format],
        preprocessing=(
            "decode to RGB, 8 bits per channel, upright (EXIF orientation applied)",
            f"resize to a short side of {description.short_side} pixels, bicubic with antialiasing, aspect ratio kept",
            f"crop the centre, {height} x {width} (height x width)",
            "normalise: (x / 255 - mean) / std, per channel",
        ),
        done_by_the_file=() if format in ("safetensors", "timm") else ("normalise", *removed, *applied),
        output=output,
        label_threshold=0.5 if description.multilabel else None,
        maps=shipped.maps,
        checked=checked,
        versions=package_versions(["torch", "timm", *(["onnx", "onnxruntime"] if format == "onnx" else [])]),
    )
    return replace(description, trained=trained, export=export)


def onnx_program(
    shipped: Shipped | Ensemble, description: ModelDescription, calibration: CalibrationMap | None = None
) -> bytes:
    """The network as ONNX: ``images`` uint8 [batch, h, w, 3] to ``probabilities`` [batch, K]; where they have a closed
    form, ``maps`` [batch, K, h', w']; if there are statistics of them, ``features`` [batch, F]."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError("exporting to ONNX needs onnx and onnxscript: pip install 'cclnet[export]'") from error
    baked_in = description.baked_in(calibration or CalibrationMap())
    with _exporting(description, "ONNX"):
        proto = to_onnx(shipped.cpu(), _example(description), shipped.outputs)
        entry = proto.metadata_props.add()
        entry.key, entry.value = "cclnet", json.dumps(baked_in, ensure_ascii=False)
        onnx.checker.check_model(proto)
        return proto.SerializeToString()


def torch_program(shipped: Shipped | Ensemble, description: ModelDescription) -> tuple[bytes, Callable[..., Any]]:
    """The network as a torch.export program: the content of its file, and the program to call.

    The example inputs, which torch would pickle, are left out: the rest is JSON and raw numbers.
    """
    with _exporting(description, "torch.export"), torch.no_grad():
        program = torch.export.export(
            shipped.cpu(), (_example(description),), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)
        )
        program.example_inputs = None
        file = io.BytesIO()
        torch.export.save(program, file)
        return file.getvalue(), program.module()


def timm_config(description: ModelDescription) -> str:
    """config.json of a timm model: the architecture, its labels, and how to prepare an image.

    What the format has no field for is refused: several networks, views that are averaged, an input that is no square.
    """
    refused = {
        "an ensemble of several networks": bool(description.members),
        f"test-time augmentation ({description.tta}; export with --tta none)": description.tta != "none",
        "features of several stages": description.pooling != "last",
        f"an input of {' x '.join(map(str, description.crop))} pixels": description.crop[0] != description.crop[1],
    }
    for what, given in refused.items():
        if given:
            raise InputError(f"timm's format has one plain network with a square input; it cannot contain {what}. "
                             "Use --format onnx.")  # fmt: skip
    known = pretrained_config(description.backbone)
    side, classes = description.crop[0], len(description.classes)
    config = {
        "architecture": description.backbone,
        "num_classes": classes,
        "label_names": list(description.classes),
        "model_args": image_size_settings(description.backbone, description.crop),
        "pretrained_cfg": {
            "tag": "cclnet",
            "custom_load": False,
            "input_size": [3, side, side],
            "fixed_input_size": bool(known and known.fixed_input_size),
            "interpolation": "bicubic",
            # timm resizes the short side to floor(side / crop_pct): the small number keeps it from rounding down.
            "crop_pct": side / (description.short_side + 1e-3),
            "crop_mode": "center",
            "mean": list(description.mean),
            "std": list(description.std),
            "num_classes": classes,
            "pool_size": None,
            "first_conv": known.first_conv if known else None,
            "classifier": known.classifier if known else None,
        },
    }
    return json.dumps(config, indent=1, ensure_ascii=False) + "\n"


def read_timm(folder: Path, description: ModelDescription) -> nn.Module:
    """The network as timm itself reads it from the exported folder."""
    import timm

    try:
        return timm.create_model(f"local-dir:{folder}", pretrained=True)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise InputError(
            f"timm cannot load this model as {description.backbone} ({first_line(error)}): its layers are not those of "
            "the timm model, for example its input layer. Use --format onnx."
        ) from error


def _example(description: ModelDescription) -> torch.Tensor:
    return torch.zeros((2, *description.crop, 3), dtype=torch.uint8)  # a batch of one would fix the batch size


@contextmanager
def _exporting(description: ModelDescription, kind: str) -> Iterator[None]:
    """Silence the exporters, and name the network in their errors."""
    try:
        with silent_exporters():
            yield
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        raise InputError(f"{description.backbone} cannot be exported to {kind}: {first_line(error)}.") from error


def check_images(crop: tuple[int, int], count: int = 8) -> Pixels:
    """Test images: black, white, noise, then blobs of random colours, [count, h, w, 3]."""
    generator = np.random.default_rng(0)
    height, width = crop
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    images = np.zeros((count, height, width, 3))
    images[1] = 255
    images[2] = generator.integers(0, 256, (height, width, 3))
    for image in images[3:]:
        at, size = generator.uniform(0.2, 0.8, 2), generator.uniform(0.05, 0.3)
        blob = np.exp(-((y - at[0]) ** 2 + (x - at[1]) ** 2) / size**2)[..., None]
        image[:] = generator.uniform(0, 255, 3) * (1 - blob) + generator.uniform(0, 255, 3) * blob
    return np.rint(images).astype(np.uint8)


def check(shipped: Shipped | Ensemble, images: Pixels, run: Run, what: str) -> dict[str, Any]:
    """Compare the outputs of ``run`` (probabilities, and maps and features if any) with the network in PyTorch, for one
    image and for all at once. Returns the largest differences, those of maps and features relative to their largest
    value."""
    batches = (images[:1], images)
    worst, worst_map = 0.0, 0.0
    for batch in batches:
        expected, given = _numpy_outputs(shipped)(batch), run(batch)
        if len(given) != len(expected):
            raise InputError(f"{what} has {len(given)} outputs instead of {len(expected)}. It was discarded.")
        worst = max(worst, _largest(given[0], expected[0]))
        for own, wanted in zip(given[1:], expected[1:], strict=True):
            worst_map = max(worst_map, _largest(own, wanted) / max(float(np.abs(wanted).max()), 1e-12))
    if not worst <= MAX_DIFFERENCE or not worst_map <= MAX_MAP_DIFFERENCE:
        raise InputError(
            f"{what} differs from PyTorch by {worst:.2g} in probability (at most {MAX_DIFFERENCE:g} is allowed) and by "
            f"{worst_map:.2g} of the largest value in its maps or features (at most {MAX_MAP_DIFFERENCE:g}). It was "
            "discarded."
        )
    sizes = tuple(map(len, batches))
    map_difference = worst_map if len(shipped.outputs) > 1 else None
    return {"images": len(images), "batches": sizes, "probability": worst, "map": map_difference}


def _largest(given: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """The largest difference; infinite where shapes differ or something is not finite."""
    if given.shape != expected.shape or not np.isfinite(given).all():
        return float("inf")
    return float(np.abs(given.astype(np.float64) - expected).max())
