"""Is decoding into the cache as fast as the cores can decode, and does the search for duplicates scale?

    python benchmarks/data.py decode FOLDER [FOLDER ...]    # any data sets that cclnet reads, e.g. WebP and JPEG
    python benchmarks/data.py duplicates

- decode: images per second into the cache, beside bare loops over the same files: as many processes, one thread each,
  that call a library and throw the pixels away. The decoder: reading the file and decoding it whole (simplejpeg for
  JPEG where it is installed, else Pillow). With resize: also torch's antialiased resize to the short side, where the
  files have another one. With writing: each process also writes the pixels to a file of its own, with nothing to find
  them by. Pillow: the decoder without simplejpeg. They take turns, so that a busy machine harms all alike; the
  processor time is reported too, which other programs disturb less than the time on the clock.
  Writing back to the disk happens beside the decoding; what of it is left at the end (the flush, until the disk has
  everything) is a matter of the disk and of how much fits into the page cache, and is reported by itself.
- again: seconds of the second run, which finds everything in the cache.
- duplicates: seconds to find all near pairs among 1,000 to 100,000 hashes.

Results go into results/data.json, section by section; those of other sections stay. The speeds of decoding are also
written as a table, results/data.md.
The loader has benchmarks/data_loader.py.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from cclnet.data.cache import decode
from cclnet.data.duplicates import BITS, near_pairs
from cclnet.data.image_io import image_size, resized_shape
from cclnet.data.parallel import available_cores
from cclnet.data.sources import open_data
from cclnet.data.table import ImageTable
from cclnet.files import write_whole

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

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


@dataclass(frozen=True)
class BareLoop:
    """What each process of a bare loop does with each file. With a folder it also writes the pixels to a file there."""

    fast: bool = True  # simplejpeg for JPEG, if it is there
    short_side: int | None = None
    folder: Path | None = None

    def __call__(self, paths: list[Path]) -> None:
        sink = None if self.folder is None else (self.folder / str(os.getpid())).open("ab", buffering=0)
        for path in paths:
            pixels = self.resized(self.decoded(path))
            if sink is not None:
                sink.write(pixels.reshape(-1).data)
        if sink is not None:
            sink.close()

    def decoded(self, path: Path) -> npt.NDArray[np.uint8]:
        content = path.read_bytes()
        if self.fast and simplejpeg is not None and content.startswith(b"\xff\xd8\xff"):
            return simplejpeg.decode_jpeg(content)
        image = Image.open(io.BytesIO(content))
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))

    def resized(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        size = None if self.short_side is None else resized_shape(*pixels.shape[:2], self.short_side)
        if size is None or size == pixels.shape[:2]:
            return pixels
        planes = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)[None]
        made = torch.nn.functional.interpolate(planes, size=size, mode="bicubic", antialias=True)
        return made[0].permute(1, 2, 0).contiguous().numpy()


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def bare_seconds(paths: list[Path], workers: int, loop: BareLoop) -> dict[str, float]:
    chunks = [paths[start : start + 32] for start in range(0, len(paths), 32)]
    before, began = processor_seconds(), time.perf_counter()
    # One thread a process, as in the cache: two processes with two threads each would only be in each other's way.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(loop, chunks))
    return {"decode": time.perf_counter() - began, "processor": processor_seconds() - before}


def cache_seconds(table: ImageTable, short_side: int, workers: int, folder: Path | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        before, began = processor_seconds(), time.perf_counter()
        images = decode(table, short_side, Path(scratch), workers, progress=False)
        total = time.perf_counter() - began
        processor = processor_seconds() - before
        began = time.perf_counter()
        decode(table, short_side, Path(scratch), workers, progress=False)
        again = time.perf_counter() - began
        size = int((images.heights.astype(np.int64) * images.widths).sum()) * 3
        return {
            "decode": total, "processor": processor, "flush": 0.0,  # each shard is flushed by its worker
            "again": again, "bytes": size
        }  # fmt: skip


def measure_decode(
    table: ImageTable, short_side: int, workers: int, rounds: int, folder: Path | None
) -> dict[str, Any]:
    paths = [Path(image) for image in table.images]
    for file in paths:
        file.read_bytes()  # from here on files come from memory, for all
    height, width = image_size(paths[0])
    jpeg = paths[0].read_bytes().startswith(b"\xff\xd8\xff")
    loops = {"decoder": BareLoop()}
    if min(height, width) != short_side:
        loops["decoder_and_resize"] = BareLoop(short_side=short_side)
    if jpeg and simplejpeg is not None:
        loops["pillow"] = BareLoop(fast=False)
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in (*loops, "writing", "cache")}
    for _ in range(rounds):
        for name, loop in loops.items():
            taken[name].append(bare_seconds(paths, workers, loop))
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            loop = BareLoop(short_side=short_side, folder=Path(scratch))
            taken["writing"].append(bare_seconds(paths, workers, loop))
        taken["cache"].append(cache_seconds(table, short_side, workers, folder))
    return {
        "images": len(table),
        "format": paths[0].suffix.lstrip("."),
        "first_image": f"{width} x {height}",
        "short_side": short_side,
        "workers": workers,
        "rounds": rounds,
        "decoder": "simplejpeg" if jpeg and simplejpeg is not None else "Pillow",
        "images_per_second": {name: round(len(table) / median(own, "decode")) for name, own in taken.items()},
        "processor_ms_per_image": {
            name: round(1000 * median(own, "processor") / len(table), 3) for name, own in taken.items()
        },
        "cache_as_share_of": {name: shares(taken[name], taken["cache"]) for name in (*loops, "writing")},
        "flush_seconds": round(median(taken["cache"], "flush"), 2),
        "flush_megabytes": round(taken["cache"][0]["bytes"] / 1e6),
        "again_seconds": round(median(taken["cache"], "again"), 3),
    }


def median(rounds: list[dict[str, float]], what: str) -> float:
    return statistics.median(one[what] for one in rounds)


def shares(bare: list[dict[str, float]], cache: list[dict[str, float]]) -> dict[str, Any]:
    """The speed of the cache as a share of that of a bare loop: on the clock, and in processor time."""
    each = {what: [b[what] / c[what] for b, c in zip(bare, cache, strict=True)] for what in ("decode", "processor")}
    return {
        "clock": round(statistics.median(each["decode"]), 3),
        "processor": round(statistics.median(each["processor"]), 3),
        "clock_each_round": [round(share, 3) for share in each["decode"]],
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
    write_whole(RESULTS.with_suffix(".md"), decode_table(results.get("decode", {})))
    print(section, name, json.dumps(measured, indent=2))


def decode_table(recorded: Mapping[str, Mapping[str, Any]]) -> str:
    """Images per second of each set, and the cache as a share of the bare loop that does the same to the pixels."""
    heads = ("Files", "Decoder", "… and resize", "… and writing", "Into the cache", "Share", "Share of processor time")
    lines = [heads, ("---", *["--:"] * (len(heads) - 1))]
    for name, entry in recorded.items():
        measured = entry["measured"]
        if "cache_as_share_of" in measured:
            speed, share = measured["images_per_second"], measured["cache_as_share_of"]
            same = share.get("decoder_and_resize", share["decoder"])
            resized = speed.get("decoder_and_resize")
            lines.append(
                (f"{name} ({measured['decoder']})", f"{speed['decoder']:,}", f"{resized:,}" if resized else "–",
                 f"{speed['writing']:,}", f"{speed['cache']:,}", f"{same['clock']:.0%}", f"{same['processor']:.0%}")
            )  # fmt: skip
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = parser.add_subparsers(dest="section", required=True)
    decoding = sections.add_parser("decode")
    decoding.add_argument("data", nargs="+")
    decoding.add_argument("--short-side", type=int, default=256)
    decoding.add_argument("--workers", type=int, default=available_cores())
    decoding.add_argument("--rounds", type=int, default=3)
    decoding.add_argument("--images", type=int, help="only so many of each set (default: all)")
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
        table = open_data(data)
        table = table.select(np.arange(min(given.images or len(table), len(table))))
        measured = measure_decode(table, given.short_side, given.workers, given.rounds, given.cache_dir)
        name = f"{measured['format']}, {measured['first_image']}, {given.workers} workers"
        record("decode", f"{given.name}, {name}" if given.name else name, measured)


if __name__ == "__main__":
    main()
