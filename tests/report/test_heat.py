from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from cclnet.report.figures import agreement_table, confusion_table, soft_label_table


def test_confusions_show_counts_shares_and_colour() -> None:
    table = confusion_table([[1500, 500], [1, 3]], ["A", "B"])
    (hit, miss), (rare_miss, _) = table.rows
    assert (hit.text, hit.small, hit.kind, hit.strength) == ("1,500", "75%", "hit", 0.75)
    assert (miss.text, miss.small, miss.kind, miss.strength) == ("500", "25%", "miss", 0.5)
    assert rare_miss.strength == miss.strength  # the colour knows the share alone
    assert miss.title == "A taken for B: 500 (25.0%)"


def test_a_class_without_images_is_blank() -> None:
    table = confusion_table([[0, 0], [1, 3]], ["A", "B"])
    assert [cell.strength for cell in table.rows[0]] == [0.0, 0.0]
    assert [cell.small for cell in table.rows[0]] == ["", ""]


def test_soft_labels_span_the_colours_off_the_diagonal() -> None:
    table = soft_label_table([[0.6, 0.1, 0.3], [0.2, 0.6, 0.2], [0.3, 0.2, 0.5]], ["A", "B", "C"])
    assert [cell.strength for cell in table.rows[0]] == pytest.approx([0, 0, 1])
    assert [cell.kind for cell in table.rows[1]] == ["hit", "own", "hit"]
    assert table.rows[0][2].text == "0.30"


def test_uniform_soft_labels_have_one_colour() -> None:
    table = soft_label_table([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]], ["A", "B", "C"])
    assert {cell.strength for row in table.rows for cell in row if cell.kind == "hit"} == {0.5}


def test_many_classes_become_a_picture_with_one_pixel_a_pair() -> None:
    counts = np.ones((50, 50), int) + 99 * np.eye(50, dtype=int)
    for table in (confusion_table(counts.tolist(), [str(k) for k in range(50)]),
                  soft_label_table((counts / counts.sum(axis=1)).tolist(), [str(k) for k in range(50)])):  # fmt: skip
        assert table.rows == ()
        picture = Image.open(io.BytesIO(base64.b64decode(table.picture.removeprefix("data:image/png;base64,"))))
        assert picture.size == (50, 50) and picture.mode == "RGBA"
    alpha = np.asarray(picture)[..., 3]
    assert (np.diagonal(alpha) == 0).all() and (alpha[~np.eye(50, dtype=bool)] > 0).all()


def test_agreement_tells_contradiction_from_agreement_and_unknown() -> None:
    table = agreement_table([[1, -0.5, None], [-0.5, 1, 0.9], [None, 0.9, 1]], ["a", "b", "c"])
    assert [(cell.text, cell.kind) for cell in table.rows[0]][:2] == [("1.00", "own"), ("−0.50", "miss")]
    assert (table.rows[0][2].text, table.rows[0][2].strength) == ("–", 0.0)
    assert (table.rows[1][2].kind, table.rows[1][2].strength) == ("hit", 0.9)
