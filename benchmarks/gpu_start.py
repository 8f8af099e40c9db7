"""How long a run takes to start on a GPU, compiled and as a plain CUDA graph, and how fast each then is.

    python benchmarks/gpu_start.py tf_efficientnet_lite0,224,64 resnet18,224,128 --out results/gpu_start.json

writes them; ``--tables`` writes the table of docs/fine_tuning.md from them. Every measurement is a process of its own:
random images, preset finetune, four epochs of 2,048 images. Compiled measurements begin with an empty compiler cache.
``--repeat`` measures compiled once more with the filled cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parents[1] / "docs" / "fine_tuning.md"
RESULT = Path(__file__).parents[1] / "results" / "gpu_start.json"
IMAGES, HELD_OUT, CLASSES, EPOCHS = 2048, 256, 7, 4


def measure(backbone: str, crop: int, batch: int, compiled: bool) -> dict[str, Any]:
    """Measure in this process."""
    import torch

    from cclnet.presets import preset_file
    from cclnet.runs.folder import RunFolder
    from cclnet.runs.provenance import origin
    from cclnet.settings import make_settings, merge_layers, read_settings
    from cclnet.training.duration import device_name
    from cclnet.training.loop import Training
    from cclnet.training.setup import make_fabric, prepare_data

    with tempfile.TemporaryDirectory() as scratch:
        folder, side = Path(scratch), round(crop / 0.875)
        write_images(folder / "set.npz", side)
        values = {
            "data": str(folder / "set.npz"), "backbone": backbone, "pretrained": False, "batch_size": batch,
            "epochs": EPOCHS, "short_side": side, "test_short_side": side, "augment": {"crop": crop},
            "cache_dir": str(folder / "cache"), "validate_every": EPOCHS, "compile": True if compiled else None,
        }  # fmt: skip
        settings = make_settings(merge_layers(read_settings(preset_file("finetune")), values))
        fabric = make_fabric(settings)
        for name in ("data", "run"):
            (folder / name).mkdir()
        data = prepare_data(settings, RunFolder(folder / "data"), fabric, progress=False)
        began = time.monotonic()
        training = Training(settings, RunFolder(folder / "run"), fabric, data)
        built = time.monotonic()
        training.step(next(iter(training.loader.epoch(0))))
        if fabric.device.type == "cuda":
            torch.cuda.synchronize()
        first = time.monotonic()
        training.fit(progress=False)
    rates = [round(record["images_per_second"]) for record in training.records]
    return {
        "backbone": backbone, "crop": crop, "batch_size": batch, "compiled": compiled,
        "network_seconds": round(built - began, 1), "first_step_seconds": round(first - built, 1),
        "images_per_second": rates, **origin(device_name(fabric.device)),
    }  # fmt: skip


def write_images(path: Path, side: int) -> None:
    """Random images in the layout of MedMNIST."""
    generator, arrays = np.random.default_rng(0), {}
    for split, count in (("train", IMAGES), ("val", HELD_OUT), ("test", HELD_OUT)):
        arrays[f"{split}_images"] = generator.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = np.arange(count)[:, None] % CLASSES
    np.savez(path, **arrays)  # type: ignore[arg-type]


def table() -> str:
    """The measurements of RESULT: the first of each backbone, size and mode."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    rows: dict[tuple[str, int, int], dict[bool, tuple[str, str]]] = {}
    for own in found["measurements"]:
        key = own["backbone"], own["crop"], own["batch_size"]
        speed = statistics.median(own["images_per_second"][1:])  # the first epoch fills caches
        rows.setdefault(key, {}).setdefault(own["compiled"], (f"{own['first_step_seconds']:.1f}", f"{speed:,.0f}"))
    lines = [
        f"| {found['device']} | crop, px | batch | compiled: first step, s | images/s | "
        "plain CUDA graph: first step, s | images/s |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (backbone, crop, batch), modes in rows.items():
        cells = [*modes.get(True, ("–", "–")), *modes.get(False, ("–", "–"))]
        lines.append(f"| {backbone} | {crop} | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_table() -> None:
    begin, end = "<!-- gpu start -->", "<!-- /gpu start -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    PAGE.write_text(f"{before}{begin}\n{table()}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="*", help="BACKBONE,CROP,BATCH")
    parser.add_argument("--one", choices=("compiled", "graph"), help="measure one in this process and print it")
    parser.add_argument("--repeat", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.tables:
        write_table()
        return
    if options.one:
        backbone, crop, batch = options.configurations[0].split(",")
        print(json.dumps(measure(backbone, int(crop), int(batch), options.one == "compiled")))
        return
    found: list[dict[str, Any]] = []
    for configuration in options.configurations:
        with tempfile.TemporaryDirectory() as cache:
            for mode in ("graph", "compiled", *(["compiled"] if options.repeat else [])):
                command = [sys.executable, __file__, configuration, "--one", mode]
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
                output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
                found.append(json.loads(output.splitlines()[-1]))
                print(found[-1], flush=True)
    about = {key: found[0].pop(key) for key in ("commit", "versions", "device")}
    for row in found[1:]:
        for key in about:
            del row[key]
    options.out.write_text(json.dumps({**about, "measurements": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
