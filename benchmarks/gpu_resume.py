"""Kill runs, continue them in new processes, and compare them with runs that were left alone: on a GPU, the same bits?

    python benchmarks/gpu_resume.py                              # writes results/gpu_resume.json
    python benchmarks/gpu_resume.py --smoke --accelerator cpu    # one small run, in less than a minute

On a GPU a resumed run captures its CUDA graph again, in another process and at another epoch. With ``deterministic`` it
must end in the same bits. In the default mode some kernels of cuDNN add in any order, so two runs that are left alone
differ as well: their difference is the noise that a resumed run is compared with.

Runs as short as these may not be compiled by default, so some are with ``compile``. The compiler takes what it compiled
before from its cache on the disk, as it does for a person. With --fresh-caches every process compiles and chooses its
kernels anew, as after a move to another machine.

benchmarks/kills.py has more kinds of runs and more kills, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import cclnet
from cclnet.files import write_whole
from cclnet.runs.folder import RunFolder
from cclnet.runs.provenance import origin
from cclnet.training.duration import device_name
from kills import COMPARED, digests, finish, newest, start

EPOCHS, BATCH_SIZE, STEPS = 4, 32, 12
COMMON = [f"batch_size={BATCH_SIZE}", "pretrained=false", "seed=0"]
RESNET = ["backbone=resnet18", "lr=.02", "short_side=72", "augment.crop=64"]
EFFICIENTNET = ["preset=finetune", "backbone=tf_efficientnet_lite0", "short_side=96", "augment.crop=80"]
CCL = ["method=ccl", "lr_ccl=.01", "method_settings.patience=2"]  # short, so that the dictionary may freeze
FORWARD = ["method=ccl-forward", "method_settings.warmup=2"]  # the label model is used from the third epoch on
DETERMINISTIC = "deterministic=true"
# The settings of the runs; those named preset are options of the command.
RUNS = {
    "resnet18, hard, deterministic": [*RESNET, "method=hard", DETERMINISTIC],
    "resnet18, ccl-forward, deterministic": [*RESNET, *FORWARD, DETERMINISTIC],
    "tf_efficientnet_lite0, finetune, deterministic": [*EFFICIENTNET, DETERMINISTIC],
    "resnet18, hard, deterministic, compiled": [*RESNET, "method=hard", DETERMINISTIC, "compile=true"],
    "tf_efficientnet_lite0, finetune, deterministic, compiled": [*EFFICIENTNET, DETERMINISTIC, "compile=true"],
    "resnet18, hard, default": [*RESNET, "method=hard"],
    "resnet18, ccl, default": [*RESNET, *CCL],
}
SMALL = ["backbone=test_resnet", "lr=.02", "short_side=32", "augment.crop=28", "ema=.9", "drop_rate=.2"]
SMOKE = {"test_resnet, ccl, deterministic": [*SMALL, *CCL, "method_settings.widths=[16, 8]", DETERMINISTIC]}
IMAGES = 500  # of which 400 are trained on: 12 batches
TIMES = ("seconds", "images_per_second")  # of the records of a history, which differ between any two runs
NOISE_FACTOR = 2.0  # a resumed run may differ from one left alone by this many times the noise


@dataclass(frozen=True)
class Options:
    """What is the same for all runs."""

    runs: dict[str, list[str]]
    data: str
    accelerator: str
    kills: int
    epochs: int
    seed: int
    limit: float  # seconds of a process


def new_run(settings: list[str], options: Options) -> list[str]:
    presets = [setting.removeprefix("preset=") for setting in settings if setting.startswith("preset=")]
    epochs = f"epochs={options.epochs}"
    sets = [f"--set={setting}" for setting in (*COMMON, epochs, *settings) if not setting.startswith("preset=")]
    preset = ["--preset", *presets] if presets else []
    return ["train", options.data, "--out", "run", "--accelerator", options.accelerator, "--quiet", *preset, *sets]


@contextmanager
def started(arguments: list[str], inside: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block."""
    process = start(arguments, inside)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_to_the_end(arguments: list[str], inside: Path, options: Options) -> None:
    with started(arguments, inside) as process:
        try:
            process.wait(options.limit)
        except subprocess.TimeoutExpired as error:
            raise SystemExit(f"not finished after {options.limit:g} s in {inside}") from error
        finish(process, inside)  # reports a failure


def left_alone(settings: list[str], inside: Path, options: Options) -> Path:
    inside.mkdir(parents=True)
    run_to_the_end(new_run(settings, options), inside, options)
    return inside / "run"


def wait_for_checkpoint(process: subprocess.Popen[bytes], run: Path, before: str, options: Options) -> None:
    """Wait until there is a newer checkpoint than ``before``."""
    end = time.monotonic() + options.limit
    while newest(run) == before:
        if process.poll() is not None:
            finish(process, run.parent)
            raise SystemExit(f"{run} ended before it was killed often enough")
        if time.monotonic() > end:
            raise SystemExit(f"no checkpoint after {options.limit:g} s in {run}")
        time.sleep(0.002)


def kill_and_resume(
    settings: list[str], inside: Path, options: Options, chance: random.Random, epoch_seconds: float
) -> tuple[Path, list[str]]:
    """Return the folder of the run, and the last checkpoint at each kill.

    A kill falls into the epoch after a new checkpoint: every process trains at least one epoch.
    """
    inside.mkdir(parents=True)
    run, fell = inside / "run", []
    arguments = new_run(settings, options)
    again = ["train", "--resume", "run", "--accelerator", options.accelerator, "--quiet"]
    for _ in range(options.kills):
        with started(arguments, inside) as process:
            wait_for_checkpoint(process, run, newest(run), options)
            time.sleep(chance.uniform(0.0, epoch_seconds))
            if process.poll() is not None:
                finish(process, inside)
                raise SystemExit(f"{run} ended before it was killed")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        fell.append(Path(newest(run)).name)
        arguments = again
    run_to_the_end(again, inside, options)
    return run, fell


