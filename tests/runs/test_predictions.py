from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cclnet.errors import InputError
from cclnet.runs.folder import read_split_file
from cclnet.runs.predictions import Predictions, read_predictions, write_predictions
from made_predictions import several_labels, single_label

GOOD = "image,label,p_a,p_b\nx,a,0.7,0.3\ny,b,0.4,0.6\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "predictions.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["predictions.csv", "predictions.csv.gz", "predictions.csv.bz2"])
@pytest.mark.parametrize("several", [False, True])
def test_what_is_written_is_read_again(tmp_path: Path, name: str, several: bool) -> None:
    made = several_labels(30) if several else single_label(30)
    p = made.probabilities.astype(np.float32).astype(np.float64)
    parts, groups = np.array(["val", "test"] * 15), np.array(["", "g1", "007"] * 10)
    made = Predictions(made.images, made.labels, p, made.classes, groups, parts)
    write_predictions(tmp_path / name, made)
    read = read_predictions(tmp_path / name)
    assert read.classes == made.classes and read.multilabel == several
    for field in ("images", "labels", "groups", "splits"):
        np.testing.assert_array_equal(getattr(read, field), getattr(made, field))
    if several:  # nine digits hold a float32
        np.testing.assert_array_equal(read.probabilities.astype(np.float32), p.astype(np.float32))
    else:
        np.testing.assert_allclose(read.probabilities, p, rtol=2e-7)
        np.testing.assert_allclose(read.probabilities.sum(axis=1), 1, rtol=1e-15)


def test_the_same_predictions_give_the_same_compressed_bytes(tmp_path: Path) -> None:
    for name in ("one.csv.gz", "two.csv.gz"):
        write_predictions(tmp_path / name, single_label(20))
    assert (tmp_path / "one.csv.gz").read_bytes() == (tmp_path / "two.csv.gz").read_bytes()


@pytest.mark.parametrize("classes", [3, 50])
def test_four_decimals_are_renormalised(tmp_path: Path, classes: int) -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(classes), 200).round(4)
    frame = pd.DataFrame(p, columns=[f"p_{k}" for k in range(classes)])
    frame.insert(0, "label", "1")
    frame.insert(0, "image", [f"i{i}" for i in range(200)])
    frame.to_csv(tmp_path / "p.csv", index=False)
    read = read_predictions(tmp_path / "p.csv")
    np.testing.assert_allclose(read.probabilities, p / p.sum(axis=1, keepdims=True), rtol=1e-15)


def test_names_that_look_like_numbers_or_nothing_stay_names(tmp_path: Path) -> None:
    read = read_predictions(written(tmp_path, "image,group,label,p_NA,p_01\n007,1.0,NA,0.9,0.1\n008,nan,01,0.5,0.5\n"))
    assert read.images.tolist() == ["007", "008"] and read.classes == ("NA", "01")
    assert read.labels.tolist() == [0, 1]
    assert read.groups is not None and read.groups.tolist() == ["1.0", "nan"]


def test_several_labels_are_recognised(tmp_path: Path) -> None:
    joined = read_predictions(written(tmp_path, "image,label,p_a,p_b\nx,a|b,0.7,0.6\ny,,0.1,0.2\n"))
    assert joined.labels.tolist() == [[1, 1], [0, 0]]
    empty = read_predictions(written(tmp_path, "image,label,p_a,p_b\nx,a,0.7,0.6\ny,,0.1,0.2\n"))
    assert empty.labels.tolist() == [[1, 0], [0, 0]]
    told = read_predictions(written(tmp_path, GOOD), multilabel=True)
    assert told.labels.tolist() == [[1, 0], [0, 1]]
    pipe_in_a_name = read_predictions(written(tmp_path, "image,label,p_a|b,p_c\nx,a|b,0.7,0.3\ny,c,0.4,0.6\n"))
    assert pipe_in_a_name.labels.tolist() == [0, 1]


def test_all_problems_of_a_file_come_in_one_error(tmp_path: Path) -> None:
    rows = ["ok,val,a,0.5,0.5", "twice,val,a,0.5,0.5", "twice,val,b,0.5,0.5", "hole,val,a,,0.5", "word,val,a,x,0.5",
            "logit,val,a,3.5,-1", "sum,val,b,0.5,0.4", "strange,val,zebra,0.5,0.5", "none,val,,0.5,0.5",
            "part,exam,a,0.5,0.5"]  # fmt: skip
    with pytest.raises(InputError) as caught:
        read_predictions(written(tmp_path, "image,part,label,p_a,p_b\n" + "\n".join(rows) + "\n"))
    message = str(caught.value)
    for expected in (
        "predictions.csv cannot be evaluated",
        "1 image more than once: twice",
        "2 images with a probability that is missing or not finite: hole, word",
        "1 image with a probability outside [0, 1]: logit (the first has 3.5). Are these logits?",
        "1 image whose probabilities do not sum to one: sum (the first sums to 0.9)",
        "2 images with a label that has no column p_<class>: no label, 'zebra' (first image: strange). "
        "Known classes: a, b",
        "1 unknown split: 'exam'. Splits are train, calibration, val, test",
    ):
        assert expected in message


