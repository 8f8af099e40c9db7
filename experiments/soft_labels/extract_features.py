"""Frozen ImageNet features of a data set, computed once, for bench.py.

python experiments/soft_labels/extract_features.py DATA --backbone tf_efficientnet_lite0 --weights FILE --out FILE.npz

Central crops of 224 px, short side 224 px, channel mean and standard deviation of the weights (--mean, --std).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from cclnet.data.cache import decode
from cclnet.data.sources import open_data
from cclnet.files import write_whole
from cclnet.network import TimmClassifier
from cclnet.settings import AugmentSettings, Settings
from cclnet.training.features import frozen_features
from cclnet.training.setup import PreparedData, make_network

SIDE = 224


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="anything that cclnet train takes")
    parser.add_argument("--backbone", default="tf_efficientnet_lite0")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--mean", nargs=3, type=float, default=(0.5, 0.5, 0.5))
    parser.add_argument("--std", nargs=3, type=float, default=(0.5, 0.5, 0.5))
    parser.add_argument("--cache-dir", default="")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(
        data=options.data, backbone=options.backbone, weights=options.weights, mean=tuple(options.mean),
        std=tuple(options.std), short_side=SIDE, augment=AugmentSettings(crop=SIDE), cache_dir=options.cache_dir,
        method="hard",
    )  # fmt: skip
    table = open_data(settings.data, settings)
    images = decode(table, settings.short_side, cache_dir=settings.cache_folder)
    network = make_network(settings, PreparedData(table, np.full(len(table), "train"), images))
    assert isinstance(network.classifier, TimmClassifier)
    found = frozen_features(network.classifier, settings, table, images, ("0",), torch.device("cpu"))["0"]
    names = np.array([Path(name).stem for name in table.names])
    write_whole(options.out, lambda file: np.savez_compressed(file, names=names, features=found.astype(np.float16)))
    print(options.out, found.shape)


if __name__ == "__main__":
    main()
