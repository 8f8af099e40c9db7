"""A run as files to ship: the network, how to prepare an image for it, a model card. Checked before they are kept."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cclnet.deploy import abstain
from cclnet.deploy.card import model_card
from cclnet.deploy.description import Description, read_description
from cclnet.deploy.programs import onnx_program, torch_program
from cclnet.deploy.selfcheck import Agreement, Pixels, Run, check, check_images
from cclnet.deploy.shipped import Shipped
from cclnet.deploy.weights import read_shipped
from cclnet.errors import InputError, unknown
from cclnet.evaluation.runs import PREDICTIONS
from cclnet.files import make_folder, write_whole
from cclnet.functional import LEAST

FORMATS = {"onnx": "model.onnx", "torch": "model.pt2", "safetensors": "model.safetensors"}


def export(run: str | Path, format: str = "onnx", out: str | Path | None = None, licence: str = "") -> Path:
    """Export the model of a run folder; returns the folder with the model, model.json, README.md (the model card) and,
    where the run has one, correlation.csv.

    The exported model is held against PyTorch before it is kept. If it differs, or anything else fails, nothing is
    left.

    Args:
        format: "onnx", from a uint8 image to probabilities and maps, in ONNX Runtime and without cclnet; "torch", a
            torch.export program (.pt2) of the same; "safetensors", the weights alone, for ``cclnet.load`` or timm.
        out: a folder that is not there yet, or empty. Default: ``export-FORMAT`` in the run folder.
        licence: of the weights, for the card.
    """
    run = Path(run).expanduser()
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if not (run / "model.safetensors").is_file():
        raise InputError(f"{run} holds no model.safetensors: give the folder of a run that was trained to the end.")
    out = run / f"export-{format}" if out is None else Path(out).expanduser().resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out} is there already: choose another --out, or remove it first.")
    description = read_description(run / "model.json")
    shipped = read_shipped(run / "model.safetensors", description)
    make_folder(out.parent)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    make_folder(partial)
    try:
        agreement = _WRITERS[format](shipped, description, partial / FORMATS[format], run)
        info = exported_info(run, description, shipped, format, agreement)
        _write_beside(run, replace(description, info=info), partial, licence)
        if out.is_dir():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}. Nothing was exported.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _write_onnx(shipped: Shipped, description: Description, path: Path, run: Path) -> Agreement:
    from cclnet.deploy.engines import OnnxEngine

    write_whole(path, onnx_program(shipped, description))
    engine = OnnxEngine(path, description, "cpu")
    return check(shipped, check_images(description.crop), engine.run_all, "the ONNX model")


def _write_torch(shipped: Shipped, description: Description, path: Path, run: Path) -> Agreement:
    content, program = torch_program(shipped, description)
    write_whole(path, content)

    return check(shipped, check_images(description.crop), _outputs_of(program), "the torch program")


def _write_safetensors(shipped: Shipped, description: Description, path: Path, run: Path) -> Agreement:
    write_whole(path, (run / "model.safetensors").read_bytes())
    copy = read_shipped(path, description)
    return check(shipped, check_images(description.crop), _outputs_of(copy), "the copy")


def _outputs_of(program: Callable[..., Any]) -> Run:
    @torch.no_grad()
    def run(batch: Pixels) -> list[Pixels]:
        return [output.numpy() for output in program(torch.from_numpy(batch))]

    return run


_WRITERS: dict[str, Callable[[Shipped, Description, Path, Path], Agreement]] = {
    "onnx": _write_onnx,
    "torch": _write_torch,
    "safetensors": _write_safetensors,
}


def _write_beside(run: Path, description: Description, folder: Path, licence: str) -> None:
    """model.json, the model card and the soft labels."""
    text = json.dumps(description.info, indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(r"\[[\s\d.,e+-]+\]", lambda numbers: " ".join(numbers[0].split()), text)  # a row of numbers on a line
    write_whole(folder / "model.json", text + "\n")
    write_whole(folder / "README.md", model_card(run, description, licence))
    if (run / "correlation.csv").is_file():
        write_whole(folder / "correlation.csv", (run / "correlation.csv").read_bytes())


def exported_info(
    run: Path, description: Description, shipped: Shipped, format: str, agreement: Agreement
) -> dict[str, Any]:
    """model.json of an export: that of the run, how to prepare an image, thresholds, and what was checked."""
    height, width = description.crop
    curve = None
    if any((run / name).is_file() for name in PREDICTIONS):
        curve = abstain.curve_of_run(run, description.temperature).to_json()
    packages = ["torch", "timm", *(["onnx", "onnxruntime"] if format == "onnx" else [])]
    info = dict(description.info)
    trained = dict(info.get("trained") or {})
    if "data" in trained:  # where it lay is nobody's business
        trained["data"] = Path(str(trained["data"])).name
    return info | {
        "trained": trained,
        "preprocessing": [
            "decode to RGB, 8 bits a channel, upright (EXIF orientation applied)",
            f"resize to a short side of {description.short_side} pixels, bicubic with antialiasing, shape kept",
            f"cut out the centre, {height} x {width} (height x width)",
            "normalise: (x / 255 - mean) / std, by channel",
        ],
        "done_by_the_file": _done_by_the_file(description) if format != "safetensors" else [],
        "output": _output_in_words(description),
        "label_threshold": 0.5 if description.multilabel else None,
        "thresholds": curve,
        "maps": shipped.maps,
        "exported": {
            "format": format,
            "file": FORMATS[format],
            "checked": agreement.to_json(),
            "versions": {name: version(name) for name in packages},
        },
    }


def _done_by_the_file(description: Description) -> list[str]:
    return ["normalise", *(["target"] if description.target is not None else []), "temperature"]


def _output_in_words(description: Description) -> str:
    """Whoever takes the plain weights finds here what is to be done with them."""
    if description.multilabel:
        return "sigmoid of logits / temperature"
    if description.target is None:
        return "softmax of logits / temperature"
    return (
        "softmax of log(p) / temperature, p = softmax of logits times the inverse of target, "
        f"at least {LEAST:g} each, made to sum to one"
    )
