"""Which distance between class means follows visual similarity on real images, and in which epochs?

    python experiments/similarity/distances.py ISIC2018 --out results/structure

trains within the training split by lesion, so that no reported image is used: hard labels with class weights, whose
confusions on unseen lesions are the reference, and ccl-centroid, whose feature moments are kept after every epoch. The
rank correlation of every candidate distance with the reference and with inverse class frequency goes into --out.json,
.md and .png.
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
from cclnet.reproduce.experiments import PaperCell
from cclnet.reproduce.paper_figures import save_picture
from cclnet.reproduce.tables import write_documents
from cclnet.runs.predictions import Floats, read_predictions
from cclnet.runs.provenance import versions
from cclnet.training.loop import train
from similarity_cells import study_recipes, write_tuning_data

DISTANCES = {
    "Mahalanobis": {"whiten": True, "centre": False},
    "Mahalanobis, centred": {"whiten": True, "centre": True},
    "Euclidean": {"whiten": False, "centre": False},
    "Euclidean, centred": {"whiten": False, "centre": True},
}
EMA_DECAY = 0.5


def trained(
    cell: PaperCell, data: str, epochs: int, folder: Path, given: argparse.Namespace
) -> tuple[Path, list[Tensor]]:
    """Train a cell; returns its run folder and the moments of its epochs, where the method has any."""
    recipe = study_recipes()[cell.split]
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


def histories(moments: Sequence[Tensor], reference: Floats, counts: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """For each distance and epoch: the agreement of closeness with the reference, of the epoch and of the running mean;
    the agreement with inverse class frequency; and the structure."""
    found = {}
    for name, form in DISTANCES.items():
        history: dict[str, list[float]] = {"epoch": [], "running": [], "rarity": [], "structure": []}
        total, weight = torch.zeros(len(counts), len(counts), dtype=torch.float64), 0.0
        for epoch in moments:
            geometry = geometry_from_means(epoch, len(counts))
            distance = class_distances(geometry, **form)
            total, weight = EMA_DECAY * total + distance, EMA_DECAY * weight + 1.0
            running = -(total / weight).numpy()
            history["epoch"].append(agreement(-distance.numpy(), reference))
            history["running"].append(agreement(running, reference))
            history["rarity"].append(agreement(running, inverse_frequency(counts)))
            known = distance[geometry.known]
            history["structure"].append(float((known - 1.0).square().mean().sqrt()))
        found[name] = history
    return found


# Names in measurements that were made before these.
FORMER = {
    "places, against the spread within": "Mahalanobis",
    "directions, against the spread within": "Mahalanobis, centred",
    "places": "Euclidean",
    "directions": "Euclidean, centred",
}


def table(measured: dict[str, Any]) -> str:
    """Markdown, one row per distance: rank correlation with the reference at some epochs, and what else decides."""
    epochs = measured["epochs"]
    shown = sorted({1, epochs // 16 or 1, epochs // 4 or 1, epochs // 2 or 1, max(1, int(0.85 * epochs)), epochs})
    heads = [
        "distance",
        *(f"epoch {epoch}" for epoch in shown),
        "with inverse class frequency, at the end",
        "structure, largest and last",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    for name, history in measured["courses"].items():
        values = [f"{history['running'][epoch - 1]:.2f}" for epoch in shown]
        values.append(f"{history['rarity'][-1]:.2f}")
        values.append(f"{max(history['structure']):.2f}, {history['structure'][-1]:.2f}")
        lines.append(f"| {' | '.join([FORMER.get(name, name), *values])} |")
    own = f"{agreement(measured['yardstick'], inverse_frequency(measured['counts'])):.2f}"
    lines.append(f"| {' | '.join(['the reference itself', *('–' for _ in shown), own, '–'])} |")
    return "\n".join(lines) + "\n"


def figure(measured: dict[str, Any], path: Path) -> None:
    """One panel per distance: agreement with the reference in blue, with inverse class frequency in red."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(13, 3.4), layout="constrained")
    axes = drawing.subplots(1, len(DISTANCES), sharex=True, sharey=True)
    for axis, (name, history) in zip(axes, measured["courses"].items(), strict=True):
        epochs = range(1, len(history["running"]) + 1)
        axis.axhline(0, color="grey", linewidth=0.6)
        axis.plot(epochs, history["epoch"], color="#31688e", alpha=0.3, linewidth=0.8)
        axis.plot(epochs, history["running"], color="#31688e", linewidth=1.4)
        axis.plot(epochs, history["rarity"], color="#b5523b", linewidth=1.4)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("epoch")
    axes[0].set_ylabel("rank correlation")
    drawing.suptitle("Class means on the real images: reference (blue; pale: one epoch), inverse class frequency (red)",
                     fontsize=10)  # fmt: skip
    save_picture(drawing, path, dots=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny settings, to test the script")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--keep", type=Path, help="also keep the moments of every fourth epoch here (.npz)")
    parser.add_argument("--out", type=Path, default=Path("results/structure"))
    parser.add_argument("--document", type=Path, help="also update the table in this page")
    given = parser.parse_args()
    weighted = PaperCell(method="hard", split="tune-lesion", seed=given.seed, changes={"class_weights": True})
    ours = PaperCell(method="ccl-centroid", split="tune-lesion", seed=given.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        table_ = open_data(given.data)
        sheet = str(write_tuning_data(table_, study_recipes()["tune-lesion"], folder / "slice"))
        run, _ = trained(weighted, sheet, given.epochs, folder / "weighted", given)
        predictions = read_predictions(run / "predictions.csv")
        reference = mean_confusion(predictions.labels, predictions.probabilities)
        _, moments = trained(ours, sheet, given.epochs, folder / "ours", given)
    counts = moments[0][: len(reference), -1].long().tolist()
    if given.keep:
        np.savez_compressed(given.keep, yardstick=reference, counts=counts,
                            moments=np.stack([m.float().numpy() for m in moments[3::4]]))  # fmt: skip
    measured = {
        "epochs": len(moments),
        "seed": given.seed,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": versions(),
        "classes": list(predictions.classes),
        "counts": counts,
        "yardstick": reference.round(4).tolist(),
        "courses": {
            name: {key: [round(value, 4) for value in values] for key, values in history.items()}
            for name, history in histories(moments, reference, counts).items()
        },
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(given.out.with_suffix(".json"), json.dumps(measured) + "\n")
    write_whole(given.out.with_suffix(".md"), table(measured))
    figure(measured, given.out.with_suffix(".png"))
    if given.document:
        write_documents(Path(), {str(given.document): {"structure": table(measured)}})
    print(table(measured))


if __name__ == "__main__":
    main()
