"""What the name of a folder says: a split (train_images), a container of files (dicom_dir, masks), an id (patient_12),
or none of these, so that it may be a class."""

from __future__ import annotations

import re

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
_IDS = "patient patients pat subject subj sub person case study series participant volunteer specimen pid id"
_WORDS = {*_FORMATS.split(), *_CONTAINERS.split(), *_MASKS.split(), *SPLIT_NAMES, "eval", "evaluation"}
_WITH_OTHERS = {"stage", "task", "phase", "version", "final", "my", "the"}  # stage1 alone may be a class
_MASK_WORDS = set(_MASKS.split())
_ID = re.compile(rf"(?:(?:{'|'.join(_IDS.split())})[-_ .]*)\d+[a-z]?", re.IGNORECASE)


def words(name: str) -> list[str]:
    """Return the words of a folder name in lower case, without numbers and single letters.

    >>> words("a. Training Set"), words("HAM10000_images_part_1"), words("stage2TrainImages")
    (['training', 'set'], ['ham10000', 'images', 'part'], ['stage', 'train', 'images'])
    """
    if name.lower() in _WORDS:
        return [name.lower()]
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", " ", name)
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


def is_container(name: str) -> bool:
    """Return whether a folder name stands for a split, a format or a container of files, and so for no class.

    >>> [is_container(name) for name in ("train_images", "dicom_dir", "masks", "fold_1", "nevus", "stage1")]
    [True, True, True, True, False, False]
    """
    found = words(name)
    return bool(set(found) & _WORDS) and set(found) <= _WORDS | _WITH_OTHERS


def is_mask_folder(name: str) -> bool:
    """Return whether a folder name stands for segmentation masks."""
    return is_container(name) and bool(set(words(name)) & _MASK_WORDS)


def is_id(name: str) -> bool:
    """Return whether a folder name is that of a patient or case.

    >>> [is_id(name) for name in ("patient_12", "Case 3", "person7", "type 2", "12")]
    [True, True, True, False, False]
    """
    return _ID.fullmatch(name) is not None
