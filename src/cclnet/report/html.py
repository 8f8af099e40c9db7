"""The report of one run: report.html, and the same as report.md."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from cclnet import __version__
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.evaluation.compare import Comparison
from cclnet.evaluation.metrics import find, headline_metrics
from cclnet.files import make_folder, write_whole
from cclnet.report import text as words
from cclnet.report.figures import (
    Confusions,
    confusion_table,
    frequent_confusions,
    kept_at,
    reliability,
    risk_coverage,
    soft_label_table,
    training_curves,
)
from cclnet.report.text import count_text, duration_text, interval_text, signed_text, value_text, with_interval
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import has_similarity
from cclnet.runs.scores import CalibrationStage, Estimate, Scores, SoftLabelSummary
from cclnet.settings import data_options


@dataclass(frozen=True)
class RunFiles:
    """Settings and epochs of a run; empty where it has none (a bare predictions.csv)."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)


def read_run(run: str | Path) -> RunFiles:
    """The files of a run folder. Of a predictions.csv alone nothing else is known, whatever lies beside it."""
    folder = Path(run)
    if not folder.is_dir():
        return RunFiles(folder.parent)
    run_folder = RunFolder(folder)
    return RunFiles(folder, run_folder.read_settings_table(), run_folder.read_history())


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings line by line, tables by dotted names.

    >>> list(flat_settings({"lr": 0.1, "split": {"by": "group"}}))
    [('lr', '0.1'), ('split.by', 'group')]
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{prefix}{name}.")
        elif isinstance(value, (str, int, float)):
            yield prefix + name, str(value).lower() if isinstance(value, bool) else str(value)
        else:
            yield prefix + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def in_short(scores: Scores) -> list[str]:
    """A summary in sentences, most important first."""
    sentences = [_accuracy_words(scores), _weakest_class(scores), _confidence(scores), _referral_words(scores)]
    return [sentence for sentence in sentences if sentence]


def what_it_is(scores: Scores) -> str:
    """Method, network and training data in one line; empty without a model.json."""
    model = scores.model
    if not model:
        return ""
    trained = model.get("trained") or {}
    pieces = [f"method {model['method']}", f"network {model['backbone']}"] if model.get("method") else []
    pieces += [f"trained on {count_text(trained['images'], 'image')}"] if trained.get("images") else []
    pieces += [f"seed {trained['seed']}"] if trained.get("seed") is not None else []
    return ", ".join(pieces)


def evaluated_on(scores: Scores | Comparison) -> str:
    """The reported split and its size."""
    split = scores.split
    name = "all images of the file" if split.name == "all" else f"the {split.name} split"
    groups = f" of {count_text(split.groups, 'group')} (lesions or patients)" if split.groups else ""
    classes = count_text(len(scores.classes), "class", "classes")
    return f"{name}: {count_text(split.images, 'image')}{groups}, {classes}"


def headline(scores: Scores) -> list[tuple[str, Estimate]]:
    """The headline metrics by name, those of calibration as trained."""
    found = scores.overall | scores.calibration.before.scores
    return [(metric.name, found[metric.name]) for metric in headline_metrics(scores.task) if metric.name in found]


def class_columns(scores: Scores) -> list[str]:
    """The metrics that tables of classes show."""
    return [name for name in scores.per_class[0].scores if scores.task in find(name).headline]


def _accuracy_words(scores: Scores) -> str:
    found = scores.overall
    if scores.multilabel:
        ranked, exact = found["mean_average_precision"], found["subset_accuracy"]
        return (
            f"The mean average precision is {with_interval(ranked, 'mean_average_precision')}; "
            f"all labels are right for {with_interval(exact, 'subset_accuracy')} of the images."
        )
    return (
        f"The model names the right class for {_with(found['accuracy'], 'accuracy')} of the images. With every class "
        f"counted equally, rare or common, it is {_with(found['balanced_accuracy'], 'balanced_accuracy')}."
    )


def _with(number: Estimate, name: str) -> str:
    interval = interval_text(number, name)
    ends = interval[1:-1].replace(", ", " to ")
    return value_text(number.value, name) + (f" (95% interval {ends})" if interval else "")


