"""Responses of the API: their schema, how they are filled in, and the sentences that explain a prediction."""

from __future__ import annotations

import numpy as np
from PIL import Image
from pydantic import BaseModel, Field

from cclnet import __version__
from cclnet.data.image_io import FORMATS, data_uri
from cclnet.deploy.engines import Floats, Maps
from cclnet.deploy.predictor import Model, Prediction, enlarge
from cclnet.deploy.serve.decoding import Upload
from cclnet.deploy.serve.guard import ServeSettings
from cclnet.evaluation.conformal import parse_sets
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import AbstentionCurve

NOTICE = (
    "Not a medical device. For research and teaching only: it does not replace an examination and must not be used to "
    "decide about anyone's care."
)
UNLIKE = "Refused: unlike the training images"
LEVELS = ((0.95, "Very sure"), (0.75, "Fairly sure"), (0.5, "Not very sure"), (0.0, "Unsure"))
RULE_WORDS = {"balanced": "because rare classes count as much as common ones", "costs": "by the costs of errors"}
MIN_IMAGES = 20  # held-out images that an error rate must be based on


class Reason(BaseModel):
    """Why a request was refused."""

    reason: str


class Status(BaseModel):
    status: str = Field(description="ok or ready")


class Examples(BaseModel):
    name: str = Field(description="The class.")
    pictures: list[str] = Field(description="Data URIs of small training images of the class.")


class ClassProbability(BaseModel):
    name: str
    probability: float = Field(ge=0, le=1, description="Calibrated if the model is.")


class SimilarClass(BaseModel):
    name: str
    weight: float = Field(ge=0, le=1, description="Its weight in the soft label of the predicted class.")
    relative: float = Field(ge=0, description="The weight relative to a uniform soft label: 1 is no similarity.")


class HeatMap(BaseModel):
    of: str = Field(description="The class that the heat map is for: the most probable one.")
    where: str = Field(description="Its location in words.")
    png: str = Field(description="Data URI of a grey PNG of the seen region; white is the strongest evidence.")


class PredictionSet(BaseModel):
    """Classes that contain the true one with this probability, on images like those of the evaluation."""

    level: float = Field(ge=0, le=1)
    classes: list[str] = Field(description="The most probable first.")


class Typicality(BaseModel):
    """Whether the image is like the training images."""

    score: float = Field(ge=0, description="Distance of its features from those of the training images.")
    limit: float = Field(ge=0, description="Largest score that is not refused.")
    refused: bool = Field(description="Whether the score is above the limit: the prediction should not be used.")


class Seen(BaseModel):
    """Region of the upright image that the network gets, as fractions of its width and height."""

    left: float
    top: float
    width: float
    height: float


class Answer(BaseModel):
    """Prediction for an image."""

    label: str = Field(description="The class by the decision rule; if multilabel, all of at least 0.5, joined by |.")
    rule: str = Field(description="The decision rule: accuracy (the most probable class), balanced or costs.")
    confidence: float = Field(ge=0, le=1, description="Probability of the label; if multilabel, of the least sure one.")
    set: PredictionSet | None = Field(description="Conformal prediction set, if the model has thresholds for them.")
    ood: Typicality | None = Field(description="Whether the image is like the training images, if this is known.")
    sureness: str = Field(description="The confidence in one or two words.")
    words: list[str] = Field(description="What the confidence means, in sentences.")
    probabilities: list[ClassProbability] = Field(description="All classes, the most probable first.")
    similar: list[SimilarClass] = Field(description="Classes it is most easily confused with, by the soft labels.")
    heat: HeatMap | None = Field(description="Location of the evidence, if requested and available.")
    seen: Seen
    picture: str | None = Field(description="Data URI of a preview of the upright image, if requested.")
    sha256: str = Field(description="Hash of the uploaded file.")
    model: str
    notice: str


class UploadLimits(BaseModel):
    bytes: int
    pixels: int
    seconds: float


