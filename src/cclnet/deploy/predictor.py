"""A trained model in a program: ``cclnet.load(path).predict(image)``, from a run folder or an exported model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from PIL import Image

from cclnet.data.image_io import MAX_PIXELS
from cclnet.deploy import engines
from cclnet.deploy.engines import Engine, Floats, Maps, OnnxEngine, Pixels, TorchEngine
from cclnet.errors import InputError, unknown
from cclnet.evaluation import conformal
from cclnet.evaluation.decision import confidence, curve_of_run, rule_of_run
from cclnet.runs.decision_rule import DecisionRule, decide
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import AbstentionCurve, Calibration, ModelDescription, has_similarity
from cclnet.runs.out_of_distribution import REFUSED, FeatureStatistics

FILES = {"onnx": "model.onnx", "torch": "model.safetensors"}
SIMILAR = 3  # number of similar classes in a prediction
MIN_WEIGHT = 0.005  # in a soft label: classes with less weight are not similar
# From violet over green to yellow with rising brightness: readable for colour-blind people, and unlike skin.
_COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], np.float32)


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    probabilities: Floats  # of the K classes, calibrated, [K]
    classes: tuple[str, ...]
    label: str  # the class chosen by the decision rule; with several labels all of at least 0.5, joined by "|"
    confidence: float  # probability of the label; with several labels that of the least confident decision
    abstain: bool | None = None  # whether the score is below the given threshold; None without a threshold
    score: float = 0.0  # by which to abstain: the confidence, or logit over logit norm, as chosen for the run
    set: tuple[str, ...] | None = None  # conformal prediction set, the most probable class first; None unless requested
    rule: str = "accuracy"  # the decision rule
    ood: float | None = None  # distance from the training images (see runs/out_of_distribution.py); None where unknown
    refused: bool | None = None  # whether that is above the threshold; None without one
    similar: tuple[tuple[str, float], ...] = ()  # classes with the most weight in the soft label of the predicted class
    heat: Maps | None = None  # evidence for the most probable class, [h, w] of the crop, 0..1; None unless requested

    def top(self, n: int = 3) -> list[tuple[str, float]]:
        """The n most probable classes with their probabilities."""
        order = np.argsort(-self.probabilities, kind="stable")[:n]
        return [(self.classes[k], float(self.probabilities[k])) for k in order]


class Model:
    """A classifier that is ready to predict, made by :func:`load`."""

    def __init__(
        self, description: ModelDescription, engine: Engine, folder: Path, calibration: Calibration | None = None,
        soft_labels: Floats | None = None, rule: DecisionRule | None = None,
        statistics: FeatureStatistics | None = None,
    ) -> None:  # fmt: skip
        self.description = description
        self.rule = rule or DecisionRule()
        self.statistics = statistics if engine.has_features else None  # to recognise images unlike the training images
        self.refuse_above: float | None = None  # the largest distance that is not refused; None: any
        self.refuse(REFUSED if self.statistics is not None else 0.0)
        self.folder = folder
        self.calibration = calibration or Calibration()  # of an exported model with the abstention curve
        self.soft_labels = soft_labels  # [K, K], row k that of class k; None where the method learns none
        self.classes, self.multilabel = description.classes, description.multilabel
        self.map = self.calibration.map  # temperature and offsets that the probabilities are calibrated with
        self.temperature = self.map.temperature  # None where none was fitted
        self.engine, self.device = engine.name, engine.device  # "torch" or "onnx", "cpu" or "cuda"
        self._engine = engine

    @property
    def info(self) -> dict[str, Any]:
        """The content of model.json."""
        return self.description.to_json()

    @cached_property
    def has_maps(self) -> bool:
        """Whether the network has class activation maps. Tested on an image, which also warms up the engine."""
        noise = np.random.default_rng(0).integers(0, 256, (1, *self.description.crop, 3), dtype=np.uint8)
        try:
            return self.run(noise, explain=True)[1] is not None
        except InputError:  # the engine has none
            self.run(noise)
            return False

    def prepare(self, image: Any, max_pixels: int = MAX_PIXELS) -> Pixels:
        """An image as input of the network, uint8 [h, w, 3]; see :func:`cclnet.deploy.engines.prepare`. A file that is
        broken, or larger than ``max_pixels`` by its header, raises ``UnreadableImage``."""
        return engines.prepare(image, self.description.short_side, self.description.crop, max_pixels)

    def run(self, batch: Pixels, explain: bool = False) -> tuple[Floats, Maps | None]:
        """Probabilities [N, K] of prepared images uint8 [N, h, w, 3]; with ``explain``, also the heat maps of their
        most probable classes, [N, h', w'] in 0..1, at the resolution of the network (see :func:`enlarge`)."""
        return self.run_scored(batch, explain)[:2]

    def run_scored(self, batch: Pixels, explain: bool = False) -> tuple[Floats, Maps | None, Floats | None]:
        """As :meth:`run`, and the distances of the images from the training images, [N]; None where there are no
        statistics."""
        self._check_batch(batch)
        probabilities, maps, features = self._engine.run(batch, explain)
        ood = None if self.statistics is None or features is None else self.statistics.score(features)
        return probabilities, None if maps is None else heat_of(maps), ood

    def _check_batch(self, batch: Pixels) -> None:
        expected = (*self.description.crop, 3)
        if batch.dtype != np.uint8 or batch.ndim != 4 or batch.shape[1:] != expected:
            raise InputError(
                f"a batch is uint8 [N, {', '.join(map(str, expected))}], as returned by prepare; got {batch.dtype} "
                f"{list(batch.shape)}."
            )

    def refuse(self, share: float) -> None:
        """Refuse images that are farther from the training images than all but this share of held-out images (default
        0.01); 0 refuses none."""
        if share and self.statistics is None:
            raise InputError(f"{self.folder} has no features.safetensors, so unlike images are not recognised.")
        limit = self.statistics.threshold(share) if share and self.statistics is not None else math.inf
        self.refuse_above = limit if math.isfinite(limit) else None  # infinite: too few held-out images for the share

    @overload
    def predict(
        self, images: list[Any] | tuple[Any, ...], explain: bool = ..., threshold: float | None = ...,
        batch_size: int = ..., sets: str | float | None = ...,
    ) -> list[Prediction]: ...  # fmt: skip

    @overload
    def predict(
        self, images: Any, explain: bool = ..., threshold: float | None = ..., batch_size: int = ...,
        sets: str | float | None = ...,
    ) -> Prediction: ...  # fmt: skip

    def predict(
        self, images: Any, explain: bool = False, threshold: float | None = None, batch_size: int = 32,
        sets: str | float | None = None,
    ) -> Prediction | list[Prediction]:  # fmt: skip
        """The prediction for an image (path, bytes, Pillow image, uint8 array), or those for a list of images.

        With a ``threshold`` (see :meth:`threshold`) the model abstains where it is less confident. With ``sets``
        (0.9, or "raps:0.9") each prediction has the set of classes that contains the true one with this probability.
        """
        if not isinstance(images, (list, tuple)):
            return self.predict([images], explain, threshold, sets=sets)[0]
        found: list[Prediction] = []
        for start in range(0, len(images), batch_size):
            crops = np.stack([self.prepare(image) for image in images[start : start + batch_size]])
            found += self.describe(*self.run_scored(crops, explain), threshold, sets)
        return found

    def describe(
        self, probabilities: Floats, heat: Maps | None = None, ood: Floats | None = None,
        threshold: float | None = None, sets: str | float | None = None,
    ) -> list[Prediction]:  # fmt: skip
        """The outputs of :meth:`run_scored` as one prediction per image."""
        limit = self.refuse_above
        chosen = decide(probabilities, self.rule)
        confidences = confidence(probabilities, None if self.multilabel else chosen)
        kind = self.calibration.confidence
        scores = confidences if self.multilabel else confidence(probabilities, chosen, kind)
        inside = None if sets is None else self.sets(probabilities, sets)
        return [
            Prediction(
                probabilities=row,
                classes=self.classes,
                label="|".join(np.array(self.classes)[row >= 0.5]) if self.multilabel else self.classes[chosen[i]],
                confidence=float(confidences[i]),
                abstain=None if threshold is None else bool(scores[i] < threshold),
                score=float(scores[i]),
                set=None if inside is None else inside[i],
                rule=self.rule.name,
                ood=None if ood is None else float(ood[i]),
                refused=None if ood is None or limit is None else bool(ood[i] > limit),
                similar=self.similar(int(chosen[i])),
                heat=None if heat is None else enlarge(heat[i], self.description.crop),
            )
            for i, row in enumerate(probabilities)
        ]

    def sets(self, probabilities: Floats, level: str | float) -> list[tuple[str, ...]]:
        """Conformal prediction sets of probabilities [N, K], the most probable class first; ``level`` as in predict."""
        fitted = self.calibration.sets
        if self.multilabel or fitted is None:
            why = (
                "with several labels there are none" if self.multilabel else "run `cclnet evaluate`, then export again"
            )
            raise InputError(f"{self.folder} has no prediction sets: {why}.")
        share, kind = conformal.parse_sets(level)
        inside = conformal.sets(probabilities, kind or fitted.kind, fitted.at(share, kind))
        order = np.argsort(-probabilities, axis=1, kind="stable")
        return [tuple(self.classes[k] for k in ranked if inside[i, k]) for i, ranked in enumerate(order)]

    def similar(self, index: int) -> tuple[tuple[str, float], ...]:
        """The other classes with the most weight in the soft label of a class; () without soft labels."""
        if self.soft_labels is None:
            return ()
        row = self.soft_labels[index]
        order = [k for k in np.argsort(-row, kind="stable") if k != index and row[k] >= MIN_WEIGHT][:SIMILAR]
        return tuple((self.classes[k], float(row[k])) for k in order)

    @cached_property
    def curve(self) -> AbstentionCurve:
        """Coverage and risk by threshold on the run's held-out images: from calibration.json of an exported model, else
        from the run's predictions."""
        if self.calibration.abstention is not None and self.rule == (self.calibration.decision or DecisionRule()):
            return self.calibration.abstention
        if self.description.export is not None:
            raise InputError(
                f"{self.folder} has no abstention curve for the decision rule '{self.rule.name}': export it again with "
                "that rule from a run that has a predictions.csv."
            )
        return curve_of_run(self.folder, self.map, self.rule, self.calibration.confidence)

    def threshold(self, coverage: float | None = None, risk: float | None = None) -> float:
        """The confidence below which to abstain, so that on the run's held-out images at least ``coverage`` of the
        images are kept, or at most ``risk`` of those kept are wrong."""
        return float(self.curve.threshold[self.curve.at(coverage, risk)])


