"""Beyond the paper: cells, yardstick, tables and figure, from results made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made import RECIPES, kept, made_result, made_run

from cclnet import InputError
from cclnet.evaluation.similarity import agreement, mean_confusion
from cclnet.methods import build_method
from cclnet.methods.base import Classes
from cclnet.report.html import render
from cclnet.reproduce import experiments as looks_cells
from cclnet.reproduce.experiments import CANDIDATES, CHOSEN, LOOKS, TUNING, USES, looks_cell, read_recipes
from cclnet.reproduce.paper_figures import looks_figure
from cclnet.reproduce.seeds import Result, Seeds, read_results
from cclnet.reproduce.similarity_tables import (
    best_change,
    looks_grid,
    looks_pairs_grid,
    structure_grid,
    tune_looks_grid,
    uses_grid,
    yardsticks,
)
from cclnet.reproduce.tables import Grid
from cclnet.runs.folder import RunFolder, open_run
from cclnet.sweep.results import record_soft_labels

RESULTS = Path(__file__).parents[2] / "results" / "isic2018"
WRONG = {"hard": 12, "lsr-u5": 12, "ccl": 9, "ccl-balanced": 9, "ccl-centroid": 3, "tuned": 3, "ccl-confusion": 3,
         "yardstick": 30}  # fmt: skip


def made(folder: Path, name: str, seed: int, backbone: str = "resnet18") -> Result:
    """The result of a row of looks, with soft labels at two epochs where the method learns some."""
    cell = looks_cell(name, backbone, seed)
    learns = cell.method.startswith("ccl")
    run = made_run(folder / "runs", cell, WRONG[name] + seed, softness=[0.5, 0.6] if learns else None)
    if learns:
        for epoch, off in ((1, 0.2), (2, 0.15)):
            rows = [[0.6, off, 0.4 - off], [off, 0.6, 0.4 - off], [0.1, 0.3, 0.6]]
            record_soft_labels(RunFolder(run), epoch, torch.tensor(rows))
    return kept(folder, cell)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    folder = tmp_path_factory.mktemp("looks")
    for name in LOOKS:
        for seed in (0, 1):
            made(folder, name, seed)
    return read_results(folder / "results")


def column(grid: Grid, name: str, of: str) -> tuple[str, ...]:
    [row] = [row for row in grid.rows if of in (row[0][0], row[1][0])]
    return row[grid.columns.index(name)]


def test_every_cell_has_settings_and_its_own_name() -> None:
    cells = [*looks_cells.looks((0, 1)), *looks_cells.tune_looks(), *looks_cells.uses((0,))]
    names = {cell.name for cell in cells}
    assert len(names) == len(cells) - 1  # plain CCL-Net stands in looks and in uses
    assert len(looks_cells.tune_looks()) <= 6
    recipes = read_recipes(RECIPES)
    for cell in cells:
        settings = cell.settings(recipes[cell.split], "isic")
        build_method(settings.method, Classes(7, 8, (1,) * 7), settings.method_settings)
        assert settings.split.by == ("given" if cell.split in TUNING else "group")
    with pytest.raises(InputError, match="unknown row of looks 'tune'; did you mean 'tuned'"):
        looks_cells.looks(rows=("tune",))


def test_each_use_changes_one_thing() -> None:
    assert CANDIDATES["start"] == {} and CHOSEN != "start"
    for changes in (*CANDIDATES.values(), *USES.values()):
        assert sum(len(inner) for inner in changes.values()) == (1 if changes else 0)


def test_the_yardstick_is_what_is_confused(results: list[Result]) -> None:
    rows = {name: [r for r in results if r.cell == looks_cell(name, seed=r.cell.seed)] for name in LOOKS}
    found = yardsticks(rows)
    assert found is not None and found.reweighed is not None
    by_hand = []
    for result in rows["yardstick"]:
        said = open_run(result.path).predictions
        means = np.stack([said.probabilities[said.labels == k].mean(axis=0) for k in range(3)])
        by_hand.append((means + means.T) / 2)
    np.testing.assert_allclose(found.balanced, np.mean(by_hand, axis=0))
    assert found.seeds_agree == pytest.approx(agreement(*by_hand))
    assert yardsticks({**rows, "yardstick": []}) is None


def test_class_frequencies_are_taken_out() -> None:
    rng = np.random.default_rng(0)
    labels, counts = np.arange(300) % 3, np.array([900, 90, 10])
    fair = rng.dirichlet([1, 1, 1], 300)
    skewed = fair * counts
    skewed /= skewed.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(mean_confusion(labels, skewed, counts), mean_confusion(labels, fair))
    assert np.isnan(mean_confusion(labels[labels < 2], fair[labels < 2])[2]).all()


def test_tables(results: list[Result], tmp_path: Path) -> None:
    seeds = Seeds(tmp_path)
    structure = structure_grid(results)
    assert [row[1][0] for row in structure.rows] == [LOOKS[n] for n in LOOKS if looks_cell(n).method.startswith("ccl")]
    assert "The yardstick itself and rarity: " in structure.caption and "two seeds' yardsticks: " in structure.caption
    assert len(column(structure, "Yardstick beyond rarity", "CCL from centroids")) == 2
    assert column(structure, "Seeds agree", "CCL-Net") == ("1.00",)
    assert len(column(structure, "Yardstick", "CCL-Net")) == 2  # the mean, and each seed
    scores = looks_grid(results, seeds)
    assert len(scores.rows) == len(LOOKS) and column(scores, "Seeds", "Hard labels") == ("2",)
    assert column(scores, "Accuracy", "CCL from centroids")[0].startswith("0.942")
    pairs = looks_pairs_grid(results, seeds)
    assert len(pairs.rows) == 12 and column(pairs, "Accuracy", "CCL from centroids − Hard labels")[0] == "+15.0"
    assert uses_grid(results, seeds).rows[0][1] == ("not run",)  # CCL-Net alone is no comparison


def test_a_backbone_without_a_yardstick_is_held_against_another_s(tmp_path: Path) -> None:
    for name in ("ccl", "yardstick"):
        made(tmp_path, name, 0)
    made(tmp_path, "ccl", 0, "mobilenetv2_100")
    structure = structure_grid(read_results(tmp_path / "results"))
    own, borrowed = structure.rows
    assert own[0] == ("ResNet-18",) and borrowed[0] == ("MobileNetV2", "yardstick of ResNet-18")
    assert own[2:] == borrowed[2:]  # the same soft labels, the same yardstick
    assert "CCL-Net, agreement of backbones: ResNet-18 and MobileNetV2 1.00." in structure.caption
    page = render("tables.html", title="Looks", grids=[structure], runs="", pictures=[])
    assert '<th scope="row">MobileNetV2<span class="ci">yardstick of ResNet-18</span></th>' in page


def test_tables_before_anything_was_run(tmp_path: Path) -> None:
    seeds = Seeds(tmp_path)
    for grid in (structure_grid([]), looks_grid([], seeds), looks_pairs_grid([], seeds), tune_looks_grid([])):
        assert all(len(row) == len(grid.columns) for row in grid.rows)
        assert any("not run" in field for row in grid.rows for field in row)


def test_the_best_candidate_comes_first(tmp_path: Path) -> None:
    cells = {cell.variant: cell for cell in looks_cells.tune_looks()}
    assert best_change([]) is None
    for name, wrong in (("start", 0), ("kl-3", 12), ("mixup-0.2", 3)):
        made_result(tmp_path, cells[name], wrong, softness=[0.8])
    found = read_results(tmp_path / "results" / "tune-lesion")
    assert [row[0][0] for row in tune_looks_grid(found).rows] == ["start", "mixup-0.2", "kl-3"]
    assert best_change(found) == "mixup-0.2"


def test_what_is_chosen_is_what_came_out_best() -> None:
    found = read_results(RESULTS / "tune-lesion")
    if not found:
        pytest.skip("the choices have not been run yet")
    assert best_change(found) == CHOSEN, "set CHOSEN in reproduce/looks_cells.py"


def test_the_course_of_a_run(results: list[Result], tmp_path: Path) -> None:
    [own] = [r for r in results if r.cell == looks_cell("ccl", seed=1)]
    assert own.soft_label_history["epochs"] == [1, 2] and own.soft_label_history["matrices"][1][0] == [0.6, 0.15, 0.25]
    assert all(r.soft_label_history is None for r in results if not r.cell.method.startswith("ccl"))
    assert RunFolder(tmp_path).read_soft_label_history() is None
    for epoch in (1, 2, 4, 5, 7, 8, 8):  # the last epoch twice, as after a resume
        record_soft_labels(RunFolder(tmp_path), epoch, torch.full((2, 2), epoch / 10))
    record_soft_labels(RunFolder(tmp_path), 12, None)
    history = RunFolder(tmp_path).read_soft_label_history()
    assert history is not None and history["epochs"] == [1, 2, 4, 8] and history["matrices"][-1] == [[0.8, 0.8]] * 2
    assert len((tmp_path / "soft_labels.jsonl").read_text().splitlines()) == 5


def test_the_figure_has_a_panel_a_method(results: list[Result]) -> None:
    figure = looks_figure(results)
    assert figure is not None
    assert [axis.get_title() for axis in figure.axes] == [
        LOOKS[n] for n in LOOKS if looks_cell(n).method.startswith("ccl")
    ]
    assert looks_figure([r for r in results if r.cell.variant != "class-weights"]) is None
