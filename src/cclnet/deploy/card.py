"""The model card of an exported model. Its text is in ``report/templates/card.md``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cclnet.report.html import class_columns, evaluated_on, in_short, render, what_it_is
from cclnet.report.text import NONE, duration_text
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import Calibration, ExportInfo, ModelDescription

COVERAGES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)


def model_card(run: Path, description: ModelDescription, calibration: Calibration, licence: str = "") -> str:
    """The card of a run as Markdown; ``description`` and ``calibration`` are those of the exported model."""
    scores, settings = RunFolder(run).read_scores(), RunFolder(run).read_settings_table()
    trained = dict(zip(description.classes, description.class_counts or (), strict=False))
    evaluated = dict(zip(scores.classes, scores.split.class_counts, strict=True)) if scores else {}
    curve = calibration.abstention
    return render(
        "card.md",
        name=run.resolve().name,
        description=description,
        export=description.export or ExportInfo(),
        temperature=calibration.temperature.value,
        settings=settings,
        split=settings.get("split") or {},
        scores=scores,
        what=what_it_is(scores) if scores else f"network {description.backbone}",
        in_short=in_short(scores) if scores else [],
        evaluated_on=evaluated_on(scores) if scores else "",
        class_scores=class_columns(scores) if scores else [],
        class_rows=[(name, trained.get(name, NONE), evaluated.get(name, NONE)) for name in description.classes],
        curve=curve,
        points=[curve.at(coverage=coverage) for coverage in COVERAGES] if curve else [],
        licence=licence,
        made=_made(description, settings),
    )


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
        ("Largest difference from PyTorch", f"{checked['probability']:.1g} in probability" if checked else None),
        ("Versions in export", _versions(exported.versions)),
    ]
    return [(name, str(value)) for name, value in lines if value not in (None, "")]


def _versions(found: Mapping[str, str] | None) -> str:
    return ", ".join(f"{name} {number}" for name, number in (found or {}).items())
