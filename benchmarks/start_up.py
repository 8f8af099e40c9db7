"""How long `data show`, `data audit` and the start of `train` take, with source trees of two versions in turn; and the
share of the decode pass that hashing the images takes.

    python benchmarks/start_up.py DATA --before OLDER_SOURCE_TREE          # writes results/data_start_up.json and .md

Every command runs in a process of its own, with an empty cache of decoded images or with a filled one. Training stops
at its first step: a small network, so that the start is measured and not the step. Times are the medians of the rounds;
processor seconds are those of all processes together, and less disturbed by other work on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import cclnet
from cclnet.data import cache
from cclnet.data.duplicates import HASHED
from cclnet.data.sources import open_data
from cclnet.files import write_json, write_whole
from cclnet.runs.provenance import origin

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "data_start_up.json"
TO_FIRST_STEP = """
import sys, tempfile
from cclnet.settings import make_settings
from cclnet.training.loop import train
class FirstStep(Exception): pass
def stop(*_): raise FirstStep
data, cache, scratch = sys.argv[1:]
settings = make_settings({"data": data, "backbone": "test_resnet", "cache_dir": cache, "method": "hard"})
try:
    train(settings, scratch, accelerator="cpu", progress=False, on_step=stop)
except FirstStep:
    pass
"""


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Clock seconds, and processor seconds of the processes that ended meanwhile."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"clock": time.perf_counter() - began, "processor": processor}


def run(tree: Path, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def one_round(tree: Path, data: str, folder: Path) -> dict[str, dict[str, float]]:
    """Every command once; audit and train twice, with a cache each that is empty at first and then filled."""
    found = {"data show": measured(lambda: run(tree, "-m", "cclnet", "data", "show", data))}
    for state in ("empty cache", "filled cache"):
        audit = [
            "-m",
            "cclnet",
            "data",
            "audit",
            data,
            "--quiet",
            "--cache-dir",
            str(folder / "a"),
            "--out",
            str(folder),
        ]
        train = ["-c", TO_FIRST_STEP, data, str(folder / "b"), str(folder / state)]
        for name, command in (("data audit", audit), ("train, to the first step", train)):
            found[f"{name}, {state}"] = measured(partial(run, tree, *command))
    return found


def hashing_share(data: str, rounds: int) -> dict[str, Any]:
    """Processor seconds of the decode pass with and without hashing, in turn."""
    table = open_data(data)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    without_hashes: dict[str, Any] = {
        "sample_rows": lambda pixels: pixels[:0],
        "perceptual_hashes": lambda samples: np.zeros(len(samples), HASHED),
        "_hash_older": lambda *_: None,
    }
    for name in ("with", "without") * rounds:
        changes = mock.patch.multiple(cache, **without_hashes) if name == "without" else nullcontext()
        with tempfile.TemporaryDirectory() as folder, changes:
            spent = measured(partial(cache.decode, table, 256, Path(folder), progress=False))
        seconds[name].append(round(spent["processor"], 3))
        print(name, seconds[name][-1], flush=True)
    with_hashes, without = (statistics.median(seconds[name]) for name in ("with", "without"))
    return {"images": len(table), "processor_seconds": seconds, "share": round(with_hashes / without - 1, 4)}


def page(results: dict[str, Any]) -> str:
    lines = ["| | before, clock | after, clock | before, processor | after, processor |", "|---|--:|--:|--:|--:|"]
    before, after = results["seconds"]["before"], results["seconds"]["after"]
    for name in after:
        cells = [f"{tree[name][kind]:.1f} s" for kind in ("clock", "processor") for tree in (before, after)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    share = results["hashing"]["share"]
    images = results["hashing"]["images"]
    lines += ["", f"{images:,} images. Hashing them takes {share:.1%} of the processor time of the decode pass."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--before", type=Path, required=True, help="the source tree of an older version")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    trees = {"before": given.before.resolve(), "after": Path(cclnet.__file__).parents[2]}
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in trees}
    for number in range(given.rounds):
        for name, tree in trees.items():
            with tempfile.TemporaryDirectory() as folder:
                rounds[name].append(one_round(tree, given.data, Path(folder)))
            print(number, name, json.dumps(rounds[name][-1]), flush=True)
    older = ["git", "-C", str(given.before), "rev-parse", "HEAD"]
    sha = subprocess.run(older, capture_output=True, text=True, check=True)
    results = {
        **origin(),
        "before": sha.stdout.strip(),
        "rounds": given.rounds,
        "seconds": {
            name: {
                command: {
                    kind: round(statistics.median(single[command][kind] for single in several), 2)
                    for kind in ("clock", "processor")
                }
                for command in several[0]
            }
            for name, several in rounds.items()
        },
        "hashing": hashing_share(given.data, given.rounds),
    }
    write_json(RESULTS, results)
    write_whole(RESULTS.with_suffix(".md"), page(results))
    print(page(results))


if __name__ == "__main__":
    main()
