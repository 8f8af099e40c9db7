"""The published numbers: some read again from the paper, and what the paper says about all of them."""

from __future__ import annotations

import pytest

from cclnet.functional import collapse_point
from cclnet.reproduce import paper


def test_some_numbers_read_again() -> None:
    assert paper.table1("resnet18", "hard") == {
        "accuracy": 0.8347, "macro_f1": 0.7073, "kappa": 0.6775, "macro_jaccard": 0.5655,
    }  # fmt: skip
    assert paper.table1("efficientnet_b0", "lsr-a1")["kappa"] == 0.5526
    assert paper.table1("mobilenetv2_100", "lsr-u5")["macro_jaccard"] == 0.5281
    assert paper.table1("mobilenetv2_100", "lsr-a5")["macro_f1"] == 0.2306
    assert paper.TABLE2[0.001] == paper.HeadRate(76, 0.38, 0.8452, 0.6972)
    assert paper.TABLE2[0.05] == paper.HeadRate(5, 0.30, 0.8417, 0.6884)


@pytest.mark.parametrize("backbone", paper.BACKBONES)
@pytest.mark.parametrize("score", paper.SCORES)
def test_what_the_text_claims_about_the_table(backbone: str, score: str) -> None:
    value = {method: paper.table1(backbone, method)[score] for method in paper.METHODS}
    assert value["ccl"] == max(value.values())
    assert max(value["lsr-a1"], value["lsr-a5"]) < value["hard"]


def test_the_two_tables_share_a_run() -> None:
    shared, cell = paper.TABLE2[paper.LR_CCL], paper.table1("resnet18", "ccl")
    assert (shared.accuracy, shared.kappa) == (cell["accuracy"], cell["kappa"])


def test_the_faster_the_head_the_sooner_and_softer() -> None:
    rates = [paper.TABLE2[rate] for rate in sorted(paper.TABLE2)]
    epochs = [rate.converged for rate in rates[1:]]
    assert rates[0].converged is None and epochs == sorted(epochs, key=lambda epoch: -(epoch or 0))
    softness = [rate.softness for rate in rates]
    assert softness == sorted(softness, reverse=True) and max(softness) < collapse_point(7)[1]
