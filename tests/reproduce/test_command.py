"""What is asked for: cells, shards, and every error message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cclnet import InputError
from cclnet.reproduce.command import EXPERIMENTS, MOVED, Request, cells_of
from cclnet.sweep.cells import parse_shard


def request(*what: str, **more: Any) -> Request:
    return Request(what=what, data="isic", out=Path("out"), results=Path("results"), **more)


def test_several_tables_share_their_cells() -> None:
    assert len(cells_of(request("table1", "table2", "figures"))) == 18 + 5 + 2
    chosen = cells_of(request("table1", seeds=(1, 2), backbones=("resnet18",), methods=("hard", "ccl"), split="lesion"))
    assert [cell.name for cell in chosen] == [
        "lesion-resnet18-hard-seed1", "lesion-resnet18-ccl-seed1",
        "lesion-resnet18-hard-seed2", "lesion-resnet18-ccl-seed2",
    ]  # fmt: skip


def test_all_is_what_the_pages_report_and_the_most_important_comes_first() -> None:
    names = [cell.name for cell in cells_of(request("all"))]
    assert len(names) == len(set(names))
    parts = [request("table1", "table2", "figures")]
    some = {"backbones": ("resnet18",), "methods": ("hard", "lsr-u5", "ccl")}
    parts += [request("table1", seeds=(0, 1, 2), split=split, **some) for split in ("paper", "lesion")]
    assert {cell.name for part in parts for cell in cells_of(part)} <= set(names)
    assert not any(name.startswith("tune") for name in names)  # choices are made, not run again
    assert [name.split("-")[1] for name in names[:6]] == ["resnet18"] * 6


def test_cells_by_name_come_in_the_order_asked_for() -> None:
    asked = ("paper-mobilenetv2_100-lsr-a?-*", "paper-resnet18-ccl-lr0.00?-seed0", "paper-*-lsr-a1-seed0")
    assert [cell.name for cell in cells_of(request("all", only=asked))] == [
        "paper-mobilenetv2_100-lsr-a1-seed0", "paper-mobilenetv2_100-lsr-a5-seed0",
        "paper-resnet18-ccl-lr0.001-seed0", "paper-resnet18-ccl-lr0.005-seed0",
        "paper-resnet18-lsr-a1-seed0", "paper-efficientnet_b0-lsr-a1-seed0",
    ]  # fmt: skip
    with pytest.raises(InputError, match="unknown cell 'paper-resnet18-cll-seed0'; did you mean 'paper-resnet18-ccl-"):
        cells_of(request("all", only=("*-hard-*", "paper-resnet18-cll-seed0")))


def test_shards_share_the_cells() -> None:
    whole = {cell.name for cell in cells_of(request("table1"))}
    requests = [request("table1", shard=(i, 4)) for i in (1, 2, 3, 4)]
    shards = [[cell.name for cell in one.own_shard(cells_of(one))] for one in requests]
    assert sum(map(len, shards)) == 18 and set().union(*shards) == whole


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(InputError, match="unknown experiment 'table3'; did you mean 'table"):
        request("table3")
    for moved in MOVED:
        with pytest.raises(InputError, match=rf"'{moved}' .*experiments/similarity/run.py {moved}"):
            request(moved)
    for split in ("bogus", "tune"):
        for what in EXPERIMENTS:
            with pytest.raises(InputError, match=f"unknown split '{split}'.* Known: lesion, paper"):
                request(what, split=split)
    with pytest.raises(InputError, match="backbones and methods select cells of table1"):
        request("table1", "table2", methods=("ccl",))
    with pytest.raises(InputError, match="give the folder of the ISIC 2018 images as --data, or --smoke"):
        Request(what=("table1",), data="", out=Path("out"), results=Path("results"))
    with pytest.raises(InputError, match="shard is i/n with i from 1 to n, got 5/4"):
        request("table1", shard=(5, 4))
    with pytest.raises(InputError, match="such as 1/4 for the first of four machines; got 'half'"):
        parse_shard("half")
