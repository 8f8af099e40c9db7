"""The head: what trains what, the freeze rule, and the refusal of batches that do not fit."""

from __future__ import annotations

import io

import pytest
import torch

from cclnet import CCLHead, InputError, functional

SMALL = {"in_features": 6, "num_classes": 4, "widths": (8, 5)}


def batch(count: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 6), torch.randint(4, (count,))


def test_terms_are_the_paper_loss() -> None:
    head = CCLHead(**SMALL, correlation_weight=10.0, margin=1.0)
    features, labels = batch()
    terms = head(features, labels)
    embedded = head.embedding(features)
    q = torch.softmax(-functional.squared_distance(embedded, head.live_dictionary), dim=1)
    expected = -q[torch.arange(16), labels].log().mean()
    torch.testing.assert_close(terms["head_cross_entropy"], expected)
    correlation = functional.class_correlation_loss(head.live_dictionary, 1.0)
    assert correlation.item() > 0
    torch.testing.assert_close(terms["class_correlation"], 10.0 * correlation)


def test_structure_of_the_embedding() -> None:
    layers = [type(m).__name__ for m in CCLHead(512, 7).embedding]
    assert layers == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear"]
    assert [m.out_features for m in CCLHead(512, 7).embedding if hasattr(m, "out_features")] == [1024, 1024, 512]


def test_features_get_no_gradient_and_soft_labels_carry_none() -> None:
    head = CCLHead(**SMALL)
    features, labels = batch()
    features.requires_grad_()
    sum(head(features, labels).values()).backward()
    assert features.grad is None
    assert all(p.grad is not None for p in head.parameters())
    assert not head.soft_labels().requires_grad


def test_dictionary_starts_at_the_length_asked_for() -> None:
    lengths = CCLHead(8, 200).live_dictionary.norm(dim=1)
    assert float(lengths.mean()) == pytest.approx(2**0.5, rel=0.02)
    lengths = CCLHead(8, 200, dictionary_norm=22.0).live_dictionary.norm(dim=1)
    assert float(lengths.mean()) == pytest.approx(22.0, rel=0.02)


def set_softness(head: CCLHead, angle: float) -> None:
    """Two classes ``angle`` apart: a smaller angle is softer."""
    with torch.no_grad():
        head.live_dictionary.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        head.live_dictionary[1] = torch.tensor([angle, 0.0]).cos() * torch.tensor([1.0, 0.0])
        head.live_dictionary[1, 1] = torch.tensor(angle).sin()


def test_freeze_rule_counts_epochs_without_a_drop() -> None:
    head = CCLHead(3, 2, widths=(2,), patience=3)
    frozen = []
    for angle in (1.0, 0.8, 0.9, 0.85, 0.7, 0.7, 0.75, 0.71, 0.2):
        set_softness(head, angle)
        head.end_epoch()
        frozen.append(head.frozen)
    # Best at the fifth epoch; the sixth (equal), seventh and eighth do not drop below it.
    assert frozen == [False] * 7 + [True, True]
    expected = CCLHead(3, 2, widths=(2,))
    set_softness(expected, 0.71)  # what was frozen is the eighth epoch's, not the ninth's or the softest
    assert torch.equal(head.soft_labels(), expected.soft_labels())


def test_without_patience_it_never_freezes() -> None:
    head = CCLHead(3, 2, widths=(2,), patience=None)
    assert [head.end_epoch()["frozen"] for _ in range(50)] == [0.0] * 50


def freeze(head: CCLHead) -> None:
    for _ in range(head.patience + 1):
        head.end_epoch()
    assert head.frozen


def train(head: CCLHead, steps: int) -> None:
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        sum(head(*batch()).values()).backward()
        optimizer.step()


def test_frozen_means_not_one_bit_moves() -> None:
    head = CCLHead(**SMALL, patience=2)
    train(head, 5)
    freeze(head)
    before, dictionary = head.soft_labels(), head.dictionary.detach().clone()
    weights = head.embedding[0].weight.detach().clone()
    train(head, 100)
    assert torch.equal(head.soft_labels(), before) and torch.equal(head.dictionary, dictionary)
    assert not torch.equal(head.live_dictionary, dictionary)  # momentum and decay did try
    assert not torch.equal(head.embedding[0].weight, weights)  # and the rest goes on
    assert torch.equal(head.live_dictionary.grad, torch.zeros_like(dictionary))  # zero, not None: DDP needs it


