"""What the checksums cost: their share of an epoch, and of the time until a command has its model.

    python benchmarks/integrity.py                       # writes results/integrity.json
    python benchmarks/integrity.py --data FOLDER         # the epoch on real images

Both shares are given. Of CPU time: that in the checksums over that of the whole process, which a busy machine does not
change. Of the clock: starts with and without SHA256SUMS in turn, and the median of their ratios; the check runs in a
thread beside the reading of the file, so it costs less time than CPU time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cclnet.data.cache import DecodedImages
from cclnet.deploy.export import export
from cclnet.files import write_json
from cclnet.runs import checksums
from cclnet.runs.provenance import origin
from cclnet.settings import make_settings
from cclnet.training.loop import train

BACKBONE = "resnet18"
LIMIT = 0.02

# In a process of its own: the CPU time of everything, and of the checks in it, until the first result.
START = """
import json, sys, time
from cclnet.runs import checksums
spent = 0.0
digest = checksums.file_digest
def timed(*file):
    global spent
    began = time.thread_time()
    try:
        return digest(*file)
    finally:
        spent += time.thread_time() - began
checksums.file_digest = timed
what, folder, image = sys.argv[1:]
if what == "resume":
    from cclnet.training.loop import train
    class Stop(Exception):
        pass
    def stop(*step):
        raise Stop
    try:
        train(None, folder, accelerator="cpu", progress=False, on_step=stop)
    except Stop:
        pass
else:
    from pathlib import Path
    from cclnet.deploy import predict
    model = predict.open_model(folder, 1, "cpu", what)
    found = predict.predict(model, predict.gather([image]), progress=False)
    predict.write_csv(Path(image).with_suffix(".csv"), model, found)
