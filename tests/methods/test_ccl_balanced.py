"""Balanced CCL: what its head weighs, what it freezes and when, and its state."""

from __future__ import annotations

import io
import math

import pytest
import torch
import torch.nn.functional as F

from cclnet import CCLNet, InputError, build_method, functional
from cclnet.methods import Classes
from cclnet.methods.ccl_balanced import BalancedHead, CCLBalanced

COUNTS = (10, 60, 30)
CLASSES = Classes(3, 6, COUNTS)
SMALL = {"widths": (8, 5)}


def fresh(classes: Classes = CLASSES, **chosen: object) -> CCLBalanced:
    torch.manual_seed(0)
    method = build_method("ccl-balanced", classes, {**SMALL, **chosen})
    assert isinstance(method, CCLBalanced)
    return method


def batch(count: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(count, 6), torch.randn(count, 3), torch.randint(3, (count,))


def distances(method: CCLBalanced, features: torch.Tensor) -> torch.Tensor:
    return functional.squared_distance(method.head.embedding(features), method.head.live_dictionary)


def test_weights_give_every_class_the_same_weight() -> None:
    method = fresh(balance="weights").eval()
    features, logits, labels = batch()
    weights = torch.tensor([100 / (3 * n) for n in COUNTS])
    losses = F.cross_entropy(-distances(method, features), labels, reduction="none") * weights[labels]
    terms = method(features, logits, labels).terms
    torch.testing.assert_close(terms["head_cross_entropy"], losses.mean())
    shares = torch.tensor(COUNTS) / 100
    torch.testing.assert_close(shares * weights, torch.full((3,), 1 / 3))  # over an epoch a third each
    torch.testing.assert_close(terms["cross_entropy"], F.cross_entropy(logits, labels))  # the network's is as it was


def test_prior_is_added_to_the_logits_while_learning() -> None:
    method = fresh(balance="prior").eval()
    features, logits, labels = batch()
    prior = torch.tensor(COUNTS) / 100
    expected = F.cross_entropy(-distances(method, features) + prior.log(), labels)
    torch.testing.assert_close(method(features, logits, labels).terms["head_cross_entropy"], expected)


@pytest.mark.parametrize("balance", ["weights", "prior"])
def test_balanced_classes_make_it_ccl(balance: str) -> None:
    classes = Classes(3, 6, (5, 5, 5))
    method = fresh(classes, balance=balance)
    torch.manual_seed(0)
    paper = build_method("ccl", classes, SMALL)
    features, logits, labels = batch()
    for name, value in paper(features, logits, labels).terms.items():
        torch.testing.assert_close(method(features, logits, labels).terms[name], value)


def test_sample_weights_mixed_labels_and_the_weight_of_the_divergence() -> None:
    method = fresh(kl_weight=0.25).eval()
    features, logits, labels = batch()
    weight = torch.zeros(12)
    weight[3] = 12.0
    alone = method(features[3:4], logits[3:4], labels[3:4]).terms
    for name, value in method(features, logits, labels, weight).terms.items():
        torch.testing.assert_close(value, alone[name])
    whole = method(features, logits, labels).terms
    for name, value in method(features, logits, F.one_hot(labels, 3).float()).terms.items():
        torch.testing.assert_close(value, whole[name])
    target = method.soft_labels()[labels]
    torch.testing.assert_close(whole["kl"], 0.25 * functional.kl_to_target(logits, target))


def test_neither_part_trains_the_other() -> None:
    method = fresh()
    features, logits, labels = batch()
    features.requires_grad_(), logits.requires_grad_()
    terms = method(features, logits, labels).terms
    (terms["cross_entropy"] + terms["kl"]).backward(retain_graph=True)
    assert all(p.grad is None for p in method.parameters()) and logits.grad is not None
    (terms["head_cross_entropy"] + terms["class_correlation"]).backward()
    assert all(p.grad is not None for p in method.parameters()) and features.grad is None


def place(head: BalancedHead, angles: tuple[float, float, float]) -> None:
    """Three classes in space, with these angles in degrees between the first two, the first and third, the last two."""
    ab, ac, bc = (math.cos(math.radians(angle)) for angle in angles)
    gram = torch.tensor([[1.0, ab, ac], [ab, 1.0, bc], [ac, bc, 1.0]])
    with torch.no_grad():
        head.live_dictionary.copy_(torch.linalg.cholesky(gram))


# drawn together, then parting one after the other, until all are at the margin
PARTING = [(20.0, 30.0, 40.0), (30.0, 60.0, 89.5), (60.0, 85.0, 90.0), (80.0, 89.0, 90.0), (90.0, 90.0, 90.0)]


def balanced_head(freeze_ratio: float = 0.5) -> BalancedHead:
    return BalancedHead(freeze_ratio, 3, 3, widths=(3,), patience=None)


def watch(head: BalancedHead) -> list[tuple[float, float]]:
    seen = []
    for angles in PARTING:
        place(head, angles)
        record = head.end_epoch()
        seen.append((record["structure"], record["frozen"]))
    return seen


def test_structure_is_how_unequal_the_distances_are() -> None:
    head = balanced_head()
    place(head, (60.0, 60.0, 90.0))  # at distances of 1, 1 and 2
    assert float(head.structure()) == pytest.approx(math.sqrt(2) / 3)
    place(head, (70.0, 70.0, 70.0))
    assert float(head.structure()) == pytest.approx(0.0, abs=1e-6)


def test_the_dictionary_is_frozen_when_half_of_its_structure_is_lost() -> None:
    head = balanced_head()
    seen = watch(head)
    assert [frozen for _, frozen in seen] == [0.0, 0.0, 0.0, 1.0, 1.0]
    most = max(structure for structure, _ in seen)
    assert seen[2][0] > 0.5 * most > seen[3][0] == seen[4][0]  # and stays as it was
    expected = balanced_head()
    place(expected, PARTING[3])
    assert torch.equal(head.soft_labels(), expected.soft_labels())


@pytest.mark.parametrize(("freeze_ratio", "epochs"), [(0.9, 3), (0.1, 5), (0.0, 6)])
def test_other_shares_and_never(freeze_ratio: float, epochs: int) -> None:
    frozen = [frozen for _, frozen in watch(balanced_head(freeze_ratio))]
    assert frozen == [float(epoch >= epochs) for epoch in range(1, 6)]


def test_freeze_state_survives_save_and_load() -> None:
    def run(save_after: int | None) -> list[tuple[float, list[list[float]]]]:
        head, log = balanced_head(), []
        for epoch, angles in enumerate(PARTING):
            if epoch == save_after:
                file = io.BytesIO()
                torch.save(head.state_dict(), file)
                file.seek(0)
                head = balanced_head()
                head.load_state_dict(torch.load(file, weights_only=True))
            place(head, angles)
            log.append((head.end_epoch()["frozen"], head.soft_labels().tolist()))
        return log

    undisturbed = run(None)
    for epoch in range(1, len(PARTING)):
        assert run(epoch) == undisturbed


def test_compiles_as_one_graph_and_the_freeze_is_seen_inside() -> None:
    method = fresh(sharpen=2.0)
    method.head.max_structure.fill_(100.0)  # almost all is lost
    compiled = torch.compile(method, fullgraph=True, backend="aot_eager")
    given = batch()
    for _ in range(2):
        torch.testing.assert_close(compiled(*given).total, method(*given).total)
        method.end_epoch()
        assert method.head.frozen
        with torch.no_grad():
            method.head.live_dictionary.add_(1.0)


def test_nothing_of_it_is_shipped() -> None:
    network = CCLNet(torch.nn.Linear(5, 6), 3, "ccl-balanced", feature_width=6, class_counts=COUNTS)
    hard = CCLNet(torch.nn.Linear(5, 6), 3, "hard", feature_width=6)
    assert set(network.export_state()) == set(hard.export_state())


@pytest.mark.parametrize(
    ("classes", "chosen", "says"),
    [
        (Classes(3, 6), {}, "pass class_counts"),
        (Classes(3, 6, (4, 0, 2)), {}, r"images of every class; classes \[1\] have none"),
        (CLASSES, {"balance": "weight"}, "unknown balance 'weight'; did you mean 'weights'"),
        (CLASSES, {"kl_weight": -1.0}, "kl_weight.*got -1.0"),
        (CLASSES, {"margin": 5.0}, "margin must lie in"),
        (CLASSES, {"freeze_ratio": 1.0}, r"freeze_ratio must lie in \[0, 1\), got 1.0"),
        (CLASSES, {"temperature": 0.0}, r"temperature must lie in \(0, inf\), got 0.0"),
    ],
)
def test_settings_that_make_no_sense(classes: Classes, chosen: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        fresh(classes, **chosen)