def _weakest_class(scores: Scores) -> str:
    known = [(value, row) for row in scores.per_class if (value := row.scores["recall"].value) is not None]
    if not known:
        return ""
    low, worst = min(known, key=lambda pair: (pair[0], -pair[1].support))
    high, best = max(known, key=lambda pair: (pair[0], pair[1].support))
    if high == low:
        return ""
    return (
        f"It finds {best.name} best ({value_text(high, 'recall')} of {count_text(best.support, 'image')}) and "
        f"{worst.name} worst ({value_text(low, 'recall')} of {count_text(worst.support, 'image')})."
    )


def _confidence(scores: Scores) -> str:
    accuracy = None if scores.multilabel else scores.overall["accuracy"].value
    if accuracy is None:
        return ""
    before, after = scores.calibration.before, scores.calibration.after
    gap = before.mean_confidence - accuracy
    direction = "overconfident" if gap > 0 else "underconfident"
    error = value_text(before.scores["ece"].value, "ece")
    first = f"On average it is {abs(100 * gap):.1f} points {direction} (calibration error {error})"
    if after is None:
        return first + "; no temperature could be fitted."
    return first + f"; after temperature the calibration error is {value_text(after.scores['ece'].value, 'ece')}."


def _referral_words(scores: Scores) -> str:
    if scores.multilabel:
        return ""
    stage = scores.calibration.stages()[-1]
    coverage, risk = kept_at(stage, 0.8)
    everything = kept_at(stage, 1.0)[1]
    if round(1 - coverage, 2) == 0 or everything == 0:  # all confidences are equal, or nothing is wrong
        return ""
    return (
        f"If the least confident {1 - coverage:.0%} of the images were referred to a person, {risk:.1%} of the rest "
        f"would be wrong, instead of {everything:.1%}."
    )


# Small pictures of images, embedded in a page.


SIDE = 96  # pixels of the longer side


def thumbnails(
    names: Sequence[str], settings: Mapping[str, Any], data: str | None = None
) -> tuple[dict[str, str], str]:
    """Data URIs of the named images, and a line that says why some are missing (empty when none is).

    Args:
        names: images as predictions.csv calls them.
        settings: settings.toml of the run, which says where its data is.
        data: where the data is now, if it has moved.
    """
    place = data or settings.get("data")
    if not names or not place:
        return {}, "" if not names else "The pictures are left out: the run does not say where its images are."
    from cclnet.data.sources import open_data

    try:
        table = open_data(place, data_options(settings))
    except InputError as error:
        first_sentence = re.split(r"(?<=\.)\s", str(error))[0]
        return {}, f"The pictures are left out, because the data cannot be opened here: {first_sentence}"
    where = {name: row for row, name in enumerate(table.names)}
    pictures, broken = {}, []
    for name in names:
        try:
            if name in where:
                pictures[name] = data_uri(pixels(table, where[name]))
        except InputError as error:
            broken.append(str(error))
    absent = len(names) - len(pictures) - len(broken)
    lines = [f"{absent} of these images are not in {place}."] if absent else []
    lines += [f"{len(broken)} of these images cannot be read: {broken[0]}."] if broken else []
    return pictures, " ".join(lines)