print(json.dumps({"cpu": time.process_time(), "checks": spent}))
"""


def timed_method(kind: Any, name: str) -> tuple[Callable[[], float], Callable[[], None]]:
    """Count the CPU seconds in a method or function; returns how to read them, and how to stop counting."""
    own, spent = getattr(kind, name), [0.0]

    def counted(*arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return own(*arguments)
        finally:
            spent[0] += time.thread_time() - began

    setattr(kind, name, counted)
    return lambda: spent[0], lambda: setattr(kind, name, own)


def write_images(folder: Path, count: int, side: int) -> Path:
    """A folder per class, because images in memory go through no cache and have no checksums."""
    generator = np.random.default_rng(0)
    for number in range(count):
        place = folder / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png", compress_level=0)
    return folder


def epoch_cost(folder: Path, data: str, images: int, crop: int) -> dict[str, Any]:
    """Two epochs: the first checks the pixels of every image, each ends with the checksum of a checkpoint."""
    side = round(crop * 8 / 7)
    settings = make_settings({
        "data": data or str(write_images(folder / "images", images, side)), "epochs": 2, "batch_size": 32,
        "backbone": BACKBONE, "augment": {"crop": crop}, "short_side": side, "cache_dir": str(folder / "cache"),
        "resident": False, "split": {"val": 0.2},
    })  # fmt: skip
    pixels, stop_pixels = timed_method(DecodedImages, "check")
    files, stop_files = timed_method(checksums, "file_digest")
    ends = [time.process_time()]

    def first_step(epoch: int, step: int) -> None:
        if (epoch, step) == (1, 1):
            ends[0] = time.process_time()

    def read(*_: object) -> None:
        ends.append(time.process_time())

    train(settings, folder / "epochs", accelerator="cpu", progress=False, on_epoch=read, on_step=first_step)
    stop_pixels()
    stop_files()
    first, both = ends[1] - ends[0], ends[2] - ends[0]
    return {
        "data": Path(data).name if data else "noise, as PNG files",
        "images": images,
        "crop": crop,
        "backbone": BACKBONE,
        "first_epoch_cpu_seconds": round(first, 3),
        "two_epochs_cpu_seconds": round(both, 3),
        "share_of_pixels_in_first_epoch": round(pixels() / first, 6),
        "share_of_files_in_two_epochs": round(files() / both, 6),
    }


def start(what: str, folder: Path, image: Path) -> tuple[float, float, float]:
    """CPU seconds, CPU seconds of the checks, and wall-clock seconds of a start."""
    began = time.perf_counter()
    words = [sys.executable, "-c", START, what, str(folder), str(image)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    wall, read = time.perf_counter() - began, json.loads(done.stdout.splitlines()[-1])
    return read["cpu"], read["checks"], wall


def start_cost(what: str, folder: Path, image: Path, repeats: int) -> dict[str, float]:
    sums = (folder / checksums.FILE_NAME, folder / "checkpoints" / checksums.FILE_NAME)
    contents = {path: path.read_bytes() for path in sums if path.exists()}
    covered, bare = [], []
    for _ in range(repeats):
        covered.append(start(what, folder, image))
        for path in contents:
            path.unlink()
        bare.append(start(what, folder, image))
        for path, content in contents.items():
            path.write_bytes(content)
    cpu, checks, walls = (np.array(column) for column in zip(*covered, strict=True))
    without = np.array([wall for *_, wall in bare])
    return {
        "starts": 2 * repeats,
        "cpu_seconds": round(float(np.median(cpu)), 3),
        "checks_cpu_seconds": round(float(np.median(checks)), 4),
        "share_of_cpu": round(float(np.median(checks / cpu)), 5),
        "wall_seconds": round(float(np.median(walls)), 3),
        "wall_seconds_without": round(float(np.median(without)), 3),
        "share_of_wall": round(float(np.median(walls / without)) - 1, 4),
    }


def speeds() -> dict[str, float]:
    """Gigabytes per second of one core."""
    content, found = bytes(np.random.default_rng(0).integers(0, 256, 2**27, dtype=np.uint8)), {}
    for name, own in {"sha256": hashlib.sha256, "crc32": zlib.crc32, "blake2b": hashlib.blake2b}.items():
        began = time.process_time()
        own(content)
        found[name] = round(len(content) / 1e9 / (time.process_time() - began), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="a folder of images; default: files of noise")
    parser.add_argument("--images", type=int, default=800, help="how many the data has")
    parser.add_argument("--crop", type=int, default=112)
    parser.add_argument("--repeats", type=int, default=9, help="starts with and without checksums, each")
    parser.add_argument("--out", type=Path, default=Path("results/integrity.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        epochs = epoch_cost(folder, options.data, options.images, options.crop)
        small = make_settings({
            "data": "synthetic:images=64,size=32", "epochs": 2, "batch_size": 16, "backbone": BACKBONE,
            "short_side": 32, "augment": {"crop": 32}, "cache_dir": str(folder / "cache"), "split": {"val": 0.25},
        })  # fmt: skip
        run = train(small, folder / "run", accelerator="cpu", progress=False)
        unfinished = train(small, folder / "unfinished", accelerator="cpu", progress=False)
        checksums.remove_covered(max((unfinished / "checkpoints").glob("*.pt")))  # so that an epoch is left
        onnx = export(run, "onnx", folder / "onnx")
        image = folder / "image.png"
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(image)
        starts = {
            "predict, torch": start_cost("torch", run, image, options.repeats),
            "predict, onnx": start_cost("onnx", onnx, image, options.repeats),
            "train --resume": start_cost("resume", unfinished, image, options.repeats),
        }
        megabytes = {path.name: round(path.stat().st_size / 1e6, 1) for path in (run / "model.safetensors",
                     onnx / "model.onnx", max((run / "checkpoints").glob("*.pt")))}  # fmt: skip
    result = {**origin(), "limit": LIMIT, "gigabytes_per_second": speeds(), "megabytes": megabytes,
              "epochs": epochs, "starts": starts}  # fmt: skip
    write_json(options.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
