"""What a preset gives on a data set: scores, minutes and device of one run.

    python benchmarks/presets.py ISIC2018 quick --weights tf_efficientnet_lite0.safetensors --result results/quick.json

trains ``cclnet train DATA --preset NAME`` and writes the scores of the reported split with 95% intervals, the wall and
CPU time of everything (decoding, training, prediction, evaluation), and where the result comes from. ``--set`` changes
settings; ``--set split.test=0.7 --set split.val=0.1`` trains on a fifth of the images.

    python benchmarks/presets.py --tables

writes the table "what you get" of the README from results/presets/NAME.json, results/probe_isic2018.json and, for
presets finetune and best, results/finetune.
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
from cclnet.files import make_folder, read_json, write_json, write_whole
from cclnet.presets import PRESETS
from cclnet.runs.folder import RunFolder
from cclnet.runs.provenance import origin
from cclnet.settings import parse_overrides

README = Path(__file__).parents[1] / "README.md"
RESULTS = Path(__file__).parents[1] / "results"
# Rows of the study of fine-tuning that stand for presets: images that were predicted by networks which had not seen
# their group, from four mirrored views. Preset finetune trains one of the five networks of its row, best all of them.
STUDY = RESULTS / "finetune" / "adopted" / "scores.json"
STUDY_ROWS = {"finetune": ("isic lite0-tta", 5), "best": ("isic lite4-tta", 1)}
BUSY = 4.0  # a load average above which minutes are those of a busy machine


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
        "preset": options.preset, "set": [own for own in options.set if not own.startswith("cache_dir=")],
        "weights": Path(options.weights or "").name,
        "backbone": model.backbone, "crop": list(model.crop), "epochs": model.trained.epochs,
        "training_images": model.trained.images, "split": scores.split.name, "images": scores.split.images,
        "scores": {name: vars(scores.overall[name]) for name in shown if name in scores.overall},
        "rules": {rule.rule: {name: vars(estimate) for name, estimate in rule.scores.items()} for rule in rules},
        "minutes": round(seconds / 60, 2),
        "cpu_minutes": round(sum(use.ru_utime + use.ru_stime for use in used) / 60, 2),
        "load_average": round(os.getloadavg()[1], 1),  # above the number of cores: of a busy machine
        **origin(model.trained.device or ""),
    }  # fmt: skip


def what_you_get() -> str:
    """The table of what is measured on ISIC 2018: the probe, then presets in the order of their cost."""
    head = [
        "Measured on ISIC 2018 (10,015 images with a short side of 256 pixels, seven classes, split by lesion).",
        "Minutes are of everything, from image files to the report; in brackets the 95% interval. On a CPU begin with",
        "`cclnet probe`; presets without a row have not been measured on the whole set.",
        "",
        "| command | balanced accuracy, rule `balanced` | accuracy | macro AUROC | evaluated on | minutes | device |",
        "|---|--:|--:|--:|---|--:|---|",
    ]
    lines: list[str] = []
    if (path := RESULTS / "probe_isic2018.json").is_file():
        probe = read_json(path)
        rules = {own["rule"]: own["scores"] for own in probe["rules"]}
        images = f"{probe['images']:,} images, out-of-fold"
        lines.append(_row("cclnet probe DATA", rules, probe["overall"], images, probe))
    for name in PRESETS:
        command = f"cclnet train DATA --preset {name}"
        if name in STUDY_ROWS:
            row, networks = STUDY_ROWS[name]
            own = next(own for own in read_json(STUDY)["rows"] if own["name"] == row)
            own["minutes"] /= networks
            images = f"{own['images']:,} images" + (", out-of-fold" if own["images"] > 5000 else "")
            training = own | {"load_average": 0.0, "device": f"{own['device']}, training only"}
            lines.append(_row(command, own["calibrated_rules"], own["overall"], images, training))
        elif (path := RESULTS / "presets" / f"{name}.json").is_file():
            own = read_json(path)
            lines.append(_row(command, own["rules"], own["scores"], f"{own['images']:,} images", own))
    return "\n".join([*head, *lines]) if lines else ""


def _row(command: str, rules: Any, overall: Any, images: str, result: Any) -> str:
    balanced, accuracy = rules["balanced"]["balanced_accuracy"], rules["accuracy"]["accuracy"]
    cells = [f"{own['value']:.3f} [{own['low']:.3f}, {own['high']:.3f}]" for own in (balanced, accuracy)]
    cells += [f"{overall['macro_auroc']['value']:.3f}", images, f"{result['minutes']:.0f}", result["device"]]
    if result["load_average"] > BUSY:
        cells[-1] += f", busy (load {result['load_average']:.0f})"
    return f"| `{command}` | {' | '.join(cells)} |"


def write_tables() -> None:
    begin, end = "<!-- what you get -->", "<!-- /what you get -->"
    before, _, rest = README.read_text(encoding="utf-8").partition(begin)
    write_whole(README, f"{before}{begin}\n{what_you_get()}\n{end}{rest.partition(end)[2]}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?")
    parser.add_argument("preset", nargs="?", choices=tuple(PRESETS))
    parser.add_argument("--tables", action="store_true", help="write the table of the README")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--set", action="append", default=[], help="name=value")
    parser.add_argument("--out", type=Path, help="the run folder")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args(words)
    if options.tables:
        write_tables()
        return 0
    if not (options.data and options.preset and options.result):
        parser.error("DATA, PRESET and --result are needed to measure.")
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
