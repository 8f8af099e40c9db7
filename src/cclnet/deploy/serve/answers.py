"""What is sent back: its form, as the API promises it, and how it is filled in."""

from __future__ import annotations

import base64
import io

import numpy as np
import numpy.typing as npt
from PIL import Image
from pydantic import BaseModel, Field

from cclnet.deploy.explain import enlarge
from cclnet.deploy.model import Model
from cclnet.deploy.serve import words
from cclnet.deploy.serve.reading import Upload
from cclnet.runs.model import AbstentionCurve

Floats = npt.NDArray[np.float64]
Heat = npt.NDArray[np.float32]


class ClassProbability(BaseModel):
    name: str
    probability: float = Field(ge=0, le=1, description="Calibrated, where the model is.")


class AlikeClass(BaseModel):
    name: str
    weight: float = Field(ge=0, le=1, description="Its weight in the soft label of the predicted class.")


class HeatMap(BaseModel):
    of: str = Field(description="The class it speaks for: the most probable one.")
    where: str = Field(description="Its place in words.")
    png: str = Field(description="Data URI of a grey PNG of the part seen; white is where most speaks for the class.")


class Seen(BaseModel):
    """The part of the upright image that the network got, as shares of its width and height."""

    left: float
    top: float
    width: float
    height: float


class Answer(BaseModel):
    """What the model says about an image."""

    label: str = Field(description="The most probable class; where there may be several, those of at least .5 and |.")
    confidence: float = Field(ge=0, le=1, description="Probability of the label; of several, the least sure decision.")
    sureness: str = Field(description="The confidence in a word or two.")
    words: list[str] = Field(description="What that means, in sentences.")
    probabilities: list[ClassProbability] = Field(description="All classes, the most probable first.")
    similar: list[AlikeClass] = Field(description="Classes most easily confused with it, by the learned soft labels.")
    heat: HeatMap | None = Field(description="Where the network looked, if asked for and if it can tell.")
    seen: Seen
    picture: str | None = Field(description="Data URI of the upright image, made smaller, if asked for.")
    sha256: str = Field(description="Of the file that was sent.")
    model: str
    notice: str


def make_answer(
    name: str, model: Model, upload: Upload, probabilities: Floats, heat: Heat | None, curve: AbstentionCurve | None
) -> Answer:
    """The answer for one image: probabilities [K] and heat [h', w'] as :meth:`Model.run` gives them."""
    (found,) = model.describe(probabilities[None])
    left, top, width, height = upload.seen
    return Answer(
        label=found.label,
        confidence=found.confidence,
        sureness=words.sureness(found.confidence),
        words=words.explanation(found, model.multilabel, model.temperature is not None, curve),
        probabilities=[ClassProbability(name=n, probability=p) for n, p in found.top(len(model.classes))],
        similar=[AlikeClass(name=n, weight=w) for n, w in found.similar],
        heat=None if heat is None else _heat_map(found.top(1)[0][0], enlarge(heat, model.description.crop)),
        seen=Seen(left=left, top=top, width=width, height=height),
        picture=upload.picture or None,
        sha256=upload.sha256,
        model=name,
        notice=words.NOTICE,
    )


def _heat_map(of: str, heat: Heat) -> HeatMap:
    file = io.BytesIO()
    Image.fromarray(np.rint(255 * heat).astype(np.uint8)).save(file, "PNG", compress_level=3)
    png = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return HeatMap(of=of, where=words.where(heat), png=png)
