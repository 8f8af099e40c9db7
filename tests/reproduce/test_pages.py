"""Tables and figures as files, from results alone."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

from cclnet import InputError
from cclnet.cli import app
from cclnet.reproduce.experiments import BACKBONES, NO_FREEZE_RATES, TABLE2, PaperCell, no_freeze
from cclnet.reproduce.pages import check_has_results, fill_markers, write_paper
from made_paper_results import made_result


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results after the command made its tables, without data or GPU."""
    folder = tmp_path_factory.mktemp("made")
    curve = [0.55 - 0.15 * epoch / 160 for epoch in range(160)]
    cells = [PaperCell(name) for name in BACKBONES] + [PaperCell(lr_ccl=rate) for rate in list(TABLE2)[2:]]
    cells += [no_freeze(rate) for rate in NO_FREEZE_RATES]
    for number, cell in enumerate(cells):
        made_result(folder, cell, wrong=3 * number, softness=curve, frozen=0 if cell.variant else 100)
    run = CliRunner().invoke(app, ["reproduce", "table1", "--results", str(folder / "results"), "--tables-only"])
    assert run.exit_code == 0, run.output
    return folder / "results"


def test_every_table_in_every_form(written: Path) -> None:
    page = (written / "table1.html").read_text()
    assert page.count("<tr>") > 18 and "not run" in page and "<style>" in page
    assert not re.search(r"(src|href)=[\"']?https?:", page) and "<script" not in page
    assert "| ResNet-18 | CCL-Net | 1 | 1.000<br>paper 0.850<br>" in (written / "table1.md").read_text()
    frame = pd.read_csv(written / "table1.csv")
    assert len(frame) == 2 * 18 * 7 and set(frame["state"]) == {"run", "not run"}
    assert len(pd.read_csv(written / "table2.csv")) == 6
    assert (written / "table2.html").read_text().count("data:image/png;base64,") == 4


def test_figures_are_small_pictures(written: Path) -> None:
    pictures = sorted((written / "figures").glob("*.png"))
    assert [path.stem for path in pictures] == [
        "correlation-by-backbone", "correlation-by-rate", "drift-without-freeze", "softness-over-epochs",
    ]  # fmt: skip
    for path in pictures:
        assert path.stat().st_size < 300_000
        with Image.open(path) as picture:
            assert min(picture.size) > 300 and len(set(picture.convert("L").resize((64, 64)).tobytes())) > 10


def test_without_results_there_are_tables_but_no_figures(tmp_path: Path) -> None:
    write_paper(tmp_path)
    assert "No cell has been run yet." in (tmp_path / "table1.html").read_text()
    assert not (tmp_path / "figures").exists() and not (tmp_path / "comparisons.json.bz2").exists()


@pytest.mark.parametrize(
    ("what", "split", "place", "message"),
    [("bogus", "paper", "made", "unknown experiment 'bogus'"), ("table1", "bogus", "made", "unknown split 'bogus'"),
     ("table1", "paper", "nowhere", r"there is no folder .*nowhere: give the folder of the results"),
     ("table1", "paper", "empty", r"empty has no results")],
)  # fmt: skip
def test_tables_of_nothing_are_refused_and_nothing_is_written(
    what: str, split: str, place: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made_result(tmp_path, PaperCell(), wrong=3)
    (tmp_path / "results").rename(tmp_path / "made")
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").write_text("<!-- table1 -->numbers<!-- /table1 -->")
    before = sorted(tmp_path.rglob("*"))
    asked = ["reproduce", what, "--split", split, "--results", place, "--tables-only", "--documents"]
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, asked, catch_exceptions=False)
    assert sorted(tmp_path.rglob("*")) == before and "numbers" in (tmp_path / "README.md").read_text()


def test_documents_are_not_written_from_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no results"):
        check_has_results(tmp_path)
    made_result(tmp_path, PaperCell(), wrong=3)
    check_has_results(tmp_path / "results")


def test_a_document_without_markers_is_told() -> None:
    with pytest.raises(InputError, match="README has no markers <!-- table1 -->"):
        fill_markers("nothing here", {"table1": "x"}, "README")


def test_filling_twice_changes_nothing() -> None:
    once = fill_markers("<!-- a --><!-- /a -->", {"a": "| x \\1 |"})
    assert fill_markers(once, {"a": "| x \\1 |"}) == once and "| x \\1 |" in once
