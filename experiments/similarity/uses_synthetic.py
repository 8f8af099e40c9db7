"""Measure ways of using CCL-Net's soft labels on the synthetic set with known similarity: several seeds, paired tests.

    python experiments/similarity/uses_synthetic.py --document docs/tables_soft_labels.md

trains unchanged CCL-Net and one change at a time (weight and temperature of the soft label, mixup, cutmix, unsoften)
with the recipe known_similarity.toml, and compares each with the first. Writes results/uses_planted.md; existing runs
are not repeated. ``run.py uses`` does the same on the real images.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from cclnet.evaluation.compare import compare
from cclnet.files import write_whole
from cclnet.report.comparison import in_markdown
from cclnet.reproduce.experiments import RECIPES
from cclnet.reproduce.tables import write_documents
from cclnet.settings import make_settings, read_settings
from cclnet.training.loop import train
from similarity_cells import USES

PATIENCE = 2  # of the freeze rule, instead of ten epochs: there are ten in all
PLAIN = "as it is"  # as in results/uses_planted.md


def one_run(run: tuple[dict[str, Any], Path]) -> str:
    torch.set_num_threads(1)
    settings, folder = run
    train(make_settings(settings), folder, accelerator="cpu", progress=False)
    return folder.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--at-once", type=int, default=2, help="runs at once, each on one core")
    parser.add_argument("--runs", type=Path, default=Path("runs/uses_planted"))
    parser.add_argument("--out", type=Path, default=Path("results/uses_planted.md"))
    parser.add_argument("--document", type=Path, help="also update the table in this page")
    given = parser.parse_args()
    base: dict[str, Any] = {**read_settings(RECIPES / "known_similarity.toml"), "method": "ccl"}
    changes: dict[str, dict[str, Any]] = {PLAIN: {}, **USES, "unsoften": {"unsoften": True}}
    folders = {name: [given.runs / f"{name.replace(' ', '-')}-seed{seed}" for seed in given.seeds] for name in changes}
    missing = []
    for name, change in changes.items():
        own = {"patience": PATIENCE, **change.get("method_settings", {})}
        augment = {**base["augment"], **change.get("augment", {})}
        for seed, folder in zip(given.seeds, folders[name], strict=True):
            settings = {**base, **change, "method_settings": own, "augment": augment, "seed": seed}
            if not (folder / "predictions.csv").exists():
                missing.append((settings, folder))
    with ProcessPoolExecutor(given.at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, done in enumerate(as_completed([pool.submit(one_run, run) for run in missing]), start=1):
            print(f"{number} of {len(missing)}: {done.result()}", flush=True)
    table = in_markdown(compare(folders, against=PLAIN, calibration="temperature"))
    write_whole(given.out, table)
    if given.document:
        write_documents(Path(), {str(given.document): {"uses planted": table}})
    print(table)


if __name__ == "__main__":
    main()