def pixels(table: ImageTable, row: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One image of a table, uint8 [H, W] or [H, W, 3]."""
    from cclnet.data.image_io import read_image

    image = table.images[row]
    if isinstance(image, np.ndarray):
        return image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image
    return read_image(image, min_short_side=SIDE)


def data_uri(image: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """A JPEG of at most 96 pixels a side, as text to stand in an ``src``."""
    picture = Image.fromarray(image).convert("RGB")
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


# From dictionaries to pages: the templates, their filters, and how they are filled.


def render(template: str, **content: Any) -> str:
    """A template of this package filled in. In HTML every text is escaped, in Markdown those marked ``| md``."""
    return _templates().get_template(template).render(
        version=__version__, style=_style(), none_sign=words.NONE, **content
    )  # fmt: skip


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("cclnet.report"),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "tells_apart": has_similarity,
        "metric": find,
        "value": words.value_text,
        "interval": words.interval_text,
        "with_interval": words.with_interval,
        "difference": words.difference_text,
        "difference_interval": words.difference_interval_text,
        "p": words.p_text,
        "signed": words.signed_text,
        "md": markdown_text,
    }
    return environment


def _style() -> Markup:
    """Our own style sheet, which is no text of a user's."""
    return Markup(files("cclnet.report").joinpath("templates/page.css").read_text(encoding="utf-8"))


def markdown_text(text: object) -> str:
    r"""Text that Markdown shows as it is: on one line, no cell ends early, no tag or emphasis begins.

    >>> print(markdown_text("a|b <script> *x*\n2"))
    a\|b &lt;script&gt; \*x\* 2
    """
    line = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*|\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", line)


REFERRED = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)


def write_report(run: str | Path, scores: Scores, out: str | Path | None = None, data: str | None = None) -> Path:
    """Write report.html and report.md of an evaluated run; returns the path of the page.

    The page is one file with all figures and pictures; it loads nothing and runs no script.

    Args:
        run: the run folder, or its predictions.csv.
        scores: what ``cclnet.evaluation.evaluate.evaluate(run)`` returned.
        out: the folder to write into; by default that of the run.
        data: where the images are, if they are not where the run's settings say.
    """
    found = read_run(run)
    folder = make_folder(found.folder if out is None else out)
    content = report_content(found, scores, data)
    write_whole(folder / "report.md", render("report.md", **content))
    write_whole(folder / "report.html", render("report.html", **content))
    return folder / "report.html"


def report_content(run: RunFiles, scores: Scores, data: str | None = None) -> dict[str, Any]:
    """Everything the two templates show."""
    classes, soft_labels = scores.classes, scores.soft_labels
    pictures, pictures_note = thumbnails([mistake.image for mistake in scores.mistakes], run.settings, data)
    curves = training_curves(run.records, None if soft_labels is None else soft_labels.collapse_softness)
    stages = _stages(scores)
    unit = "decisions" if scores.multilabel else "images"  # with several labels every class is a decision of its own
    return {
        "scores": scores,
        "what": what_it_is(scores),
        "evaluated_on": evaluated_on(scores),
        "in_short": in_short(scores),
        "contents": _contents(scores, bool(curves)),
        "tiles": headline(scores),
        "class_scores": class_columns(scores),
        "confusion": confusion_table(scores.confusion, classes) if scores.confusion else None,
        "confusions": _confusions(scores),
        "pictures": pictures,
        "pictures_note": pictures_note,
        "calibration_scores": list(scores.calibration.before.scores),
        "calibration_stages": stages,
        "unit": unit,
        "calibration_figures": [
            *(reliability(stage, f"Reliability {title}", unit) for title, stage in stages),
            risk_coverage(scores.calibration.before, scores.calibration.after, unit),
        ],
        "referral": _referral(scores),
        "soft_labels": soft_label_table(soft_labels.matrix, classes) if soft_labels else None,
        "soft_label_words": _soft_label_words(soft_labels) if soft_labels else [],
        "training_figures": curves,
        "training_words": _training_words(run),
        "made": _made(scores),
        "settings": list(flat_settings(run.settings)),
        "versions": _versions(scores),
        "absent": _absent(run, scores),
    }


def _contents(scores: Scores, trained: bool) -> list[tuple[str, str]]:
    entries = [
        ("scores", "Scores", True), ("classes", "Classes", True), ("confusion", "Confusions", scores.confusion),
        ("mistakes", "Worst mistakes", scores.mistakes), ("calibration", "Calibration", True),
        ("soft-labels", "Soft labels", scores.soft_labels), ("training", "Training", trained),
        ("split", "Split and leaks", True), ("settings", "Settings", True),
    ]  # fmt: skip
    return [(id, title) for id, title, there in entries if there]


