from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fake_run import MakeRun
from page_check import read_page

from cclnet.evaluation.compare import compare
from cclnet.report import write_comparison
from cclnet.report.text import difference_text, minus_signs, p_text, value_text


def seeds(make_run: MakeRun, method: str, count: int, **settings: Any) -> list[Path]:
    return [make_run(f"{method}-{seed}", method=method, seed=seed, images=200, **settings) for seed in range(count)]


def test_verdict_first_then_every_number(make_run: MakeRun, tmp_path: Path) -> None:
    compared = compare({"ccl": seeds(make_run, "ccl", 3, skill=3.0), "hard": seeds(make_run, "hard", 3)}, draws=50)
    path = write_comparison(tmp_path / "out", compared)
    page, markdown = read_page(path), (path.parent / "comparison.md").read_text()
    assert page.problems == [] and path.name == "comparison.html"
    assert json.loads((path.parent / "comparison.json").read_text()) == json.loads(json.dumps(compared.to_json()))
    (comparison,) = compared.comparisons
    assert page.text.index(minus_signs(comparison.verdict)) < page.text.index("Share of images whose most probable")
    for metric in compared.metrics:
        name, test = metric.name, comparison.metrics[metric.name]
        for text in (page.text, markdown):
            assert difference_text(test.difference, name) in text
            for method in compared.methods:
                assert value_text(method.scores[name].mean, name) in text
                assert all(value_text(value, name) in text for value in method.scores[name].values)
        assert p_text(test.p_holm) in page.text
    permutation = comparison.metrics["accuracy"].permutation
    assert permutation is not None and permutation.in_words in page.text
    assert page.text.count("Soft labels of ccl-") == 3  # side by side, beside their agreement


def test_one_run_each_brings_mcnemar(make_run: MakeRun, tmp_path: Path) -> None:
    compared = compare({"ccl": seeds(make_run, "ccl", 1), "hard": seeds(make_run, "hard", 1)}, draws=50)
    page = read_page(write_comparison(tmp_path / "out", compared))
    mcnemar = compared.comparisons[0].mcnemar
    assert page.problems == [] and mcnemar is not None and mcnemar.in_words in page.text
    assert "Do the soft labels agree?" not in page.text


def test_one_seed_is_warned_of_once(make_run: MakeRun, tmp_path: Path) -> None:
    compared = compare({name: seeds(make_run, name, 1) for name in ("ccl", "hard", "lsr")}, draws=50)
    path = write_comparison(tmp_path / "out", compared)
    for text in (read_page(path).text, (path.parent / "comparison.md").read_text()):
        assert text.lower().count("one seed") == 1 and "nothing can be said" not in text
        assert "no evidence of a difference" in text and "ccl minus hard is" in text


def test_many_methods_are_shown_eight_to_a_table(make_run: MakeRun, tmp_path: Path) -> None:
    runs = {f"method {k}": [make_run(f"run-{k}", seed=k, images=120)] for k in range(9)}
    page = read_page(write_comparison(tmp_path / "out", compare(runs, draws=10)))
    assert page.problems == [] and page.text.count("Further methods") == 1


def test_three_methods_have_three_comparisons(make_run: MakeRun, tmp_path: Path) -> None:
    compared = compare({name: seeds(make_run, name, 2) for name in ("ccl", "hard", "lsr")}, draws=50)
    page = read_page(write_comparison(tmp_path / "out", compared))
    assert page.problems == [] and {"pair-1", "pair-2", "pair-3"} <= set(page.ids)


def test_several_labels_per_image_are_compared(make_run: MakeRun, tmp_path: Path) -> None:
    many = {"multilabel": True, "classes": ("oedema", "nodule", "mass")}
    compared = compare({name: seeds(make_run, name, 2, **many) for name in ("ccl", "hard")}, draws=50)
    assert read_page(write_comparison(tmp_path / "out", compared)).problems == []


def test_names_are_text_and_nothing_else(make_run: MakeRun, tmp_path: Path) -> None:
    classes = ("<script>alert(1)</script>", "a|b", "c")
    runs = {f"<b>{m}</b>|": seeds(make_run, m, 2, classes=classes) for m in ("ccl", "hard")}
    path = write_comparison(tmp_path / "out", compare(runs, draws=50))
    page = read_page(path)
    assert page.problems == [] and not {"script", "b"} & set(page.tags)
    assert "<b>ccl</b>|" in page.text and "<b" not in (path.parent / "comparison.md").read_text()


def test_matrices_beyond_a_dozen_are_counted(make_run: MakeRun, tmp_path: Path) -> None:
    compared = compare({"ccl": seeds(make_run, "ccl", 14)}, draws=20)
    page = read_page(write_comparison(tmp_path / "out", compared))
    assert "12 of 14 matrices are shown." in page.text
