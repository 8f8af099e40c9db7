"""Does loading keep up with the network, does its memory stay constant, does its time grow with the images alone?

    python benchmarks/data_loader.py                 # writes results/data_loader_cpu.json or _cuda.json

- throughput: batches loaded and augmented, resident and streamed, in images per second, beside what a ResNet-18
  trains on the same device and what a torchvision v2 DataLoader over the same decoded pixels gives;
- memory: the most anonymous memory (what is not page cache) that streaming takes, from 1,000 to 100,000 images;
- growth: the time of one streamed epoch, from 1,000 to 100,000 small images.

Pixels are random for the throughput; for the other two they are a sparse file, so that no disk is measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from cclnet.data.augment import augment
from cclnet.data.cache import DecodedImages
from cclnet.data.loader import Loader
from cclnet.data.parallel import available_cores
from cclnet.files import write_whole
from cclnet.runs.provenance import versions
from cclnet.settings import AugmentSettings

BATCH = 128
CLASSES = 7
MEAN, STD = (0.76, 0.55, 0.57), (0.14, 0.15, 0.17)


def flat_images(path: Path, count: int, height: int, width: int, random: bool) -> DecodedImages:
    """``count`` images in a memory-mapped file, of noise or of nothing (a sparse file)."""
    size = 3 * height * width
    with path.open("wb") as file:
        if random:
            generator = np.random.default_rng(0)
            for _ in range(count):
                file.write(generator.bytes(size))
        else:
            file.truncate(count * size)
    pixels = np.memmap(path, dtype=np.uint8, mode="r")
    sides = np.full(count, height, dtype=np.int32), np.full(count, width, dtype=np.int32)
    return DecodedImages(pixels, np.arange(count, dtype=np.int64) * size, *sides)


def make_loader(images: DecodedImages, settings: AugmentSettings, device: torch.device, resident: bool) -> Loader:
    labels = np.arange(len(images)) % CLASSES
    rows = np.arange(len(images))
    return Loader(images, labels, rows, batch_size=BATCH, augment=settings, device=device, resident=resident)


def make_augment(settings: AugmentSettings, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """As the training engine runs it: compiled on a GPU, plain on a CPU."""
    mean, std = torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)

    def augmented(crops: Tensor, parameters: Tensor) -> Tensor:
        return augment(crops, parameters, settings, mean, std)

    return torch.compile(augmented, fullgraph=True, dynamic=False) if device.type == "cuda" else augmented


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of ``work``, after one run to warm up."""
    work()
    timed = []
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        timed.append(time.perf_counter() - began)
    return statistics.median(timed)


