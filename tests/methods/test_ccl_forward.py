"""Forward CCL: its loss, its limits, the matrix it reads from the warm-up, and its state."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F

from cclnet import CCLNet, InputError, build_method
from cclnet.methods import Classes
from cclnet.methods.ccl_forward import (
    CCLForward,
    forward_loss,
    label_model,
    labels_of_predicted,
    share_of_correct_labels,
    true_shares,
)

CLASSES = Classes(3, 6, (10, 60, 30))
A = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.05, 0.35, 0.6]], dtype=torch.float64)


def fresh(**settings: float) -> CCLForward:
    method = build_method("ccl-forward", CLASSES, settings)
    assert isinstance(method, CCLForward)
    return method


def batch(count: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 6), torch.randn(count, 3, dtype=torch.float64), torch.randint(3, (count,))


def test_without_sharpening_it_is_the_likelihood_of_the_label() -> None:
    _, logits, labels = batch()
    expected = F.nll_loss((torch.softmax(logits, dim=1) @ A).log(), labels)
    torch.testing.assert_close(forward_loss(logits, A, labels), expected)


@pytest.mark.parametrize("sharpen", [0.5, 1.0, 2.0, 4.0])
def test_the_gradient_is_that_of_the_sharpened_posterior_as_target(sharpen: float) -> None:
    _, logits, labels = batch()
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(forward_loss(logits, A, labels, sharpen), logits)
    posterior = (torch.softmax(logits, dim=1) * A[:, labels].mT).pow(sharpen).detach()
    target = posterior / posterior.sum(dim=1, keepdim=True)
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, target), logits)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("sharpen", [1.0, 2.0])
def test_the_warm_up_is_hard_labels(sharpen: float) -> None:
    features, logits, labels = batch()
    logits.requires_grad_()
    loss = fresh(sharpen=sharpen)(features, logits, labels).total
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))
    assert torch.isfinite(torch.autograd.grad(loss, logits)[0]).all()


def test_softness_one_stays_hard_labels() -> None:
    method = fresh(softness=1.0, warmup=1)
    features, logits, labels = batch()
    method(features, logits, labels)
    method.end_epoch()
    torch.testing.assert_close(method(features, logits, labels).total, F.cross_entropy(logits, labels))


def test_the_table_changes_once_at_the_end_of_the_warm_up() -> None:
    method, seen = fresh(softness=0.7, warmup=2), []
    for epoch in range(4):
        features, logits, labels = batch(40)
        method(features, logits + epoch, labels.roll(epoch))
        assert method.end_epoch()["softness"] == pytest.approx(1.0 if epoch == 0 else 0.7)
        seen.append(method.soft_labels())
    torch.testing.assert_close(seen[0], torch.eye(3, dtype=torch.float64))
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2]) and torch.equal(seen[1], seen[3])


def test_a_sure_network_finds_where_labels_of_each_class_go() -> None:
    """Images of true class k, labelled by A; the network knows k. The off-diagonal has the shape of A's."""
    generator = torch.Generator().manual_seed(0)
    true = torch.arange(3).repeat_interleave(20_000)
    given = torch.multinomial(A[true], 1, generator=generator)[:, 0]
    sums = labels_of_predicted(20.0 * F.one_hot(true, 3).double(), given, torch.ones(3), 4.0).sum(dim=0)
    found = label_model(sums, 0.7)
    expected = label_model(A, 0.7)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


