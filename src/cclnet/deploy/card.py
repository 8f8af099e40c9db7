"""The model card: what a model is, what it was evaluated on and how well it did, and what it is not for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cclnet.report.html import class_columns, evaluated_on, in_short, render, what_it_is
from cclnet.report.text import count_text, duration_text
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import Calibration, ExportInfo, ModelDescription
from cclnet.runs.scores import Scores

NOT_STATED = (
    "No licence has been stated for these weights: ask who trained them before you pass them on. They come from the "
    "training data, whose licence may reach them (that of ISIC 2018 and HAM10000 is CC BY-NC 4.0), and from the "
    "pretrained weights if training started from any. cclnet itself is under the MIT licence."
)
SPLITS = {
    "auto": "by lesion or patient where the data names them, else by class",
    "group": "by lesion or patient",
    "class": "by class, whatever lesion or patient an image is of",
    "given": "as it came with the data",
}
COVERAGES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)


def model_card(run: Path, description: ModelDescription, calibration: Calibration, licence: str = "") -> str:
    """The card of a run as Markdown; ``description`` and ``calibration`` are those of the exported model."""
    scores, exported = RunFolder(run).read_scores(), description.export or ExportInfo()
    settings = RunFolder(run).read_settings_table()
    content: dict[str, Any] = {
        "name": run.resolve().name,
        "format": exported.format,
        "shape": ", ".join(map(str, description.crop)),
        "what": _what(scores, description),
        "in_short": in_short(scores) if scores else [],
        "facts": _facts(description, calibration.temperature.value),
        "preparing_note": " (cclnet does it; the last is part of the file)" if exported.done_by_the_file else "",
        "preprocessing": exported.preprocessing,
        "data_words": _data_words(description, settings),
        "class_rows": _class_rows(scores, description),
        "class_count": count_text(len(description.classes), "class", "classes"),
        "split_words": _split_words(scores, settings),
        "scores": scores,
        "evaluated_on": evaluated_on(scores) if scores else "",
        "class_scores": class_columns(scores) if scores else [],
        "calibration_scores": list(scores.calibration.before.scores) if scores else [],
        "licence": licence or NOT_STATED,
        "limits": list(scores.warnings) if scores else [],
        "made": _made(description, settings),
        **_abstaining(calibration),
    }
    return render("card.md", **content)


def _what(scores: Scores | None, description: ModelDescription) -> str:
    told = what_it_is(scores) if scores else f"network {description.backbone}"
    kind = "may name several classes for an image" if description.multilabel else "names one class for an image"
    return f"An image classifier ({told}) that {kind} out of {', '.join(description.classes)}."


def _facts(description: ModelDescription, fitted: float | None) -> list[tuple[str, str]]:
    height, width = description.crop
    return [
        ("Input", f"RGB image; the network sees its centre, {height} x {width} pixels of a short side of "
                  f"{description.short_side}"),
        ("Output", "a probability for each class, " + ("each of its own (sigmoid)" if description.multilabel
                   else "together one (softmax)")),
        *([("Soft labels", "those of its training are taken out of the probabilities")] if description.target else []),
        ("Temperature", f"{fitted:.4g}, already applied" if fitted else "none fitted: probabilities are as trained"),
        ("Maps", "in closed form (class activation maps)" if description.export and description.export.maps
                 else "by Grad-CAM, from the run folder or the weights"),
    ]  # fmt: skip


def _data_words(description: ModelDescription, settings: Mapping[str, Any]) -> str:
    data = description.trained.data or "unknown data"
    start = "from timm's pretrained weights" if settings.get("pretrained") else (
        "from given weights" if settings.get("weights") else "from random weights")  # fmt: skip
    return f"Trained on {count_text(description.trained.images or 0, 'image')} of {data}, {start}."


def _class_rows(scores: Scores | None, description: ModelDescription) -> list[dict[str, Any]]:
    trained = dict(zip(description.classes, description.class_counts or (), strict=False))
    held_out = dict(zip(scores.classes, scores.split.class_counts, strict=True)) if scores else {}
    return [{"name": n, "trained": trained.get(n, "–"), "evaluated": held_out.get(n, "–")} for n in description.classes]


def _split_words(scores: Scores | None, settings: Mapping[str, Any]) -> str:
    split = settings.get("split") or {}
    by = SPLITS.get(str(split.get("by")), "")
    seed = f" (seed {split['seed']})" if "seed" in split else ""
    how = f"Images were split {by}{seed}. " if by else ""
    if scores is None:
        return how + "What the model does on held-out images is not known here."
    return how + (
        scores.leak.in_words
        if scores.leak
        else "Whether images of one lesion or patient lie on both sides is not known."
    )


def _abstaining(calibration: Calibration) -> dict[str, Any]:
    curve = calibration.abstention
    if curve is None:
        return {"abstaining": [], "abstaining_on": ""}
    points = [curve.at(coverage=coverage) for coverage in COVERAGES]
    rows = [{"threshold": curve.threshold[p], "coverage": curve.coverage[p], "risk": curve.risk[p]} for p in points]
    return {"abstaining": rows, "abstaining_on": f"{curve.images:,} images of the split '{curve.split}'"}


def _made(description: ModelDescription, settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    trained, exported = description.trained, description.export or ExportInfo()
    checked = exported.checked
    lines: list[tuple[str, Any]] = [
        ("Method", description.method),
        ("Network", f"{description.backbone} (timm)"),
        ("Epochs", trained.epochs),
        ("Batch size", settings.get("batch_size")),
        ("Learning rate", settings.get("lr")),
        ("Seed", trained.seed),
        ("Device", trained.device),
        ("Training time", duration_text(trained.seconds) if trained.seconds is not None else None),
        ("Versions in training", _versions(trained.versions)),
        ("File", exported.file),
        ("Held against PyTorch", f"{checked['probability']:.1g} apart in probability at most" if checked else None),
        ("Versions in export", _versions(exported.versions)),
    ]  # fmt: skip
    return [(name, str(value)) for name, value in lines if value not in (None, "")]


def _versions(found: Mapping[str, str] | None) -> str:
    return ", ".join(f"{name} {number}" for name, number in (found or {}).items())
