"""Is decoding into the cache as fast as the cores can decode, and does the search for duplicates scale?

    python benchmarks/data.py decode FOLDER [FOLDER ...]    # any data set that cclnet reads, e.g. WebP and JPEG
    python benchmarks/data.py duplicates

- decode: images per second into the cache, beside what a plain pool of processes gives that makes the same calls
  (read, decode, resize) and throws the pixels away; and beside one that also writes them, each process to a file of
  its own, with nothing to find them by. They take turns, so that a busy machine harms all alike;
  the processor time is reported too, which other programs disturb less than the time on the clock.
  Writing back to the disk happens beside the decoding; what of it is left at the end (the flush, until the disk has
  everything) is a matter of the disk and of how much fits into the page cache, and is reported by itself.
- again: seconds of the second run, which finds everything in the cache.
- duplicates: seconds to find all near pairs among 1,000 to 100,000 hashes.

Results go into results/data.json, section by section; those of other sections stay.
The loader has benchmarks/data_loader.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cclnet.data.decode import decode
from cclnet.data.duplicates import BITS, near_pairs
from cclnet.data.parallel import available_cores
from cclnet.data.pixels import image_size
from cclnet.data.resize import read_resized
from cclnet.data.sources import open_data
from cclnet.data.store import Content, PixelStore
from cclnet.data.table import ImageTable
from cclnet.files import write_whole

RESULTS = Path(__file__).parents[1] / "results" / "data.json"


def machine() -> dict[str, Any]:
    found = {"python": platform.python_version()}
    for package in ("cclnet", "numpy", "pillow", "simplejpeg"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
              if line.startswith("model name")]  # fmt: skip
    return {"cpu": models[0] if models else platform.processor(), "cores": available_cores(), "versions": found}


def decode_and_forget(paths: list[Path], short_side: int, folder: Path | None) -> None:
    """The bare decoder; with a folder, each process also writes the pixels to a file there."""
    if folder is None:
        for path in paths:
            read_resized(path, short_side)
    else:
        with (folder / str(os.getpid())).open("ab", buffering=0) as file:
            for path in paths:
                file.write(read_resized(path, short_side).data)


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def bare_seconds(paths: list[Path], short_side: int, workers: int, folder: Path | None = None) -> dict[str, float]:
    chunks = [paths[start : start + 32] for start in range(0, len(paths), 32)]
    before, began = processor_seconds(), time.perf_counter()
    # One thread a process, as in the cache: two processes with two threads each would only be in each other's way.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(partial(decode_and_forget, short_side=short_side, folder=folder), chunks))
    return {"decode": time.perf_counter() - began, "processor": processor_seconds() - before}


@contextmanager
def timed_flush() -> Iterator[list[float]]:
    """The seconds of each last save, when all is decoded and the disk is waited for."""
    seconds: list[float] = []
    save = PixelStore.save

    def timed(self: PixelStore, content: Content, finished: bool) -> None:
        began = time.perf_counter()
        save(self, content, finished)
        if finished:
            seconds.append(time.perf_counter() - began)

    PixelStore.save = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        PixelStore.save = save  # type: ignore[method-assign]


def cache_seconds(table: ImageTable, short_side: int, workers: int, folder: Path | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=folder) as scratch, timed_flush() as flush:
        before, began = processor_seconds(), time.perf_counter()
        images = decode(table, short_side, Path(scratch), workers, progress=False)
        total = time.perf_counter() - began
        processor = processor_seconds() - before
        began = time.perf_counter()
        decode(table, short_side, Path(scratch), workers, progress=False)
        again = time.perf_counter() - began
        size = int((images.heights.astype(np.int64) * images.widths).sum()) * 3
        return {
            "decode": total - flush[0], "processor": processor, "flush": flush[0], "again": again, "bytes": size
        }  # fmt: skip


def measure_decode(path: str, short_side: int, workers: int, rounds: int, folder: Path | None) -> dict[str, Any]:
    table = open_data(path)
    paths = [Path(image) for image in table.images]
    for file in paths:
        file.read_bytes()  # from here on files come from memory, for both
    bare, writing, cached = [], [], []
    for _ in range(rounds):
        bare.append(bare_seconds(paths, short_side, workers))
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            writing.append(bare_seconds(paths, short_side, workers, Path(scratch)))
        cached.append(cache_seconds(table, short_side, workers, folder))

    def median(rounds: list[dict[str, float]], what: str) -> float:
        return statistics.median(one[what] for one in rounds)

    def share(of: list[dict[str, float]], what: str) -> list[float]:
        return [round(b[what] / c[what], 3) for b, c in zip(of, cached, strict=True)]

    return {
        "images": len(table),
        "format": paths[0].suffix.lstrip("."),
        "first_image": "{1} x {0}".format(*image_size(paths[0])),
        "short_side": short_side,
        "workers": workers,
        "rounds": rounds,
        "bare_images_per_second": round(len(table) / median(bare, "decode")),
        "cache_images_per_second": round(len(table) / median(cached, "decode")),
        "share_of_bare": statistics.median(share(bare, "decode")),
        "share_of_bare_each_round": share(bare, "decode"),
        "share_of_bare_and_writing": statistics.median(share(writing, "decode")),
        "bare_processor_ms_per_image": round(1000 * median(bare, "processor") / len(table), 3),
        "writing_processor_ms_per_image": round(1000 * median(writing, "processor") / len(table), 3),
        "cache_processor_ms_per_image": round(1000 * median(cached, "processor") / len(table), 3),
        "share_of_bare_by_processor_time": statistics.median(share(bare, "processor")),
        "share_of_bare_and_writing_by_processor_time": statistics.median(share(writing, "processor")),
        "flush_seconds": round(median(cached, "flush"), 2),
        "flush_megabytes": round(cached[0]["bytes"] / 1e6),
        "again_seconds": round(median(cached, "again"), 3),
    }


def measure_duplicates() -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    found = []
    for count in (1_000, 10_000, 100_000):
        # Bits as uneven as those of real images: the coarse ones mostly agree.
        chance = 0.5 + 0.4 / (1 + np.arange(BITS)[None] / 8)
        bits = generator.random((count, BITS)) < chance
        bits[count // 2 : count // 2 + count // 100] = bits[: count // 100]
        hashes = np.packbits(bits, axis=1).view(np.uint64)
        began = time.perf_counter()
        pairs, _ = near_pairs(hashes)
        seconds = time.perf_counter() - began
        found.append({"hashes": count, "seconds": round(seconds, 2), "planted": count // 100, "pairs": len(pairs)})
    return found


def record(section: str, name: str, measured: object) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(section, {})[name] = {"machine": machine(), "measured": measured}
    RESULTS.parent.mkdir(exist_ok=True)
    write_whole(RESULTS, json.dumps(results, indent=2) + "\n")
    print(section, name, json.dumps(measured, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = parser.add_subparsers(dest="section", required=True)
    decoding = sections.add_parser("decode")
    decoding.add_argument("data", nargs="+")
    decoding.add_argument("--short-side", type=int, default=256)
    decoding.add_argument("--workers", type=int, default=available_cores())
    decoding.add_argument("--rounds", type=int, default=3)
    decoding.add_argument("--cache-dir", type=Path, help="where the caches are made for a while (default: /tmp)")
    decoding.add_argument(
        "--name", default="", help="put before the name of each result, e.g. what kind of disk it was"
    )
    sections.add_parser("duplicates")
    given = parser.parse_args()
    if given.section == "duplicates":
        record("duplicates", f"{available_cores()} cores", measure_duplicates())
        return
    for data in given.data:
        measured = measure_decode(data, given.short_side, given.workers, given.rounds, given.cache_dir)
        name = f"{measured['format']}, {measured['first_image']}, {given.workers} workers"
        record("decode", f"{given.name}, {name}" if given.name else name, measured)


if __name__ == "__main__":
    main()
