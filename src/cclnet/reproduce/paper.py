"""What the paper printed: Tables 1 and 2 of Wei et al. 2020, number by number."""

from __future__ import annotations

from dataclasses import dataclass

BACKBONES = {"resnet18": "ResNet-18", "efficientnet_b0": "EfficientNet-B0", "mobilenetv2_100": "MobileNetV2"}
METHODS = {
    "hard": "Baseline",
    "lsr-u1": "LSR-u1",
    "lsr-u5": "LSR-u5",
    "lsr-a1": "LSR-a1",
    "lsr-a5": "LSR-a5",
    "ccl": "CCL-Net",
}
SCORES = ("accuracy", "macro_f1", "kappa", "macro_jaccard")
LR_CCL = 0.0005  # of the head, wherever it is not what is varied

# Table 1: accuracy, F1 score, kappa, Jaccard of each method, in the order of METHODS.
_TABLE1 = {
    "resnet18": (
        (0.8347, 0.7073, 0.6775, 0.5655),
        (0.8422, 0.7220, 0.6886, 0.5839),
        (0.8437, 0.7211, 0.6908, 0.5837),
        (0.7883, 0.6046, 0.5016, 0.4547),
        (0.7029, 0.2020, 0.1530, 0.1470),
        (0.8502, 0.7227, 0.6986, 0.5842),
    ),
    "efficientnet_b0": (
        (0.8333, 0.7190, 0.6696, 0.5728),
        (0.8382, 0.7014, 0.6736, 0.5573),
        (0.8432, 0.7262, 0.6884, 0.5852),
        (0.8038, 0.6542, 0.5526, 0.5058),
        (0.7189, 0.2968, 0.2295, 0.2031),
        (0.8482, 0.7390, 0.6969, 0.6006),
    ),
    "mobilenetv2_100": (
        (0.8308, 0.6922, 0.6637, 0.5524),
        (0.8248, 0.6791, 0.6547, 0.5400),
        (0.8253, 0.6604, 0.6539, 0.5281),
        (0.8068, 0.6432, 0.5631, 0.4922),
        (0.7114, 0.2306, 0.2037, 0.1655),
        (0.8342, 0.7050, 0.6718, 0.5648),
    ),
}


def table1(backbone: str, method: str) -> dict[str, float]:
    """The four scores of a cell of Table 1 by name.

    >>> table1("resnet18", "ccl")["accuracy"]
    0.8502
    """
    return dict(zip(SCORES, _TABLE1[backbone][list(METHODS).index(method)], strict=True))


@dataclass(frozen=True)
class HeadRate:
    """A column of Table 2. ``converged`` is None where the head never did."""

    converged: int | None
    softness: float
    accuracy: float
    kappa: float


TABLE2 = {
    0.0001: HeadRate(None, 0.48, 0.8422, 0.6863),
    0.0005: HeadRate(137, 0.41, 0.8502, 0.6986),
    0.001: HeadRate(76, 0.38, 0.8452, 0.6972),
    0.005: HeadRate(23, 0.35, 0.8442, 0.6902),
    0.01: HeadRate(12, 0.33, 0.8422, 0.6856),
    0.05: HeadRate(5, 0.30, 0.8417, 0.6884),
}
