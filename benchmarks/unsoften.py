"""Measure how soft labels change probabilities, and the effect of removing them again, from kept results alone.

    python benchmarks/unsoften.py --document docs/tables_soft_labels.md

evaluates every kept run that was trained with soft labels twice: its predictions, and these with the target removed
(``cclnet.functional.unsoften``), which needs no further data. Writes results/unsoftened.json.bz2 and
.md, and the table into the page. Then the unsoftened predictions of LSR-a5 are mixed with the class frequencies again
by increasing shares, to find the share at which they have the paper's scores of LSR-a (results/prior_readings.md). Runs
without kept predictions are skipped.
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
from cclnet.reproduce.seeds import PaperResult, read_results
from cclnet.reproduce.tables import write_documents
from cclnet.runs.folder import OpenedRun, open_run
from cclnet.runs.predictions import write_predictions

HEADS = [
    "run", "accuracy", "balanced accuracy", "ECE", "log loss", "ECE after temperature", "log loss after temperature",
]  # fmt: skip

EPSILONS = (0.0, 0.1, 0.3, 0.5, 0.5228, 0.55, 0.6, 0.61, 0.62, 0.63, 0.65)


def target_of(result: PaperResult) -> Tensor | None:
    """The training target at the end of the run, [K, K]; None for hard labels."""
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
    """The scores of the columns, of the predictions or of the unsoftened predictions."""
    predictions = run.predictions.of_split(run.split)
    if target is not None:
        predictions = replace(
            predictions, probabilities=unsoften(torch.tensor(predictions.probabilities), target.double()).numpy()
        )
    with tempfile.TemporaryDirectory() as scratch:
        write_predictions(Path(scratch) / "predictions.csv", predictions)
        found = evaluate(Path(scratch) / "predictions.csv", draws=2, calibration="temperature")
    values = [found.overall["accuracy"], found.overall["balanced_accuracy"]]
    values += [stage.scores[name] for stage in found.calibration.stages() for name in ("ece", "nll")]
    return {name: round(value.value, 6) for name, value in zip(HEADS[1:], values, strict=True)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the predictions' scores, and after the arrow those of the unsoftened predictions."""
    lines = [f"| {' | '.join(HEADS)} |", "|---|" + "--:|" * (len(HEADS) - 1)]
    for row in rows:
        predictions, left = row["said"], row["unsoftened"]
        pairs = [
            f"{predictions[name]:.3f} → {left[name]:.3f}" if left else f"{predictions[name]:.3f}" for name in HEADS[1:]
        ]
        lines.append(f"| {' | '.join([row['run'], *pairs])} |")
    return "\n".join(lines) + "\n"


def prior_readings(result: PaperResult) -> str:
    """Markdown: accuracy, F1 and kappa if the label had this share of the class frequencies."""
    run, target = open_run(result.path), target_of(result)
    assert target is not None
    predictions = run.predictions.of_split(run.split)
    left = unsoften(torch.tensor(predictions.probabilities), target.double()).numpy()
    prior = np.array(result.class_counts) / sum(result.class_counts)
    lines = ["| ε of the label | accuracy | F1 | kappa |", "|--:|--:|--:|--:|"]
    for epsilon in EPSILONS:
        mixed = replace(predictions, probabilities=(1 - epsilon) * left + epsilon * prior)
        scored = point_estimates(mixed, overall_metrics("single-label"))
        lines.append(f"| {epsilon:g} | {' | '.join(f'{scored[n]:.3f}' for n in ('accuracy', 'macro_f1', 'kappa'))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results/isic2018"))
    parser.add_argument("--out", type=Path, default=Path("results/unsoftened"))
    parser.add_argument("--document", type=Path, help="also update the table in this page")
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
        write_documents(Path(), {str(given.document): {"unsoftened": table(rows)}})


if __name__ == "__main__":
    main()
