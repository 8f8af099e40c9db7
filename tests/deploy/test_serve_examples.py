"""Training images that are shown where that is allowed: which ones, and what happens when they are not to be had."""

from __future__ import annotations

from pathlib import Path

import httpx
import pandas as pd
import pytest
from served import serving

from cclnet.data.sources import open_data
from cclnet.data.split import make_split, write_split
from cclnet.deploy.serve.examples import COUNT, choose, read_examples
from cclnet.errors import InputError
from cclnet.settings import SplitSettings

DATA = "synthetic:images=70,size=16"


def write_run(folder: Path, data: str = DATA) -> tuple[str, ...]:
    """The files of a run that examples are read from: settings and split."""
    table = open_data(DATA)
    write_split(folder / "split.csv", table, make_split(table, SplitSettings(val=0.3)))
    (folder / "settings.toml").write_text(f'data = "{data}"\n', encoding="utf-8")
    return table.classes


def test_only_training_images_of_the_class_are_chosen_one_of_a_lesion(tmp_path: Path) -> None:
    classes = write_run(tmp_path)
    split = pd.read_csv(tmp_path / "split.csv", dtype=str).set_index("image")
    chosen = choose(split.reset_index(), classes, multilabel=False)
    assert set(chosen) == set(classes)
    for name, images in chosen.items():
        rows = split.loc[images]
        assert 1 <= len(rows) <= COUNT
        assert (rows["split"] == "train").all() and (rows["label"] == name).all()
        assert rows["group"].is_unique


def test_images_of_several_labels_count_for_each() -> None:
    split = pd.DataFrame(
        {"image": ["a", "b", "c", "d"], "split": ["train", "train", "train", "val"], "label": ["x|y", "y", "", "x|y"]}
    )
    chosen = choose(split, ("x", "y", "z"), multilabel=True)
    assert chosen["x"] == ["a"] and sorted(chosen["y"]) == ["a", "b"] and chosen["z"] == []


def test_images_without_a_lesion_are_not_taken_for_one(tmp_path: Path) -> None:
    split = pd.DataFrame({"image": list("abcd"), "split": "train", "label": "x", "group": ["", "", "g", "g"]})
    assert len(choose(split, ("x",), multilabel=False)["x"]) == 3


def test_pictures_are_read_and_served(tmp_path: Path) -> None:
    classes = write_run(tmp_path)
    pictures, note = read_examples(tmp_path, classes, multilabel=False)
    assert note == "" and all(1 <= len(pictures[name]) <= COUNT for name in classes)
    assert all(uri.startswith("data:image/jpeg;base64,") for found in pictures.values() for uri in found)
    with serving(tmp_path, {"classes": classes[:3]}, examples=pictures) as address:
        for index in range(3):
            answer = httpx.get(f"{address}/examples/{index}").json()
            assert answer == {"name": classes[index], "pictures": pictures[classes[index]]}
        assert httpx.get(f"{address}/examples/3").status_code == 404
        assert httpx.get(f"{address}/model").json()["examples"]


def test_data_that_has_moved_is_found_where_it_is_said_to_be(tmp_path: Path) -> None:
    classes = write_run(tmp_path, data="gone")
    with pytest.raises(InputError, match=r"--examples: there is nothing to show.*say where: --data"):
        read_examples(tmp_path, classes, multilabel=False)
    assert read_examples(tmp_path, classes, multilabel=False, data=DATA)[0]


def test_a_run_without_its_split_has_no_examples(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"--examples shows images of the training split, but .*split.csv cannot be read"
    ):
        read_examples(tmp_path, ("x",), multilabel=False)
    (tmp_path / "split.csv").write_text("image,part\na,train\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"split.csv has no column label"):
        read_examples(tmp_path, ("x",), multilabel=False)
