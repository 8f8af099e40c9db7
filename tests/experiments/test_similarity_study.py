"""The similarity study: cells, reference confusion matrix, tables and figure, from results made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import run
import similarity_cells
from cclnet import InputError
from cclnet.evaluation.similarity import agreement, mean_confusion
from cclnet.methods import build_method
from cclnet.methods.base import Classes
from cclnet.report.html import render
from cclnet.reproduce.seeds import PaperResult, SeedStatistics, read_results
from cclnet.reproduce.tables import Grid, fill_markers, markdown
from cclnet.runs.folder import RunFolder, open_run
from cclnet.sweep.results import record_soft_labels
from made_paper_results import kept, made_result, made_run
from similarity_cells import CANDIDATES, CHOSEN, ROWS, TUNING, USES, row_cell, study_recipes, tune
from similarity_tables import (
    best_change,
    references,
    scores_grid,
    scores_pairs_grid,
    similarity_figure,
    structure_grid,
    study_blocks,
    study_grids,
    tune_grid,
    tune_similarity_grid,
    uses_grid,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "isic2018"
WRONG = {"hard": 12, "lsr-u5": 12, "ccl": 9, "ccl-balanced": 9, "ccl-centroid": 3, "tuned": 3, "ccl-confusion": 3,
         "reference": 30}  # fmt: skip


def made(folder: Path, name: str, seed: int, backbone: str = "resnet18") -> PaperResult:
    """The result of a row of ROWS, with soft labels at two epochs where the method learns some."""
    cell = row_cell(name, backbone, seed)
    learns = cell.method.startswith("ccl")
    run = made_run(folder / "runs", cell, WRONG[name] + seed, softness=[0.5, 0.6] if learns else None)
    if learns:
        for epoch, off in ((1, 0.2), (2, 0.15)):
            rows = [[0.6, off, 0.4 - off], [off, 0.6, 0.4 - off], [0.1, 0.3, 0.6]]
            record_soft_labels(RunFolder(run), epoch, torch.tensor(rows))
    return kept(folder, cell)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[PaperResult]:
    folder = tmp_path_factory.mktemp("similarity")
    for name in ROWS:
        for seed in (0, 1):
            made(folder, name, seed)
    return read_results(folder / "results")


def column(grid: Grid, name: str, of: str) -> tuple[str, ...]:
    [row] = [row for row in grid.rows if of in (row[0][0], row[1][0])]
    return row[grid.columns.index(name)]


def test_every_cell_has_settings_and_its_own_name() -> None:
    cells = [*similarity_cells.similarity((0, 1)), *similarity_cells.tune_similarity(), *similarity_cells.uses((0,))]
    names = {cell.name for cell in cells}
    assert len(names) == len(cells) - 1  # plain CCL-Net is in similarity and in uses
    assert len(similarity_cells.tune_similarity()) <= 6
    recipes = study_recipes()
    for cell in cells:
        settings = cell.settings(recipes[cell.split], "isic")
        build_method(settings.method, Classes(7, 8, (1,) * 7), settings.method_settings)
        assert settings.split.by == ("given" if cell.split in TUNING else "group")
    with pytest.raises(InputError, match="unknown row of the study 'tune'; did you mean 'tuned'"):
        similarity_cells.similarity(rows=("tune",))


def test_each_use_changes_one_thing() -> None:
    assert CANDIDATES["start"] == {} and CHOSEN != "start"
    for changes in (*CANDIDATES.values(), *USES.values()):
        assert sum(len(inner) for inner in changes.values()) == (1 if changes else 0)


def test_the_reference_is_the_mean_confusion(results: list[PaperResult]) -> None:
    rows = {name: [r for r in results if r.cell == row_cell(name, seed=r.cell.seed)] for name in ROWS}
    found = references(rows)
    assert found is not None and found.corrected is not None
    by_hand = []
    for result in rows["reference"]:
        predictions = open_run(result.path).predictions
        means = np.stack([predictions.probabilities[predictions.labels == k].mean(axis=0) for k in range(3)])
        by_hand.append((means + means.T) / 2)
    np.testing.assert_allclose(found.balanced, np.mean(by_hand, axis=0))
    assert found.seeds_agree == pytest.approx(agreement(*by_hand))
    assert references({**rows, "reference": []}) is None


def test_prior_correction_removes_class_frequencies() -> None:
    rng = np.random.default_rng(0)
    labels, counts = np.arange(300) % 3, np.array([900, 90, 10])
    fair = rng.dirichlet([1, 1, 1], 300)
    skewed = fair * counts
    skewed /= skewed.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(mean_confusion(labels, skewed, counts), mean_confusion(labels, fair))
    assert np.isnan(mean_confusion(labels[labels < 2], fair[labels < 2])[2]).all()


def test_tables(results: list[PaperResult], tmp_path: Path) -> None:
    seeds = SeedStatistics(tmp_path)
    structure = structure_grid(results)
    assert [row[1][0] for row in structure.rows] == [ROWS[n] for n in ROWS if row_cell(n).method.startswith("ccl")]
    assert (
        "The reference and inverse class frequency: " in structure.caption
        and "the references of two seeds: " in structure.caption
    )
    assert len(column(structure, "Reference given frequency", "CCL from centroids")) == 3  # with p
    assert column(structure, "Seeds agree", "CCL-Net")[0] == "1.00"
    assert len(column(structure, "Reference", "CCL-Net")) == 3  # the mean, each seed, p
    scores = scores_grid(results, seeds)
    assert len(scores.rows) == len(ROWS) and column(scores, "Seeds", "Hard labels") == ("2",)
    assert column(scores, "Accuracy", "CCL from centroids")[0].startswith("0.942")
    pairs = scores_pairs_grid(results, seeds)
    assert len(pairs.rows) == 12 and column(pairs, "Accuracy", "CCL from centroids − Hard labels")[0] == "+15.0"
    assert uses_grid(results, seeds).rows[0][1] == ("not run",)  # CCL-Net alone is no comparison


def test_a_backbone_without_a_reference_uses_another_one(tmp_path: Path) -> None:
    for name in ("ccl", "reference"):
        made(tmp_path, name, 0)
    made(tmp_path, "ccl", 0, "mobilenetv2_100")
    structure = structure_grid(read_results(tmp_path / "results"))
    own, borrowed = structure.rows
    assert own[0] == ("ResNet-18",) and borrowed[0] == ("MobileNetV2", "reference of ResNet-18")
    assert own[2:] == borrowed[2:]  # the same soft labels, the same reference
    assert "CCL-Net, agreement of backbones: ResNet-18 and MobileNetV2 1.00 (p 1)." in structure.caption
    page = render("tables.html", title="Similarity", grids=[structure], runs="", pictures=[])
    assert '<th scope="row">MobileNetV2<span class="ci">reference of ResNet-18</span></th>' in page


def test_tables_before_anything_was_run(tmp_path: Path) -> None:
    seeds = SeedStatistics(tmp_path)
    for grid in (structure_grid([]), scores_grid([], seeds), scores_pairs_grid([], seeds), tune_similarity_grid([])):
        assert all(len(row) == len(grid.columns) for row in grid.rows)
        assert any("not run" in field for row in grid.rows for field in row)


def test_the_best_candidate_comes_first(tmp_path: Path) -> None:
    cells = {cell.variant: cell for cell in similarity_cells.tune_similarity()}
    assert best_change([]) is None
    for name, wrong in (("start", 0), ("kl-3", 12), ("mixup-0.2", 3)):
        made_result(tmp_path, cells[name], wrong, softness=[0.8])
    found = read_results(tmp_path / "results" / "tune-lesion")
    assert [row[0][0] for row in tune_similarity_grid(found).rows] == ["start", "mixup-0.2", "kl-3"]
    assert best_change(found) == "mixup-0.2"


def test_what_is_chosen_is_what_came_out_best() -> None:
    found = read_results(RESULTS / "tune-lesion")
    if not found:
        pytest.skip("the choices have not been run yet")
    assert best_change(found) == CHOSEN, "set CHOSEN in similarity_cells.py"


def test_the_history_of_soft_labels(results: list[PaperResult], tmp_path: Path) -> None:
    [own] = [r for r in results if r.cell == row_cell("ccl", seed=1)]
    assert own.soft_label_history["epochs"] == [1, 2] and own.soft_label_history["matrices"][1][0] == [0.6, 0.15, 0.25]
    assert all(r.soft_label_history is None for r in results if not r.cell.method.startswith("ccl"))
    assert RunFolder(tmp_path).read_soft_label_history() is None
    for epoch in (1, 2, 4, 5, 7, 8, 8):  # the last epoch twice, as after a resume
        record_soft_labels(RunFolder(tmp_path), epoch, torch.full((2, 2), epoch / 10))
    record_soft_labels(RunFolder(tmp_path), 12, None)
    history = RunFolder(tmp_path).read_soft_label_history()
    assert history is not None and history["epochs"] == [1, 2, 4, 8] and history["matrices"][-1] == [[0.8, 0.8]] * 2
    assert len((tmp_path / "soft_labels.jsonl").read_text().splitlines()) == 5


def test_the_figure_has_one_panel_per_method(results: list[PaperResult]) -> None:
    figure = similarity_figure(results)
    assert figure is not None
    assert [axis.get_title() for axis in figure.axes] == [ROWS[n] for n in ROWS if row_cell(n).method.startswith("ccl")]
    assert similarity_figure([r for r in results if r.cell.variant != "class-weights"]) is None


def test_open_choices_start_where_they_are_defined_whatever_the_recipe() -> None:
    recipe = study_recipes()["tune"] | {"epochs": 7, "clip": 9.0}
    found = {cell.variant: cell.settings(recipe, "slice.csv") for cell in tune()}
    assert (found["start"].epochs, found["start"].clip, found["start"].method) == (160, 1.0, "hard")
    assert found["epochs-100"].epochs == 100 and found["clip-none"].clip == 0.0
    assert found["jitter-strong"].augment.hue == 0.1 and found["jitter-strong"].augment.horizontal_flip == 0.5
    assert {settings.split.by for settings in found.values()} == {"given"}
    assert {cell.split for cell in tune()} == {"tune"}
    names = [cell.name for cell in tune()]
    assert len({repr(settings) for settings in found.values()}) == len(set(names)) == len(names)


def test_the_best_open_choice_comes_first(tmp_path: Path) -> None:
    candidates = {cell.variant: cell for cell in tune()}
    for name, wrong in (("start", 12), ("clip-none", 3), ("jitter-strong", 30)):
        made_result(tmp_path, candidates[name], wrong)
    grid = tune_grid(read_results(tmp_path / "results" / "tune"))
    assert [row[0][0] for row in grid.rows] == ["clip-none", "start", "jitter-strong"]
    strong = dict(zip(grid.columns, grid.rows[2], strict=True))
    assert strong["Jitter"] == ("0.4/0.4/0.4/0.1",) and grid.rows[0][grid.columns.index("Clip")] == ("none",)
    assert tune_grid([]).rows == ()
    assert run.main(["tune", "--tables-only", "--results", str(tmp_path / "results")]) == 0  # no other results needed
    assert "clip-none" in (tmp_path / "results" / "tune.html").read_text()


def names_of(*words: str) -> list[str]:
    """The names of the cells that a command line runs, unfinished because it has no time."""
    return [cell.name for cell in run.cells_of(run.arguments(words))]


def test_all_is_what_the_documents_report() -> None:
    names = names_of("all")
    assert len(names) == len(set(names)) and set(names_of("similarity", "--seeds", "0,1,2")) <= set(names)
    assert not any(name.startswith("tune") for name in names)  # choices are made, not run again
    assert names_of("looks", "--methods", "hard,reference", "--backbones", "mobilenetv2_100") == [
        "lesion-mobilenetv2_100-hard-seed0",
        "lesion-mobilenetv2_100-hard-class-weights-seed0",
    ]
    assert names_of("tune-looks", "--only", "*-kl-3-*") == ["tune-lesion-resnet18-ccl-centroid-kl-3-seed0"]


def test_what_cannot_be_requested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["similarity", "--out", str(tmp_path)]) == 2 and "--data" in capsys.readouterr().err
    empty = ["similarity", "--tables-only", "--documents", "--results", str(tmp_path)]
    assert run.main(empty) == 2 and "has no results" in capsys.readouterr().err
    assert run.main(["similarity", "--smoke", "--out", str(tmp_path), "--backbones", "resnet19"]) == 2
    assert "did you mean 'resnet18'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("forked_sweep")
def test_tuning_cells_run_on_data_of_their_own(tmp_path: Path) -> None:
    words = ["tune", "--smoke", "--only", "tune-resnet18-hard-start-seed0", "--accelerator", "cpu", "--out"]
    assert run.main([*words, str(tmp_path)]) == 0
    assert (tmp_path / "tune-data" / "images.csv").exists()
    assert [r.cell.name for r in read_results(tmp_path / "results" / "tune")] == ["tune-resnet18-hard-start-seed0"]


def test_documents_and_tables_agree_with_the_results() -> None:
    for name, blocks in study_blocks(RESULTS).items():
        text = (ROOT / name).read_text(encoding="utf-8")
        command = "run: python experiments/similarity/run.py all --results results/isic2018 --tables-only --documents"
        assert fill_markers(text, blocks, name) == text, command
    for name, content in study_grids(RESULTS, SeedStatistics(RESULTS)).items():
        assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == markdown(*content), name
