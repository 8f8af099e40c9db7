"""Tables from results made by hand: values, differences from the paper, seeds, cells not run; pages and documents."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

from cclnet import InputError
from cclnet.cli import app
from cclnet.evaluation.compare import Comparison, verdict
from cclnet.reproduce import seeds as seeds_module
from cclnet.reproduce.experiments import BACKBONES, NO_FREEZE_RATES, TABLE2, PaperCell, folds, no_freeze, published
from cclnet.reproduce.seeds import PaperResult, SeedStatistics, correct_together, pooled, read_results, seeds_of
from cclnet.reproduce.tables import (
    NOT_RUN,
    OUR_SCORES,
    Grid,
    check_has_results,
    cost_grid,
    fill_markers,
    folds_grid,
    paper_grids,
    rivals_grid,
    seed_variance,
    table1_grid,
    table1_rows,
    table2_grid,
    table2_rows,
    write_paper,
)
from cclnet.runs.kept_result import write_kept_predictions, write_kept_result
from made_paper_results import made_result

WRONG = {"ccl": (3, 6), "hard": (12, 18), "lsr-u5": (12,)}  # of 60, for the seeds 0 and 1


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[PaperResult]:
    folder = tmp_path_factory.mktemp("made")
    for method, each in WRONG.items():
        for seed, wrong in enumerate(each):
            made_result(folder, PaperCell(method=method, seed=seed), wrong)
    frozen = [0.5, 0.44, 0.40] + [0.41] * 10 + [0.41] * 3
    made_result(folder, PaperCell(lr_ccl=0.05), 9, softness=frozen, frozen=13)
    return read_results(folder / "results")


@pytest.fixture(scope="module")
def seeds(results: list[PaperResult]) -> SeedStatistics:
    return SeedStatistics(results[0].path.parent)


def row(grid: Grid, *names: str) -> dict[str, tuple[str, ...]]:
    found = [r for r in grid.rows if tuple(field[0] for field in r[: len(names)]) == names]
    assert len(found) == 1
    return dict(zip(grid.columns, found[0], strict=True))


def test_one_seed_beside_the_paper(results: list[PaperResult], seeds: SeedStatistics) -> None:
    grid = table1_grid(results, seeds)
    assert len(grid.rows) == 18
    cell = row(grid, "ResNet-18", "LSR-u5")
    own = next(r for r in results if r.cell.method == "lsr-u5").scores["accuracy"]
    paper = published("resnet18", "lsr-u5")["accuracy"]
    assert cell["Seeds"] == ("1",)
    assert cell["Accuracy"][:2] == ("0.800", "paper 0.844")
    pooled = seed_variance(results, seeds)["accuracy"]
    between = stats.t.ppf(0.975, pooled.freedom) * math.sqrt(pooled.variance)
    low = own["value"] - math.hypot(own["value"] - own["low"], between) - paper
    high = min(own["value"] + math.hypot(own["high"] - own["value"], between), 1) - paper
    assert cell["Accuracy"][2] == f"−0.044 [{low:+.3f}, {high:+.3f}]".replace("-", "−")
    assert cell["Balanced accuracy"][0] == "0.800" and "paper" not in " ".join(cell["Balanced accuracy"])
    assert "Evaluated on 60 images of 30 lesions." in grid.caption


def test_several_seeds_are_a_mean_with_its_spread(results: list[PaperResult], seeds: SeedStatistics) -> None:
    cell = row(table1_grid(results, seeds), "ResNet-18", "Baseline")
    assert cell["Seeds"] == ("2",)
    assert cell["Accuracy"][0] == f"0.750 ± {np.std([0.8, 0.7], ddof=1):.3f}"
    mean = seeds.mean(seeds_of(results, PaperCell(method="hard")))["accuracy"]
    assert mean["values"] == [0.8, 0.7] and mean["low"] < 0.75 < mean["high"]


def test_cells_that_were_not_run_say_so(results: list[PaperResult], seeds: SeedStatistics) -> None:
    cell = row(table1_grid(results, seeds), "MobileNetV2", "CCL-Net")
    assert cell["Seeds"] == ("–",) and cell["Accuracy"] == (NOT_RUN, "paper 0.834") and cell["ECE"] == (NOT_RUN,)
    lesion = table1_grid(results, seeds, "lesion")
    assert len(lesion.rows) == 9 and all(r[3][0] == NOT_RUN for r in lesion.rows)
    assert "for orientation" in lesion.caption


def test_nothing_run_at_all(tmp_path: Path) -> None:
    none = SeedStatistics(tmp_path)
    assert all(r[3][0] == NOT_RUN for r in table1_grid([], none).rows)
    assert [r[2] for r in table2_grid([], none).rows][1] == (NOT_RUN, "paper 137")
    assert rivals_grid([], none).rows[0][0] == (NOT_RUN,)
    assert cost_grid([]).rows == ()


def test_the_rate_of_the_head(results: list[PaperResult], seeds: SeedStatistics) -> None:
    grid = table2_grid(results, seeds)
    fast = row(grid, "0.05")
    assert fast["Converged at"] == ("3", "paper 5") and fast["Frozen at"] == ("13",)
    assert fast["Softness"] == ("0.400", "paper 0.30", "+0.100, at the end 0.410")
    assert fast["Accuracy"][0] == "0.850"
    shared = row(grid, "0.0005")
    assert shared["Seeds"] == ("2",) and shared["Converged at"] == ("never, never", "paper 137")
    assert row(grid, "0.01")["Softness"] == (NOT_RUN, "paper 0.33")
    rows = table2_rows(results)
    assert len(rows) == 7 and [r["state"] for r in rows].count(NOT_RUN) == 4
    run = next(r for r in rows if r["lr_ccl"] == 0.05)
    assert (run["converged_softness"], run["final_softness"]) == (0.4, 0.41)


def test_rivals_are_compared_over_the_seeds_that_all_have(results: list[PaperResult], seeds: SeedStatistics) -> None:
    grid = rivals_grid(results, seeds)
    assert [r[2][0] for r in grid.rows] == ["CCL-Net − Baseline", "CCL-Net − LSR-u5", "Baseline − LSR-u5"]
    assert grid.rows[0][4][-1].startswith("detectable ")
    first = row(grid, "the paper's split", "ResNet-18", "CCL-Net − Baseline")
    assert first["Seeds"] == ("1",)  # uniform smoothing has one seed
    assert first["Accuracy"][0] == "+15.0" and first["In words"][0].startswith("One seed each")
    without = [r for r in results if r.cell.method != "lsr-u5"]
    pair = SeedStatistics(Path("nowhere")).compare_all(without)
    assert pair is not None and pair["pairs"][0]["seeds"] == {"a": 2, "b": 2, "paired": True}
    test = pair["pairs"][0]["metrics"]["accuracy"]
    assert test["difference"] == pytest.approx((0.15 + 0.2) / 2)
    assert test["seed_differences"] == pytest.approx([0.15, 0.2])


def test_a_difference_reads_the_same_in_its_field_and_in_its_words(
    results: list[PaperResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a tenth of a point, but for the last bit: rounded when it is kept it would be shown as a tenth."""
    almost = -0.0005 + 1e-15
    compare = seeds_module.compare

    def compared(*given: Any, **more: Any) -> Comparison:
        found, pairs = compare(*given, draws=10, **more), []
        for pair in found.comparisons:
            test = replace(pair.metrics["accuracy"], difference=almost, low=5 * almost, high=-almost)
            words = verdict("accuracy", "a", "b", replace(test, p_holm=0.5), (1, 1))
            pairs.append(replace(pair, metrics=pair.metrics | {"accuracy": replace(test, verdict=words)}))
        return replace(found, comparisons=tuple(pairs))

    monkeypatch.setattr(seeds_module, "compare", compared)
    first = SeedStatistics(tmp_path)
    rivals_grid(results, first)
    first.write()
    grid = rivals_grid(results, SeedStatistics(tmp_path))  # as it was kept
    for cell in (dict(zip(grid.columns, own, strict=True)) for own in grid.rows):
        assert cell["Accuracy"][:2] == ("0.0", "[−0.2, 0.0]")
        assert f"{cell['Pair'][0].replace('−', 'minus')} is 0.0 points [-0.2, 0.0]" in cell["In words"][0]


