"""The network: one backward pass against the paper's two steps, and what is exported."""

from __future__ import annotations

import copy
import math

import pytest
import timm
import torch
from torch import nn

from cclnet import CCLNet, InputError, functional
from cclnet.network import TimmClassifier


class Tiny(nn.Module):
    """A real small convolutional network with batch norm."""

    feature_width = 12

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 12, 3, 2), nn.BatchNorm2d(12), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def tiny_ccl() -> CCLNet:
    settings = {"widths": (16, 16, 8), "patience": 2}
    return CCLNet(Tiny(), num_classes=4, method="ccl", method_settings=settings).double()


def test_one_backward_pass_is_the_paper_algorithm_to_the_last_bit() -> None:
    """Fifty iterations of the literal two-step algorithm and of one summed backward pass, float64, with
    momentum, weight decay, clipping of each group by its own norm, and a freeze on the way."""
    ours = tiny_ccl()
    literal = copy.deepcopy(ours)
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(8, 3, 16, 16, dtype=torch.float64, generator=generator),
         torch.randint(4, (8,), generator=generator))
        for _ in range(50)
    ]  # fmt: skip

    optimizer = torch.optim.SGD(ours.param_groups(lr=0.1, lr_ccl=0.05), momentum=0.9)
    backbone = torch.optim.SGD(literal.classifier.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    head_step = torch.optim.SGD(literal.method.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    for step, (images, labels) in enumerate(batches):
        optimizer.zero_grad()
        ours(images, labels).total.backward()
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.5)
        optimizer.step()

        head = literal.method.head
        soft = functional.soft_labels(head.dictionary).detach()
        features = literal.classifier.features(images)
        logits = literal.classifier.logits(features)
        loss = functional.cross_entropy(logits, labels) + functional.kl_to_target(logits, soft[labels])
        backbone.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(literal.classifier.parameters(), 0.5)
        backbone.step()
        head_loss = sum(head(features.detach(), labels).values())
        head_step.zero_grad()
        head_loss.backward()
        nn.utils.clip_grad_norm_(literal.method.parameters(), 0.5)
        head_step.step()

        if step % 10 == 9:
            assert ours.method.end_epoch() == head.end_epoch()

    for (name, a), (_, b) in zip(ours.state_dict().items(), literal.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_neither_loss_reaches_the_other_part() -> None:
    net = tiny_ccl()
    images, labels = torch.randn(8, 3, 16, 16, dtype=torch.float64), torch.randint(4, (8,))
    terms = net(images, labels).terms
    network, head = list(net.classifier.parameters()), list(net.method.parameters())

    def reached(loss: torch.Tensor, parameters: list[nn.Parameter]) -> list[bool]:
        return [g is not None for g in torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)]

    classification = terms["cross_entropy"] + terms["kl"]
    own = terms["head_cross_entropy"] + terms["class_correlation"]
    assert all(reached(classification, network)) and not any(reached(classification, head))
    assert all(reached(own, head)) and not any(reached(own, network))


BACKBONES = ["resnet18", "mobilenetv2_100", "efficientnet_b0", "mobilenetv3_small_100", "vit_tiny_patch16_224"]


@pytest.mark.parametrize("name", BACKBONES)
def test_timm_models_are_taken_apart_right(name: str) -> None:
    """Features and classifier together give timm's own logits; the width is the one the classifier takes."""
    extra = {"img_size": 64} if name.startswith("vit") else {}
    net = CCLNet(name, num_classes=5, method="hard", backbone_settings=extra).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(net(images), net.classifier.model(images))
        assert net.classifier.features(images).shape == (2, net.classifier.feature_width)


def test_exported_weights_are_the_timm_model_and_nothing_of_the_head() -> None:
    net = CCLNet("resnet18", num_classes=5, method="ccl").eval()
    state = net.export_state()
    plain = timm.create_model("resnet18", num_classes=5)
    assert set(state) == set(plain.state_dict())
    plain.load_state_dict(state)
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(plain.eval()(images), net(images))


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "resnet18"])
@pytest.mark.parametrize("side", [64, 90])  # 90: the sides of the maps do not divide each other
def test_pooled_stages_are_the_means_of_all_feature_maps(name: str, side: int) -> None:
    classifier = TimmClassifier(name, 3, pooling="stages").eval()
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        features = classifier.features(images)
        last, stages = classifier.model.forward_intermediates(images)
        torch.testing.assert_close(classifier.model(images), classifier.logits(features))
    assert features.shape[1] == classifier.feature_width == classifier.model.get_classifier().in_features
    maps = [own for own in stages if own is not last] + [last]
    if side == 64:
        torch.testing.assert_close(features, torch.cat([own.mean((2, 3)) for own in maps], 1), rtol=1e-4, atol=1e-5)
    else:
        assert features.shape[1] == sum(own.shape[1] for own in maps)
    plain = timm.create_model(name, num_classes=3).state_dict()
    assert list(plain) == list(classifier.shipped.state_dict())
    grey = TimmClassifier(name, 3, in_channels=1, pooling="stages").eval()
    assert grey.features(images[:, :1]).shape == features.shape


def test_exported_weights_of_a_module() -> None:
    state = tiny_ccl().export_state()
    assert {name.split(".")[0] for name in state} == {"backbone", "classifier"}


def test_parameter_groups() -> None:
    net = tiny_ccl()
    groups = net.param_groups(lr=0.3, lr_ccl=0.02, weight_decay=0.5)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [
        ("network", 0.3, 0.5), ("method", 0.02, 0.5)]  # fmt: skip
    parameters = [id(p) for g in groups for p in g["params"]]
    assert sorted(parameters) == sorted(id(p) for p in net.parameters())
    assert len(CCLNet(Tiny(), 4, method="hard").param_groups()) == 1


