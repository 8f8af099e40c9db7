"""Small data sets drawn on the fly in the layouts that people download."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def draw(path: Path, seed: int = 0, size: tuple[int, int] = (12, 16)) -> Path:
    """A noisy picture of height and width ``size`` at ``path``, in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def write_csv(path: Path, rows: Sequence[Sequence[object]], separator: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(separator.join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


def truth_rows(classes: Sequence[str], labels: Mapping[str, str]) -> list[list[object]]:
    """A ground truth as ISIC writes it: one column a class, 1.0 for the class of the image."""
    marks = [[image, *(float(label == name) for name in classes)] for image, label in labels.items()]
    return [["image", *classes], *marks]


ISIC2018 = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
ISIC2019 = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC", "UNK")


def isic_split(root: Path, split: str, labels: Mapping[str, str], *, year: int = 2018, suffix: str = ".jpg") -> None:
    """One split of a challenge: ``Training``, ``Validation`` or ``Test``."""
    stem = f"ISIC2018_Task3_{split}" if year == 2018 else f"ISIC_2019_{split}"
    inside = root / f"{stem}_GroundTruth" if year == 2018 else root
    classes = ISIC2018 if year == 2018 else ISIC2019
    write_csv(inside / f"{stem}_GroundTruth.csv", truth_rows(classes, labels))
    for i, image in enumerate(labels):
        draw(root / f"{stem}_Input" / f"{image}{suffix}", seed=i)
    (root / f"{stem}_Input" / "ATTRIBUTION.txt").write_text("by somebody")


HAM_COLUMNS = ["lesion_id", "image_id", "dx", "dx_type", "age", "sex", "localization"]
HAM_IMAGES = {"ISIC_0024306": ("HAM_1", "nv"), "ISIC_0024307": ("HAM_1", "nv"), "ISIC_0024308": ("HAM_2", "mel"),
              "ISIC_0024309": ("HAM_3", "akiec"), "ISIC_0024310": ("HAM_4", "mel")}  # fmt: skip


def ham_rows(images: Mapping[str, tuple[str, str]], dataset: bool = False) -> list[list[object]]:
    rows = [[lesion, image, dx, "histo", "50.0", "male", "back"] for image, (lesion, dx) in images.items()]
    if dataset:
        return [[*HAM_COLUMNS, "dataset"], *([*row, "vidir_modern"] for row in rows)]
    return [HAM_COLUMNS, *rows]


def class_folders(root: Path, images: Mapping[str, int]) -> Path:
    """``{"train/cat": 3}`` draws train/cat/0.png and two more."""
    for folder, count in images.items():
        for i in range(count):
            draw(root / folder / f"{i}.png", seed=i)
    return root