def test_captions_say_what_intervals_are_over(results: list[PaperResult], seeds: SeedStatistics) -> None:
    caption = table1_grid(results, seeds).caption
    assert "over seeds and lesions" in caption and "2 degrees of freedom" in caption
    one_each = [r for r in results if r.cell.seed == 0]
    assert "conditional on that seed" in table1_grid(one_each, seeds).caption


def test_the_pooled_variance_is_that_within_cells(results: list[PaperResult], seeds: SeedStatistics) -> None:
    own = [[0.8, 0.7], [r.value("accuracy") for r in seeds_of(results, PaperCell())]]
    pooled = seed_variance(results, seeds)["accuracy"]
    assert pooled.freedom == 2
    assert pooled.variance == pytest.approx(np.mean([np.var(values, ddof=1) for values in own]), abs=1e-6)


def test_holm_is_over_all_pairs_of_a_table() -> None:
    def pair(p: float, seeds: int) -> dict[str, Any]:
        test = {"difference": 0.02, "low": 0.01, "high": 0.03, "p": p, "p_holm": p, "evidence": True, "better": "a",
                "seed_differences": None, "detectable": 0.01, "verdict": ""}  # fmt: skip
        return {"a": "x", "b": "y", "seeds": {"a": seeds, "b": seeds, "paired": True}, "metrics": {"accuracy": test}}

    tests = [found["metrics"]["accuracy"] for found in correct_together([pair(0.01, 5), pair(0.03, 5), pair(0.001, 1)])]
    assert [test["p_holm"] for test in tests] == pytest.approx([0.02, 0.03, 0.003])
    assert [test["evidence"] for test in tests] == [True, True, False]  # one seed is no evidence about a method
    tests = [found["metrics"]["accuracy"] for found in correct_together([pair(0.03, 5)] * 2)]
    assert not any(test["evidence"] or test["better"] for test in tests)
    assert "once corrected" in tests[0]["verdict"]


