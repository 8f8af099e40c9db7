"""What an epoch costs as the data grows: whole training epochs from 1,000 to 100,000 images.

    python benchmarks/scale.py                       # writes results/scale_cpu.json or scale_cuda.json

Pixels come from a sparse file on the disk, so that the size of the set is that of a real one and no disk is measured;
everything else is what `cclnet train` does: order, crops, augmentation, forward, backward, update, checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cclnet.data.cache import DecodedImages
from cclnet.data.table import ImageTable
from cclnet.runs.folder import RunFolder
from cclnet.runs.provenance import versions
from cclnet.settings import Settings, make_settings
from cclnet.training.loop import Training
from cclnet.training.setup import PreparedData, make_fabric

CLASSES = tuple("ABCDEFG")


def sparse_data(count: int, side: int, folder: Path) -> PreparedData:
    """``count`` training images and a handful for validation, in a sparse file."""
    total, size = count + 64, 3 * side * side
    path = folder / f"{count}.pixels"
    with path.open("wb") as file:
        file.truncate(total * size)
    pixels = np.memmap(path, dtype=np.uint8, mode="r")
    sides = np.full(total, side, dtype=np.int32)
    images = DecodedImages(pixels, np.arange(total, dtype=np.int64) * size, sides, sides)
    labels = np.random.default_rng(0).integers(len(CLASSES), size=total)
    names = [str(i) for i in range(total)]
    table = ImageTable("sparse", path, names, [path] * total, labels, CLASSES)
    parts = np.array(["train"] * count + ["val"] * 64)
    return PreparedData(table, parts, images)


def anonymous_megabytes() -> float:
    """Memory of this process that is not page cache."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def one_size(settings: Settings, count: int, folder: Path) -> dict[str, Any]:
    fabric = make_fabric(settings)
    run = folder / f"run-{count}"
    run.mkdir()
    training = Training(settings, RunFolder(run), fabric, sparse_data(count, settings.short_side, folder))
    began = time.monotonic()
    training.step(next(iter(training.loader.epoch(0))))  # warm: compiling and first allocations are not the data's cost
    training.fit(progress=False)
    wall = time.monotonic() - began
    last = training.records[-1]
    return {
        "images": count,
        "epoch_seconds": last["seconds"],
        "microseconds_an_image": 1e6 / last["images_per_second"],
        "wall_seconds_with_checkpoint": wall,
        "anonymous_megabytes": anonymous_megabytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--backbone", default="test_resnet")
    parser.add_argument("--crop", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    settings = make_settings(
        {
            "backbone": given.backbone,
            "short_side": given.crop * 8 // 7,
            "batch_size": given.batch_size,
            "augment": {"crop": given.crop},
            "epochs": 1,
            "lr": 0.001,
        }
    )
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for count in given.sizes:
            rows.append(one_size(settings, count, Path(scratch)))
            print(rows[-1], flush=True)
    on_gpu = torch.cuda.is_available()
    content = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "cores": os.cpu_count(),
        "versions": versions(),
        "settings": {k: v for k, v in vars(given).items() if k != "out"},
        "rows": rows,
    }
    out = given.out or Path(f"results/scale_{'cuda' if on_gpu else 'cpu'}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
