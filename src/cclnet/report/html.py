"""The report of one run: report.html, and the same content as report.md.

Python collects the content; its text is in the templates. ``sentences.txt`` holds the sentences that depend on numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from cclnet import __version__
from cclnet.data import image_io
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.evaluation.compare import Comparison
from cclnet.evaluation.doubts import mean_doubt
from cclnet.evaluation.metrics import find, headline_metrics
from cclnet.files import make_folder, write_whole
from cclnet.report import figures, text
from cclnet.report.figures import Records, kept_at, series
from cclnet.report.text import count_text
from cclnet.runs.folder import RunFolder, flattened
from cclnet.runs.model import has_similarity
from cclnet.runs.out_of_distribution import REFUSED
from cclnet.runs.predictions import duration_text
from cclnet.runs.scores import Estimate, Scores
from cclnet.settings import data_options

THUMBNAIL = 160  # pixels of the longer side
LABEL_MODEL_METHOD, ORDERED_METHOD, BASELINE = "ccl-forward", "ordinal", "hard"
OFFSETS_SHOWN = 20  # classes
FEW_IMAGES = 20  # of a class, as in the experiments with few images
# Mean doubt of labels: 0.14 and 0.15 on the labels of ISIC 2018 and APTOS 2019, 0.23 and 0.24 with 20% of them wrong.
MANY_DOUBTS = 0.2
REFERRED = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)  # shares of images


def write_report(run: str | Path, scores: Scores, out: str | Path | None = None, data: str | None = None) -> Path:
    """Write report.html and report.md of an evaluated run; returns the path of report.html.

    The page is one file with all figures and pictures; it loads nothing and runs no script.

    ``run`` is the run folder or its predictions.csv; ``out`` the folder to write to, by default that of the run;
    ``data`` where the images are, if they are not where the run's settings say.
    """
    run = Path(run)
    folder = make_folder((run if run.is_dir() else run.parent) if out is None else out)
    content = report_content(run, scores, data)
    write_whole(folder / "report.md", render("report.md", **content))
    write_whole(folder / "report.html", render("report.html", **content))
    return folder / "report.html"


def report_content(run: Path, scores: Scores, data: str | None = None) -> dict[str, Any]:
    """Everything that the two templates show. Of a predictions.csv alone, neither settings nor epochs are known."""
    if scores.soft_labels and not has_similarity(scores.soft_labels.matrix):  # hard labels, label smoothing
        scores = replace(scores, soft_labels=None)
    files = RunFolder(run) if run.is_dir() else None
    settings, records = (files.read_settings_table(), files.read_history()) if files else ({}, [])
    statistics = files.read_feature_statistics() if files else None
    classes, soft_labels, calibration = scores.classes, scores.soft_labels, scores.calibration
    pictures, pictures_note = thumbnails([mistake.image for mistake in scores.mistakes], settings, data)
    stages = list(zip(("as trained", "calibrated"), calibration.stages(), strict=False))
    unit = "decisions" if scores.multilabel else "images"  # with several labels, every class is a decision
    matrix, collapse = (soft_labels.matrix, soft_labels.collapse_softness) if soft_labels else (None, None)
    trained = ((scores.model or {}).get("trained") or {}).get("versions") or {}
    return {
        "scores": scores,
        "what": what_it_is(scores),
        "evaluated_on": evaluated_on(scores),
        "in_short": sentences("summary", scores) + method_hints(run, scores),
        "tiles": headline(scores),
        "class_scores": class_columns(scores),
        "operating_points": list(scores.per_class[0].thresholds),
        "confusion": figures.confusion_table(scores.confusion, classes) if scores.confusion else None,
        "confusions": figures.frequent_confusions(scores.confusion, classes, matrix) if scores.confusion else None,
        "pictures": pictures,
        "pictures_note": pictures_note,
        "calibration_stages": stages,
        "unit": unit,
        "calibration_figures": [
            *(figures.reliability(stage, f"Reliability {title}", unit) for title, stage in stages),
            figures.risk_coverage(calibration.before, calibration.after, unit),
        ],
        "referral": [] if scores.multilabel else [kept_at(stages[-1][1], 1 - referred) for referred in REFERRED],
        "soft_labels": figures.soft_label_table(matrix, classes) if matrix else None,
        "uniform_weight": (1 - soft_labels.softness) / max(len(classes) - 1, 1) if soft_labels else None,
        "soft_label_sentences": sentences("soft_labels", soft_labels) if soft_labels else [],
        "unlike": sentences("unlike", statistics, REFUSED) if statistics else [],
        "training_figures": figures.training_curves(records, collapse),
        "training_sentence": _training_sentence(records),
        "made": _made(scores),
        "settings": list(flat_settings(settings)),
        "versions": [
            *((f"{name} (training)", str(value)) for name, value in trained.items()),
            *((f"{name} (evaluation)", value) for name, value in scores.versions.items()),
        ],
        "missing": sentences("missing", scores, settings, records),
    }


def what_it_is(scores: Scores) -> str:
    """Method, network and training data in one line; empty without a model.json."""
    model = scores.model or {}
    trained = model.get("trained") or {}
    pieces = [f"method {model['method']}", f"network {model['backbone']}"] if model.get("method") else []
    pieces += [f"trained on {count_text(trained['images'], 'image')}"] if trained.get("images") else []
    pieces += [f"seed {trained['seed']}"] if trained.get("seed") is not None else []
    return ", ".join(pieces)


def evaluated_on(scores: Scores | Comparison) -> str:
    """The reported split and its size."""
    split = scores.split
    name = "all images of the file" if split.name == "all" else f"the {split.name} split"
    model = getattr(scores, "model", None) or {}
    if split.name == "val" and (folds := (model.get("trained") or {}).get("folds")):
        name = f"out-of-fold predictions of {folds} folds"
    groups = f" of {count_text(split.groups, 'group')} (lesions or patients)" if split.groups else ""
    classes = count_text(len(scores.classes), "class", "classes")
    return f"{name}: {count_text(split.images, 'image')}{groups}, {classes}"


def headline(scores: Scores) -> list[tuple[str, Estimate]]:
    """The headline metrics by name, calibration metrics as trained."""
    found = scores.overall | scores.calibration.before.scores
    return [(metric.name, found[metric.name]) for metric in headline_metrics(scores.task) if metric.name in found]


def class_columns(scores: Scores) -> list[str]:
    """The metrics that tables of classes show."""
    return [name for name in scores.per_class[0].scores if scores.task in find(name).headline]


def flat_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings by dotted name (split.by), with values as they are written in settings.toml."""
    for name, value in flattened(settings):
        if isinstance(value, list):
            yield name, ", ".join(map(str, value))
        else:
            yield name, str(value).lower() if isinstance(value, bool) else str(value)