def test_freeze_state_survives_save_and_load_in_mid_patience() -> None:
    def run(save_after: int | None) -> list[float]:
        torch.manual_seed(1)
        head = CCLHead(**SMALL, patience=4)
        log = []
        for epoch in range(9):
            if epoch == save_after:
                file = io.BytesIO()
                torch.save(head.state_dict(), file)
                file.seek(0)
                head = CCLHead(**SMALL, patience=4)
                head.load_state_dict(torch.load(file, weights_only=True))
            if epoch < 3:
                with torch.no_grad():
                    head.live_dictionary[0] += 0.5 * head.live_dictionary[1]  # drawn together: softer
            else:
                with torch.no_grad():
                    head.live_dictionary[0] += 0.01 * torch.randn(5, generator=torch.Generator().manual_seed(epoch))
                    head.live_dictionary[0] -= 0.05 * head.live_dictionary[1]
            log.append((head.end_epoch()["frozen"], head.soft_labels().tolist()))
        return log

    undisturbed = run(None)
    assert [bool(frozen) for frozen, _ in undisturbed] == [False] * 6 + [True] * 3
    for epoch in (1, 4, 5, 7, 8):
        assert run(epoch) == undisturbed


def test_compiles_as_one_graph_and_the_freeze_is_seen_inside() -> None:
    head = CCLHead(**SMALL, patience=1)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    features, labels = batch()

    def both() -> None:
        for name, value in compiled(features, labels).items():
            torch.testing.assert_close(value, head(features, labels)[name])

    both()
    freeze(head)
    with torch.no_grad():
        head.live_dictionary.add_(1.0)
    both()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_agrees_with_float64(dtype: torch.dtype) -> None:
    """The embedding's matrix products run in half precision, all after them does not: within 2e-2 (bf16),
    2e-3 (fp16) of float64. Evaluation mode: batch statistics of a small batch amplify rounding."""
    head = CCLHead(32, 5, widths=(64, 64, 32)).eval()
    features, labels = torch.randn(64, 32), torch.randint(5, (64,))
    with torch.autocast("cpu", dtype=dtype):
        half = head(features, labels)
    exact = head.double()(features.double(), labels)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    for name, value in half.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), exact[name], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_classes": 1}, "got 1: .* at least 2 classes"),
        ({"in_features": 0}, "must be positive"),
        ({"widths": ()}, "must be positive"),
        ({"margin": 5.0}, r"margin must lie in \(0, 4\]"),
        ({"correlation_weight": -1.0}, r"correlation_weight must lie in \[0, inf\]"),
        ({"patience": 0}, r"patience must lie in \[1, inf\), got 0"),
        ({"dictionary_norm": 0.0}, r"dictionary_norm must lie in \(0, inf\), got 0.0"),
    ],
)
def test_settings_that_make_no_sense(settings: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        CCLHead(**{**SMALL, **settings})


@pytest.mark.parametrize(
    ("features", "labels", "says"),
    [
        (torch.randn(3, 6), torch.tensor([0, 1, 4]), r"0 … 3 for 4 classes, got 0 … 4"),
        (torch.randn(3, 6), torch.tensor([0, -1, 2]), r"got -1 … 2"),
        (torch.randn(3, 6), torch.tensor([0, 1, 2], dtype=torch.int32), r"torch.int64 .* got torch.int32"),
        (torch.randn(3, 6), torch.tensor([[0], [1], [2]]), r"squeeze\(1\)"),
        (torch.randn(3, 6), torch.tensor([0, 1]), r"shape \[3\], one per image, got \[2\]"),
        (torch.randn(3, 6), torch.tensor([0.0, 1.0, 2.0]), r"class weights must have shape \[3, 4\]"),
        (torch.randn(3, 6), torch.full((3, 4), 0.5), "sum to one"),
        (torch.randn(3, 7), torch.tensor([0, 1, 2]), r"shape \[N, 6\].*got \[3, 7\]"),
        (torch.randn(3, 6, 2, 2), torch.tensor([0, 1, 2]), "Pool the feature map"),
        (torch.tensor([[float("nan")] * 6, [0.0] * 6]), torch.tensor([0, 1]), "features of 1 of 2 images are NaN"),
    ],
)
def test_batches_that_do_not_fit(features: torch.Tensor, labels: torch.Tensor, says: str) -> None:
    with pytest.raises(InputError, match=says):
        CCLHead(**SMALL)(features, labels)


def test_one_image_by_itself_is_embedded_with_the_averages() -> None:
    head = CCLHead(**SMALL)
    head(*batch())
    features, labels = batch(1)
    trained = head(features, labels)["head_cross_entropy"]
    assert head.embedding.training and trained.requires_grad
    torch.testing.assert_close(trained, head.eval()(features, labels)["head_cross_entropy"])


def test_what_the_freeze_rule_compares_keeps_its_digits() -> None:
    head = CCLHead(**SMALL).to(torch.bfloat16)
    assert head.best_softness.dtype == torch.float64 and head.live_dictionary.dtype == torch.bfloat16


@pytest.mark.parametrize("widths", [(10**12,), (2**40, 2**40), (2**15, 2**15), (1,) * 100_000])
def test_absurd_widths_take_no_memory(widths: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"weights; at most|1 to 64 widths"):
        CCLHead(512, 7, widths)
