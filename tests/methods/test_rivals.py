"""The methods of other papers, each compared with its formula in plain Python loops and double precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cclnet import InputError, build_method
from cclnet.methods import Classes, Method
from cclnet.methods.label_relaxation import relaxation_loss

RIVALS = ("ols", "tf-kd", "mbls", "maxsup", "label-relaxation", "confidence-penalty", "focal", "ordinal")
K = 4
CLASSES = Classes(num_classes=K, in_features=3)


# The formulas, for the logits z of one image and its label y as weights of the classes.


def log_softmax(z: Sequence[float]) -> list[float]:
    largest = max(z)
    total = largest + math.log(sum(math.exp(v - largest) for v in z))
    return [v - total for v in z]


def cross_entropy(z: Sequence[float], target: Sequence[float]) -> float:
    return -sum(t * v for t, v in zip(target, log_softmax(z), strict=True))


def kl(target: Sequence[float], z: Sequence[float]) -> float:
    return sum(t * (math.log(t) - v) for t, v in zip(target, log_softmax(z), strict=True) if t > 0)


def mixed(rows: list[list[float]], y: Sequence[float]) -> list[float]:
    return [sum(y[c] * rows[c][k] for c in range(K)) for k in range(K)]


def ols(z: Sequence[float], y: Sequence[float], alpha: float = 0.5) -> float:
    """Before the end of the first epoch: the table is uniform."""
    return alpha * cross_entropy(z, y) + (1 - alpha) * cross_entropy(z, [1 / K] * K)


def tf_kd(
    z: Sequence[float], y: Sequence[float], alpha: float = 0.1, temperature: float = 20, confidence: float = 0.99
) -> float:
    rows = []
    for c in range(K):
        raised = [math.exp((confidence if k == c else (1 - confidence) / (K - 1)) / temperature) for k in range(K)]
        rows.append([v / sum(raised) for v in raised])
    return (1 - alpha) * cross_entropy(z, y) + alpha * kl(mixed(rows, y), z)


def mbls(z: Sequence[float], y: Sequence[float], alpha: float = 0.1, margin: float = 10) -> float:
    return cross_entropy(z, y) + alpha * sum(max(0.0, max(z) - v - margin) for v in z) / K


def maxsup(z: Sequence[float], y: Sequence[float], alpha: float = 0.1) -> float:
    return cross_entropy(z, y) + alpha * (max(z) - sum(z) / K)


def label_relaxation(z: Sequence[float], y: Sequence[float], alpha: float = 0.1) -> float:
    own = list(y).index(1)
    p = [math.exp(v) for v in log_softmax(z)]
    if p[own] >= 1 - alpha:
        return 0.0
    rest = sum(p) - p[own]
    return kl([1 - alpha if k == own else alpha * p[k] / rest for k in range(K)], z)


def confidence_penalty(z: Sequence[float], y: Sequence[float], beta: float = 0.1) -> float:
    return cross_entropy(z, y) - beta * -sum(math.exp(v) * v for v in log_softmax(z))


def focal(z: Sequence[float], y: Sequence[float], gamma: float = 3) -> float:
    return -sum(t * (1 - math.exp(v)) ** gamma * v for t, v in zip(y, log_softmax(z), strict=True))


def ordinal(
    z: Sequence[float], y: Sequence[float], sigma: float = 1, positions: Sequence[float] = tuple(range(K))
) -> float:
    rows = []
    for c in range(K):
        bell = [math.exp(-((positions[k] - positions[c]) ** 2) / (2 * sigma**2)) for k in range(K)]
        rows.append([v / sum(bell) for v in bell])
    return cross_entropy(z, mixed(rows, y))


FORMULAS: dict[str, Callable[..., float]] = {
    "ols": ols,
    "tf-kd": tf_kd,
    "mbls": mbls,
    "maxsup": maxsup,
    "label-relaxation": label_relaxation,
    "confidence-penalty": confidence_penalty,
    "focal": focal,
    "ordinal": ordinal,
}
OTHER_SETTINGS: list[tuple[str, dict]] = [
    ("ols", {"alpha": 0.8}),
    ("tf-kd", {"alpha": 0.95, "temperature": 0.3, "confidence": 0.9}),
    ("mbls", {"alpha": 0.4, "margin": 1.0}),
    ("maxsup", {"alpha": 0.2}),
    ("label-relaxation", {"alpha": 0.4}),
    ("confidence-penalty", {"beta": 0.7}),
    ("focal", {"gamma": 0.5}),
    ("ordinal", {"sigma": 0.6, "positions": (2.0, 0.0, 1.0, 4.5)}),
]
CASES = [*((name, {}) for name in RIVALS), *OTHER_SETTINGS]


def batch(spread: float = 4.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, logits, class indices, class weights of mixed images: all float64."""
    generator = torch.Generator().manual_seed(1)
    logits = spread * torch.randn(9, K, dtype=torch.float64, generator=generator)
    labels = torch.randint(K, (9,), generator=generator)
    shares = torch.rand(9, 1, dtype=torch.float64, generator=generator)
    weights = shares * F.one_hot(labels, K) + (1 - shares) * F.one_hot(labels.roll(1), K)
    return torch.zeros(9, 3, dtype=torch.float64), logits, labels, weights