def load(
    path: str | Path, device: str = "auto", engine: str = "auto", threads: int | None = None,
    decision: str | None = None, cost: str | None = None, tta: str | None = None,
) -> Model:  # fmt: skip
    """A model from a run folder or an export (the folder, model.onnx or model.safetensors).

    No pickle is ever loaded: weights are .safetensors, programs are ONNX, and model.json is checked. ``torch.export``
    programs (.pt2) are refused, because PyTorch unpickles and evaluates parts of them.

    Args:
        device: "auto" (the GPU if there is one), "cpu", "cuda".
        engine: "torch"; "onnx" (needs onnxruntime; a run folder is converted first, which takes seconds); or "auto":
            that of the file, and if both files exist ONNX on a CPU and torch on a GPU.
        threads: threads of ONNX Runtime per batch. Default: one per core.
        decision: the decision rule, "accuracy", "balanced" or "costs". Default: that of the run.
        cost: the costs of errors, such as "MEL:NV=10" (true:predicted), or a .csv or .toml file of them.
        tta: test-time augmentation, see ``Settings.tta``. Default, and "auto": that of the run, which its calibration
            was fitted with.
    """
    path = Path(path).expanduser()
    if engine not in ("auto", *FILES):
        raise unknown("engine", engine, ("auto", *FILES))
    folder, available = _files_of(path)
    files = RunFolder(folder)
    description, calibration = files.read_model(), files.read_calibration()
    if tta not in (None, "auto"):
        if "torch" not in available or (engine == "onnx" and "onnx" in available):
            raise InputError("tta is part of an exported program: give the run folder, or export it with --tta.")
        description, available = description.with_tta(tta), {"torch"}
    classes, multilabel = description.classes, description.multilabel
    rule = rule_of_run(files, classes, multilabel, description.class_counts, decision, cost)
    if engine == "torch" and "torch" not in available:
        raise InputError("an ONNX model runs only in the engine onnx; for torch give the run folder.")
    if engine == "auto":
        on_gpu = len(available) == 2 and engines.torch_device(device) != "cpu"
        engine = "torch" if on_gpu or "onnx" not in available else "onnx"
    soft_labels = files.read_soft_labels(classes)
    if soft_labels is not None and not has_similarity(soft_labels):
        soft_labels = None
    statistics = files.read_feature_statistics()
    if engine == "onnx" and "onnx" in available:
        started: Engine = OnnxEngine(folder / FILES["onnx"], description, calibration.map, device, threads)
    else:
        from cclnet.deploy.shipped import read_shipped

        shipped = read_shipped(folder / FILES["torch"], description, calibration.map, statistics is not None)
        if engine == "torch":
            started = TorchEngine(shipped, device)
        else:
            from cclnet.deploy.export import check, check_images, onnx_program

            converted = onnx_program(shipped, description, calibration.map)
            started = onnx = OnnxEngine(converted, description, calibration.map, device, threads)
            check(shipped, check_images(description.crop), onnx.run_all, "the converted model")
    return Model(description, started, folder, calibration, soft_labels, rule, statistics)