class ModelInfo(BaseModel):
    """Description of the model, and what this server accepts."""

    name: str
    classes: list[str]
    multilabel: bool = Field(description="Whether an image may have several labels.")
    decision: str = Field(description="The decision rule: accuracy, balanced or costs.")
    calibrated: bool
    temperature: float | None
    offsets: list[float] | None = Field(description="Added to the logits after the temperature, one per class.")
    backbone: str
    method: str
    training_images: int | None
    engine: str
    device: str
    short_side: int = Field(description="Images are resized to this short side, then cropped at the centre.")
    crop: list[int] = Field(description="Height and width of the crop.")
    soft_labels: list[list[float]] | None = Field(description="Soft label of each class, one row per class.")
    judged: list[str] = Field(description="Evaluation of the model, in sentences.")
    refuses: bool = Field(description="Whether images unlike the training images are refused.")
    heat_maps: bool
    examples: bool = Field(description="Whether training images are shown.")
    kept: bool = Field(description="Whether uploads are kept.")
    formats: list[str]
    limits: UploadLimits
    version: str
    notice: str


def model_info(model: Model, settings: ServeSettings) -> ModelInfo:
    from cclnet.report.html import evaluated_on, sentences

    description, limits = model.description, settings.limits
    scores = RunFolder(model.folder).read_scores()
    return ModelInfo(
        name=settings.name,
        classes=list(model.classes),
        multilabel=model.multilabel,
        decision=model.rule.name,
        calibrated=model.temperature is not None,
        temperature=model.temperature,
        offsets=None if model.map.offsets is None else list(model.map.offsets),
        backbone=description.backbone,
        method=description.method,
        training_images=description.trained.images,
        engine=model.engine,
        device=model.device,
        short_side=description.short_side,
        crop=list(description.crop),
        soft_labels=None if model.soft_labels is None else model.soft_labels.tolist(),
        judged=[] if scores is None else [f"Evaluated on {evaluated_on(scores)}.", *sentences("summary", scores)],
        refuses=model.refuse_above is not None,
        heat_maps=model.has_maps,
        examples=bool(settings.examples),
        kept=settings.kept_in is not None,
        formats=[name for name in FORMATS if name != "DIB"] + ["DICOM"],
        limits=UploadLimits(bytes=limits.upload_bytes, pixels=limits.pixels, seconds=limits.seconds),
        version=__version__,
        notice=NOTICE,
    )


def make_answer(
    settings: ServeSettings, model: Model, upload: Upload, output: tuple[Floats, Maps | None, float | None],
    curve: AbstentionCurve | None,
) -> Answer:  # fmt: skip
    """Return the answer for one image from its probabilities [K], heat map [h', w'] and distance from the training
    images (:meth:`Model.run_scored`)."""
    p, heat, distance = output
    ood = None if distance is None else np.array([distance])
    (prediction,) = model.describe(p[None], None, ood, sets=settings.sets)
    ranked = prediction.top(len(model.classes))
    return Answer(
        label=prediction.label,
        rule=prediction.rule,
        confidence=prediction.confidence,
        set=_prediction_set(settings.sets, prediction.set),
        ood=_typicality(prediction, model.refuse_above),
        sureness=UNLIKE if prediction.refused else sureness(prediction.confidence),
        words=explain_confidence(prediction, model.multilabel, model.temperature is not None, curve),
        probabilities=[ClassProbability(name=n, probability=p) for n, p in ranked],
        similar=_similar(model, prediction),
        heat=None if heat is None else _heat_map(ranked[0][0], enlarge(heat, model.description.crop)),
        seen=Seen(**dict(zip(("left", "top", "width", "height"), upload.seen, strict=True))),
        picture=upload.picture or None,
        sha256=upload.sha256,
        model=settings.name,
        notice=NOTICE,
    )


def _similar(model: Model, prediction: Prediction) -> list[SimilarClass]:
    """The similar classes, each with its weight relative to the mean weight of the other classes in the soft label."""
    if model.soft_labels is None or not prediction.similar:
        return []
    # The row that the weights are from: that of the label or, with several labels, of the most probable class.
    own = prediction.label if prediction.label in model.classes else prediction.top(1)[0][0]
    k = model.classes.index(own)
    uniform = (1 - float(model.soft_labels[k, k])) / (len(model.classes) - 1)
    return [SimilarClass(name=n, weight=w, relative=w / uniform) for n, w in prediction.similar]