def losses(run: Path) -> list[dict[str, float]]:
    """The losses and all other numbers of every epoch, without its times."""
    history = RunFolder(run).read_history()
    return [{name: value for name, value in record.items() if name not in TIMES} for record in history]


def difference(first: Path, second: Path) -> dict[str, Any]:
    """How two finished runs differ: which files in their bits, weights and losses by how much at most."""
    one, other = digests(first), digests(second)
    weights, other_weights = (load_file(run / "model.safetensors") for run in (first, second))
    history, other_history = losses(first), losses(second)
    if list(weights) != list(other_weights) or [list(r) for r in history] != [list(r) for r in other_history]:
        raise SystemExit(f"{first} and {second} have other weights or losses")
    of_losses = [abs(a[name] - b[name]) for a, b in zip(history, other_history, strict=True) for name in a]
    of_weights = [float((weights[n].double() - other_weights[n].double()).abs().max()) for n in weights]
    return {
        "identical": bool(one) and one == other and history == other_history,
        "same_sha256": {name: one[name] == other.get(name) for name in one},
        "weights": max(of_weights),
        "losses": max(of_losses),
    }


def compare(name: str, folder: Path, options: Options) -> dict[str, Any]:
    """Train a run alone and killed; a second time alone if it is not deterministic, or if the killed one differs."""
    settings = options.runs[name]
    deterministic = DETERMINISTIC in settings
    began = time.monotonic()
    alone = left_alone(settings, folder / "alone", options)
    epoch_seconds = min(record["seconds"] for record in RunFolder(alone).read_history())
    chance = random.Random(f"{options.seed} {name}")
    resumed, fell = kill_and_resume(settings, folder / "killed", options, chance, epoch_seconds)
    found = difference(alone, resumed)
    result = {
        "run": name, "deterministic": deterministic, "settings": settings, "kills": len(fell), "fell": fell,
        "epoch_seconds": epoch_seconds, "sha256": digests(alone), "resumed": found,
    }  # fmt: skip
    passed = found["identical"]
    if not (deterministic and passed):
        noise = difference(alone, left_alone(settings, folder / "again", options))
        within = {key: found[key] <= NOISE_FACTOR * noise[key] for key in ("weights", "losses")}
        result |= {"left_alone_twice": noise, "within_noise": within}
        passed = not deterministic and all(within.values())
    result |= {"passed": passed, "minutes": round((time.monotonic() - began) / 60, 2)}
    return result


def in_words(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['run']}: {result['error']}"
    found, noise = result["resumed"], result.get("left_alone_twice")
    words = f"{result['run']}: {result['kills']} kills, identical: {found['identical']}"
    words += f", weights differ by {found['weights']:.3g}, losses by {found['losses']:.3g}"
    if noise:
        words += f"; two runs left alone by {noise['weights']:.3g} and {noise['losses']:.3g}"
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--kills", type=int, default=2, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--parallel", type=int, default=2, help="kinds of runs at once")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a process")
    parser.add_argument("--fresh-caches", action="store_true", help="compile anew in every process")
    parser.add_argument("--only", nargs="*", help="some of the runs")
    parser.add_argument("--smoke", action="store_true", help="one run of a small network")
    parser.add_argument("--out", type=Path, default=Path("results/gpu_resume.json"))
    given = parser.parse_args()
    if given.kills < 1:
        parser.error("--kills must be 1 or more")
    epochs = max(EPOCHS, 2 * given.kills)  # until a kill, up to two epochs end
    # The processes start in other folders, where a relative PYTHONPATH would not be found.
    os.environ["PYTHONPATH"] = str(Path(cclnet.__file__).parents[1])
    if given.fresh_caches:
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    data = f"synthetic:images={IMAGES},size={32 if given.smoke else 96}"
    runs = SMOKE if given.smoke else RUNS
    runs = {name: runs[name] for name in given.only or runs}
    options = Options(runs, data, given.accelerator, given.kills, epochs, given.seed, given.limit)
    on_gpu = given.accelerator != "cpu" and torch.cuda.is_available()
    device = device_name(torch.device("cuda")) if on_gpu else ""
    began, results = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.parallel) as pool:
        folders = {name: Path(scratch) / str(number) for number, name in enumerate(runs)}
        started_runs = {pool.submit(compare, name, folders[name], options): name for name in runs}
        for done in as_completed(started_runs):
            error = done.exception()  # the results of the other runs are kept
            failed = {"run": started_runs[done], "error": str(error), "passed": False}
            results.append(done.result() if error is None else failed)
            print(in_words(results[-1]), flush=True)
            content = {
                **origin(device), "accelerator": given.accelerator, "seed": given.seed, "epochs": epochs,
                "steps": STEPS, "fresh_caches": given.fresh_caches,
                "data": data, "settings": COMMON, "compared": COMPARED, "noise_factor": NOISE_FACTOR,
                "minutes": round((time.monotonic() - began) / 60, 2),
                "runs": sorted(results, key=lambda result: list(runs).index(str(result["run"]))),
            }  # fmt: skip
            write_whole(given.out, json.dumps(content, indent=1) + "\n")
    if not all(result["passed"] for result in results):
        raise SystemExit("a resumed run differs from the one that was left alone")


if __name__ == "__main__":
    main()
