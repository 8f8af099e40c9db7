"""What the ways of using CCL-Net's soft labels do, on drawn lesions, several seeds, paired tests.

    python benchmarks/uses.py --document docs/using.md

trains CCL-Net as it is and with one thing changed at a time (the weight of the soft label, its temperature, sharpened
once it is frozen, images mixed with their labels, the labels taken out again), with the recipe of ``cclnet
compare-methods`` for the drawn set, and compares each with the first. Writes results/uses_planted.md; runs that are
there already are not made again. On the real images ``cclnet reproduce uses`` does the same.
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
from cclnet.reproduce.experiments import USES
from cclnet.reproduce.pages import fill_markers
from cclnet.settings import make_settings, read_settings
from cclnet.training.loop import train

RECIPE = Path(__file__).parents[1] / "recipes" / "planted" / "methods.toml"
PATIENCE = 2  # of the freeze rule, instead of ten epochs: there are ten in all
PLAIN = "as it is"


def one_run(job: tuple[dict[str, Any], Path]) -> str:
    torch.set_num_threads(1)
    settings, folder = job
    train(make_settings(settings), folder, accelerator="cpu", progress=False)
    return folder.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--at-once", type=int, default=2, help="runs at once, each on one core")
    parser.add_argument("--runs", type=Path, default=Path("runs/uses_planted"))
    parser.add_argument("--out", type=Path, default=Path("results/uses_planted.md"))
    parser.add_argument("--document", type=Path, help="also put the table between the markers of this page")
    given = parser.parse_args()
    base: dict[str, Any] = {**read_settings(RECIPE), "method": "ccl"}
    changes: dict[str, dict[str, Any]] = {PLAIN: {}, **USES, "unsoften": {"unsoften": True}}
    folders = {name: [given.runs / f"{name.replace(' ', '-')}-seed{seed}" for seed in given.seeds] for name in changes}
    jobs = []
    for name, change in changes.items():
        own = {"patience": PATIENCE, **change.get("method_settings", {})}
        augment = {**base["augment"], **change.get("augment", {})}
        for seed, folder in zip(given.seeds, folders[name], strict=True):
            settings = {**base, **change, "method_settings": own, "augment": augment, "seed": seed}
            if not (folder / "predictions.csv").exists():
                jobs.append((settings, folder))
    with ProcessPoolExecutor(given.at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, done in enumerate(as_completed([pool.submit(one_run, job) for job in jobs]), start=1):
            print(f"{number} of {len(jobs)}: {done.result()}", flush=True)
    table = in_markdown(compare(folders, against=PLAIN))
    write_whole(given.out, table)
    if given.document:
        page = given.document.read_text(encoding="utf-8")
        write_whole(given.document, fill_markers(page, {"uses planted": table}, given.document.name))
    print(table)


if __name__ == "__main__":
    main()
