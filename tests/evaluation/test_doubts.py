"""Doubtful labels: the ranking against the posterior by hand, which predictions count, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from cclnet import InputError
from cclnet.cli import app
from cclnet.evaluation.doubts import find_doubts, label_model
from cclnet.methods.ccl_forward import label_model as method_label_model
from cclnet.methods.ccl_forward import labels_of_predicted
from cclnet.runs.folder import RunFolder, SplitTable

CLASSES = ("a", "b", "c")


def write(path: Path, p: np.ndarray, labels: np.ndarray, splits: list[str] | None = None, prefix: str = "i") -> Path:
    frame = pd.DataFrame({"image": [f"{prefix}{n}" for n in range(len(p))]})
    if splits:
        frame["split"] = splits
    frame["label"] = [CLASSES[k] for k in labels]
    for k, name in enumerate(CLASSES):
        frame[f"p_{name}"] = p[:, k]
    frame.to_csv(path, index=False)
    return path


def random_predictions(count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.dirichlet(np.ones(3), count), rng.integers(0, 3, count)


def test_the_doubt_is_the_posterior_of_the_other_classes(tmp_path: Path) -> None:
    p, labels = random_predictions()
    found = find_doubts([write(tmp_path / "predictions.csv", p, labels)])
    for row in found.table.to_dict("records"):
        n = int(row["image"][1:])
        joint = p[n] * found.label_model[:, labels[n]]
        assert row["doubt"] == pytest.approx(1 - joint[labels[n]] / joint.sum())
        assert row["p_label"] == pytest.approx(p[n, labels[n]])
        joint[labels[n]] = -1
        assert row["suggested"] == CLASSES[int(joint.argmax())]
    assert found.table["doubt"].is_monotonic_decreasing


def test_the_label_model_is_that_of_the_method() -> None:
    torch = pytest.importorskip("torch")
    p, labels = random_predictions()
    shares = torch.tensor(np.bincount(labels) / len(labels))
    sums = labels_of_predicted(torch.tensor(p).log(), torch.tensor(labels), shares, 4.0).sum(dim=0)
    np.testing.assert_allclose(label_model(p, labels), method_label_model(sums, 0.7).numpy(), atol=1e-12)


def test_between_equal_predictions_the_usual_mistake_is_more_doubtful(tmp_path: Path) -> None:
    """Wrong labels of b are a, those of c are b: a label a with half of the prediction on b is more doubtful than one
    with half on c."""
    sure = np.repeat(np.eye(3) * 0.94 + 0.02, [40, 40, 40], axis=0)
    labels = np.repeat([0, 1, 2], 40)
    labels[40:52], labels[80:92] = 0, 1
    p = np.concatenate([sure, [[0.4, 0.5, 0.1], [0.4, 0.1, 0.5]]])
    found = find_doubts([write(tmp_path / "p.csv", p, np.concatenate([labels, [0, 0]]))]).table.set_index("image")
    assert found.loc["i120", "doubt"] > found.loc["i121", "doubt"] + 0.2
    assert found.loc["i120", "suggested"] == "b"


def test_only_held_out_predictions_count_and_several_are_averaged(tmp_path: Path) -> None:
    p, labels = random_predictions(6)
    other = p[::-1].copy()
    first = write(tmp_path / "first.csv", p, labels, ["train", "train", "val", "val", "test", "test"])
    second = write(tmp_path / "second.csv", other, labels, ["train", "val", "val", "train", "train", "test"])
    found = find_doubts([first, second])
    by_name = found.table.set_index("image")
    assert set(by_name.index) == {"i1", "i2", "i3", "i4", "i5"} and found.left_out == 1
    assert by_name.loc["i1", "p_label"] == pytest.approx(other[1, labels[1]])
    assert by_name.loc["i2", "p_label"] == pytest.approx((p[2] + other[2])[labels[2]] / 2)


def test_images_that_a_run_was_trained_on_are_counted_as_left_out(tmp_path: Path) -> None:
    p, labels = random_predictions(6)
    run = RunFolder(tmp_path)
    write(run.predictions, p[:2], labels[:2], ["val", "val"])
    run.write_split(SplitTable(np.array([f"i{n}" for n in range(6)]), np.array(["val"] * 2 + ["train"] * 4)))
    found = find_doubts([tmp_path])
    assert len(found.table) == 2 and found.left_out == 4


def test_runs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    p, labels = random_predictions(6)
    first = write(tmp_path / "first.csv", p, labels)
    with pytest.raises(InputError, match="different labels"):
        find_doubts([first, write(tmp_path / "second.csv", p, (labels + 1) % 3)])
    with pytest.raises(InputError, match="trained on"):
        find_doubts([write(tmp_path / "third.csv", p, labels, ["train"] * 6)])
    other = pd.read_csv(first).rename(columns={"p_c": "p_d"}).replace({"label": {"c": "d"}})
    other.to_csv(tmp_path / "fourth.csv", index=False)
    with pytest.raises(InputError, match="a, b, d"):
        find_doubts([first, tmp_path / "fourth.csv"])


def test_the_command_writes_a_table_and_a_page_that_escapes_names(tmp_path: Path) -> None:
    p, labels = random_predictions(20)
    file = write(tmp_path / "predictions.csv", p, labels, prefix="<b>")
    result = CliRunner().invoke(app, ["doubts", str(file), "--top", "3"], catch_exceptions=False)
    assert result.exit_code == 0 and "20 labels ranked" in result.output
    table = pd.read_csv(tmp_path / "doubts.csv")
    assert len(table) == 20 and list(table.columns[:4]) == ["image", "label", "suggested", "doubt"]
    page = (tmp_path / "doubts.html").read_text(encoding="utf-8")
    assert page.count('<th scope="row">') == 3
    assert "&lt;b&gt;" in page and "<b>0" not in page
    file = write(tmp_path / "formula.csv", p, labels, prefix="=1+")
    CliRunner().invoke(app, ["doubts", str(file)], catch_exceptions=False)
    assert pd.read_csv(tmp_path / "doubts.csv")["image"].str.startswith("'=1+").all()


@pytest.mark.parametrize(("wrong", "hinted"), [(0, False), (30, True)])
def test_the_report_hints_at_wrong_labels_where_predictions_doubt_many(
    tmp_path: Path, wrong: int, hinted: bool
) -> None:
    labels = np.arange(60) % 3
    p = np.eye(3)[labels] * 0.85 + 0.05
    labels[:wrong] = (labels[:wrong] + 1) % 3
    file = write(tmp_path / "predictions.csv", p, labels)
    CliRunner().invoke(app, ["evaluate", str(file), "--draws", "20"], catch_exceptions=False)
    assert ("ccl-forward" in (tmp_path / "report.md").read_text(encoding="utf-8")) == hinted