def by_formula(
    name: str, chosen: dict, logits: torch.Tensor, weights: torch.Tensor, sample_weight: torch.Tensor | None = None
) -> float:
    sample = [1.0] * len(logits) if sample_weight is None else sample_weight.tolist()
    rows = zip(logits.tolist(), weights.tolist(), sample, strict=True)
    return sum(w * FORMULAS[name](z, y, **chosen) for z, y, w in rows) / len(logits)


@pytest.mark.parametrize(("name", "chosen"), CASES)
@pytest.mark.parametrize("weighed", [False, True])
def test_equals_its_formula_on_hard_labels(name: str, chosen: dict, weighed: bool) -> None:
    features, logits, labels, _ = batch()
    weight = torch.rand(9, dtype=torch.float64) if weighed else None
    got = build_method(name, CLASSES, chosen)(features, logits, labels, weight).total
    assert got.dtype == torch.float64
    assert float(got) == pytest.approx(by_formula(name, chosen, logits, F.one_hot(labels, K), weight), rel=1e-12)


@pytest.mark.parametrize(("name", "chosen"), [case for case in CASES if case[0] != "label-relaxation"])
def test_equals_its_formula_on_mixed_images(name: str, chosen: dict) -> None:
    features, logits, _, weights = batch()
    got = build_method(name, CLASSES, chosen)(features, logits, weights).total
    assert float(got) == pytest.approx(by_formula(name, chosen, logits, weights), rel=1e-12)


@pytest.mark.parametrize("name", RIVALS)
def test_class_weights_of_one_class_are_that_class(name: str) -> None:
    features, logits, labels, _ = batch()
    method = build_method(name, CLASSES)
    one_hot = F.one_hot(labels, K).double()
    if name == "label-relaxation":
        with pytest.raises(InputError, match=r"class indices.*turn mixup and cutmix off"):
            method(features, logits, one_hot)
    else:
        torch.testing.assert_close(
            method(features, logits, one_hot).total, method(features, logits, labels).total, rtol=1e-12, atol=0
        )


@given(
    name=st.sampled_from(RIVALS),
    logits=st.lists(st.floats(-30, 30), min_size=K, max_size=K),
    label=st.integers(0, K - 1),
)
@settings(max_examples=200, deadline=None)
def test_equals_its_formula_wherever_hypothesis_looks(name: str, logits: list[float], label: int) -> None:
    one_hot = [float(k == label) for k in range(K)]
    got = build_method(name, CLASSES)(
        torch.zeros(1, 3), torch.tensor([logits], dtype=torch.float64), torch.tensor([label])
    ).total
    assert float(got) == pytest.approx(FORMULAS[name](logits, one_hot), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("name", "chosen"), CASES)
def test_gradients(name: str, chosen: dict) -> None:
    features, logits, labels, weights = batch()
    method = build_method(name, CLASSES, chosen)
    sample_weight = torch.rand(9, dtype=torch.float64)
    logits.requires_grad_()
    for target in (labels,) if name == "label-relaxation" else (labels, weights):
        assert torch.autograd.gradcheck(lambda z, y=target: method(features, z, y, sample_weight).total, logits)