def loader_rates(
    images: DecodedImages, settings: AugmentSettings, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Images per second of loading and augmenting, and milliseconds of the host for each batch."""
    augmented = make_augment(settings, device)
    rates: dict[str, Any] = {}
    for name, resident in (("resident", True), ("streamed", False)):
        loader = make_loader(images, settings, device, resident)

        def epoch(loader: Loader = loader) -> None:
            for batch in loader.epoch():
                augmented(batch.crops, batch.parameters)

        def host_alone(loader: Loader = loader) -> None:
            for _ in loader.epoch():
                pass

        count = len(loader) * BATCH
        rates[name] = count / seconds_of(epoch, device, repeats)
        rates[f"{name}_without_augmentation"] = count / seconds_of(host_alone, device, repeats)
        if resident:
            batch = next(loader.epoch())
            rates["augmentation"] = BATCH / seconds_of(
                lambda batch=batch: augmented(batch.crops, batch.parameters), device, 20
            )
            wait(device)
            began = time.perf_counter()
            host_alone()
            rates["resident_host_ms_per_batch"] = 1000 * (time.perf_counter() - began) / len(loader)
    return rates


def network_rate(crop: int, device: torch.device, repeats: int) -> float:
    """Images per second that a ResNet-18 trains on one fixed batch: on a GPU in bf16, compiled, as a CUDA graph;
    on a CPU in float32, a quarter of the batch (which is no slower there)."""
    network = timm.create_model("resnet18", num_classes=CLASSES).to(device, memory_format=torch.channels_last)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, fused=on_gpu)
    batch = BATCH if on_gpu else BATCH // 4
    images = torch.randn(batch, 3, crop, crop, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch,), device=device)
    called = torch.compile(network, dynamic=False) if on_gpu else network

    def gradients() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = torch.nn.functional.cross_entropy(called(images), labels)
        loss.backward()

    if not on_gpu:

        def step() -> None:
            optimizer.zero_grad()
            gradients()
            optimizer.step()

        return batch / seconds_of(step, device, repeats)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            gradients()
    torch.cuda.synchronize()
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients()

    def steps() -> None:
        for _ in range(50):
            graph.replay()
            optimizer.step()

    return 50 * batch / seconds_of(steps, device, repeats)


class DecodedSet(Dataset[Tensor]):
    """The same pixels as a map-style dataset with torchvision transforms, as a user would write it."""

    def __init__(self, images: DecodedImages, settings: AugmentSettings) -> None:
        self.images = images
        self.transform = v2.Compose([
            v2.RandomCrop(settings.crop),
            v2.RandomHorizontalFlip(settings.horizontal_flip),
            v2.RandomVerticalFlip(settings.vertical_flip),
            v2.ColorJitter(settings.brightness, settings.contrast, settings.saturation, settings.hue),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> Tensor:
        return self.transform(torch.from_numpy(self.images.image(row).copy()).permute(2, 0, 1))


def reference_rate(images: DecodedImages, settings: AugmentSettings, device: torch.device, repeats: int) -> float:
    """Images per second of a DataLoader with a worker for each core."""
    loader = DataLoader(
        DecodedSet(images, settings), BATCH, shuffle=True, drop_last=True, num_workers=available_cores(),
        pin_memory=device.type == "cuda", persistent_workers=True,
    )  # fmt: skip

    def epoch() -> None:
        for batch in loader:
            batch.to(device, non_blocking=True)

    return len(loader) * BATCH / seconds_of(epoch, device, repeats)


def throughput(device: torch.device, folder: Path, repeats: int) -> list[dict[str, Any]]:
    measured = []
    for (height, width), crop, count in (((256, 341), 224, 8192), ((72, 96), 64, 16384)):
        if device.type == "cpu":
            count //= 16 if crop == 224 else 8
        settings = AugmentSettings(crop=crop)
        images = flat_images(folder / f"noise{crop}", count, height, width, random=True)
        row: dict[str, Any] = {"crop": crop, "image": [height, width], "images": count}
        row.update(loader_rates(images, settings, device, repeats))
        row["resnet18"] = network_rate(crop, device, repeats)
        row["reference"] = reference_rate(images, settings, device, min(repeats, 2))
        for name in ("resident", "streamed"):
            row[f"{name}_over_resnet18"] = row[name] / row["resnet18"]
            row[f"{name}_over_reference"] = row[name] / row["reference"]
        measured.append(row)
        print(json.dumps(row), flush=True)
    return measured


def anonymous_bytes() -> int:
    """Memory of this process that is not the page cache of some file."""
    fields = Path("/proc/self/smaps_rollup").read_text().split("Anonymous:")[1].split()
    return 1024 * int(fields[0])


def streamed_memory(count: int, folder: Path, device: torch.device, batches: int = 60) -> dict[str, Any]:
    """Run in a process of its own: the most anonymous memory while ``batches`` batches are streamed."""
    images = flat_images(folder / f"memory{count}", count, 256, 341, random=False)
    loader = make_loader(images, AugmentSettings(), device, resident=False)
    most, left, epoch = 0, batches, 0
    before = anonymous_bytes()
    while left > 0:
        for _ in zip(range(left), loader.epoch(epoch), strict=False):
            most = max(most, anonymous_bytes())
            left -= 1
        epoch += 1
    row = {"images": count, "anonymous_mib_before": before / 2**20, "anonymous_mib_most": most / 2**20}
    if device.type == "cuda":
        row["device_mib_most"] = torch.cuda.max_memory_allocated(device) / 2**20
    return row


def memory(device: torch.device, folder: Path, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    measured = []
    for count in counts:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            measured.append(pool.submit(streamed_memory, count, folder, device).result())
        print(json.dumps(measured[-1]), flush=True)
    return measured


def growth(device: torch.device, folder: Path, counts: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    settings = AugmentSettings(crop=64)
    augmented = make_augment(settings, device)
    measured = []
    for count in counts:
        images = flat_images(folder / f"growth{count}", count, 72, 96, random=False)
        loader = make_loader(images, settings, device, resident=False)

        def epoch(loader: Loader = loader) -> None:
            for batch in loader.epoch():
                augmented(batch.crops, batch.parameters)

        seconds = seconds_of(epoch, device, repeats)
        loaded = len(loader) * BATCH
        measured.append({"images": loaded, "seconds": seconds, "microseconds_per_image": 1e6 * seconds / loaded})
        print(json.dumps(measured[-1]), flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--sections", nargs="+", default=["throughput", "memory", "growth"])
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    counts = tuple(arguments.counts)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sections = {
            "throughput": partial(throughput, device, folder, arguments.repeats),
            "memory": partial(memory, device, folder, counts),
            "growth": partial(growth, device, folder, counts, arguments.repeats),
        }
        measured = {name: sections[name]() for name in arguments.sections}
    measured = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "settings": {"batch_size": BATCH, "repeats": arguments.repeats, "augment": vars(AugmentSettings())},
        **measured,
    }
    arguments.out.mkdir(exist_ok=True)
    write_whole(arguments.out / f"data_loader_{device.type}.json", json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