def _files_of(path: Path) -> tuple[Path, set[str]]:
    """The folder of a model, and the engines whose files it contains, or that of the given file."""
    if path.is_dir():
        available = {engine for engine, name in FILES.items() if (path / name).is_file()}
        if not available:
            hint = ""
            if (path / "checkpoints").is_dir():
                hint += " Its checkpoints are only for resuming: cclnet train --resume."
            if (path / "model.pt2").is_file():
                hint += " A torch.export program (.pt2) is for torch.export.load, in a program that trusts it."
            raise InputError(f"{path} holds no model: neither model.safetensors nor model.onnx.{hint}")
        return path, available
    if not path.is_file():
        raise InputError(f"{path} does not exist: give a run folder, or a folder or file that cclnet export wrote.")
    if engines_of_file := {engine for engine, name in FILES.items() if path.name == name}:
        return path.parent, engines_of_file
    raise InputError(
        f"{path.name} is refused: models are loaded only from model.safetensors and model.onnx. Other kinds (.pt, "
        ".pth, .ckpt, .pkl, .pt2) can run code when they are loaded."
    )


def heat_of(maps: npt.NDArray[np.floating]) -> Maps:
    """Positive evidence for the class in 0..1: maps [N, h, w] without negative values, each divided by its maximum."""
    positive = np.maximum(maps, 0).astype(np.float32)
    largest = positive.max(axis=(1, 2), keepdims=True)
    return np.divide(positive, largest, out=np.zeros_like(positive), where=largest > 0)


def enlarge(heat: Maps, size: tuple[int, int]) -> Maps:
    """A map [h', w'] resized to the size [h, w] of the image, bilinear."""
    larger = Image.fromarray(heat).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.clip(np.asarray(larger, np.float32), 0, 1)


def overlay(pixels: Pixels, heat: Maps, strength: float = 0.55) -> Pixels:
    """The image [h, w, 3] with its heat map [h, w] on it; where the heat is zero, the image is unchanged."""
    position = np.clip(heat, 0, 1) * (len(_COLOURS) - 1)
    below = np.minimum(position.astype(np.intp), len(_COLOURS) - 2)
    between = (position - below)[..., None]
    colours = _COLOURS[below] * (1 - between) + _COLOURS[below + 1] * between
    cover = (strength * np.clip(heat, 0, 1))[..., None]
    return np.rint(pixels * (1 - cover) + colours * cover).astype(np.uint8)