def test_label_relaxation_has_the_gradient_of_a_constant_target() -> None:
    _, logits, labels, _ = batch()
    alpha = 0.3
    logits.requires_grad_()
    relaxation_loss(logits, labels, alpha).backward()
    p = torch.softmax(logits.detach(), dim=1)
    own = F.one_hot(labels, K).bool()
    right = p[own]
    target = torch.where(own, 1 - alpha, alpha * p / (1 - right)[:, None])
    expected = torch.where((right >= 1 - alpha)[:, None], 0.0, p - target) / len(logits)
    assert 0 < int((right >= 1 - alpha).sum()) < len(logits)  # both branches are there
    torch.testing.assert_close(logits.grad, expected)


HARD_LIMITS: list[tuple[str, dict]] = [
    ("ols", {"alpha": 1.0}),
    ("tf-kd", {"alpha": 0.0}),
    ("tf-kd", {"alpha": 1.0, "temperature": 1e-3, "confidence": 1.0}),  # a teacher that is not softened
    ("mbls", {"alpha": 0.0}),
    ("mbls", {"margin": 1e6}),
    ("mbls", {"margin": math.inf}),
    ("maxsup", {"alpha": 0.0}),
    ("label-relaxation", {"alpha": 0.0}),
    ("confidence-penalty", {"beta": 0.0}),
    ("focal", {"gamma": 0.0}),
    ("ordinal", {"sigma": 1e-3}),
    ("ordinal", {"sigma": 1e-200}),
]


@pytest.mark.parametrize(("name", "chosen"), HARD_LIMITS)
def test_the_limit_is_hard_labels(name: str, chosen: dict) -> None:
    features, logits, labels, _ = batch()
    logits.requires_grad_()
    got = build_method(name, CLASSES, chosen)(features, logits, labels).total
    expected = F.cross_entropy(logits, labels)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    (ours,), (theirs,) = torch.autograd.grad(got, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_maxsup_is_label_smoothing_where_every_image_is_predicted_right() -> None:
    features, logits, _, _ = batch()
    labels = logits.argmax(dim=1)
    got = build_method("maxsup", CLASSES, {"alpha": 0.15})(features, logits, labels).total
    torch.testing.assert_close(got, F.cross_entropy(logits, labels, label_smoothing=0.15))


def test_a_hot_virtual_teacher_is_label_smoothing() -> None:
    features, logits, labels, _ = batch()
    got = build_method("tf-kd", CLASSES, {"alpha": 0.3, "temperature": 1e9})(features, logits, labels).total
    expected = F.cross_entropy(logits, labels, label_smoothing=0.3) - 0.3 * math.log(K)  # its entropy
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=0)


def test_label_relaxation_asks_no_more_than_its_share() -> None:
    sure = torch.tensor([[math.log(0.9), math.log(0.06), math.log(0.04)]]).double() + 3.0
    for alpha, free in ((0.11, True), (0.09, False)):
        assert (float(relaxation_loss(sure, torch.tensor([0]), alpha)) == 0.0) is free


