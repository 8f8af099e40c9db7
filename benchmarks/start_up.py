"""How long `data show`, `data audit` and the start of `train` take, with source trees of two versions in turn; and the
share of the decode pass that hashing the images takes.

    python benchmarks/start_up.py DATA --before OLDER_SOURCE_TREE          # writes results/data_start_up.json and .md
    python benchmarks/start_up.py DATA                                     # the share of hashing: data_hashing.json

Every command runs in a process of its own, with an empty cache of decoded images or with a filled one. Training stops
at its first step: a small network, so that the start is measured and not the step. Times are the medians of the rounds;
processor seconds are those of all processes together, and less disturbed by other work on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
from cclnet.data.image_io import read_resized
from cclnet.data.sources import open_data
from cclnet.files import read_json, write_json, write_whole
from cclnet.runs.provenance import origin

ROOT = Path(__file__).parents[1]
SAMPLED = 5  # every so many images, for the share of hashing
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
    """Clock seconds, and processor seconds of the processes that ended meanwhile, workers of workers included: this
    process adopts those whose parent has ended (PR_SET_CHILD_SUBREAPER), and waits for them."""
    ctypes.CDLL(None).prctl(36, 1)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    clock = time.perf_counter() - began
    with contextlib.suppress(ChildProcessError):  # until there are none
        while True:
            os.waitpid(-1, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"clock": clock, "processor": processor}


def run(tree: Path, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def one_round(tree: Path, data: str, folder: Path) -> dict[str, dict[str, float]]:
    """Every command once, and the audit twice: with an empty cache, and with the one that it filled."""
    cache_dir, options = str(folder / "cache"), ["--quiet", "--out", str(folder)]
    audit = ["-m", "cclnet", "data", "audit", data, "--cache-dir", cache_dir, *options]
    commands = {
        "data show": ["-m", "cclnet", "data", "show", data],
        "data audit, empty cache": audit,
        "data audit, filled cache": audit,
        "train, to the first step, filled cache": ["-c", TO_FIRST_STEP, data, cache_dir, str(folder / "run")],
    }
    return {name: measured(partial(run, tree, *command)) for name, command in commands.items()}


def hashing_share(data: str) -> dict[str, Any]:
    """Processor seconds of what a decoding worker does with chunks of images, with and without hashing in turn."""
    paths = [image for image in open_data(data).images if isinstance(image, Path)]
    seconds = {"with": 0.0, "without": 0.0}
    without_hashes: dict[str, Any] = {
        "sample_rows": lambda pixels: pixels[:0],
        "perceptual_hashes": lambda samples: np.zeros(len(samples), HASHED),
    }
    rows = list(range(0, len(paths), SAMPLED))
    entries, _ = cache.file_entries(paths, Path(data))
    with tempfile.TemporaryFile(buffering=0) as file:
        writing = cache._Writing(
            cache.PixelStore(Path(data)), entries, lambda row: read_resized(paths[row], 256), 256, workers=1
        )
        for start in range(0, len(rows), 32):
            for name in ("with", "without") if start % 64 else ("without", "with"):
                changes = mock.patch.multiple(cache, **without_hashes) if name == "without" else nullcontext()
                file.seek(0)
                with changes:
                    began = time.process_time()
                    writing.write_images(file, rows[start : start + 32], {})
                    seconds[name] += time.process_time() - began
    return {
        "images": len(rows),
        "processor_seconds": {name: round(spent, 3) for name, spent in seconds.items()},
        "share": round(seconds["with"] / seconds["without"] - 1, 4),
    }


def page(results: dict[str, Any]) -> str:
    """The processor seconds as a table: unlike those of the clock, they do not depend on other work on the machine."""
    lines = ["| processor seconds | before | after |", "|---|--:|--:|"]
    before, after = results["seconds"]["before"], results["seconds"]["after"]
    lines += [f"| {name} | {before[name]['processor']:.1f} | {after[name]['processor']:.1f} |" for name in after]
    share = results["hashing"]["share"]
    lines += ["", f"{results['images']:,} images. Hashing adds {share:.1%} to the processor time of the decode pass."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="")
    parser.add_argument("--before", type=Path, help="the source tree of an older version")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page-only", action="store_true", help="write the table of the kept results again")
    given = parser.parse_args()
    if given.page_only:
        write_whole(RESULTS.with_suffix(".md"), page(read_json(RESULTS)))
        return
    if given.data and not given.before:
        write_json(RESULTS.with_name("data_hashing.json"), {**origin(), **hashing_share(given.data)})
        return
    if not given.data:
        parser.error("DATA is needed")
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
        "images": len(open_data(given.data)),
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
        "hashing": hashing_share(given.data),
    }
    write_json(RESULTS, results)
    write_whole(RESULTS.with_suffix(".md"), page(results))
    print(page(results))


if __name__ == "__main__":
    main()