def test_statistics_are_kept_until_predictions_change(results: list[PaperResult], tmp_path: Path) -> None:
    own = seeds_of(results, PaperCell(method="hard"))
    first = SeedStatistics(tmp_path)
    made = first.mean(own)
    first.write()
    again = SeedStatistics(tmp_path)
    again.cached["mean of paper-resnet18-hard"]["content"]["accuracy"]["mean"] = math.pi
    assert again.mean(own)["accuracy"]["mean"] == math.pi  # not made anew
    again.cached["mean of paper-resnet18-hard"]["made_from"][own[0].path.stem] = "of other predictions"
    assert again.mean(own) == made


def test_lines_for_a_spreadsheet(results: list[PaperResult], seeds: SeedStatistics) -> None:
    rows = table1_rows(results, seeds)
    assert len(rows) == 2 * 18 * len(OUR_SCORES)
    found = next(
        r
        for r in rows
        if (r["method"], r["score"], r["backbone"], r["split"]) == ("lsr-u5", "accuracy", "resnet18", "paper")
    )
    assert found["mean"] == pytest.approx(0.8) and found["difference"] == pytest.approx(0.8 - 0.8437)
    assert found["difference_low"] < found["difference"] < found["difference_high"]
    assert found["state"] == "run" and rows[-1]["state"] == NOT_RUN and rows[-1]["mean"] is None


def test_what_it_took(results: list[PaperResult]) -> None:
    grid = cost_grid(results)
    assert row(grid, "a made GPU", "ResNet-18")["Minutes per run"] == ("1.0",)


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
    assert len(frame) == 2 * 18 * len(OUR_SCORES) and set(frame["state"]) == {"run", "not run"}
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


def made_folds(folder: Path, counts: dict[str, int]) -> list[PaperResult]:
    """Results of two folds' worth of distinct images per fold, with so many errors per method."""
    made = []
    for cell in folds((0, 1)):
        if cell.method in counts:
            kept = made_result(folder, cell, counts[cell.method] + cell.seed)
            own = kept.read_predictions()
            named = replace(
                own,
                images=np.char.add(f"{cell.variant}-", own.images),
                groups=None if own.groups is None else np.char.add(f"{cell.variant}-", own.groups),
            )
            kept = replace(kept, image_table=write_kept_predictions(kept.path, named).name)
            write_kept_result(kept)
            made.append(kept)
    return made


def test_folds_are_compared_on_every_image_once(tmp_path: Path) -> None:
    results = made_folds(tmp_path, {"ccl": 3, "hard": 9})
    whole = pooled([r.read_predictions() for r in results if (r.cell.method, r.cell.seed) == ("ccl", 0)])
    assert len(whole) == 5 * 60 and len(set(whole.images.tolist())) == 300
    seeds = SeedStatistics(tmp_path / "results")
    grid = folds_grid(results, seeds)
    assert grid is not None
    [(pair, count, accuracy, *_)] = grid.rows
    assert pair == ("CCL-Net − Baseline",) and count == ("2",) and accuracy[0] == "+10.0"
    assert folds_grid(results[1:], seeds) is not None  # the other seed is complete
    assert folds_grid([r for r in results if r.cell.variant != "fold3"], seeds) is None
    assert "folds" in paper_grids(results, seeds) and "folds" not in paper_grids(results[:3], seeds)