@pytest.mark.parametrize("name", [*RIVALS, "focal-below-one"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_extreme_logits_stay_finite(name: str, dtype: torch.dtype) -> None:
    chosen = {"gamma": 0.3} if name == "focal-below-one" else {}
    method = build_method(name.removesuffix("-below-one"), CLASSES, chosen)
    rows = [[1e4, -1e4, 0, 0], [-1e4] * K, [1e4] * K, [0] * K, [-1e4, 1e4, 1e4, -1e4], [0, 0, 0, 1e4]]
    for label in range(K):
        logits = torch.tensor(rows, dtype=dtype, requires_grad=True)
        loss = method(torch.zeros(6, 3), logits, torch.full((6,), label)).total
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    assert all(math.isfinite(value) for value in method.end_epoch().values())
    assert method.soft_labels() is None or torch.isfinite(method.soft_labels()).all()


@pytest.mark.parametrize(
    ("name", "mixed_images"), [(n, m) for n in RIVALS for m in (False, True) if not (m and n == "label-relaxation")]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_float32(name: str, dtype: torch.dtype, mixed_images: bool) -> None:
    features, logits, labels, weights = batch()
    target = weights if mixed_images else labels
    half = logits.to(dtype)
    in_double, in_half = build_method(name, CLASSES), build_method(name, CLASSES)
    for _ in range(2):  # the second epoch of online smoothing has a table of its own
        with torch.autocast("cpu", dtype=dtype):
            got = in_half(features.to(dtype), half, target.float() if mixed_images else target).total
        assert got.dtype == torch.float32
        expected = in_double(features, half.double(), target).total
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)
        in_half.end_epoch(), in_double.end_epoch()


@pytest.mark.parametrize("name", RIVALS)
def test_compiles_as_one_graph(name: str) -> None:
    torch.compiler.reset()
    features, logits, labels, weights = batch()
    plain, method = build_method(name, CLASSES), build_method(name, CLASSES)
    compiled = torch.compile(method, fullgraph=True, backend="aot_eager")
    for target in (labels,) if name == "label-relaxation" else (labels, weights):
        ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        compiled(features, ours, target).total.backward()
        plain(features, theirs, target).total.backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(method.state_dict()[key], value)


@pytest.mark.parametrize("name", RIVALS)
def test_tables_are_distributions_and_the_rest_have_none(name: str) -> None:
    table = build_method(name, CLASSES).soft_labels()
    if name in ("ols", "tf-kd", "ordinal"):
        assert table is not None and table.shape == (K, K) and (table >= 0).all()
        torch.testing.assert_close(table.sum(dim=1), torch.ones(K, dtype=torch.float64))
    else:
        assert table is None


def test_ordered_classes_keep_their_order() -> None:
    table = build_method("ordinal", CLASSES).soft_labels()
    for own in range(K):
        by_distance = sorted(range(K), key=lambda k, own=own: abs(k - own))
        values = table[own][by_distance]
        assert (values.diff() <= 0).all()
    shuffled = build_method("ordinal", CLASSES, {"positions": [2, 0, 3, 1]}).soft_labels()
    order = torch.tensor([1, 3, 0, 2])  # the classes by their place
    torch.testing.assert_close(shuffled[order][:, order], table)


REFUSED: list[tuple[str, dict, str]] = [
    ("ols", {"alpha": 1.1}, r"alpha must lie in \[0, 1\], got 1.1"),
    ("ols", {"alpha": math.nan}, "got nan"),
    ("tf-kd", {"alpha": -0.1}, r"alpha must lie in \[0, 1\], got -0.1"),
    ("tf-kd", {"temperature": 0}, r"temperature must lie in \(0, inf\), got 0"),
    ("tf-kd", {"confidence": 0.25}, r"confidence must lie in \(0.25, 1\], got 0.25: .*1/4"),
    ("tf-kd", {"confidence": 1.01}, r"confidence .* 1\], got 1.01"),
    ("mbls", {"alpha": -1}, r"alpha .* \[0, inf\), got -1"),
    ("mbls", {"margin": -1}, r"margin .* \[0, inf\], got -1: a difference of logits"),
    ("maxsup", {"alpha": math.inf}, r"alpha .* \[0, inf\), got inf"),
    ("label-relaxation", {"alpha": 1.0}, r"alpha must lie in \[0, 1\), got 1.0"),
    ("confidence-penalty", {"beta": -0.1}, r"beta .* \[0, inf\), got -0.1"),
    ("focal", {"gamma": -2}, r"gamma .* \[0, inf\), got -2"),
    ("ordinal", {"sigma": 0}, r"sigma .* \(0, inf\), got 0"),
    ("ordinal", {"positions": (1, 2, 3)}, "positions must be 4 numbers, .* got 3"),
    ("ordinal", {"positions": (1, 2, 2, 3)}, "positions must be finite and all different"),
    ("ordinal", {"positions": (1, 2, math.inf, 3)}, "positions must be finite and all different"),
]


@pytest.mark.parametrize(("name", "chosen", "says"), REFUSED)
def test_settings_out_of_range_are_refused(name: str, chosen: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        build_method(name, CLASSES, chosen)


@pytest.mark.parametrize("name", RIVALS)
def test_unknown_settings_and_labels_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"unknown setting of method '{name}' 'epsilom'"):
        build_method(name, CLASSES, {"epsilom": 0.1})
    method: Method = build_method(name, CLASSES)
    features, logits, labels, _ = batch()
    with pytest.raises(InputError, match="0 … 3 for 4 classes"):
        method(features, logits, labels + K)
    with pytest.raises(InputError, match=r"labels must be torch.int64 class indices, got torch.int32"):
        method(features, logits, labels.int())