def _training_sentence(records: Records) -> str:
    seconds, speeds = ([value for _, value in series(records, name)] for name in ("seconds", "images_per_second"))
    duration = f" in {duration_text(sum(seconds))}" if seconds else ""
    speed = f", {sorted(speeds)[len(speeds) // 2]:,.0f} images per second in the median epoch" if speeds else ""
    return f"{len(records)} epochs{duration}{speed}."


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
        ("Soft labels", "removed from the probabilities" if model.get("target") else None),
        ("Temperature", scores.calibration.temperature.value),
        ("Offsets", _offsets_text(scores)),
    ]
    known = [(name, value) for name, value in lines if value is not None]
    return [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in known]


def _offsets_text(scores: Scores) -> str | None:
    """The offsets of the classes, largest first; None where the temperature is alone."""
    offsets = scores.calibration.temperature.offsets
    if offsets is None:
        return None
    ranked = sorted(zip(offsets, scores.classes, strict=True), reverse=True)
    shown = ", ".join(f"{name} {value:+.2f}" for value, name in ranked[:OFFSETS_SHOWN])
    return shown + (", …" if len(ranked) > OFFSETS_SHOWN else "")


def method_hints(run: Path, scores: Scores) -> list[str]:
    """Sentences for data where another method may be better: doubtful labels, few images, ordered classes."""
    model = scores.model or {}
    method, counts = model.get("method"), model.get("class_counts")
    if scores.multilabel:
        return []
    doubt = mean_doubt(run) if method != LABEL_MODEL_METHOD else 0.0
    fewest = min(counts) if counts and method not in (None, BASELINE) else FEW_IMAGES + 1
    ordered = "quadratic_weighted_kappa" in scores.overall and method != ORDERED_METHOD
    return (
        (sentences("label_hint", doubt) if doubt >= MANY_DOUBTS else [])
        + (sentences("few_images_hint", fewest) if fewest <= FEW_IMAGES else [])
        + (sentences("order_hint") if ordered else [])
    )


