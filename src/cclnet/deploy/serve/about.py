"""What the model is: for ``GET /model``, and for the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from cclnet import __version__
from cclnet.data.image_io import FORMATS
from cclnet.deploy.model import Model
from cclnet.deploy.serve.limits import Limits
from cclnet.deploy.serve.words import NOTICE
from cclnet.runs.scores import read_scores


class UploadLimits(BaseModel):
    bytes: int
    pixels: int
    seconds: float


class ModelCard(BaseModel):
    """What the model tells apart, how it was made, and what this server takes."""

    name: str
    classes: list[str]
    multilabel: bool = Field(description="Whether an image may carry several labels.")
    calibrated: bool
    temperature: float | None
    backbone: str
    method: str
    training_images: int | None
    engine: str
    device: str
    short_side: int = Field(description="Images are resized to this short side, then the centre is cut out.")
    crop: list[int] = Field(description="Height and width of the centre.")
    soft_labels: list[list[float]] | None = Field(description="Row by row, what the label of a class is made of.")
    judged: list[str] = Field(description="How good it is, in sentences.")
    heat_maps: bool
    examples: bool = Field(description="Whether training images are shown.")
    kept: bool = Field(description="Whether images that are sent are kept.")
    formats: list[str]
    limits: UploadLimits
    version: str
    notice: str


def model_card(name: str, model: Model, limits: Limits, *, heat_maps: bool, examples: bool, kept: bool) -> ModelCard:
    info = model.info
    trained: dict[str, Any] = info.get("trained") or {}
    return ModelCard(
        name=name,
        classes=list(model.classes),
        multilabel=model.multilabel,
        calibrated=model.temperature is not None,
        temperature=model.temperature,
        backbone=model.description.backbone,
        method=str(info.get("method", "")),
        training_images=trained.get("images"),
        engine=model.engine,
        device=model.device,
        short_side=model.description.short_side,
        crop=list(model.description.crop),
        soft_labels=None if model.correlation is None else model.correlation.tolist(),
        judged=judged_sentences(model.folder),
        heat_maps=heat_maps,
        examples=examples,
        kept=kept,
        formats=[name for name in FORMATS if name != "DIB"] + ["DICOM"],
        limits=UploadLimits(bytes=limits.upload_bytes, pixels=limits.pixels, seconds=limits.seconds),
        version=__version__,
        notice=NOTICE,
    )


def judged_sentences(folder: Path) -> list[str]:
    """How good the model is, in the sentences of its report; empty where it has not been evaluated."""
    path = folder / "scores.json"
    if not path.is_file():
        return []
    from cclnet.report.html import evaluated_on, in_short

    scores = read_scores(path)
    return [f"Evaluated on {evaluated_on(scores)}.", *in_short(scores)]
