"""What grows with the data and with the number of processes.

    python benchmarks/scale.py epochs       # training epochs of 1,000 to 100,000 images: results/scale_cpu.json
    python benchmarks/scale.py images       # 10,000 to 1,000,000 images in tar files: results/scale_images.json
    python benchmarks/scale.py processes    # 1 to 8 processes with gloo: results/scale_processes.json
    python benchmarks/scale.py tables       # write the tables of docs/scale.md from these files

Epochs: pixels come from a sparse file on the disk, so that the size of the set is that of a real one and no disk is
measured; everything else is what `cclnet train` does: order, crops, augmentation, forward, backward, update,
checkpoint.

Images: drawn JPEG files of 32 pixels in tar files, then what a run does with them, in a new process for each size:
table, split, decoding into the cache, audit, and loading one epoch. Memory and processor time are those of the process
and its workers together, sampled from outside; memory is without the page cache.

Processes: the same training by one process and by several; and what their messages cost.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from cclnet.data.audit import audit
from cclnet.data.cache import DecodedImages, decode
from cclnet.data.loader import Loader
from cclnet.data.sources import open_data
from cclnet.data.split import make_split
from cclnet.data.table import ImageTable
from cclnet.files import write_whole
from cclnet.runs.folder import RunFolder
from cclnet.runs.provenance import origin
from cclnet.settings import AugmentSettings, Settings, make_settings

if TYPE_CHECKING:  # imported where needed, because the memory of the stages without training is measured
    from cclnet.training.setup import PreparedData

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "scale.md"
SIDE, IN_TAR, DRAWN = 32, 10_000, 500  # pixels of a drawn image, images in a tar file, images drawn at a time
STAGES = ("start", "table", "split", "cache", "audit", "epoch")  # start: of Python and its imports

CLASSES = tuple("ABCDEFG")


def sparse_data(count: int, side: int, folder: Path) -> PreparedData:
    """``count`` training images and a handful for validation, in a sparse file."""
    from cclnet.training.setup import PreparedData

    total, size = count + 64, 3 * side * side
    path = folder / f"{count}.pixels"
    with path.open("wb") as file:
        file.truncate(total * size)
    pixels = np.memmap(path, dtype=np.uint8, mode="r")
    sides = np.full(total, side, dtype=np.int32)
    images = DecodedImages(pixels, np.arange(total, dtype=np.int64) * size, sides, sides)
    labels = np.random.default_rng(0).integers(len(CLASSES), size=total)
    names = [str(i) for i in range(total)]
    table = ImageTable("sparse", path, names, [path] * total, labels, CLASSES)
    parts = np.array(["train"] * count + ["val"] * 64)
    return PreparedData(table, parts, images)


def anonymous_megabytes() -> float:
    """Memory of this process that is not page cache."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def one_size(settings: Settings, count: int, folder: Path) -> dict[str, Any]:
    from cclnet.training.loop import Training
    from cclnet.training.setup import make_fabric

    fabric = make_fabric(settings)
    run = folder / f"run-{count}"
    run.mkdir()
    training = Training(settings, RunFolder(run), fabric, sparse_data(count, settings.short_side, folder))
    began = time.monotonic()
    training.step(next(iter(training.loader.epoch(0))))  # warm: compiling and first allocations are not the data's cost
    training.fit(progress=False)
    wall = time.monotonic() - began
    last = training.records[-1]
    return {
        "images": count,
        "epoch_seconds": last["seconds"],
        "microseconds_an_image": 1e6 / last["images_per_second"],
        "wall_seconds_with_checkpoint": wall,
        "anonymous_megabytes": anonymous_megabytes(),
    }


def write(name: str, content: dict[str, Any]) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    write_whole(RESULTS / name, json.dumps({**origin(device), "seed": 0, **content}, indent=1) + "\n")


def measure_epochs(given: argparse.Namespace) -> None:
    settings = make_settings(
        {
            "backbone": "test_resnet",
            "short_side": 16 * 8 // 7,
            "batch_size": 128,
            "augment": {"crop": 16},
            "epochs": 1,
            "lr": 0.001,
        }
    )
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for count in given.sizes or [1_000, 10_000, 100_000]:
            rows.append(one_size(settings, count, Path(scratch)))
            print(rows[-1], flush=True)
    write(f"scale_{'cuda' if torch.cuda.is_available() else 'cpu'}.json", {"rows": rows})