def thumbnails(
    names: Sequence[str], settings: Mapping[str, Any], data: str | None = None
) -> tuple[dict[str, str], str]:
    """Data URIs of the images that predictions.csv names so, and a note that says why some are missing, or "".

    The data is where the run's settings say, or at ``data`` if it has moved.
    """
    location = data or settings.get("data")
    if not names or not location:
        return {}, "" if not names else "The pictures are left out: the run does not say where its images are."
    from cclnet.data.sources import open_data

    try:
        table = open_data(location, data_options(settings))
    except InputError as error:
        first_sentence = re.split(r"(?<=\.)\s", str(error))[0]
        return {}, f"The pictures are left out, because the data cannot be opened here: {first_sentence}"
    rows = {name: row for row, name in enumerate(table.names)}
    pictures, broken = {}, []
    for name in names:
        try:
            if name in rows:
                pictures[name] = data_uri(pixels(table, rows[name]))
        except InputError as error:
            broken.append(str(error))
    missing = len(names) - len(pictures) - len(broken)
    notes = [f"{missing} of these images are not in {location}."] if missing else []
    notes += [f"{len(broken)} of these images cannot be read: {broken[0]}."] if broken else []
    return pictures, " ".join(notes)


def pixels(table: ImageTable, row: int) -> npt.NDArray[np.uint8]:
    """One image of a table, uint8 [H, W] or [H, W, 3]."""
    image = table.images[row]
    if isinstance(image, np.ndarray):
        return image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image
    return image_io.read_image(image, min_short_side=THUMBNAIL)


def data_uri(image: npt.NDArray[np.uint8]) -> str:
    """A JPEG of at most THUMBNAIL pixels per side, as a data URI."""
    picture = Image.fromarray(image).convert("RGB")
    picture.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    return image_io.data_uri(picture, "JPEG", quality=80, optimize=True)


def render(template: str, **content: Any) -> str:
    """A filled template of this package. HTML templates escape all text, Markdown templates text marked ``| md``."""
    style = Markup(files("cclnet.report").joinpath("templates/page.css").read_text(encoding="utf-8"))
    return _templates().get_template(template).render(version=__version__, style=style, none_sign=text.NONE, **content)


def sentences(macro: str, *content: Any) -> list[str]:
    """The lines that a macro of sentences.txt makes of the content."""
    written: str = getattr(_templates().get_template("sentences.txt").module, macro)(*content)
    return [line for line in written.split("\n") if line]


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
        "has_similarity": has_similarity,
        "kept_at": kept_at,
        "bar": figures.ratio_bar,
        "legend": figures.colour_legend,
        "metric": find,
        "value": text.value_text,
        "interval": text.interval_text,
        "with_interval": text.with_interval,
        "difference": text.difference_text,
        "difference_interval": text.difference_interval_text,
        "outcome": text.outcome_text,
        "amount": text.amount_text,
        "p": text.p_text,
        "signed": text.signed_text,
        "threshold": text.threshold_text,
        "counted": count_text,
        "duration": duration_text,
        "one_line": lambda name: " ".join(name.split()),
        "lowest": lowest,
        "md": markdown_text,
    }
    return environment


def lowest(values: Sequence[float | None], names: Sequence[str]) -> tuple[str, float | None]:
    """The name with the lowest value, and the value; those that are None are left out."""
    known = [(value, name) for value, name in zip(values, names, strict=True) if value is not None]
    return min(known)[::-1] if known else (text.NONE, None)


def markdown_text(value: object) -> str:
    """Text that Markdown shows unchanged: on one line, without table cells, tags or emphasis of its own."""
    line = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*|\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", line)
