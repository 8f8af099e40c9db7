"""Keep what `cclnet probe` reached on a data set: results/probe_NAME.json, and results/probe.md for all of them.

    cclnet probe DATA --weights FILE --out RUN
    python benchmarks/probe.py NAME=RUN [NAME=RUN ...] [--duplicates NAME=DATA ...]

The scores are those in the scores.json of the run: out-of-fold, or of the test split that came with the data. With
--duplicates, the images of the reported split that also occur in another split are counted (`cclnet data audit`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.metrics import cohen_kappa_score

from cclnet.data.audit import audit
from cclnet.data.sources import open_data
from cclnet.files import read_json, write_json, write_whole
from cclnet.report.html import evaluated_on
from cclnet.runs.folder import RunFolder
from cclnet.schema import to_plain
from cclnet.settings import SplitSettings

RESULTS = Path(__file__).parents[1] / "results"
SCORES = ("accuracy", "balanced_accuracy", "macro_auroc", "kappa", "macro_f1")


def kept(run: RunFolder, duplicates: dict[str, int] | None) -> dict[str, Any]:
    """What is kept of a run."""
    scores, model = run.read_scores(), run.read_model()
    assert scores is not None and scores.decisions is not None
    trained = to_plain(model.trained)
    fitted = dict(model.extra["probe"])
    return {
        **{name: trained[name] for name in ("commit", "versions", "device", "seed", "fingerprint")},
        "backbone": model.backbone,
        "short_side": model.short_side,
        "crop": list(model.crop),
        "evaluated_on": evaluated_on(scores),
        "folds": model.trained.folds,
        "seconds": fitted.pop("seconds"),
        "cpu_seconds": fitted.pop("cpu_seconds"),
        "choice": fitted,
        "overall": {name: to_plain(scores.overall[name]) for name in SCORES if name in scores.overall},
        "rules": [
            {**to_plain(own), "quadratic_kappa": quadratic_kappa(np.array(own.confusion))}
            for own in scores.decisions.rules
        ],
        "leak": None if scores.leak is None else scores.leak.in_words,
        "duplicates": duplicates,
    }


def quadratic_kappa(confusion: npt.NDArray[np.int64]) -> float:
    """Cohen's kappa with quadratic weights, for ordered classes, from a confusion matrix."""
    true, chosen = np.indices(confusion.shape)
    return float(cohen_kappa_score(true.ravel(), chosen.ravel(), weights="quadratic", sample_weight=confusion.ravel()))


def count_duplicates(data: str) -> dict[str, int]:
    """The number of findings of the audit of the given split, by kind."""
    found = audit(open_data(data), SplitSettings(by="given", allow_leaks=True)).findings
    return {str(kind): int(count) for kind, count in found["finding"].value_counts().items()}


def table() -> str:
    lines = [
        "# Linear probes",
        "",
        "Logistic regression on the frozen features of an ImageNet backbone (`cclnet probe`), written by",
        "`benchmarks/probe.py` from the JSON files beside this page. Penalty and class weights are chosen inside the",
        "training folds. The time includes decoding and feature extraction unless these were cached; the machine was",
        "shared, so CPU time says more than wall time.",
        "",
        "| data | evaluated on | rule | accuracy | balanced accuracy | quadratic kappa | CPU minutes |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for path in sorted(RESULTS.glob("probe_*.json")):
        own = read_json(path)
        for rule in own["rules"]:
            numbers = [f"{rule['scores'][name]['value']:.3f}" for name in ("accuracy", "balanced_accuracy")]
            numbers.append(f"{rule['quadratic_kappa']:.3f}")
            minutes = f"{own['cpu_seconds'] / 60:.1f}"
            name, cells = path.stem.removeprefix("probe_"), " | ".join([*numbers, minutes])
            lines.append(f"| {name} | {own['evaluated_on']} | {rule['rule']} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--duplicates", nargs="*", default=[], metavar="NAME=DATA")
    options = parser.parse_args()
    data = dict(pair.split("=", 1) for pair in options.duplicates)
    for name, run in (pair.split("=", 1) for pair in options.runs):
        found = count_duplicates(data[name]) if name in data else None
        write_json(RESULTS / f"probe_{name}.json", kept(RunFolder(run), found))
    write_whole(RESULTS / "probe.md", table())


if __name__ == "__main__":
    main()
