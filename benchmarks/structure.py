"""Which distance between the classes' mean features follows looks on real images, and from when to when?

    python benchmarks/structure.py ISIC2018 --out results/structure

trains on a slice of the training part of the split by lesion, so that nothing of what is reported is looked at:
hard labels with weighed classes, whose confusions on unseen lesions are the yardstick, and ccl-centroid, of which the
moments of its features are kept after every epoch. From these every candidate distance is computed again, and its rank
correlation with the yardstick and with class rarity goes into --out.json, .md and .png.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cclnet.data.sources import open_data
from cclnet.evaluation.similarity import agreement, inverse_frequency, mean_confusion
from cclnet.files import write_whole
from cclnet.methods.ccl_centroid import CCLCentroid
from cclnet.methods.class_geometry import class_distances, geometry_from_means
from cclnet.reproduce.command import RECIPES
from cclnet.reproduce.experiments import Cell, read_recipes, write_tuning_data
from cclnet.reproduce.pages import fill_markers
from cclnet.reproduce.paper_figures import save_picture
from cclnet.runs.predictions import Floats, read_predictions
from cclnet.runs.provenance import versions
from cclnet.training.loop import train

DISTANCES = {
    "places, against the spread within": {"whiten": True, "centre": False},
    "directions, against the spread within": {"whiten": True, "centre": True},
    "places": {"whiten": False, "centre": False},
    "directions": {"whiten": False, "centre": True},
}
MEMORY = 0.5


def trained(cell: Cell, data: str, epochs: int, folder: Path, given: argparse.Namespace) -> tuple[Path, list[Tensor]]:
    """Train a cell; returns its run folder and the moments of its epochs, where the method has any."""
    recipe = read_recipes(RECIPES)[cell.split]
    settings = cell.settings({**recipe, "epochs": epochs, "validate_every": epochs}, data, smoke=given.smoke)
    kept: list[Tensor] = []
    forget = CCLCentroid.end_epoch

    def note(method: CCLCentroid) -> dict[str, float]:
        kept.append(method.moments.clone().cpu())
        return forget(method)

    CCLCentroid.end_epoch = note  # type: ignore[method-assign]
    try:
        run = train(settings, folder, accelerator=given.accelerator, cache_dir=given.cache_dir)
    finally:
        CCLCentroid.end_epoch = forget  # type: ignore[method-assign]
    return run, kept


def courses(moments: Sequence[Tensor], yardstick: Floats, counts: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """For each distance, epoch by epoch: how near classes lie against the yardstick and against rarity, of the epoch
    alone and of the running mean, and its structure."""
    found = {}
    for name, form in DISTANCES.items():
        course: dict[str, list[float]] = {"epoch": [], "running": [], "rarity": [], "structure": []}
        total, weight = torch.zeros(len(counts), len(counts), dtype=torch.float64), 0.0
        for epoch in moments:
            places = geometry_from_means(epoch, len(counts))
            distance = class_distances(places, **form)
            total, weight = MEMORY * total + distance, MEMORY * weight + 1.0
            running = -(total / weight).numpy()
            course["epoch"].append(agreement(-distance.numpy(), yardstick))
            course["running"].append(agreement(running, yardstick))
            course["rarity"].append(agreement(running, inverse_frequency(counts)))
            known = distance[places.known]
            course["structure"].append(float((known - 1.0).square().mean().sqrt()))
        found[name] = course
    return found


def table(measured: dict[str, Any]) -> str:
    """Markdown: a row a distance; its rank correlation with the yardstick at some epochs, and what else decides."""
    epochs = measured["epochs"]
    shown = sorted({1, epochs // 16 or 1, epochs // 4 or 1, epochs // 2 or 1, max(1, int(0.85 * epochs)), epochs})
    heads = ["distance", *(f"epoch {epoch}" for epoch in shown), "with rarity, at the end", "structure, most and last"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    for name, course in measured["courses"].items():
        values = [f"{course['running'][epoch - 1]:.2f}" for epoch in shown]
        values.append(f"{course['rarity'][-1]:.2f}")
        values.append(f"{max(course['structure']):.2f}, {course['structure'][-1]:.2f}")
        lines.append(f"| {' | '.join([name, *values])} |")
    own = f"{agreement(measured['yardstick'], inverse_frequency(measured['counts'])):.2f}"
    lines.append(f"| {' | '.join(['the yardstick itself', *('–' for _ in shown), own, '–'])} |")
    return "\n".join(lines) + "\n"


def figure(measured: dict[str, Any], path: Path) -> None:
    """A panel a distance: with the yardstick in blue, with rarity in red."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(13, 3.4), layout="constrained")
    axes = drawing.subplots(1, len(DISTANCES), sharex=True, sharey=True)
    for axis, (name, course) in zip(axes, measured["courses"].items(), strict=True):
        epochs = range(1, len(course["running"]) + 1)
        axis.axhline(0, color="grey", linewidth=0.6)
        axis.plot(epochs, course["epoch"], color="#31688e", alpha=0.3, linewidth=0.8)
        axis.plot(epochs, course["running"], color="#31688e", linewidth=1.4)
        axis.plot(epochs, course["rarity"], color="#b5523b", linewidth=1.4)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("epoch")
    axes[0].set_ylabel("rank correlation")
    drawing.suptitle("Class means on the real images: the yardstick (blue; pale: of one epoch), class rarity (red)",
                     fontsize=10)  # fmt: skip
    save_picture(drawing, path, dots=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny settings, to try the command")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--keep", type=Path, help="also keep the moments of every fourth epoch here (.npz)")
    parser.add_argument("--out", type=Path, default=Path("results/structure"))
    parser.add_argument("--document", type=Path, help="also put the table between the markers of this page")
    given = parser.parse_args()
    weighed = Cell(method="hard", split="tune-lesion", seed=given.seed, changes={"class_weights": True})
    ours = Cell(method="ccl-centroid", split="tune-lesion", seed=given.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        table_ = open_data(given.data)
        sheet = str(write_tuning_data(table_, read_recipes(RECIPES)["tune-lesion"], folder / "slice"))
        run, _ = trained(weighed, sheet, given.epochs, folder / "weighed", given)
        said = read_predictions(run / "predictions.csv")
        yardstick = mean_confusion(said.labels, said.probabilities)
        _, moments = trained(ours, sheet, given.epochs, folder / "ours", given)
    counts = moments[0][: len(yardstick), -1].long().tolist()
    if given.keep:
        np.savez_compressed(given.keep, yardstick=yardstick, counts=counts,
                            moments=np.stack([m.float().numpy() for m in moments[3::4]]))  # fmt: skip
    measured = {
        "epochs": len(moments),
        "seed": given.seed,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": versions(),
        "classes": list(said.classes),
        "counts": counts,
        "yardstick": yardstick.round(4).tolist(),
        "courses": {
            name: {key: [round(value, 4) for value in values] for key, values in course.items()}
            for name, course in courses(moments, yardstick, counts).items()
        },
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(given.out.with_suffix(".json"), json.dumps(measured) + "\n")
    write_whole(given.out.with_suffix(".md"), table(measured))
    figure(measured, given.out.with_suffix(".png"))
    if given.document:
        page = given.document.read_text(encoding="utf-8")
        write_whole(given.document, fill_markers(page, {"structure": table(measured)}, given.document.name))
    print(table(measured))


if __name__ == "__main__":
    main()
