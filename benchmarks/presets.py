"""What a preset gives on a data set: scores, minutes and device of one run.

    python benchmarks/presets.py ISIC2018 quick --weights tf_efficientnet_lite0.safetensors --result results/quick.json

trains ``cclnet train DATA --preset NAME`` and writes the scores of the reported split with 95% intervals, the wall and
CPU time of everything (decoding, training, prediction, evaluation), and where the result comes from. ``--set`` changes
settings; ``--set split.test=0.7 --set split.val=0.1`` trains on a fifth of the images.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cclnet
from cclnet.errors import InputError
from cclnet.files import make_folder, write_json
from cclnet.runs.folder import RunFolder
from cclnet.runs.provenance import origin
from cclnet.settings import parse_overrides


def measure(options: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    weights = {"weights": str(options.weights)} if options.weights else {}
    run = cclnet.train(options.data, options.out, preset=options.preset, **weights, **parse_overrides(options.set))
    seconds = time.perf_counter() - began
    folder = RunFolder(run)
    model, scores = folder.read_model(), folder.read_scores()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    shown = ("accuracy", "balanced_accuracy", "macro_auroc", "kappa", "ece")
    rules = () if scores.decisions is None else scores.decisions.rules
    return {
        "preset": options.preset, "set": options.set, "weights": Path(options.weights or "").name,
        "backbone": model.backbone, "crop": list(model.crop), "epochs": model.trained.epochs,
        "training_images": model.trained.images, "split": scores.split.name, "images": scores.split.images,
        "scores": {name: vars(scores.overall[name]) for name in shown if name in scores.overall},
        "rules": {rule.rule: {name: vars(estimate) for name, estimate in rule.scores.items()} for rule in rules},
        "minutes": round(seconds / 60, 2),
        "cpu_minutes": round(sum(use.ru_utime + use.ru_stime for use in used) / 60, 2),
        "load_average": round(os.getloadavg()[1], 1),  # above the number of cores: of a busy machine
        **origin(model.trained.device or ""),
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("preset")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--set", action="append", default=[], help="name=value")
    parser.add_argument("--out", type=Path, help="the run folder")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(words)
    try:
        result = measure(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    make_folder(options.result.parent)
    write_json(options.result, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