# Images in tar files.


def draw_tars(count: int, folder: Path) -> None:
    """``count`` different pictures of seven classes, as train-0000.tar, …"""
    import simplejpeg

    generator = np.random.default_rng(0)
    colours = generator.integers(64, 192, (len(CLASSES), 1, 1, 3))
    number = 0
    for tar_number in range(-(-count // IN_TAR)):
        with tarfile.open(folder / f"train-{tar_number:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(min(IN_TAR, count - number) // DRAWN):
                labels = generator.integers(len(CLASSES), size=DRAWN)
                coarse = colours[labels] + generator.integers(-60, 60, (DRAWN, 8, 8, 3))
                pictures = coarse.astype(np.uint8).repeat(SIDE // 8, axis=1).repeat(SIDE // 8, axis=2)
                for picture, label in zip(pictures, labels.tolist(), strict=True):
                    jpeg = simplejpeg.encode_jpeg(picture, quality=90)
                    for suffix, content in (("jpg", jpeg), ("cls", b"%d" % label)):
                        info = tarfile.TarInfo(f"{number:08d}.{suffix}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
                    number += 1
                tar.members.clear()  # type: ignore[attr-defined]


def all_stages(folder: Path, workers: int) -> None:
    """What a run does with a set, in this process; one line of JSON per stage."""
    began = time.perf_counter()

    def done(**more: Any) -> None:
        nonlocal began
        print(json.dumps({"seconds": time.perf_counter() - began, **more}), flush=True)
        began = time.perf_counter()

    done()
    table = open_data(folder / "set")
    done(images=len(table))
    splits = make_split(table)
    done()
    cache = folder / "cache"
    images = decode(table, SIDE, cache, workers, progress=False)
    done(shards=len(list(cache.rglob("shard-*.bin"))))
    found = audit(table, None, SIDE, cache, workers, progress=False)
    done(findings=len(found.findings))
    rows = np.flatnonzero(splits == "train")
    loader = Loader(images, table.labels, rows, batch_size=128, augment=AugmentSettings(crop=28), resident=False)
    seen = sum(len(batch.rows) for batch in loader.epoch(0))
    done(images=seen)


@dataclass
class Watch:
    """What a process and its descendants take, sampled from outside."""

    pid: int
    cpu: dict[int, float] = field(default_factory=dict)  # seconds of each process, also of those that have ended

    def sample(self) -> tuple[float, float]:
        """Return megabytes without files, and with the pages of mapped files. Pages that several processes share are
        divided between them. Also adds up the processor time."""
        own = with_files = 0.0
        pids = [self.pid]
        while pids:
            current = pids.pop()
            try:
                text = Path(f"/proc/{current}/smaps_rollup").read_text()
                ticks = Path(f"/proc/{current}/stat").read_text().rpartition(")")[2].split()[11:13]
                pids += map(int, Path(f"/proc/{current}/task/{current}/children").read_text().split())
            except OSError:
                continue  # it has ended
            found = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
            own += int(found.get("Pss_Anon", 0)) / 1024
            with_files += int(found.get("Pss", 0)) / 1024
            self.cpu[current] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return own, with_files


def one_set(count: int, folder: Path, workers: int) -> dict[str, Any]:
    (folder / "set").mkdir()
    draw_tars(count, folder / "set")
    log, last = folder / "log", len(STAGES)
    peaks, spent, with_files = [0.0] * (last + 1), [0.0] * (last + 1), 0.0
    with log.open("w") as out:
        command = [sys.executable, __file__, "stages", "--folder", str(folder), "--workers", str(workers)]
        process = subprocess.Popen(command, stdout=out)
        watch, before = Watch(process.pid), 0.0
        while process.poll() is None:
            (own, all_of_it), stage = watch.sample(), log.read_text().count("\n")
            peaks[stage], with_files = max(peaks[stage], own), max(with_files, all_of_it)
            total = sum(watch.cpu.values())
            spent[stage], before = spent[stage] + total - before, total
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"the stages ended with code {process.returncode}")
    stages = dict(zip(STAGES, map(json.loads, log.read_text().splitlines()), strict=True))
    for name, peak, seconds in zip(STAGES, peaks, spent, strict=False):
        stages[name] |= {"peak_megabytes": peak, "processor_seconds": seconds}
    return {
        "images": count, "stages": stages, "peak_megabytes": max(peaks),
        "peak_megabytes_with_mapped_files": with_files,
        "set_bytes": sum(path.stat().st_size for path in (folder / "set").iterdir()),
        "cache_bytes": sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file()),
    }  # fmt: skip


def measure_images(given: argparse.Namespace) -> None:
    """Measure each size; sizes that are not given are kept in the file."""
    sizes = given.sizes or [10_000, 100_000, 1_000_000]
    file = RESULTS / "scale_images.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = [row for row in rows if row["images"] not in sizes]
    for count in sizes:
        with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
            rows.append(one_set(count, Path(scratch), given.workers) | {"origin": origin()})
        rows.sort(key=lambda row: row["images"])
        print(rows[-1], flush=True)
        write(file.name, {"settings": {"side": SIDE, "workers": given.workers}, "rows": rows})


# Processes.

TRAINED = ["data=synthetic:images=160,size=32", "short_side=32", "backbone=test_resnet", "epochs=3", "batch_size=32",
           "lr=.02", "split.val=.2", "augment.crop=28", "precision=64", "batch_norm=frozen",
           "method=ccl-confusion"]  # fmt: skip
MESSAGES = {"gradients of ResNet-18": 11_180_103 * 4, "moments of 2,048 features": (7 + 2048 + 1) ** 2 * 8}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def torchrun(processes: int, *words: str) -> list[str]:
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), *rendezvous]
    return [sys.executable, *launcher, *words]


def measure_messages(given: argparse.Namespace) -> None:
    """Seconds of an all-reduce of each message, on rank 0 as JSON; run by torchrun."""
    dist.init_process_group("gloo")
    seconds: dict[str, float] = {}
    for name, size in MESSAGES.items():
        message, taken = torch.zeros(size // 8, dtype=torch.float64), []
        for _ in range(6):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(message)
            taken.append(time.perf_counter() - began)
        seconds[name] = statistics.median(taken[1:])
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def measure_processes(given: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        histories: dict[int, list[dict[str, float]]] = {}
        for processes in given.sizes or [1, 2, 4, 8]:
            words = ["-m", "cclnet", "train", "--accelerator", "cpu", "--quiet", "--out", f"run{processes}",
                     *(f"--set={setting}" for setting in TRAINED)]  # fmt: skip
            command = [sys.executable, *words] if processes == 1 else torchrun(processes, *words)
            subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
            lines = (Path(scratch) / f"run{processes}" / "metrics.jsonl").read_text().splitlines()
            histories[processes] = [json.loads(line) for line in lines]
            terms = ("loss", "cross_entropy", "kl", "softness", "structure", "val_loss")
            pairs = zip(histories[1], histories[processes], strict=True)
            row: dict[str, Any] = {
                "processes": processes,
                "largest_difference": max(abs(a[term] - b[term]) for a, b in pairs for term in terms),
            }
            if processes > 1:
                done = subprocess.run(torchrun(processes, __file__, "messages"), stdout=subprocess.PIPE, check=True)
                row["seconds"] = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            print(row, flush=True)
    write("scale_processes.json", {"settings": {"training": TRAINED, "bytes": MESSAGES}, "rows": rows})


# The model of many GPUs, and the tables.

# Bytes per second of one GPU in each direction, as sold, and the share of it that all-reduces usually reach.
LINKS = {
    "8 GPUs, NVLink 450 GB/s": (8, 450e9),
    "64 GPUs, InfiniBand 50 GB/s per GPU": (64, 50e9),
    "64 GPUs, Ethernet 100 Gbit/s per node of 8": (64, 12.5e9 / 8),
}
REACHED, LATENCY = 0.7, 20e-6  # share of the bandwidth; seconds of one collective beside its bytes


def modelled_rows(backbone: str, rate: float, batch: int = 128, steps_per_epoch: int = 100) -> list[list[str]]:
    """Bytes per step and efficiency of a backbone, before and now. Nothing overlaps: with DDP most of the gradients are
    sent during the backward pass, so the true efficiency of the gradients is higher."""
    from cclnet.network import CCLNet

    network = CCLNet(backbone, 7, "ccl-centroid", pretrained=False)
    gradients = 4 * sum(p.numel() for p in network.parameters())
    width = 7 + network.method.classes.in_features + 1
    moments, compute = width * width * 8, batch / rate
    rows = []
    for link, (gpus, bandwidth) in LINKS.items():

        def seconds(reduced: float, sent: float, collectives: int, gpus: int = gpus, speed: float = bandwidth) -> float:
            ring = 2 * (gpus - 1) / gpus * reduced + sent  # bytes through the link of one GPU
            return ring / (REACHED * speed) + collectives * LATENCY

        before = seconds(gradients + moments, moments, 4)
        now = seconds(gradients + moments / steps_per_epoch, 0.0, 2)
        efficiency = [f"{compute / (compute + spent):.0%}" for spent in (before, now)]
        megabytes = [f"{size / 1e6:.1f}" for size in (gradients + 2 * moments, gradients + moments / steps_per_epoch)]
        rows.append([backbone, link, *megabytes, *efficiency])
    return rows


def markdown(columns: list[str], rows: list[list[str]], numbers: int) -> str:
    """A table whose columns from ``numbers`` on are aligned to the right."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    rule = "|".join("---" if i < numbers else "--:" for i in range(len(columns)))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / name).read_text())["rows"]


def images_table() -> str:
    rows = [
        [f"{row['images']:,}", *(f"{row['stages'][stage]['processor_seconds']:.1f}" for stage in STAGES[1:]),
         f"{sum(row['stages'][stage]['processor_seconds'] for stage in STAGES[1:]) / row['images'] * 1e6:.0f}",
         f"{row['peak_megabytes']:,.0f}", f"{row['stages']['cache']['shards']:,}"]
        for row in rows_of("scale_images.json")
    ]  # fmt: skip
    return markdown(
        ["images", *(f"{stage}, s" for stage in STAGES[1:]), "µs an image", "memory, MB", "shards"], rows, 0
    )


def processes_table() -> str:
    rows = [
        [str(row["processes"]), f"{row['largest_difference']:.0e}" if row["largest_difference"] else "0",
         *(f"{1e3 * row['seconds'][name]:.0f}" if "seconds" in row else "–" for name in MESSAGES)]
        for row in rows_of("scale_processes.json")
    ]  # fmt: skip
    return markdown(["processes", "largest difference", *(f"{name}, ms" for name in MESSAGES)], rows, 0)


def model_table() -> str:
    rows = [row for speed in rows_of("benchmark_h200.json") for row in modelled_rows(speed["backbone"], speed["ccl"])]
    return markdown(["backbone", "link", "MB per step, before", "now", "efficiency, before", "now"], rows, 2)


def epochs_table() -> str:
    rows = [
        [f"{row['images']:,}", f"{row['epoch_seconds']:.1f}", f"{row['microseconds_an_image']:.0f}",
         f"{row['anonymous_megabytes']:.0f}"]
        for row in rows_of("scale_cpu.json")
    ]  # fmt: skip
    return markdown(["images", "seconds an epoch", "µs an image", "memory beside the page cache, MB"], rows, 0)


TABLES = {"images": images_table, "scale": epochs_table, "processes": processes_table, "model": model_table}


def write_tables(given: argparse.Namespace) -> None:
    """Put every table into docs/scale.md."""
    for name, make in TABLES.items():
        text, table = PAGE.read_text(encoding="utf-8"), make()
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"docs/scale.md has no place for the table {name}")
        write_whole(PAGE, f"{before}{start}{table}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {
        "epochs": measure_epochs, "images": measure_images, "processes": measure_processes, "tables": write_tables,
        "stages": lambda given: all_stages(given.folder, given.workers), "messages": measure_messages,
    }  # fmt: skip
    parser.add_argument("what", choices=commands)
    parser.add_argument("--sizes", type=int, nargs="+", help="images or processes")
    parser.add_argument("--folder", type=Path, help="for the files of the benchmark; it needs 8 GB")
    parser.add_argument("--workers", type=int, default=1, help="processes that decode")
    given = parser.parse_args()
    commands[given.what](given)


if __name__ == "__main__":
    main()
