"""What the name of a folder says: a split (train_images), a container of files (dicom_dir, masks), an id (patient_12),
or none of these, so that it may be a class."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cclnet.data.table import SPLIT_NAMES

_FORMATS = "dicom dicoms dcm tif tiff tiffs png pngs jpg jpgs jpeg jpegs bmp webp nii nifti npz npy hdf5"
_CONTAINERS = (
    "image images img imgs picture pictures pic pics photo photos file files data dataset datasets database folder "
    "folders dir directory archive set sets input inputs raw original originals resized cropped preprocessed processed "
    "augmented output outputs slice slices frame frames fold folds part parts batch batches subset split splits chunk "
    "unlabeled unlabelled external isic ham10000"
)
_MASKS = (
    "mask masks segmentation segmentations seg segs annotation annotations annot label labels groundtruth ground truth "
    "gt gts roi rois contour contours overlay overlays bbox bboxes boxes superpixels"
)
_IDS = (
    "patient patients pat subject subj sub person case study series participant volunteer specimen pid id visit "
    "session ses exam donor animal mouse video clip slide scan"
)
_WORDS = {*_FORMATS.split(), *_CONTAINERS.split(), *_MASKS.split(), *SPLIT_NAMES, "eval", "evaluation"}
# No class with one of the words above; alone they may be one (stage1, cases and controls).
_LIKE_CONTAINERS = (
    "stage task phase version final prelim preliminary my the new cases samples scans patches tiles slides crops xray "
    "xrays cxr"
)
_WITH_OTHERS = set(_LIKE_CONTAINERS.split())
_MASK_WORDS = set(_MASKS.split())
# patient_12, P0012, 10253, TCGA-A1-A0SB; not the numbers of grades, nor those of the classes of ImageNet (n01440764).
_ID = re.compile(
    rf"(?:{'|'.join(_IDS.split())})[-_ .]*\d+[a-z]?|(?!n\d{{8}}$)[a-z]{{0,4}}[-_]?\d{{3,}}|TCGA-\w\w-\w{{3,}}.*",
    re.IGNORECASE,
)


def words(name: str) -> list[str]:
    """Return the words of a folder name in lower case, without numbers and single letters.

    >>> words("a. Training Set"), words("HAM10000_images_part_1"), words("stage2TrainImages")
    (['training', 'set'], ['ham10000', 'images', 'part'], ['stage', 'train', 'images'])
    >>> words("trainA")
    ['train']
    """
    if name.lower() in _WORDS:
        return [name.lower()]
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z]$)", " ", name)
    found = (piece.lower() for piece in re.split(r"[^A-Za-z0-9]+", spaced))
    numberless = (piece if piece in _WORDS else piece.rstrip("0123456789") for piece in found)
    return [piece for piece in numberless if len(piece) > 1]


def split_of_folder(name: str) -> str:
    """Return the split that a folder name stands for, "" if none.

    >>> [split_of_folder(name) for name in ("train_images", "Testing", "val_dir", "trained", "images")]
    ['train', 'test', 'val', '', '']
    """
    found = words(name)
    splits = {SPLIT_NAMES[word] for word in found if word in SPLIT_NAMES}
    only_words = set(found) <= (_WORDS | _WITH_OTHERS) - _MASK_WORDS
    return splits.pop() if len(splits) == 1 and only_words else ""


def splits_among(names: Iterable[str]) -> dict[str, str]:
    """Return the splits that folders beside each other stand for: by their names alone, or because the names differ in
    the split only.

    >>> splits_among(["train_images", "val", "nevus"]), splits_among(["chest_train", "chest_test"])
    ({'train_images': 'train', 'val': 'val'}, {'chest_train': 'train', 'chest_test': 'test'})
    """
    names = list(names)
    if alone := {name: split for name in names if (split := split_of_folder(name))}:
        return alone
    found = {name: _splits_in(name) for name in names if len(_splits_in(name)) == 1}
    others = {frozenset(words(name)) - _WORDS - _WITH_OTHERS for name in found}
    if len(others) > 1 or len(set[str]().union(*found.values())) < len(found) or len(found) < 2:
        return {}
    return {name: split.pop() for name, split in found.items()}


def _splits_in(name: str) -> set[str]:
    return {SPLIT_NAMES[word] for word in words(name) if word in SPLIT_NAMES}


def is_container(name: str) -> bool:
    """Return whether a folder name stands for a split, a format or a container of files, and so for no class.

    >>> [is_container(name) for name in ("train_images", "dicom_dir", "masks", "fold_1", "nevus", "stage1")]
    [True, True, True, True, False, False]
    """
    return _are_of_container(set(words(name)))


def _are_of_container(found: set[str]) -> bool:
    return bool(found & _WORDS) and found <= _WORDS | _WITH_OTHERS


def containers_among(names: Iterable[str]) -> set[str]:
    """Return which folders beside each other are no classes: containers by their own names, or by the words that not
    all of them share; and where some name train and others test or val, all that name a split.

    >>> sorted(containers_among(["normal cases", "malignant cases", "test cases"]))
    ['test cases']
    >>> sorted(containers_among(["bones-training-dataset", "bones-test-dataset"]))
    ['bones-test-dataset', 'bones-training-dataset']
    >>> containers_among(["test_positive", "test_negative"])
    set()
    """
    found = {name: set(words(name)) for name in names}
    shared = set.intersection(*found.values()) if len(found) > 1 else set[str]()
    with_split = {name for name in found if _splits_in(name)}
    several = len({split for name in with_split for split in _splits_in(name)}) > 1
    return {
        name
        for name, own in found.items()
        if _are_of_container(own) or _are_of_container(own - shared - _MASK_WORDS) or (several and name in with_split)
    }


def is_mask_folder(name: str) -> bool:
    """Return whether a folder name stands for segmentation masks."""
    return is_container(name) and bool(set(words(name)) & _MASK_WORDS)


def is_id(name: str) -> bool:
    """Return whether a folder name is that of a patient or case.

    >>> [is_id(name) for name in ("patient_12", "Case 3", "P0012", "type 2", "12")]
    [True, True, True, False, False]
    """
    return _ID.fullmatch(name) is not None
