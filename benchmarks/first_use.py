"""How long does a new user wait: for help, for an error, for the expected time of a long run, for a first report?

    python benchmarks/first_use.py                     # this source tree: the entry "after"
    python benchmarks/first_use.py --source OTHER      # an older source tree: the entry "before"

Every command runs in a new process, as a user starts it, on the CPU. Reported are the seconds on the clock and the
processor time, which other programs on the machine disturb less, and the load of the machine at the start. Wrong
settings are measured three times (median), the others once.

- expected_time: from the start of ``cclnet train`` on 17,000 JPEG files of 600 x 450 pixels, with default settings and
  an empty cache, to the line that says how long the run will take. The run is then stopped. An older version that says
  nothing within LIMIT seconds has null.
- pretrained_without_a_connection: the hub's address is one at which nothing listens.
- small_run: a whole run of two epochs on 64 small images, with its report.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cclnet.files import write_whole
from cclnet.runs.provenance import Commit, versions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "first_use.json"
IMAGES = 17_000
LIMIT = 120.0  # seconds to wait for the expected time
ERRORS = {
    "help": ["train", "--help"],
    "unknown_setting": ["train", "X", "--set", "foo=1"],
    "unknown_method": ["train", "synthetic", "--method", "clc", "--out", "run"],
    "unknown_backbone": ["train", "synthetic", "--backbone", "resnt18", "--out", "run"],
    "pretrained_without_a_connection": ["train", "synthetic", "--pretrained", "--backbone", "resnet18", "--out", "run"],
}
SMALL = ["train", "synthetic:images=64,size=32", "--short-side", "32", "--set", "augment.crop=28", "--backbone",
         "test_resnet", "--epochs", "2", "--batch-size", "16", "--accelerator", "cpu", "--quiet"]  # fmt: skip


def write_images(folder: Path) -> None:
    """Two classes of 8,500 JPEG files. There are 60 different pictures; trailing bytes make every file its own."""
    generator, pictures = np.random.default_rng(0), []
    for _ in range(60):
        coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize((600, 450), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
        pictures.append(file.getvalue())
    for k, name in enumerate(("normal", "pneumonia")):
        (folder / name).mkdir(parents=True)
        for i in range(IMAGES // 2):
            content = pictures[(7 * i + 30 * k) % 60] + i.to_bytes(4, "big") + bytes([k])
            (folder / name / f"{name}_{i:05d}.jpg").write_bytes(content)


def environment(source: Path) -> dict[str, str]:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "COLUMNS": "200"}
    return {**os.environ, **nowhere, "PYTHONPATH": str(source / "src")}


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def timed(source: Path, words: list[str], folder: Path) -> dict[str, float]:
    before, began = processor_seconds(), time.perf_counter()
    command = [sys.executable, "-m", "cclnet", *words]
    done = subprocess.run(command, cwd=folder, env=environment(source), capture_output=True, check=False)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "processor_seconds": processor_seconds() - before, "exit_code": done.returncode}


def expected_time(source: Path, folder: Path) -> dict[str, Any]:
    """Start a long run, and wait for the line with its expected time."""
    command = [sys.executable, "-m", "cclnet", "train", "many", "--out", "long", "--accelerator", "cpu", "--cache-dir",
               "cache"]  # fmt: skip
    before, began = processor_seconds(), time.perf_counter()
    output = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=environment(source), stdout=output, stderr=subprocess.STDOUT,
                               text=True, start_new_session=True)  # fmt: skip
    found: dict[str, Any] = {"seconds": None}

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if "expected time" in line and found["seconds"] is None:
                found.update(seconds=time.perf_counter() - began, line=line.strip())
                process.send_signal(signal.SIGTERM)

    reader = threading.Thread(target=read)
    reader.start()
    reader.join(LIMIT)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait()
    reader.join()
    return {**found, "processor_seconds": processor_seconds() - before}


def commit_of(source: Path) -> Commit:
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(source), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return Commit(git("rev-parse", "HEAD"), not git("status", "--porcelain", "--untracked-files=no"))


def measure(source: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"commit": asdict(commit_of(source)), "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_images(folder / "many")
        timed(source, ["--version"], folder)  # fills the file cache
        for name, words in ERRORS.items():
            repeats = [timed(source, words, folder) for _ in range(3 if name in ("help", "unknown_setting") else 1)]
            found[name] = {key: round(statistics.median(one[key] for one in repeats), 2) for key in repeats[0]}
        found["small_run"] = {key: round(value, 2) for key, value in timed(source, SMALL, folder).items()}
        long = expected_time(source, folder)
        found["expected_time"] = {key: round(v, 1) if isinstance(v, float) else v for key, v in long.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="An older source tree to measure.")
    source = parser.parse_args().source
    content = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    content["after" if source is None else "before"] = measure(ROOT if source is None else source)
    content |= {"device": f"CPU, {os.cpu_count()} cores", "versions": versions(), "commit": asdict(commit_of(ROOT))}
    write_whole(RESULTS, json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
