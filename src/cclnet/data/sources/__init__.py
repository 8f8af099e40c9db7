"""Data sources: each known layout is read to an :class:`~cclnet.data.table.ImageTable`.

To add a layout, write a module with a :class:`Source` and add it to ``SOURCES``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from cclnet.data.sources import folders, isic, manifest, medmnist
from cclnet.data.sources.image_files import below, image_files, subfolders
from cclnet.data.sources.source import Options, Source, listed
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, unknown

__all__ = ["SOURCES", "Options", "Source", "open_data"]

SOURCES: dict[str, Source] = {
    "isic": isic.ISIC,
    "ham10000": isic.HAM10000,
    "medmnist": medmnist.SOURCE,
    "folders": folders.SOURCE,
    "manifest": manifest.SOURCE,
}
# Layouts that many folders resemble: used only where no specific layout fits.
_GENERAL = ("folders", "manifest")


def open_data(
    path: str | Path,
    *,
    source: str | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    group_column: str | None = None,
    split_column: str | None = None,
    label_separator: str | None = None,
    image_folder: str | Path | None = None,
    strict: bool = False,
    follow_links: bool = False,
) -> ImageTable:
    """Read the data set at ``path``; its layout is detected.

    ``path`` is a folder, a table or an .npz file; ``medmnist:NAME`` to download one; or ``synthetic`` or
    ``synthetic-multilabel``, optionally with settings (``synthetic:overlap=much,seed=3``). ``source`` (a name in
    :data:`SOURCES`) chooses where two layouts fit. The columns are those of a manifest, see
    :class:`~cclnet.data.sources.source.Options`. Images without label and labels without image are left out and
    reported in ``problems`` of the table; ``strict`` refuses them.
    """
    options = Options(
        image_column=image_column,
        label_column=label_column,
        group_column=group_column,
        split_column=split_column,
        label_separator=label_separator,
        image_folder=None if image_folder is None else Path(image_folder).expanduser(),
        strict=strict,
        follow_links=follow_links,
    )
    kind, _, rest = str(path).partition(":")
    path = Path(path).expanduser()
    if not path.exists():
        if kind in ("synthetic", "synthetic-multilabel"):
            return _synthetic(kind, rest)
        if kind == "medmnist":
            path = medmnist.download(rest)
    return _choose(path, source, options).read(path, options)


def _choose(path: Path, source: str | None, options: Options) -> Source:
    if not path.exists():
        raise InputError(f"{path} does not exist. {_supported()}")
    if source is not None:
        if source not in SOURCES:
            raise unknown("source", source, SOURCES)
        return SOURCES[source]
    if options.for_manifest:
        return SOURCES["manifest"]
    found = {name: evidence for name, known in SOURCES.items() if (evidence := known.find(path))}
    fitting = {name: evidence for name, evidence in found.items() if name not in _GENERAL} or found
    if len(fitting) > 1:
        ways = "; ".join(
            f"{SOURCES[name].title} ({listed([e.name for e in evidence], 3)}): source={name}"
            for name, evidence in fitting.items()
        )
        raise InputError(
            f"{path} can be read in {len(fitting)} ways: {ways}. Choose one with source (--source), or give the file "
            "or folder of one of them."
        )
    if not fitting:
        raise InputError(f"{_nothing_fits(path)} {_supported()}")
    return SOURCES[next(iter(fitting))]


def _nothing_fits(path: Path) -> str:
    """Return why a path was not recognised."""
    if path.is_file():
        return f"{path} is not a supported table or .npz file."
    if not any(path.iterdir()):
        return f"{path} is an empty folder."
    for folder in subfolders(path)[:20]:
        if fitting := [known.title for known in SOURCES.values() if known.find(folder)]:
            return f"{path} is not a data set, but {folder} looks like one ({' or '.join(fitting)}): give that path."
    if files := image_files(path, follow_links=True, first_only=True):
        return f"{path} contains images (such as {below(path, files[0])}) but no labels."
    return f"{path} contains neither images nor a table of images."


def _supported() -> str:
    layouts = "".join(f"\n  - {source.title}: {source.layout}" for source in SOURCES.values())
    synthetic = "synthetic, synthetic-multilabel: small generated sets that need no files"
    return f"Supported layouts:{layouts}\n  - {synthetic}"


def _synthetic(kind: str, settings: str) -> ImageTable:
    """Generate a synthetic set from settings such as ``overlap=much,seed=3``."""
    from cclnet.data.synthetic import SyntheticSettings, synthetic
    from cclnet.data.synthetic.multilabel import MultilabelSettings, synthetic_multilabel

    multilabel = kind == "synthetic-multilabel"
    known = {field.name: field.default for field in fields(MultilabelSettings if multilabel else SyntheticSettings)}
    chosen: dict[str, Any] = {}
    for assignment in filter(None, settings.split(",")):
        name, _, text = assignment.partition("=")
        if name not in known:
            raise unknown("setting of the synthetic set", name, known)
        chosen[name] = _value(text)
        if type(known[name]) is int and type(chosen[name]) is not int:
            raise InputError(f"{kind}:{assignment}: {name} must be an integer, such as {name}={known[name]}.")
    if multilabel:
        return synthetic_multilabel(MultilabelSettings(**chosen))
    return synthetic(SyntheticSettings(**chosen))


def _value(text: str) -> bool | int | float | str:
    """Parse a value as bool, int, float or str.

    >>> [_value(text) for text in ("3", "0.1", "true", "much")]
    [3, 0.1, True, 'much']
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
