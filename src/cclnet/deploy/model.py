"""A trained model in a program: ``cclnet.load(path).predict(image)``, from a run folder or from what was exported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from cclnet.data.image_io import MAX_PIXELS
from cclnet.deploy import abstain
from cclnet.deploy import engines as preparing
from cclnet.deploy.engines import Engine, OnnxEngine, TorchEngine
from cclnet.deploy.explain import Heat, enlarge, heat_of
from cclnet.errors import InputError, unknown
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import AbstentionCurve, Calibration, ModelDescription, has_similarity

Floats = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]

FILES = {"onnx": "model.onnx", "torch": "model.safetensors"}
SIMILAR = 3  # classes most alike the predicted one that a prediction names
LEAST_WEIGHT = 0.005  # in a soft label: two classes that share less are not alike


@dataclass(frozen=True)
class Prediction:
    """What the model says about one image.

    Attributes:
        probabilities: of the K classes, calibrated with the run's temperature, [K].
        classes: their names.
        label: the most probable class; where an image may carry several, those of at least .5, joined by ``|``.
        confidence: probability of the label; for several labels that of the least sure decision.
        abstain: whether the confidence is below the threshold asked for; None where none was asked for.
        similar: the classes most alike the predicted one with their weight in its soft label, strongest first.
        heat: where the network looked for the most probable class, [h, w] of the crop, 0..1; None unless asked for.
    """

    probabilities: Floats
    classes: tuple[str, ...]
    label: str
    confidence: float
    abstain: bool | None = None
    similar: tuple[tuple[str, float], ...] = ()
    heat: Heat | None = None

    def top(self, n: int = 3) -> list[tuple[str, float]]:
        """The n most probable classes with their probabilities."""
        order = np.argsort(-self.probabilities, kind="stable")[:n]
        return [(self.classes[k], float(self.probabilities[k])) for k in order]


class Model:
    """A classifier ready to use. Made by :func:`load`.

    Attributes:
        classes, multilabel: what it tells apart, and whether an image may carry several labels.
        temperature: by which logits are divided, None where none was fitted (then probabilities are as trained).
        soft_labels: [K, K], row k that of class k; None where the method learns none.
        calibration: what was fitted after training: the temperature, and the abstention curve of an exported model.
        engine: "torch" or "onnx".
        device: "cpu" or "cuda".
    """

    def __init__(
        self,
        description: ModelDescription,
        engine: Engine,
        folder: Path,
        calibration: Calibration | None = None,
        soft_labels: Floats | None = None,
    ) -> None:
        self.description = description
        self.folder = folder
        self.calibration = calibration or Calibration()
        self.soft_labels = soft_labels
        self.classes, self.multilabel = description.classes, description.multilabel
        self.temperature = self.calibration.temperature.value
        self._engine = engine

    @property
    def info(self) -> dict[str, Any]:
        """The content of model.json."""
        return self.description.to_json()

    @property
    def engine(self) -> str:
        return self._engine.name

    @property
    def device(self) -> str:
        return self._engine.device

    @cached_property
    def has_maps(self) -> bool:
        """Whether the network can tell where it looked. Tried out, which warms it up as well."""
        noise = np.random.default_rng(0).integers(0, 256, (1, *self.description.crop, 3), dtype=np.uint8)
        try:
            return self.run(noise, explain=True)[1] is not None
        except InputError:  # the engine says that it has none
            self.run(noise)
            return False

    def prepare(self, image: Any, max_pixels: int = MAX_PIXELS) -> Pixels:
        """An image (path, bytes of a file, Pillow image, uint8 array) as the network takes it, uint8 [h, w, 3].

        Read, set upright, resized to the run's short side, its centre cut out: the same pixels as in testing. Raises
        :class:`cclnet.data.image_io.UnreadableImage` for what is broken, or larger than ``max_pixels`` by its header.
        """
        return preparing.prepare(image, self.description.short_side, self.description.crop, max_pixels)

    def run(self, batch: Pixels, explain: bool = False) -> tuple[Floats, Heat | None]:
        """Probabilities [N, K] of prepared images uint8 [N, h, w, 3]; where asked for, the heat of each one's most
        probable class, [N, h', w'] in 0..1, as coarse as the network sees (``explain.enlarge`` brings it to size)."""
        expected = (*self.description.crop, 3)
        if batch.dtype != np.uint8 or batch.ndim != 4 or batch.shape[1:] != expected:
            raise InputError(
                f"a batch is uint8 [N, {', '.join(map(str, expected))}], as prepare gives it; got {batch.dtype} "
                f"{list(batch.shape)}."
            )
        probabilities, maps = self._engine.run(batch, explain)
        return probabilities, None if maps is None else heat_of(maps)

    @overload
    def predict(
        self,
        images: list[Any] | tuple[Any, ...],
        explain: bool = ...,
        threshold: float | None = ...,
        batch_size: int = ...,
    ) -> list[Prediction]: ...

    @overload
    def predict(
        self, images: Any, explain: bool = ..., threshold: float | None = ..., batch_size: int = ...
    ) -> Prediction: ...

    def predict(
        self, images: Any, explain: bool = False, threshold: float | None = None, batch_size: int = 32
    ) -> Prediction | list[Prediction]:
        """What the model says about an image (path, bytes, Pillow image, uint8 array), or about a list of them.

        ``threshold``: abstain where it is less confident than this; :meth:`threshold` finds it.
        """
        if not isinstance(images, (list, tuple)):
            return self.predict([images], explain, threshold)[0]
        found: list[Prediction] = []
        for start in range(0, len(images), batch_size):
            crops = np.stack([self.prepare(image) for image in images[start : start + batch_size]])
            found += self.describe(*self.run(crops, explain), threshold)
        return found

    def describe(
        self, probabilities: Floats, heat: Heat | None = None, threshold: float | None = None
    ) -> list[Prediction]:
        """What :meth:`run` gave, image by image, in words."""
        sure = abstain.confidence(probabilities, self.multilabel)
        return [
            Prediction(
                probabilities=row,
                classes=self.classes,
                label=self._label(row),
                confidence=float(sure[i]),
                abstain=None if threshold is None else bool(sure[i] < threshold),
                similar=self.similar(int(row.argmax())),
                heat=None if heat is None else enlarge(heat[i], self.description.crop),
            )
            for i, row in enumerate(probabilities)
        ]

    def similar(self, index: int, count: int = SIMILAR) -> tuple[tuple[str, float], ...]:
        """The classes that weigh most in the soft label of a class beside itself, as far as they weigh anything; ()
        where there are no soft labels."""
        if self.soft_labels is None:
            return ()
        row = self.soft_labels[index]
        order = [k for k in np.argsort(-row, kind="stable") if k != index and row[k] >= LEAST_WEIGHT][:count]
        return tuple((self.classes[k], float(row[k])) for k in order)

    @cached_property
    def curve(self) -> AbstentionCurve:
        """Coverage and risk by threshold on the run's held-out images: from the run's predictions, or, of an exported
        model, from its calibration.json."""
        if self.calibration.abstention is not None:
            return self.calibration.abstention
        if self.description.export is not None:
            raise InputError(
                f"{self.folder} has no abstention curve: it was exported from a run without predictions.csv. Export it "
                "again from a run that has them."
            )
        return abstain.curve_of_run(self.folder, self.temperature)

    def threshold(self, coverage: float | None = None, risk: float | None = None) -> float:
        """The confidence below which to abstain so that, as on the run's held-out images, at least ``coverage`` of the
        images are kept, or at most ``risk`` of those kept are wrong."""
        return float(self.curve.threshold[self.curve.at(coverage, risk)])

    def _label(self, row: Floats) -> str:
        if self.multilabel:
            return "|".join(name for name, p in zip(self.classes, row, strict=True) if p >= 0.5)
        return self.classes[int(row.argmax())]


def load(path: str | Path, device: str = "auto", engine: str = "auto", threads: int | None = None) -> Model:
    """A model from a run folder, or from what ``cclnet export`` wrote (the folder, model.onnx or model.safetensors).

    No pickle is ever loaded: weights are .safetensors, programs are ONNX, and model.json is checked. ``torch.export``
    programs (.pt2) are refused, for PyTorch unpickles and evaluates parts of them.

    Args:
        device: "auto" (the GPU where there is one), "cpu", "cuda".
        engine: "torch"; "onnx" (needs onnxruntime; a run folder is converted first, which takes seconds); or "auto":
            the one that the file is for, and where there are both ONNX on a CPU, torch on a GPU.
        threads: that ONNX Runtime may use for one batch. Default: one a core.
    """
    path = Path(path).expanduser()
    if engine not in ("auto", *FILES):
        raise unknown("engine", engine, ("auto", *FILES))
    folder, there = _files_of(path)
    files = RunFolder(folder)
    description, calibration = files.read_model(), files.read_calibration()
    chosen = _choose(there, engine, device)
    soft_labels = files.read_soft_labels(description.classes)
    if soft_labels is not None and not has_similarity(soft_labels):
        soft_labels = None
    started = _start(folder, chosen, there, description, calibration.temperature.value, device, threads)
    return Model(description, started, folder, calibration, soft_labels)


def _files_of(path: Path) -> tuple[Path, set[str]]:
    """The folder of a model, and the engines that it, or the one file given, is for."""
    if path.is_dir():
        there = {engine for engine, name in FILES.items() if (path / name).is_file()}
        if not there:
            checkpoints = (
                " Its checkpoints are for going on with it: cclnet train --resume."
                if (path / "checkpoints").is_dir()
                else ""
            )
            program = (
                " A torch.export program (.pt2) is for torch.export.load, in a program that trusts it."
                if (path / "model.pt2").is_file()
                else ""
            )
            raise InputError(f"{path} holds no model: neither model.safetensors nor model.onnx.{checkpoints}{program}")
        return path, there
    if not path.is_file():
        raise InputError(
            f"there is nothing at {path}: give a run folder, or a folder or file that cclnet export wrote."
        )
    for engine, name in FILES.items():
        if path.name == name:
            return path.parent, {engine}
    raise InputError(
        f"{path.name} is refused: models are loaded from model.safetensors and model.onnx alone. Other kinds (.pt, "
        ".pth, .ckpt, .pkl, .pt2) can run code when they are loaded."
    )


def _choose(there: set[str], engine: str, device: str) -> str:
    if engine == "torch" and "torch" not in there:
        raise InputError("an ONNX model runs in the engine onnx alone; for torch give the run folder.")
    if engine != "auto" or len(there) == 1:
        return engine if engine != "auto" else next(iter(there))
    from cclnet.deploy.engines import torch_device

    return "torch" if torch_device(device) != "cpu" else "onnx"


def _start(
    folder: Path,
    engine: str,
    there: set[str],
    description: ModelDescription,
    temperature: float | None,
    device: str,
    threads: int | None,
) -> Engine:
    if engine in there and engine == "onnx":
        return OnnxEngine(folder / FILES["onnx"], description, temperature, device, threads)
    from cclnet.deploy.shipped import read_shipped

    shipped = read_shipped(folder / FILES["torch"], description, temperature)
    if engine == "torch":
        return TorchEngine(shipped, device)
    from cclnet.deploy.export import check, check_images, onnx_program

    converted = OnnxEngine(onnx_program(shipped, description, temperature), description, temperature, device, threads)
    check(shipped, check_images(description.crop), converted.run_all, "the converted model")
    return converted
