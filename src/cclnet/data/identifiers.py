"""Ids of patients or lesions in image names: taken as groups by a regular expression, and pointed out where names look
as if they had them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cclnet.data.table import ImageTable, listed
from cclnet.errors import InputError

_SEPARATOR, _FIELD = "[_. ()-]+", "[^/_. ()-]+"
_SEPARATORS = re.compile(_SEPARATOR)
_ID_WORD = re.compile(r"(?:patient|person|subject|subj|case|pat|pid|sub|study|lesion|specimen)[-_ ]?\d+", re.IGNORECASE)
_MOST_FIELDS = 6  # of a file name that an id may have: SOB_B_A-14-22549AB-40-001.png
_FEWEST_IDS = 5  # with several images; fewer are no pattern
_LEAST_SHARED = 0.3  # share of the images that share their id with another
_LEAST_PURITY = 0.8  # share of the images with the most common label of their id, where no word says that it is an id


def compile_regex(pattern: str) -> re.Pattern[str]:
    """Return the expression of group_regex, compiled."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"group_regex '{pattern}' is not a regular expression: {error}.") from error


def groups_by_regex(names: Sequence[str], pattern: str) -> list[str]:
    """Return the id in each name: the groups of the expression joined by "_", or the match if it has none; "" where
    nothing matches.

    >>> groups_by_regex(["train/person12_virus_3.jpeg", "other.png"], r"person(\\d+)")
    ['12', '']
    """
    compiled = compile_regex(pattern)
    matches = [compiled.search(name) for name in names]
    if not any(matches):
        raise InputError(f"group_regex '{pattern}' matches no image name; names are like {listed(names, 3)}.")
    return ["" if m is None else "_".join(filter(None, m.groups())) or m[0] for m in matches]


@dataclass(frozen=True)
class SuspectedIds:
    """Ids that image names seem to contain."""

    regex: str  # that takes them
    example: str
    ids: int  # with several images
    images: int  # of these ids
    divided: int | None  # ids with images in more than one split; None without splits

    def __str__(self) -> str:
        across = "" if self.divided is None else f", {self.divided:,} of them in more than one split"
        return (
            f"image names look as if they had ids, such as {self.example}: {self.ids:,} ids have several images "
            f"({self.images:,} images){across}. If these are patients or lesions, keep them together with "
            f"--group-regex '{self.regex}' (group_regex)"
        )


def suspected_ids(table: ImageTable, splits: npt.NDArray[np.str_] | None = None) -> SuspectedIds | None:
    """Return the ids that the image names seem to contain; None where there are none, or where groups are known.

    An id is a part of the path, the beginning of the file name or a folder inside the class folder that contains a
    digit, that many images share, and whose images mostly have one label (unless a word such as "patient" stands before
    it). ``splits``: by default those of the table.
    """
    if table.groups is not None:
        return None
    splits = table.splits if splits is None else splits
    stems = [name.rpartition("/")[2] for name in table.names]
    worded = [match[0] if (match := _ID_WORD.search(name)) else "" for name in table.names]
    if found := _check(table, splits, worded, worded=True):
        return found
    fields = range(1, _MOST_FIELDS + 1)
    beginnings = (_check(table, splits, [_prefix(stem, count) for stem in stems], False) for count in fields)
    folders = (
        _check(table, splits, _folders(table, level), False, rf"([^/]+)(?:/[^/]*){{{level}}}$") for level in (1, 2, 3)
    )
    return max(filter(None, (*beginnings, *folders)), key=lambda found: found.images, default=None)


def _folders(table: ImageTable, level: int) -> list[str]:
    """Return the folder so many levels above each image, "" where it is the first, the class, or without a digit."""
    found = []
    for name, label in zip(table.names, table.label_names(), strict=True):
        above = name.split("/")[:-1]
        folder = above[-level] if len(above) > level else ""
        found.append(folder if folder != label and any(character.isdigit() for character in folder) else "")
    return found


def _prefix(name: str, fields: int) -> str:
    """Return the first fields of a file name, "" where it has no more than these or they contain no digit.

    >>> _prefix("00012_005.png", 1), _prefix("TCGA-A1-A0SB-01.png", 3), _prefix("nevus (3).png", 1)
    ('00012', 'TCGA-A1-A0SB', '')
    """
    stem = name.rpartition(".")[0] or name
    ends = [match.start() for match in _SEPARATORS.finditer(stem) if match.start() > 0 and match.end() < len(stem)]
    if len(ends) < fields:
        return ""
    prefix = stem[: ends[fields - 1]]
    return prefix if any(character.isdigit() for character in prefix) else ""


def _check(
    table: ImageTable, splits: npt.NDArray[np.str_] | None, keys: list[str], worded: bool, regex: str = ""
) -> SuspectedIds | None:
    """Return what is known of the keys of the images if they look like ids, else None."""
    counts = Counter(key for key in keys if key)
    several = {key for key, count in counts.items() if count > 1}
    rows = [row for row, key in enumerate(keys) if key in several]
    if len(several) < _FEWEST_IDS or len(rows) < _LEAST_SHARED * len(keys) or max(counts.values()) > len(keys) / 4:
        return None
    if not worded and not table.multilabel:
        labels = Counter((keys[row], int(table.labels[row])) for row in rows)
        most: dict[str, int] = {}
        for (key, _), count in labels.items():
            most[key] = max(most.get(key, 0), count)
        if sum(most.values()) < _LEAST_PURITY * len(rows):
            return None
    divided = None
    if splits is not None:
        pairs = {(keys[row], str(splits[row])) for row in rows}
        divided = sum(count > 1 for count in Counter(key for key, _ in pairs).values())
    example = next(key for key in keys if key in several)
    return SuspectedIds(regex or _regex(several, worded), example, len(several), len(rows), divided)


def _regex(keys: set[str], worded: bool) -> str:
    """Return an expression that finds such keys.

    >>> _regex({"person1", "person23"}, True), _regex({"A1-B2", "C3-DD"}, False)
    ('person\\\\d+', '([^/_. ()-]+[_. ()-]+[^/_. ()-]+)[_. ()-]+[^/]*$')
    """
    shapes = Counter(re.sub(r"\d+", r"\\d+", re.escape(key)) for key in keys)
    shape, count = shapes.most_common(1)[0]
    if count == len(keys) and not shape.startswith(r"\d"):
        return shape
    if worded:
        return f"(?i){_ID_WORD.pattern}"
    fields = len(_SEPARATORS.split(next(iter(keys))))
    if fields > 2:
        return f"((?:{_FIELD}{_SEPARATOR}){{{fields - 1}}}{_FIELD}){_SEPARATOR}[^/]*$"
    return "(" + _SEPARATOR.join([_FIELD] * fields) + ")" + _SEPARATOR + "[^/]*$"
