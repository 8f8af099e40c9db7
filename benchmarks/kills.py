"""Kill runs at random moments and continue them each time: do they end in the same bits?

    python benchmarks/kills.py                       # forty kills, writes results/kills.json

Each run is left alone once. Then the same run is killed (SIGKILL, with all its processes) at random moments, in the
middle of steps, checkpoints and start-up, and continued each time by the command that a person would use: ``cclnet
train --resume``, or the same command again for a sweep. The folds of a cross-validation end in their ensemble.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from cclnet.files import write_whole
from cclnet.runs.provenance import origin

SETTINGS = [
    "short_side=32", "backbone=test_resnet", "batch_size=16", "lr=.02", "lr_ccl=.01", "augment.crop=28",
    "deterministic=true", "pretrained=false",
]  # fmt: skip
FOLDS = 3
CCL = ["method=ccl", "method_settings.widths=[16, 8]", "method_settings.patience=3"]
# What differs between the runs.
RUNS = {
    "resident": ["method=hard", "resident=true"],
    "streamed": ["method=hard", "resident=false"],
    "ccl": CCL,
    "default method": [],
    "ema": [*CCL, "ema=.9"],
    "folds": ["method=hard", f"folds={FOLDS}"],
}
DATA = "synthetic:images=240,size=32"
SWEEP_METHODS = "hard,lsr"
COMPARED = ("model.safetensors", "predictions.csv", "soft_labels.csv")


def commands(name: str, epochs: int) -> tuple[list[str], list[str], str]:
    """Return the command that starts a run, the one that continues it, and its folder."""
    folder = name.replace(" ", "-")
    of_one = -(-epochs // FOLDS) if name == "folds" else epochs
    sets = [f"--set={setting}" for setting in (*SETTINGS, f"epochs={of_one}")]
    if name == "sweep":
        methods = ["--methods", SWEEP_METHODS, "--seeds", "0"]
        command = ["compare-methods", DATA, *methods, "--out", folder, "--accelerator", "cpu", "--draws", "20",
                   "--parallel", "2", *sets]  # fmt: skip
        return command, command, folder
    sets += [f"--set={setting}" for setting in RUNS[name]]
    new = ["train", DATA, "--out", folder, "--accelerator", "cpu", "--quiet", *sets]
    return new, ["train", "--resume", folder, "--accelerator", "cpu", "--quiet"], folder


def start(arguments: list[str], inside: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(inside / "cache")}
    command = [sys.executable, "-m", "cclnet", *arguments]
    with (inside / "output.txt").open("wb") as output:
        return subprocess.Popen(
            command, cwd=inside, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def finish(process: subprocess.Popen[bytes], inside: Path) -> None:
    if code := process.wait():
        raise SystemExit(f"exit code {code} in {inside}:\n{(inside / 'output.txt').read_text(errors='replace')}")


def digests(run: Path) -> dict[str, str]:
    found = [path for path in sorted(run.rglob("*")) if path.name in COMPARED]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def newest(run: Path) -> str:
    """The last checkpoint that was written; in a sweep also the run it belongs to."""
    try:
        kept = sorted(run.rglob("epoch-*.pt"), key=lambda path: (path.parent.stat().st_ctime_ns, path.name))
    except FileNotFoundError:  # a sweep removes the checkpoints of a run that is done
        return newest(run)
    return str(kept[-1].relative_to(run)) if kept else ""


def kill_and_continue(name: str, inside: Path, epochs: int, kills: int, chance: random.Random) -> list[str]:
    """Return where each kill fell. One in five falls into the start-up, at any moment of it; the others after at least
    one new checkpoint, within the steps and checkpoints of the next second."""
    new, again, folder = commands(name, epochs)
    fell: list[str] = []
    process = start(new, inside)
    while len(fell) < kills:
        before = newest(inside / folder)
        if len(fell) % 5 == 4:
            time.sleep(chance.uniform(0.0, 6.0))
        else:
            while newest(inside / folder) == before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 1.0))
        if process.poll() is not None:
            raise SystemExit(f"{name} ended before it was killed often enough: give it more --epochs")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        fell.append(newest(inside / folder) or "before the first checkpoint")
        # A run without its settings does not exist yet: a person would start it again.
        exists = (inside / folder / "settings.toml").is_file()
        process = start(again if exists else new, inside)
    finish(process, inside)
    return fell


def harm(name: str, folder: Path, epochs: int, kills: int, seed: int) -> dict[str, Any]:
    """Run one kind of run alone and killed, and compare them."""
    alone, killed = (folder / name / kind for kind in ("alone", "killed"))
    for inside in (alone, killed):
        inside.mkdir(parents=True)
    new, _, run = commands(name, epochs)
    finish(start(new, alone), alone)
    expected = digests(alone / run)
    fell = kill_and_continue(name, killed, epochs, kills, random.Random(f"{seed} {name}"))
    same = bool(expected) and digests(killed / run) == expected
    print(f"{name}: {len(fell)} kills, {len(expected)} files identical: {same}", flush=True)
    return {"run": name, "kills": len(fell), "fell": fell, "files": sorted(expected), "identical": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="over all runs together")
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="runs at once")
    parser.add_argument("--only", nargs="*", help="some of the runs")
    parser.add_argument("--out", type=Path, default=Path("results/kills.json"))
    given = parser.parse_args()
    names = given.only or [*RUNS, "sweep"]
    each = -(-given.kills // len(names))
    begin = time.monotonic()
    runs: list[dict[str, Any]] = []
    if given.only and given.out.exists():  # the other runs stay
        runs += [run for run in json.loads(given.out.read_text())["runs"] if run["run"] not in names]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.workers) as pool:
        harmed = [pool.submit(harm, name, Path(scratch), given.epochs, each, given.seed) for name in names]
        for done in as_completed(harmed):
            runs.append(done.result())
            content = {
                **origin(), "seed": given.seed, "epochs": given.epochs, "data": DATA, "settings": SETTINGS,
                "changes": RUNS, "compared": COMPARED, "minutes": round((time.monotonic() - begin) / 60, 2),
                "runs": runs,
            }  # fmt: skip
            write_whole(given.out, json.dumps(content, indent=1) + "\n")
    if not all(run["identical"] for run in runs):
        raise SystemExit("a killed run differs from the one that was left alone")


if __name__ == "__main__":
    main()