def drawn(rate: float, count: int = 6000) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a network that knows classes 0 and 1 and confuses class 2 with 1, and labels of which ``rate`` are
    wrong."""
    generator = torch.Generator().manual_seed(0)
    true = torch.multinomial(torch.tensor(CLASSES.counts, dtype=torch.float64), count, True, generator=generator)
    seen = torch.where((true == 2) & (torch.rand(count, generator=generator) < 0.5), 1, true)
    wrong = torch.rand(count, generator=generator) < rate
    given = torch.where(wrong, (true + 1 + torch.randint(2, (count,), generator=generator)) % 3, true)
    return 6.0 * F.one_hot(seen, 3).double(), given


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4])
def test_the_diagonal_is_the_share_of_correct_labels(rate: float) -> None:
    """Of the class that is known best: the confused classes have a smaller share of their own label."""
    method, (logits, given) = fresh(warmup=1), drawn(rate)
    method(torch.zeros(len(given), 6), logits, given)
    assert method.end_epoch()["softness"] == pytest.approx(1.0 - rate, abs=0.03)


def test_right_labels_stay_hard_labels() -> None:
    """Also with the weights of the classes: they multiply the only class that a right label allows."""
    method, (logits, given) = fresh(warmup=1), drawn(0.0)
    known = given != 2
    logits, given = 12.0 * F.one_hot(given[known], 3).double(), given[known]
    method(torch.zeros(len(given), 6), logits, given)
    assert method.end_epoch()["softness"] > 0.9999
    features, logits, labels = batch()
    logits.requires_grad_()
    found, expected = (
        torch.autograd.grad(loss, logits)[0]
        for loss in (method(features, logits, labels).total, F.cross_entropy(logits, labels))
    )
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_few_images_give_no_share() -> None:
    few = torch.tensor([[4.0, 5.0], [0.0, 2.0]])
    assert float(share_of_correct_labels(few)) == 1.0
    assert float(share_of_correct_labels(10 * few)) == 1.0  # 20 images of the second class
    assert float(share_of_correct_labels(torch.tensor([[40.0, 50.0], [0.0, 2.0]]))) == pytest.approx(4 / 9)


def test_the_shares_of_the_true_classes_explain_those_of_the_labels() -> None:
    shares = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    found = true_shares(1000 * shares @ A, A)
    torch.testing.assert_close(found, shares, atol=0.01, rtol=0)
    torch.testing.assert_close(true_shares(100 * shares, torch.eye(3, dtype=torch.float64)), shares)


def test_a_class_that_is_predicted_too_often_gets_less_weight() -> None:
    """Labels say that the classes are equally frequent, and the network predicts the first for most images."""
    for align, sign in ((1.0, 1), (0.0, 0)):
        method = fresh(softness=0.7, warmup=1, align=align)
        logits = torch.tensor([[2.0, 0.0, 0.0]]).repeat(90, 1)
        labels = torch.arange(3).repeat(30)
        method(torch.zeros(90, 6), logits, labels)
        method.end_epoch()
        found = torch.sign(method.class_weight.log()).tolist()
        assert found == [-sign, sign, sign]


def test_the_weights_of_the_classes_move_the_target() -> None:
    _, logits, labels = batch()
    weights = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(forward_loss(logits, A, labels, 2.0, class_weight=weights), logits)
    posterior = weights * (torch.softmax(logits, dim=1) * A[:, labels].mT).square().detach()
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, posterior / posterior.sum(dim=1, keepdim=True)), logits)
    torch.testing.assert_close(gradient, expected)


def test_evaluation_leaves_the_state_alone() -> None:
    method = fresh().eval()
    method(*batch())
    assert all(float(getattr(method, name).sum()) == 0.0 for name in method.epoch_sums)


def test_mixed_labels_and_image_weights() -> None:
    features, logits, labels = batch()
    method = fresh(warmup=1)
    method(features, logits, labels)
    method.end_epoch()
    method.eval()
    whole = method(features, logits, labels).total
    torch.testing.assert_close(method(features, logits, F.one_hot(labels, 3).double()).total, whole)
    weight = torch.zeros(12, dtype=torch.float64)
    weight[3] = 12.0
    torch.testing.assert_close(
        method(features, logits, labels, weight).total, method(features[3:4], logits[3:4], labels[3:4]).total
    )


def test_a_restored_method_continues_exactly() -> None:
    first = fresh(warmup=2)
    first(*batch())
    first.end_epoch()
    first(*batch(70))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = fresh(warmup=2)
    second.load_state_dict(torch.load(file, weights_only=True))
    for method in (first, second):
        method(*batch(90))
        method.end_epoch()
    assert torch.equal(first.table, second.table) and not torch.equal(first.table, torch.eye(3, dtype=torch.float64))
    assert torch.equal(first.class_weight, second.class_weight) and not torch.equal(first.class_weight, torch.ones(3))
    assert torch.equal(first(*batch(5)).total, second(*batch(5)).total)


def test_with_logit_adjustment_the_balanced_prediction_picks_the_images() -> None:
    """The method sees logits plus log prior and divides the prior out again: the same sums as for the plain logits of
    equally frequent classes."""
    _, logits, labels = batch()
    shares = torch.tensor(CLASSES.counts, dtype=torch.float64) / 100
    adjusted = labels_of_predicted(logits + shares.log(), labels, shares, 4.0).sum(dim=0)
    torch.testing.assert_close(adjusted, labels_of_predicted(logits, labels, torch.ones(3), 4.0).sum(dim=0))


def test_without_class_counts_classes_count_as_equally_frequent() -> None:
    net = CCLNet(torch.nn.Flatten(), 3, "ccl-forward", feature_width=4)
    assert torch.isfinite(net(torch.randn(5, 4), torch.randint(3, (5,))).total)


@pytest.mark.parametrize(
    "settings",
    [{"softness": -0.1}, {"softness": 1.1}, {"warmup": 0}, {"sharpen": 0.0}, {"power": -1.0}, {"align": 2.0}],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        fresh(**settings)