def _confusions(scores: Scores) -> Confusions:
    if not scores.confusion:
        return Confusions((), "")
    matrix = None if scores.soft_labels is None else scores.soft_labels.matrix
    return frequent_confusions(scores.confusion, scores.classes, matrix)


def _stages(scores: Scores) -> list[tuple[str, CalibrationStage]]:
    return list(zip(("as trained", "after temperature"), scores.calibration.stages(), strict=False))


def _referral(scores: Scores) -> list[tuple[float, float]]:
    stage = scores.calibration.stages()[-1]
    return [] if scores.multilabel else [kept_at(stage, 1 - referred) for referred in REFERRED]


def _soft_label_words(soft_labels: SoftLabelSummary) -> list[str]:
    """What the soft labels are like, and what they follow."""
    uniform, collapse = soft_labels.uniform_smoothing, soft_labels.collapse_softness
    softness = f"Softness {soft_labels.softness:.3f}: the mean weight a soft label leaves on its own class."
    if collapse is not None:
        softness += f" A dictionary that has learned nothing ends at the collapse point, {collapse:.3f}."
    lines = [
        softness,
        f"Uniform label smoothing of the same softness (epsilon {uniform.epsilon:.3f}) differs from these labels in "
        f"{uniform.distance_mean:.1%} of the weight on average, {uniform.distance_max:.1%} at most: the less, the less "
        "the soft labels know about the classes.",
    ]
    if soft_labels.inverse_frequency_agreement is not None:
        lines.append(
            f"Rank correlation with inverse class frequency {signed_text(soft_labels.inverse_frequency_agreement)}: "
            "near 1, the soft labels show which classes are rare rather than which look similar."
        )
    if soft_labels.confusion_agreement is not None:
        lines.append(
            f"Rank correlation with the confusion matrix {signed_text(soft_labels.confusion_agreement)}: near 1, the "
            "soft labels are large for the classes that the model confuses."
        )
    return lines


def _training_words(run: RunFiles) -> str:
    if not run.records:
        return ""
    seconds = [r["seconds"] for r in run.records if isinstance(r.get("seconds"), (int, float))]
    speeds = sorted(r["images_per_second"] for r in run.records if isinstance(r.get("images_per_second"), (int, float)))
    text = f"{len(run.records)} epochs"
    if seconds and math.isfinite(sum(seconds)):
        text += f" in {duration_text(sum(seconds))}"
    if speeds:
        text += f", {speeds[len(speeds) // 2]:,.0f} images a second at the median epoch"
    return text + "."


def _made(scores: Scores) -> list[tuple[str, str]]:
    model = scores.model or {}
    trained = model.get("trained") or {}
    lines: list[tuple[str, Any]] = [
        ("Method", model.get("method")),
        ("Network", model.get("backbone")),
        ("Data", trained.get("data")),
        ("Training images", trained.get("images")),
        ("Seed", trained.get("seed")),
        ("Device", trained.get("device")),
        ("Training time", duration_text(trained["seconds"]) if trained.get("seconds") is not None else None),
        ("Soft labels", "taken out of the probabilities again" if model.get("target") else None),
        ("Temperature", scores.calibration.temperature.value),
    ]
    known = [(name, value) for name, value in lines if value is not None]
    return [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in known]


def _versions(scores: Scores) -> list[tuple[str, str]]:
    trained = ((scores.model or {}).get("trained") or {}).get("versions") or {}
    lines = [(f"{name} (training)", str(value)) for name, value in trained.items()]
    return lines + [(f"{name} (evaluation)", value) for name, value in scores.versions.items()]


def _absent(run: RunFiles, scores: Scores) -> list[str]:
    """What another run would show, and why this one does not."""
    lines = []
    if not run.records:
        lines.append("training curves (no metrics.jsonl)")
    if not run.settings:
        lines.append("settings (no settings.toml)")
    if scores.model is None:
        lines.append("how the model was made (no model.json)")
    if scores.soft_labels is None:
        lines.append("soft labels (no soft_labels.csv: the method learns none)")
    if scores.confusion is None:
        lines.append("confusion matrix and worst mistakes (an image may carry several labels)")
    return lines
