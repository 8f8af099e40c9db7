"""What soft labels do to probabilities, and what is left when they are taken out again, from kept results alone.

    python benchmarks/unsoften.py --document docs/using.md

judges every kept run that was trained with soft labels twice, on the same images: as its network says, and with its
target taken out (``cclnet.functional.unsoften``), which needs no further data. Writes results/unsoftened.json.bz2 and
.md, and the table into the page. Then it asks how much of the class frequencies in the label it takes to come to the
paper's rows of LSR-a: what is left of the run with LSR-a5 is mixed with them again by ever more, and scored
(results/prior_readings.md). Runs whose predictions are not kept are left out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cclnet.evaluation.evaluate import evaluate
from cclnet.evaluation.metrics import overall_metrics, point_estimates
from cclnet.files import write_json_bz2, write_whole
from cclnet.functional import unsoften
from cclnet.methods import Classes, build_method
from cclnet.reproduce.pages import fill_markers
from cclnet.reproduce.seeds import Result, read_results
from cclnet.runs.folder import OpenedRun, open_run
from cclnet.runs.predictions import write_predictions

HEADS = [
    "run", "accuracy", "balanced accuracy", "ECE", "log loss", "ECE after temperature", "log loss after temperature",
]  # fmt: skip

EPSILONS = (0.0, 0.1, 0.3, 0.5, 0.5228, 0.55, 0.6, 0.61, 0.62, 0.63, 0.65)


def target_of(result: Result) -> Tensor | None:
    """What the run was trained towards at its end, [K, K]; None for hard labels."""
    settings = result.settings
    classes = Classes(len(result.classes), 8, tuple(result.class_counts))
    method = build_method(settings["method"], classes, settings["method_settings"])
    own = torch.eye(classes.num_classes, dtype=torch.float64)
    if result.soft_labels is None:
        fixed = method.target()
        return None if fixed is None or torch.equal(fixed.double(), own) else fixed
    labels = torch.tensor(result.soft_labels, dtype=torch.float64)
    return method.hard_share * own + (1.0 - method.hard_share) * labels


def scores(run: OpenedRun, target: Tensor | None) -> dict[str, float]:
    """The scores of the columns, of what the run says or of what is left without its target."""
    said = run.predictions.of_split(run.split)
    if target is not None:
        said = replace(said, probabilities=unsoften(torch.tensor(said.probabilities), target.double()).numpy())
    with tempfile.TemporaryDirectory() as scratch:
        write_predictions(Path(scratch) / "predictions.csv", said)
        found = evaluate(Path(scratch) / "predictions.csv", draws=2)
    values = [found.overall["accuracy"], found.overall["balanced_accuracy"]]
    values += [stage.scores[name] for stage in found.calibration.stages() for name in ("ece", "nll")]
    return {name: round(value.value, 6) for name, value in zip(HEADS[1:], values, strict=True)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: as the network says, and after the arrow with the soft labels taken out."""
    lines = [f"| {' | '.join(HEADS)} |", "|---|" + "--:|" * (len(HEADS) - 1)]
    for row in rows:
        said, left = row["said"], row["unsoftened"]
        pairs = [f"{said[name]:.3f} → {left[name]:.3f}" if left else f"{said[name]:.3f}" for name in HEADS[1:]]
        lines.append(f"| {' | '.join([row['run'], *pairs])} |")
    return "\n".join(lines) + "\n"


def prior_readings(result: Result) -> str:
    """Markdown: accuracy, F1 and kappa if the label had held this much of the class frequencies."""
    run, target = open_run(result.path), target_of(result)
    assert target is not None
    said = run.predictions.of_split(run.split)
    left = unsoften(torch.tensor(said.probabilities), target.double()).numpy()
    prior = np.array(result.class_counts) / sum(result.class_counts)
    lines = ["| ε of the label | accuracy | F1 | kappa |", "|--:|--:|--:|--:|"]
    for epsilon in EPSILONS:
        mixed = replace(said, probabilities=(1 - epsilon) * left + epsilon * prior)
        scored = point_estimates(mixed, overall_metrics("single-label"))
        lines.append(f"| {epsilon:g} | {' | '.join(f'{scored[n]:.3f}' for n in ('accuracy', 'macro_f1', 'kappa'))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results/isic2018"))
    parser.add_argument("--out", type=Path, default=Path("results/unsoftened"))
    parser.add_argument("--document", type=Path, help="also put the table between the markers of this page")
    given = parser.parse_args()
    rows = []
    for result in read_results(given.results):
        if not result.predictions.exists():
            continue
        run, target = open_run(result.path), target_of(result)
        left = None if target is None else scores(run, target)
        rows.append({"run": result.name, "said": scores(run, None), "unsoftened": left})
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    write_json_bz2(given.out.with_suffix(".json.bz2"), rows)
    write_whole(given.out.with_suffix(".md"), table(rows))
    found = [result for result in read_results(given.results) if result.cell.name == "paper-resnet18-lsr-a5-seed0"]
    if found:
        write_whole(given.out.with_name("prior_readings.md"), prior_readings(found[0]))
    if given.document:
        page = given.document.read_text(encoding="utf-8")
        write_whole(given.document, fill_markers(page, {"unsoftened": table(rows)}, given.document.name))


if __name__ == "__main__":
    main()
