"""Parquet files with image bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_webdataset import png

from cclnet.data import archives
from cclnet.data.cache import decode, decode_readable
from cclnet.data.image_io import UnreadableImage, read_image
from cclnet.data.sources import open_data
from cclnet.errors import InputError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(path: Path, columns: dict[str, Any], row_group: int = 4, metadata: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(columns)
    parquet.write_table(table.replace_schema_metadata(metadata), path, row_group_size=row_group)
    return path


def hugging_face(path: Path, first: int, count: int) -> Path:
    """As ``datasets`` writes it: image as struct of bytes and path, label as class number with names in the schema."""
    rows = range(first, first + count)
    label = {"names": ["benign", "malignant"], "_type": "ClassLabel"}
    info = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
    columns = {
        "image": [{"bytes": png(i), "path": f"{i}.png"} for i in rows],
        "label": [i % 2 for i in rows],
        "patient_id": [f"p{i // 2}" for i in rows],
        "age": [40 + i for i in rows],
    }
    return write(path, columns, metadata={"huggingface": json.dumps(info)})


def test_hugging_face_datasets(tmp_path: Path) -> None:
    hugging_face(tmp_path / "data" / "train-00000-of-00002.parquet", 0, 10)
    hugging_face(tmp_path / "data" / "train-00001-of-00002.parquet", 10, 10)
    hugging_face(tmp_path / "data" / "test-00000-of-00001.parquet", 20, 6)
    table = open_data(tmp_path)
    assert table.source == "Parquet with images" and len(table) == 26
    assert table.classes == ("benign", "malignant") and table.extra["age"].tolist()[0] == "60"  # test comes first
    assert table.splits is not None and table.splits.tolist() == ["test"] * 6 + ["train"] * 20
    assert table.groups is not None and len(set(table.groups)) == 13
    images = decode(table, 12, tmp_path / "cache", workers=2, progress=False)
    for row, seed in ((0, 20), (5, 25), (6, 0), (25, 19)):
        assert table.labels[row] == seed % 2
        np.testing.assert_array_equal(images.image(row), read_image(png(seed)))


def test_plain_bytes_and_chosen_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {
        "content": [png(i) for i in range(6)], "isic_id": [f"ISIC_{i}" for i in range(6)],
        "first": ["a", "b"] * 3, "second": ["c", "c", "d"] * 2,
    })  # fmt: skip
    table = open_data(path, label_column="second")
    assert table.classes == ("c", "d") and table.names[5] == "ISIC_5"
    np.testing.assert_array_equal(read_image(table.images[5]), read_image(png(5)))


def test_a_table_without_image_bytes_is_a_manifest(tmp_path: Path) -> None:
    from layouts import draw

    for i in range(4):
        draw(tmp_path / f"{i}.png", seed=i)
    write(tmp_path / "x.parquet", {"image": [f"{i}.png" for i in range(4)], "label": ["a", "b"] * 2})
    assert open_data(tmp_path / "x.parquet").source == "manifest"


def test_names_that_lead_elsewhere_are_not_used(tmp_path: Path) -> None:
    columns = {"image": [png(i) for i in range(4)], "path": ["../1", "/etc/2", "3", "4"], "label": ["a", "b"] * 2}
    assert open_data(write(tmp_path / "x.parquet", columns)).names[1] == "x/0000001"


def test_rows_without_an_image_or_a_label(tmp_path: Path) -> None:
    columns = {"image": [png(0), None, b"no image", png(3)], "label": ["a", "b", "a", None]}
    table = open_data(write(tmp_path / "x.parquet", columns))
    assert len(table) == 3 and "without a label: 1 (x/0000003)" in table.problems[0]
    broken = decode_readable(table, 12, tmp_path / "cache", workers=1, progress=False)[1]
    assert sorted(broken) == [1, 2] and "has no image" in broken[1]


def test_limits_and_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = open_data(write(tmp_path / "x.parquet", {"image": [png(i) for i in range(4)], "label": ["a", "b"] * 2}))
    monkeypatch.setattr(archives, "MAX_ROW_GROUP", 100)
    with pytest.raises(UnreadableImage, match=r"row group has .* at most 100"):
        read_image(table.images[0])
    monkeypatch.undo()
    with pytest.raises(UnreadableImage, match="no row 99"):
        read_image(Path(f"{tmp_path}/x.parquet/@99/x"))
    content = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(content[:-20] + bytes(20))
    with pytest.raises(UnreadableImage, match="cannot be read as Parquet"):
        read_image(table.images[0])
    with pytest.raises(InputError):
        open_data(tmp_path / "x.parquet")


def test_small_files_that_expand_to_gigabytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values take no room in a Parquet file: a few kilobytes may claim a hundred million of them."""
    monkeypatch.setattr(archives, "MAX_EQUAL_CELLS", 100_000)
    many, nothing = 2**17, pyarrow.nulls(2**17, pyarrow.binary())
    rows = write(tmp_path / "rows.parquet", {"image": nothing, "label": ["a"] * many}, row_group=many)
    bare = write(tmp_path / "bare.parquet", {"image": ["x.png"] * many, "label": ["a"] * many}, row_group=many)
    for path in (rows, bare):
        assert path.stat().st_size < 5_000
        with pytest.raises(InputError, match=r"is refused: its [\d,]+ bytes claim to have \d{3},\d{3} values"):
            open_data(path)
    monkeypatch.undo()
    long = write(tmp_path / "long.parquet", {"image": [png(0)] * 3000, "label": ["x" * 400_000, "b"] * 1500}, 3000)
    assert long.stat().st_size < 100_000
    with pytest.raises(InputError, match=r"claim to have 600,\d{3},\d{3} bytes of text"):
        open_data(long)


def test_a_row_group_of_equal_images_is_limited_by_what_it_expands_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(0)] * 400, "label": ["a", "b"] * 200}, row_group=400)
    monkeypatch.setattr(archives, "MAX_ROW_GROUP", 20 * len(png(0)))
    assert path.stat().st_size < archives.MAX_ROW_GROUP
    with pytest.raises(UnreadableImage, match=r"row group has .* at most [\d,]+ bytes"):
        read_image(open_data(path).images[0])