def _prediction_set(level: str | None, classes: tuple[str, ...] | None) -> PredictionSet | None:
    return (
        None if level is None or classes is None else PredictionSet(level=parse_sets(level)[0], classes=list(classes))
    )


def _typicality(prediction: Prediction, limit: float | None) -> Typicality | None:
    if prediction.ood is None or prediction.refused is None or limit is None:
        return None
    return Typicality(score=prediction.ood, limit=limit, refused=prediction.refused)


def sureness(confidence: float) -> str:
    return next(text for minimum, text in LEVELS if confidence >= minimum)


def _heat_map(of: str, heat: Maps) -> HeatMap:
    png = data_uri(Image.fromarray(np.rint(255 * heat).astype(np.uint8)), "PNG", compress_level=3)
    return HeatMap(of=of, where=heat_location(heat), png=png)


def explain_confidence(
    prediction: Prediction, multilabel: bool, calibrated: bool, curve: AbstentionCurve | None
) -> list[str]:
    """Return sentences that say what the confidence means."""
    confidence, p = prediction.confidence, prediction.probabilities
    if prediction.refused:
        return [
            "The image differs from the training images more than nearly all held-out images did. The model knows only "
            "images like those, so its prediction should not be used."
        ]
    if multilabel:
        k = int(np.abs(p - 0.5).argmin())
        sentences = [
            f"{int((p >= 0.5).sum())} of {len(p)} findings have a probability of at least 50%. "
            f"Closest call: {prediction.classes[k]} ({percent(float(p[k]))})."
        ]
    else:
        (top, first), (name, probability) = prediction.top(2)
        second = f"{name} ({percent(probability)})."
        sentences = [f"The second most probable class is {second}"]
        if prediction.label != top:
            sentences = [f"Chosen {RULE_WORDS[prediction.rule]}; the most probable class is {top} ({percent(first)})."]
        elif first < 0.5:
            advice = "A person should look at this image."
            sentences = [f"No class reaches 50%; the second most probable is {second} {advice}"]
    if not calibrated:
        sentences.append("The probabilities are not calibrated: use them as a ranking, not as frequencies.")
    elif not multilabel:
        sentences.append(f"By its calibration, {per_hundred(confidence)} such images are of this class.")
    if curve is not None:
        # The error rate on held-out images with at least this confidence. The last threshold keeps every image.
        point = int(np.flatnonzero(curve.threshold <= prediction.score)[0])
        images = round(float(curve.coverage[point]) * curve.images)
        wrong = percent(float(curve.risk[point])) if curve.risk[point] > 0 else "none"
        held_out = f"On {curve.images:,} held-out images it was at least this confident for {images:,}"
        sentences += [f"{held_out}, and wrong for {wrong} of these."] if images >= MIN_IMAGES else []
    return sentences


def per_hundred(p: float) -> str:
    """A probability as "about 93 in 100"."""
    if p >= 0.995:
        return "more than 99 in 100"
    return "fewer than 1 in 100" if p < 0.005 else f"about {round(100 * p)} in 100"


def percent(p: float) -> str:
    """A probability as "93.4%"; only 0 and 1 are shown as 0% and 100%."""
    if p in (0.0, 1.0):
        return f"{p:.0%}"
    if p < 0.001:
        return "less than 0.1%"
    return "more than 99.9%" if p > 0.999 else f"{100 * p:.1f}%"


def heat_location(heat: Maps) -> str:
    """Return the location of the strongest half of a heat map [h, w] in words, for people who do not see it."""
    strong = np.where(heat >= 0.5 * heat.max(), heat, 0)
    total = float(strong.sum())
    if total == 0:
        return "nowhere"
    height, width = heat.shape
    y = float((strong.sum(axis=1) @ (np.arange(height) + 0.5)) / (height * total))
    x = float((strong.sum(axis=0) @ (np.arange(width) + 0.5)) / (width * total))
    vertical = "upper" if y < 0.42 else "lower" if y > 0.58 else ""
    horizontal = "left" if x < 0.42 else "right" if x > 0.58 else ""
    if vertical:
        return f"in the {vertical} {horizontal or 'part'}"
    return f"on the {horizontal}" if horizontal else "in the centre or all over the image"
