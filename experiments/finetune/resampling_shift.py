"""How interpolation of the test images changes the predictions of a network that was trained on interpolated images.

    python experiments/finetune/resampling_shift.py RUN [RUN ...] --results results/finetune

Each RUN is the folder of a finished run. Its held-out images are predicted from central crops, as in any evaluation,
and from the same crops moved by a random part of a pixel, with bilinear and with bicubic interpolation. A moved crop
shows the same image, so predictions differ only by what interpolation does to fine texture. Writes resampling.json and
resampling.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from cclnet.data.augment import normalise
from cclnet.data.loader import Loader
from cclnet.files import make_folder, write_json, write_whole
from cclnet.runs.folder import RunFolder
from cclnet.runs.provenance import origin
from cclnet.training.setup import make_fabric, make_network, prepare_data

CROPS = {"central crops": "", "moved, bilinear": "bilinear", "moved, bicubic": "bicubic"}


def moved(crops: Tensor, mode: str, generator: torch.Generator) -> Tensor:
    """uint8 crops [n, h, w, 3], each moved by a part of a pixel, uniform in both directions."""
    if not mode:
        return crops
    count, height, width = crops.shape[:3]
    offset = torch.rand(count, 2, generator=generator).to(crops.device)

    def places(axis: int, size: int) -> Tensor:
        return (torch.arange(size, device=crops.device) + 0.5 + offset[:, [axis]]) * 2 / size - 1

    x, y = places(0, width)[:, None], places(1, height)[:, :, None]
    grid = torch.stack((x.expand(-1, height, -1), y.expand(-1, -1, width)), dim=-1)
    pixels = crops.permute(0, 3, 1, 2).float()
    shifted = F.grid_sample(pixels, grid, mode=mode, padding_mode="border", align_corners=False)
    return shifted.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


@torch.no_grad()
def shift_of_run(folder: Path) -> list[dict[str, Any]]:
    """Accuracy, log loss and mean probability of each class for the three kinds of crops."""
    run = RunFolder(folder)
    settings = run.read_settings()
    fabric = make_fabric(settings)
    data = prepare_data(settings, run, fabric, progress=False)
    network = make_network(settings, data, resumed=True).classifier.shipped
    network.load_state_dict(load_file(run.weights))
    network = network.eval().to(fabric.device, memory_format=torch.channels_last)
    mean, std = (torch.tensor(own, device=fabric.device) for own in (settings.input_mean, settings.input_std))
    rows, images = data.rows("val"), data.test_images or data.images
    crop, device = settings.augment.crop, fabric.device
    model = run.read_model().trained
    commit = None if model.commit is None else model.commit.sha
    loader = Loader(images, data.table.labels, rows, batch_size=64, crop=crop, device=device)
    labels = torch.from_numpy(data.table.labels[rows])
    found = []
    for name, mode in CROPS.items():
        generator = torch.Generator().manual_seed(0)
        outputs = [network(normalise(moved(own.crops, mode, generator), mean, std)) for own in loader.epoch()]
        logits = torch.cat(outputs).double().cpu()
        shares = logits.softmax(1).mean(0), torch.bincount(labels, minlength=logits.shape[1]) / len(rows)
        predicted, true = ([round(float(value), 4) for value in own] for own in shares)
        found.append({
            "run": folder.resolve().name, "crops": name, "images": len(rows), "classes": list(data.table.classes),
            "accuracy": round(float((logits.argmax(1) == labels).double().mean()), 4),
            "log_loss": round(float(F.cross_entropy(logits, labels)), 4),
            "mean_probability": predicted, "share": true, "trained_by": commit, "training_images": model.images,
            "epochs": model.epochs,
        })  # fmt: skip
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, default=Path("results/finetune"))
    options = parser.parse_args(words)
    rows = [row for run in options.runs for row in shift_of_run(run)]
    classes = rows[0]["classes"]
    lines = [f"| run | crops | accuracy | log loss | {' | '.join(classes)} |"]
    lines.append("|---|---" + "|--:" * (2 + len(classes)) + "|")
    for row in rows:
        shares = " | ".join(f"{value:.3f}" for value in row["mean_probability"])
        lines.append(f"| {row['run']} | {row['crops']} | {row['accuracy']:.3f} | {row['log_loss']:.3f} | {shares} |")
    true = " | ".join(f"{value:.3f}" for value in rows[-1]["share"])
    lines.append(f"| | share of the images | | | {true} |")
    make_folder(options.results)
    write_json(options.results / "resampling.json", {"rows": rows, **origin()})
    write_whole(options.results / "resampling.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
