"""Kill a run twenty times at random moments and resume it each time: does it end in the same bits?

    python benchmarks/kills.py                       # writes results/kills.json

A run on the embedded set, on the CPU, is left alone once; then the same run is killed (SIGKILL) at random moments, in
the middle of steps, checkpoints and start-up, and resumed each time, with images resident and streamed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cclnet.runs.provenance import versions

SETTINGS = [
    "data=synthetic:images=400,size=32", "short_side=32", "backbone=test_resnet", "batch_size=16", "lr=.02",
    "lr_ccl=.01", "augment.crop=28", "method_settings.widths=[16, 8]", "method_settings.patience=3", "ema=.9",
    "deterministic=true",
]  # fmt: skip
COMPARED = ("model.safetensors", "predictions.csv", "soft_labels.csv")


def start(arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cclnet", "train", "--accelerator", "cpu", "--quiet", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def new_run(name: str, epochs: int, resident: bool) -> list[str]:
    sets = [*SETTINGS, f"epochs={epochs}", f"resident={str(resident).lower()}"]
    return ["--out", name, *(f"--set={setting}" for setting in sets)]


def digests(run: Path) -> dict[str, str]:
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in COMPARED}


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(errors.decode())


def newest(run: Path) -> str:
    kept = sorted(path.name for path in (run / "checkpoints").glob("epoch-*.pt"))
    return kept[-1] if kept else ""


def killed_run(folder: Path, name: str, epochs: int, kills: int, resident: bool, chance: random.Random) -> list[str]:
    """Returns where each kill fell. One in five falls into the start-up, at any moment of it; the others after at least
    one new checkpoint, within the steps and checkpoints of the next second and a half."""
    run, fell = folder / name, []
    process = start(new_run(name, epochs, resident), folder)
    while len(fell) < kills:
        before = newest(run)
        if len(fell) % 5 == 4:
            time.sleep(chance.uniform(0.0, 6.0))
        else:
            while newest(run) == before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 1.5))
        if process.poll() is not None:
            raise SystemExit("the run ended before it was killed often enough: give it more --epochs")
        process.kill()
        process.wait()
        fell.append(newest(run) or "before the first checkpoint")
        process = start(["--resume", name], folder)
    finish(process)
    return fell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/kills.json"))
    given = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        finish(start(new_run("whole", given.epochs, True), folder))
        expected = digests(folder / "whole")
        for resident in (True, False):
            name = "resident" if resident else "streamed"
            fell = killed_run(folder, name, given.epochs, given.kills, resident, random.Random(given.seed))
            same = digests(folder / name) == expected
            runs.append({"images": name, "kills": len(fell), "fell": fell, "identical": same})
            print(name, len(fell), "kills, identical:", same, flush=True)
    content = {
        "device": "CPU",
        "seed": given.seed,
        "epochs": given.epochs,
        "versions": versions(),
        "settings": SETTINGS,
        "compared": COMPARED,
        "runs": runs,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    if not all(run["identical"] for run in runs):
        raise SystemExit("a killed run differs from the one that was left alone")


if __name__ == "__main__":
    main()
