"""Hard labels, label smoothing and CCL behind the one protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cclnet import METHODS, InputError, Loss, Method, build_method, functional, register_method
from cclnet.cli import app
from cclnet.data.sources import open_data
from cclnet.methods import Classes, check_method_fits, method_card, method_settings, methods_for
from cclnet.methods.base import epoch_sums, sum_by_class
from cclnet.methods.class_geometry import batch_moments
from cclnet.report.figures import loss_terms
from cclnet.settings import make_settings
from cclnet.sweep.compare_methods import fitting_entries
from cclnet.training.loop import train

COUNTS = (10, 60, 30)
CLASSES = Classes(num_classes=3, in_features=6, counts=COUNTS)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(8, 6), torch.randn(8, 3), torch.randint(3, (8,))


@pytest.mark.parametrize("name", METHODS)
def test_protocol(name: str) -> None:
    method = build_method(name, CLASSES)
    features, logits, labels = batch()
    if name in methods_for(multilabel=True):
        labels = torch.randint(2, (8, 3))
    logits.requires_grad_()
    loss = method(features, logits, labels)
    torch.testing.assert_close(loss.total, sum(loss.terms.values()))
    loss.total.backward()
    assert torch.isfinite(logits.grad).all() and float(logits.grad.abs().sum()) > 0
    table = method.soft_labels()
    assert table is None or torch.allclose(table.sum(dim=1), torch.ones(3, dtype=table.dtype))
    assert all(isinstance(value, float) for value in method.end_epoch().values())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("hard", {}), ("lsr-a5", {}), ("ccl", {}), ("ccl", {"kl_weight": 3.0}), ("ccl-balanced", {"kl_weight": 0.5}),
        ("ccl-centroid", {"kl_weight": 2.0}), ("ccl-confusion", {}), ("ols", {"alpha": 0.3}), ("tf-kd", {"alpha": 0.4}),
        ("ordinal", {}),
    ],
)  # fmt: skip
def test_the_target_is_what_the_network_is_trained_towards(name: str, settings: dict) -> None:
    """A network that says the target of each class has nothing to learn."""
    method = build_method(name, CLASSES, settings).double().eval()
    target = method.target()
    assert target is not None
    logits = target.double().clamp(min=1e-12).log().requires_grad_()
    method(torch.randn(3, 6, dtype=torch.float64), logits, torch.arange(3)).total.backward()
    torch.testing.assert_close(logits.grad, torch.zeros(3, 3, dtype=torch.float64), atol=1e-7, rtol=0)


def test_methods_without_one_target_have_none() -> None:
    assert all(build_method(name, CLASSES).target() is None for name in ("focal", "mbls", "ccl-multilabel", "bce"))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_card_that_names_its_settings(name: str) -> None:
    card = method_card(name)
    for heading in ("**Idea.**", "**Formula.**", "**Settings.**", "**When not to use it.**"):
        assert heading in card
    for setting in method_settings(name):
        assert f"`{setting}`" in card


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("lsr-")])  # their card is lsr's
def test_cards_tell_the_defaults(name: str) -> None:
    written = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", method_card(name), flags=re.MULTILINE))
    assert {key: written[key].strip() for key in method_settings(name)} == {
        key: _as_written(value) for key, value in method_settings(name).items()
    }


def _as_written(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value).lower()


@pytest.mark.parametrize("settings", [{}, {"margin": 1.0}, {"margin": 1.0, "temperature": 0.5}])
@pytest.mark.parametrize("name", ["ccl", "ccl-balanced"])
def test_a_dictionary_with_all_classes_at_the_margin_has_the_collapse_softness(
    name: str, settings: dict[str, float]
) -> None:
    method = build_method(name, CLASSES, {"widths": (8,), **settings})
    angle = 1.0 - settings.get("margin", 2.0) / 2.0  # the cosine of two unit vectors at that squared distance
    corners = torch.linalg.cholesky(torch.full((3, 3), angle) + (1.0 - angle) * torch.eye(3))
    with torch.no_grad():
        method.head.live_dictionary.copy_(F.pad(corners, (0, 5)))
    assert method.collapse_softness == pytest.approx(float(method.head.softness()), abs=1e-6)


def test_without_a_dictionary_there_is_nothing_to_collapse() -> None:
    for name in ("hard", "lsr", "ols", "mbls", "ccl-centroid"):
        assert build_method(name, CLASSES).collapse_softness is None


def test_hard_is_cross_entropy() -> None:
    features, logits, labels = batch()
    torch.testing.assert_close(
        build_method("hard", CLASSES)(features, logits, labels).total, F.cross_entropy(logits, labels)
    )


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5228, 1.0])
def test_lsr_equals_torch_label_smoothing(epsilon: float) -> None:
    features, logits, labels = batch()
    got = build_method("lsr", CLASSES, {"epsilon": epsilon})(features, logits, labels).total
    torch.testing.assert_close(got, F.cross_entropy(logits, labels, label_smoothing=epsilon))


@pytest.mark.parametrize(
    ("name", "epsilon", "prior"),
    [("lsr-u1", 0.1, None), ("lsr-u5", 0.5228, None), ("lsr-a1", 0.1, COUNTS), ("lsr-a5", 0.5228, COUNTS)],
)
def test_the_four_rows_of_the_paper(name: str, epsilon: float, prior: tuple | None) -> None:
    distribution = None if prior is None else torch.tensor(prior) / sum(prior)
    expected = functional.smoothed_labels(3, epsilon, distribution)
    torch.testing.assert_close(build_method(name, CLASSES).soft_labels().double(), expected, atol=1e-7, rtol=0)


def test_ccl_is_cross_entropy_plus_kl_to_the_dictionary_as_it_is() -> None:
    method = build_method("ccl", CLASSES)
    features, logits, labels = batch()
    terms = method(features, logits, labels).terms
    q, p = torch.softmax(logits, dim=1), method.head.soft_labels()[labels]
    torch.testing.assert_close(terms["kl"], (p * (p / q).log()).sum(dim=1).mean())
    torch.testing.assert_close(terms["cross_entropy"], F.cross_entropy(logits, labels))


def test_mixed_labels_mix_the_soft_rows() -> None:
    features, logits, labels = batch()
    weights = 0.3 * F.one_hot(labels, 3) + 0.7 * F.one_hot(labels.roll(1), 3)
    for name in ("hard", "lsr-u5", "ccl"):
        method = build_method(name, CLASSES)
        terms = method(features, logits, weights).terms
        if name == "lsr-u5":
            table = method.soft_labels()
            target = 0.3 * table[labels] + 0.7 * table[labels.roll(1)]
            torch.testing.assert_close(terms["cross_entropy"], F.cross_entropy(logits, target))
        else:
            torch.testing.assert_close(terms["cross_entropy"], F.cross_entropy(logits, weights))
        if name == "ccl":
            table = method.soft_labels()
            target = 0.3 * table[labels] + 0.7 * table[labels.roll(1)]
            torch.testing.assert_close(terms["kl"], functional.kl_to_target(logits, target))


def test_sample_weights_weigh_every_term_of_a_sample() -> None:
    features, logits, labels = batch()
    weight = torch.zeros(8)
    weight[3] = 8.0
    for name in ("hard", "lsr-a1", "ccl"):
        method = build_method(name, CLASSES).eval()
        alone = method(features[3:4], logits[3:4], labels[3:4]).terms
        for term, value in method(features, logits, labels, weight).terms.items():
            torch.testing.assert_close(value, alone[term])


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("clc", {}, "unknown method 'clc'; did you mean 'ccl'"),
        ("ccl", {"margn": 1}, "unknown setting of method 'ccl' 'margn'; did you mean 'margin'"),
        ("hard", {"epsilon": 1}, "method 'hard' has no settings, got 'epsilon'"),
        ("lsr", {"epsilon": -1.0}, r"epsilon must lie in \[0, 1\]"),
    ],
)
def test_names_and_settings_that_are_not_there(name: str, settings: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        build_method(name, CLASSES, settings)


def test_prior_needs_counts() -> None:
    with pytest.raises(InputError, match="pass class_counts"):
        build_method("lsr-a1", Classes(3, 6))


@pytest.mark.parametrize("name", ["hard", "lsr-u1", "ccl"])
def test_labels_out_of_range_are_refused(name: str) -> None:
    features, logits, _ = batch()
    with pytest.raises(InputError, match="0 … 2 for 3 classes"):
        build_method(name, CLASSES)(features, logits, torch.full((8,), 3))


def test_classes_refuse_nonsense() -> None:
    with pytest.raises(InputError, match="at least 2 classes"):
        Classes(1, 6)
    with pytest.raises(InputError, match="expected 3 class counts, got 2"):
        Classes(3, 6, (1, 2))


def test_unknown_card() -> None:
    with pytest.raises(InputError, match="unknown method"):
        method_card("nothing")


class Toy(Method):
    """Cross entropy and a penalty on the logits, from outside of the package."""

    card = "# Toy method\n"

    def __init__(self, classes: Classes, penalty: float = 0.01) -> None:
        super().__init__(classes)
        self.penalty = penalty

    def forward(
        self, features: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None = None
    ) -> Loss:
        self.check_labels(logits, labels)
        penalty = self.penalty * logits.square().mean()
        return Loss.of(cross_entropy=functional.cross_entropy(logits, labels, weight), penalty=penalty)

    def end_epoch(self) -> dict[str, float]:
        return {"toy_diagnostic": 3.0}


@pytest.fixture
def toy() -> Iterator[str]:
    register_method("toy", Toy)
    yield "toy"
    del METHODS["toy"]


def test_a_method_registered_from_outside_is_listed_and_trained(toy: str, tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["methods"]).output
    assert "toy  penalty=0.01" in listed
    assert "Toy method" in CliRunner().invoke(app, ["methods", toy]).output
    settings = make_settings({
        "data": "synthetic:images=84,size=32", "short_side": 32, "augment": {"crop": 28}, "backbone": "test_resnet",
        "method": toy, "method_settings": {"penalty": 0.5}, "epochs": 1, "batch_size": 32,
    })  # fmt: skip
    assert toy in [entry.method for entry in fitting_entries(open_data(settings.data, settings))[0]]
    run = train(settings, tmp_path / "run", accelerator="cpu", progress=False, cache_dir=tmp_path / "cache")
    [record] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert record["loss"] == pytest.approx(record["cross_entropy"] + record["penalty"], rel=1e-5)
    assert record["toy_diagnostic"] == 3.0 and record["penalty"] > 0
    assert loss_terms([record]) == ["cross_entropy", "penalty"]  # the diagnostic is no term


def test_registering_refuses_other_classes_and_names_in_use() -> None:
    with pytest.raises(InputError, match="already a method 'ccl'"):
        register_method("ccl", Toy)
    with pytest.raises(InputError, match="subclass"):
        register_method("linear", torch.nn.Linear)
    register_method("toy-strong", partial(Toy, penalty=1.0))
    try:
        assert method_settings("toy-strong") == {"penalty": 1.0} and method_card("toy-strong") == Toy.card
    finally:
        del METHODS["toy-strong"]


def test_a_method_without_a_card_shows_its_docstring(monkeypatch: pytest.MonkeyPatch, toy: str) -> None:
    monkeypatch.setattr(Toy, "card", "")
    assert "a penalty on the logits" in method_card(toy)


def test_bce_has_its_own_card() -> None:
    assert method_card("bce").startswith("# Binary cross entropy") and method_card("hard").startswith("# Hard labels")


def test_former_names_of_settings_are_accepted() -> None:
    former = build_method("ccl-confusion", CLASSES, {"hold": 0.1, "memory": 0.2, "confusions": 0.7})
    assert (former.freeze_ratio, former.ema_decay, former.confusion_weight) == (0.1, 0.2, 0.7)
    assert build_method("ccl-balanced", CLASSES, {"hold": 0.1}).head.freeze_ratio == 0.1
    with pytest.raises(InputError, match="freeze_ratio is given twice"):
        build_method("ccl-centroid", CLASSES, {"freeze_ratio": 0.1, "hold": 0.1})


@pytest.mark.parametrize("setting", ["class_weights", "balanced_sampling"])
def test_classes_are_not_balanced_twice(setting: str, tmp_path: Path) -> None:
    settings = make_settings({
        "data": "synthetic:images=84,size=32", "short_side": 32, "augment": {"crop": 28}, "backbone": "test_resnet",
        "method": "ccl-balanced", setting: True,
    })  # fmt: skip
    with pytest.raises(InputError, match="'ccl-balanced' already balances the classes"):
        train(settings, tmp_path / "run", accelerator="cpu", progress=False, cache_dir=tmp_path / "cache")
    check_method_fits("ccl", multilabel=False, classes_balanced=True)


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 8]), st.booleans())
@settings(max_examples=20, deadline=None)
def test_sums_of_an_epoch_have_the_same_bits_however_it_is_divided(seed: int, processes: int, mixed: bool) -> None:
    """Sums of each process alone, added up afterwards, in any order of the images."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(200, 7, generator=generator) * 10.0 ** torch.randint(-3, 4, (200, 1), generator=generator)
    labels = torch.randint(4, (200,), generator=generator)
    if mixed:
        shares = torch.rand(200, 1, generator=generator)
        labels = shares * F.one_hot(labels, 4) + (1 - shares) * F.one_hot(labels.flip(0), 4)
    probabilities = torch.softmax(40.0 * torch.randn(200, 4, generator=generator, dtype=torch.float64), dim=1)

    def sums(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one_hot = functional.rows_of(torch.eye(4, dtype=torch.float64), labels[rows])
        return batch_moments(features[rows], labels[rows], 4), sum_by_class(probabilities[rows], one_hot, 24)

    order = torch.randperm(200, generator=generator)
    divided = [sums(rows) for rows in order.tensor_split(processes)]
    for whole, several in zip(sums(torch.arange(200)), zip(*divided, strict=True), strict=True):
        assert torch.equal(torch.stack(several).sum(dim=0), whole)
    exact = functional.rows_of(torch.eye(4, dtype=torch.float64), labels).mT @ probabilities
    torch.testing.assert_close(sums(order)[1].sum(dim=0), exact, rtol=1e-4 if mixed else 1e-9, atol=0.0)


def test_sums_of_an_epoch_are_state_but_no_buffers() -> None:
    """Distributed data parallel broadcasts buffers in every step."""
    method = build_method("ccl-confusion", Classes(3, 5), {}).half()
    assert {"moments", "confusion"} == {name for name, _ in epoch_sums(method)} <= set(method.state_dict())
    assert not {"moments", "confusion"} & {name for name, _ in method.named_buffers()}
    assert method.moments.dtype == method.confusion.dtype == torch.float64
    state = method.state_dict()
    del state["moments"]
    with pytest.raises(RuntimeError, match="moments"):
        method.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"moments.*\[2, 2\]"):
        method.load_state_dict(state | {"moments": torch.zeros(2, 2)})
    method.load_state_dict(state | {"moments": torch.ones(9, 9), "confusion": torch.ones(3, 3)})  # of an older version
    assert float(method.moments.sum()) == 81 and float(method.confusion.sum()) == 9