def test_examples_are_three_at_most(tmp_path: Path) -> None:
    rows = "".join(f"i{n},a,0.5,0.4\n" for n in range(9))
    with pytest.raises(InputError, match=r"9 images whose probabilities .* i0, i1, i2, \.\.\. \(the first"):
        read_predictions(written(tmp_path, "image,label,p_a,p_b\n" + rows))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,p_a,p_b\nx,0.5,0.5\n", "no column 'image' (found: name, p_a, p_b)"),
        ("image,p_a,p_b\nx,0.5,0.5\n", "no column 'label'"),
        ("image,label,a,b\nx,a,0.5,0.5\n", "no column 'p_<class>'"),
        ("image,label,p_a,p_a\nx,a,0.5,0.5\n", "1 column more than once: p_a"),
        ("image,label,p_a,p_\nx,a,0.5,0.5\n", "a column 'p_' without the name of its class"),
        ("image,label,p_a,p_b\n", "no image: the file has a header only"),
        ("image,label,p_a\nx,a,1.0\n", "one class only"),
        ("", "cannot be read as comma-separated text"),
        ("image,label,p_a,p_b\nx,a,0.5,0.5,7\n", "cannot be read as comma-separated text"),
        ('image,label,p_a,p_b\nx,"a,0.5,0.5\n', "cannot be read as comma-separated text"),
    ],
)
def test_what_is_no_predictions_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_predictions(written(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file .*nowhere\.csv\. Expected a predictions\.csv"):
        read_predictions(tmp_path / "nowhere.csv")
    (tmp_path / "broken.csv.gz").write_bytes(b"not compressed")
    with pytest.raises(InputError, match="cannot be read as comma-separated text"):
        read_predictions(tmp_path / "broken.csv.gz")


def test_predictions_in_memory_are_held_to_the_same(tmp_path: Path) -> None:
    good = single_label(5)
    with pytest.raises(InputError, match="these predictions cannot be evaluated"):
        Predictions(good.images, good.labels, good.probabilities * 2, good.classes)
    with pytest.raises(InputError, match="5 images and 4 classes, but 4 labels"):
        Predictions(good.images, good.labels[:4], good.probabilities, good.classes)
    with pytest.raises(InputError, match=r"labels must lie in 0\.\.3, got 0\.\.9"):
        Predictions(good.images, np.array([0, 1, 2, 3, 9]), good.probabilities, good.classes)


def test_a_name_with_a_bar_cannot_be_joined_by_bars(tmp_path: Path) -> None:
    made = several_labels(4, 2)
    made = Predictions(made.images, made.labels, made.probabilities, ("a|b", "c"))
    with pytest.raises(InputError, match=r"labels are joined by '\|', so no class name may contain it: a\|b"):
        write_predictions(tmp_path / "p.csv", made)
    assert not (tmp_path / "p.csv").exists()


def test_parts_are_selected() -> None:
    made = single_label(6)
    parted = Predictions(
        made.images, made.labels, made.probabilities, made.classes, None, np.array(["val", "test"] * 3)
    )
    assert parted.of_split("test").images.tolist() == made.images[1::2].tolist()
    assert len(parted.of_split("all")) == 6
    assert len(made.of_split("val")) == 0


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_a_compressed_table_that_expands_to_gigabytes_is_refused(tmp_path: Path, suffix: str) -> None:
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix]
    head = b"image,label,p_a,p_b\n"
    path = tmp_path / f"predictions.csv{suffix}"
    path.write_bytes(compress(head + b"x.png,a,0.5,0.5\n"))
    assert read_predictions(path).images.tolist() == ["x.png"]
    path.write_bytes(compress(head + bytes(2**26)))
    with pytest.raises(InputError, match="is refused: it decompresses to more than 67,108,864 bytes"):
        read_predictions(path)
    path.write_bytes(compress(head + b"x.png,a,0.5,0.5\n")[:-9] + bytes(9))
    with pytest.raises(InputError, match="cannot be read"):
        read_predictions(path)


def test_a_text_without_end_or_a_column_for_everything_is_refused(tmp_path: Path) -> None:
    """An array of texts gives each the room of the longest."""
    path = tmp_path / "predictions.csv"
    rows = "".join(f"{i}.png,a,0.5,0.5\n" for i in range(1000))
    path.write_text(f"image,label,p_a,p_b\n{rows}{'x' * 10**6},a,0.5,0.5\n")
    with pytest.raises(InputError, match="text in the column 'image' has 1,000,000 characters"):
        read_predictions(path)
    path.write_text(f"image,split\n{'y' * 10**6},val\n")
    with pytest.raises(InputError, match="text in the column 'image' has 1,000,000 characters"):
        read_split_file(path)
    path.write_text("image,label," + ",".join(f"p_{i}" for i in range(10_000)) + "\n")
    with pytest.raises(InputError, match="10,002 columns; at most 10,000"):
        read_predictions(path)
