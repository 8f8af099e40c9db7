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
from cclnet.files import make_folder, write_whole
from cclnet.report import text as words
from cclnet.report.figures import (
    Confusions,
    Figure,
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


# A run in a few sentences, for a reader who reads no further.


Judged = Mapping[str, Any]


def in_short(judged: Judged) -> list[str]:
    """The findings, most important first, each a whole sentence."""
    sentences = [_how_often_right(judged), _weakest_class(judged), _confidence(judged), _keeping(judged)]
    return [sentence for sentence in sentences if sentence]


def what_it_is(judged: Judged) -> str:
    """Method, network and training data in one line; empty without a model.json."""
    model = judged["model"]
    if not model:
        return ""
    trained = model.get("trained") or {}
    pieces = [f"method {model['method']}", f"network {model['backbone']}"] if model.get("method") else []
    pieces += [f"trained on {count_text(trained['images'], 'image')}"] if trained.get("images") else []
    pieces += [f"seed {trained['seed']}"] if trained.get("seed") is not None else []
    return ", ".join(pieces)


def judged_on(judged: Judged) -> str:
    """The part that is reported, with its size."""
    part = judged["split"]
    name = "all images of the file" if part["name"] == "all" else f"the {part['name']} part"
    groups = f" of {count_text(part['groups'], 'group')} (lesions or patients)" if part["groups"] else ""
    classes = count_text(len(judged["classes"]), "class", "classes")
    return f"{name}: {count_text(part['images'], 'image')}{groups}, {classes}"


def _how_often_right(judged: Judged) -> str:
    scores = judged["scores"]
    if judged["task"] == "multi-label":
        ranked, exact = scores["mean_average_precision"], scores["subset_accuracy"]
        return (
            f"The mean average precision is {with_interval(ranked, 'mean_average_precision')}; "
            f"all labels are right for {with_interval(exact, 'subset_accuracy')} of the images."
        )
    return (
        f"The model names the right class for {_with(scores['accuracy'], 'accuracy')} of the images. With every class "
        f"counted equally, rare or common, it is {_with(scores['balanced_accuracy'], 'balanced_accuracy')}."
    )


def _with(number: Mapping[str, Any], name: str) -> str:
    interval = interval_text(number, name)
    ends = interval[1:-1].replace(", ", " to ")
    return value_text(number["value"], name) + (f" (95% interval {ends})" if interval else "")


def _weakest_class(judged: Judged) -> str:
    known = [row for row in judged["per_class"] if row["recall"]["value"] is not None]
    if not known:
        return ""
    worst = min(known, key=lambda row: (row["recall"]["value"], -row["support"]))
    best = max(known, key=lambda row: (row["recall"]["value"], row["support"]))
    if best["recall"]["value"] == worst["recall"]["value"]:
        return ""
    return (
        f"It finds {best['class']} best ({value_text(best['recall']['value'], 'recall')} of "
        f"{count_text(best['support'], 'image')}) and {worst['class']} worst "
        f"({value_text(worst['recall']['value'], 'recall')} of {count_text(worst['support'], 'image')})."
    )


def _confidence(judged: Judged) -> str:
    if judged["task"] == "multi-label":
        return ""
    calibration, accuracy = judged["calibration"], judged["scores"]["accuracy"]["value"]
    before, after = calibration["before"], calibration["after"]
    gap = before["mean_confidence"] - accuracy
    way = "surer than it is right" if gap > 0 else "less sure than it is right"
    error = value_text(before["ece"]["value"], "ece")
    first = f"On average it is {abs(100 * gap):.1f} points {way} (calibration error {error})"
    if after is None:
        return first + "; no temperature could be fitted."
    return first + f"; after one temperature the calibration error is {value_text(after['ece']['value'], 'ece')}."


def _keeping(judged: Judged) -> str:
    if judged["task"] == "multi-label":
        return ""
    side = judged["calibration"]["after"] or judged["calibration"]["before"]
    coverage, risk = kept_at(side, 0.8)
    everything = kept_at(side, 1.0)[1]
    if round(1 - coverage, 2) == 0 or everything == 0:  # all are equally sure, or there is nothing to gain
        return ""
    return (
        f"If the least sure {1 - coverage:.0%} of the images went to a person, {risk:.1%} of the rest would be wrong, "
        f"instead of {everything:.1%}."
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
        "score": words.score,
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


CALIBRATION_SCORES = ("nll", "brier", "ece", "adaptive_ece", "classwise_ece", "aurc")
CLASS_SCORES = ("recall", "precision", "f1", "auroc", "average_precision")
TILES = ("accuracy", "balanced_accuracy", "macro_f1", "kappa", "macro_auroc", "mean_average_precision", "micro_f1",
         "subset_accuracy")  # fmt: skip
REFERRED = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)


def write_report(run: str | Path, judged: Judged, out: str | Path | None = None, data: str | None = None) -> Path:
    """Write report.html and report.md of a judged run; returns the path of the page.

    The page is one file: figures and pictures are inside, nothing is fetched, nothing runs.

    Args:
        run: the run folder, or its predictions.csv.
        judged: what ``cclnet.evaluation.evaluate.evaluate(run)`` returned.
        out: the folder to write into; by default that of the run.
        data: where the images are, if they are not where the run's settings say.
    """
    found = read_run(run)
    folder = make_folder(found.folder if out is None else out)
    content = report_content(found, judged, data)
    write_whole(folder / "report.md", render("report.md", **content))
    write_whole(folder / "report.html", render("report.html", **content))
    return folder / "report.html"


def report_content(run: RunFiles, judged: Judged, data: str | None = None) -> dict[str, Any]:
    """Everything the two templates show."""
    classes, correlation = judged["classes"], judged["correlation"]
    confusions = _confusions(judged)
    pictures, pictures_note = thumbnails([m["image"] for m in judged["mistakes"]], run.settings, data)
    curves = training_curves(run.records, correlation and correlation["collapse_softness"])
    return {
        "judged": judged,
        "what": what_it_is(judged),
        "judged_on": judged_on(judged),
        "in_short": in_short(judged),
        "contents": _contents(judged, bool(curves)),
        "tiles": _tiles(judged),
        "class_scores": [name for name in CLASS_SCORES if name in judged["per_class"][0]],
        "confusion": confusion_table(judged["confusion"], classes) if judged["confusion"] else None,
        "confusions": confusions,
        "pictures": pictures,
        "pictures_note": pictures_note,
        "calibration_scores": [name for name in CALIBRATION_SCORES if name in judged["calibration"]["before"]],
        "calibration_sides": _sides(judged),
        "unit": _unit(judged),
        "calibration_figures": _calibration_figures(judged),
        "referral": _referral(judged),
        "soft_labels": soft_label_table(correlation["matrix"], classes) if correlation else None,
        "correlation_words": _correlation_words(judged) if correlation else [],
        "training_figures": curves,
        "training_words": _training_words(run),
        "made": _made(judged),
        "settings": list(flat_settings(run.settings)),
        "versions": _versions(judged),
        "absent": _absent(run, judged),
    }


def _contents(judged: Judged, trained: bool) -> list[tuple[str, str]]:
    entries = [
        ("scores", "Scores", True), ("classes", "Classes", True), ("confusion", "Confusions", judged["confusion"]),
        ("mistakes", "Worst mistakes", judged["mistakes"]), ("calibration", "Calibration", True),
        ("correlation", "Soft labels", judged["correlation"]), ("training", "Training", trained),
        ("split", "Split and leaks", True), ("settings", "Settings", True),
    ]  # fmt: skip
    return [(id, title) for id, title, there in entries if there]


def _tiles(judged: Judged) -> list[tuple[str, Mapping[str, Any]]]:
    first = [(name, judged["scores"][name]) for name in TILES if name in judged["scores"]][:5]
    return [*first, ("ece", judged["calibration"]["before"]["ece"])]


def _confusions(judged: Judged) -> Confusions:
    if not judged["confusion"]:
        return Confusions((), "")
    matrix = judged["correlation"] and judged["correlation"]["matrix"]
    return frequent_confusions(judged["confusion"], judged["classes"], matrix)


def _sides(judged: Judged) -> list[tuple[str, Mapping[str, Any]]]:
    calibration = judged["calibration"]
    after = [("after temperature", calibration["after"])] if calibration["after"] else []
    return [("as trained", calibration["before"]), *after]


def _calibration_figures(judged: Judged) -> list[Figure]:
    calibration = judged["calibration"]
    figures = [reliability(side, f"Reliability {title}", _unit(judged)) for title, side in _sides(judged)]
    return [*figures, risk_coverage(calibration["before"], calibration["after"], _unit(judged))]


def _unit(judged: Judged) -> str:
    """What is judged: with several labels every class of every image is a decision of its own."""
    return "images" if judged["task"] == "single-label" else "decisions"


def _referral(judged: Judged) -> list[tuple[float, float]]:
    side = judged["calibration"]["after"] or judged["calibration"]["before"]
    return [kept_at(side, 1 - referred) for referred in REFERRED] if judged["task"] == "single-label" else []


def _correlation_words(judged: Judged) -> list[str]:
    """What the learned matrix is like, and how far it is to be believed."""
    c = judged["correlation"]
    uniform = c["uniform_smoothing"]
    lines = [
        f"Softness {c['softness']:.3f}: the mean weight a soft label leaves on its own class."
        + (
            f" A dictionary that has learned nothing ends at the collapse point, {c['collapse_softness']:.3f}."
            if c["collapse_softness"] is not None
            else ""
        ),
        f"Uniform label smoothing of the same softness (epsilon {uniform['epsilon']:.3f}) differs from these labels in "
        f"{uniform['distance_mean']:.1%} of the weight on average, {uniform['distance_max']:.1%} at most: the less, "
        "the less the matrix knows about the classes.",
    ]
    if c["rarity_agreement"] is not None:
        lines.append(
            f"Rank correlation with the rarity of the classes {signed_text(c['rarity_agreement'])}: near 1, the matrix "
            "says which classes are rare rather than which look alike."
        )
    if c["confusion_agreement"] is not None:
        lines.append(
            f"Rank correlation with what the model confuses {signed_text(c['confusion_agreement'])}: near 1, the "
            "matrix holds alike what the model mixes up."
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


def _made(judged: Judged) -> list[tuple[str, str]]:
    model = judged["model"] or {}
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
        ("Temperature", judged["calibration"]["temperature"]["value"]),
    ]
    known = [(name, value) for name, value in lines if value is not None]
    return [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in known]


def _versions(judged: Judged) -> list[tuple[str, str]]:
    trained = ((judged["model"] or {}).get("trained") or {}).get("versions") or {}
    lines = [(f"{name} (training)", str(value)) for name, value in trained.items()]
    return lines + [(f"{name} (judging)", str(value)) for name, value in judged["versions"].items()]


def _absent(run: RunFiles, judged: Judged) -> list[str]:
    """What another run would show, and why this one does not."""
    lines = []
    if not run.records:
        lines.append("training curves (no metrics.jsonl)")
    if not run.settings:
        lines.append("settings (no settings.toml)")
    if judged["model"] is None:
        lines.append("how the model was made (no model.json)")
    if judged["correlation"] is None:
        lines.append("soft labels (no soft_labels.csv: the method learns none)")
    if judged["confusion"] is None:
        lines.append("confusion matrix and worst mistakes (an image may carry several labels)")
    return lines