@pytest.mark.parametrize("backbone", ["test_resnet", "test_vit", "test_efficientnet"])
def test_earlier_layers_learn_more_slowly_and_norms_are_not_decayed(backbone: str) -> None:
    net = CCLNet(backbone, 4)
    groups = net.param_groups(lr=0.1, lr_ccl=0.02, weight_decay=0.5, layer_decay=0.5, decay_norms=False)
    rate, decay = ({id(p): g[key] for g in groups for p in g["params"]} for key in ("lr", "weight_decay"))
    assert sorted(rate) == sorted(id(p) for p in net.parameters())
    named = dict(net.classifier.model.named_parameters())
    head = net.classifier.model.get_classifier()
    assert rate[id(head.weight)] == rate[id(head.bias)] == 0.1
    rates = [rate[id(p)] for p in named.values()]
    levels = sorted({round(math.log2(0.1 / r)) for r in rates})  # 0 for the classifier, one more for each layer
    assert levels == list(range(len(levels))) and len(levels) >= 3 and rates[0] < 0.02
    for name, parameter in named.items():
        exempt = parameter.ndim <= 1 or "pos_embed" in name or "cls_token" in name
        assert decay[id(parameter)] == (0.0 if exempt else 0.5), name
    method = [g for g in groups if g["name"] == "method"]
    assert len(method) == 1 and (method[0]["lr"], method[0]["weight_decay"]) == (0.02, 0.5)
    decayed = net.param_groups(weight_decay=0.5, layer_decay=0.5)
    assert {g["weight_decay"] for g in decayed} == {0.5}


def test_layers_of_any_module() -> None:
    groups = CCLNet(Tiny(), 4, method="hard").param_groups(lr=1.0, layer_decay=0.5)
    assert sorted({g["lr"] for g in groups}) == [0.5, 1.0]


@pytest.mark.parametrize("method", ["hard", "lsr", "ccl", "focal", "ols"])
def test_logit_adjustment_adds_the_log_prior_in_training_only(method: str) -> None:
    counts = [60, 30, 9, 1]
    plain, adjusted = (CCLNet(Tiny(), 4, method, class_counts=counts, logit_adjustment=tau) for tau in (0.0, 1.5))
    adjusted.load_state_dict(plain.state_dict())  # no further state
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    assert torch.equal(plain.eval()(images), adjusted.eval()(images))
    for net in (plain, adjusted):
        net.train()
    plain.classifier.classifier.bias.data += 1.5 * (torch.tensor(counts) / 100).log()  # the same in closed form
    torch.testing.assert_close(adjusted(images, labels).total, plain(images, labels).total)


def test_logit_adjustment_of_one_is_the_balanced_softmax() -> None:
    counts = torch.tensor([60.0, 30.0, 9.0, 1.0])
    net = CCLNet(Tiny(), 4, "hard", class_counts=counts.int().tolist(), logit_adjustment=1.0).eval()
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    share = counts * net(images).exp()
    expected = -(share / share.sum(dim=1, keepdim=True))[torch.arange(8), labels].log().mean()
    torch.testing.assert_close(net(images, labels).total, expected)
    with pytest.raises(InputError, match="one label per image"):
        CCLNet(Tiny(), 4, "bce", class_counts=[1, 2, 3, 4], logit_adjustment=1.0)
    with pytest.raises(InputError, match=r"logit_adjustment.*-1"):
        CCLNet(Tiny(), 4, "hard", class_counts=[1, 2, 3, 4], logit_adjustment=-1.0)


def test_eval_gives_logits_alone() -> None:
    logits = tiny_ccl().eval()(torch.randn(2, 3, 16, 16, dtype=torch.float64))
    assert isinstance(logits, torch.Tensor) and logits.shape == (2, 4)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: CCLNet("resnet81", 7), "unknown backbone 'resnet81'; did you mean 'resnet"),
        (lambda: CCLNet("resnet18", 1), "at least 2 classes"),
        (lambda: CCLNet(nn.Flatten(), 7), "pass feature_width"),
        (lambda: CCLNet("test_vit", 7, pooling="stages"), "Use pooling 'last'"),
        (lambda: CCLNet("resnet18", 7, method="cll"), "unknown method 'cll'; did you mean 'ccl'"),
        (lambda: CCLNet("resnet18", 7, method_settings={"patiense": 3}), "did you mean 'patience'"),
        (lambda: CCLNet("resnet18", 7, method="lsr-a5"), "pass class_counts"),
        (lambda: CCLNet(nn.Conv2d(3, 4, 3), 7, feature_width=4)(torch.randn(2, 3, 8, 8)), "pooled features"),
    ],
)
def test_what_cannot_be_built_is_refused(build, says: str) -> None:
    with pytest.raises(InputError, match=says):
        build()


def test_a_classifier_that_is_a_convolution() -> None:
    network = CCLNet("dla46_c", 5, "hard").eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(network(images), network.classifier.shipped(images))


def test_a_backbone_with_two_classifiers_is_refused() -> None:
    with pytest.raises(InputError, match="one classifier"):
        CCLNet("deit_tiny_distilled_patch16_224", 5)


def test_weights_that_cannot_be_fetched_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise FileNotFoundError("no connection\nand a long story")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(InputError, match=r"resnet18 .*no connection.*--weights"):
        CCLNet("resnet18", 5, pretrained=True)
