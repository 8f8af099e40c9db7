"""Training speed on this machine: whole epochs as ``cclnet train`` runs them, the network alone on one fixed batch (the
ceiling), and a plain DataLoader over the image files (the reference)."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from cclnet.data.table import ImageTable
from cclnet.errors import InputError, unknown
from cclnet.methods import Loss
from cclnet.network import image_size_settings
from cclnet.runs.folder import RunFolder
from cclnet.runs.provenance import source_commit, versions
from cclnet.settings import Settings
from cclnet.training.cuda_graph import capture_graph, compiled
from cclnet.training.loop import Training
from cclnet.training.setup import PreparedData, make_fabric, make_network, make_optimizer, prepare_data

PARTS = ("epochs", "ceiling", "reference")
METHODS = ("hard", "ccl")
REPEATS = 5  # timings of the ceiling


def benchmark(
    settings: Settings,
    backbones: Sequence[str],
    methods: Sequence[str] = METHODS,
    parts: Sequence[str] = PARTS,
    epochs: int = 4,
    accelerator: str = "auto",
) -> dict[str, Any]:
    """Measure each backbone; return images per second, their ratios, and what was measured on what.

    ``epochs`` are timed per method, after one epoch to warm up (which includes compilation). The ceiling is the median
    of ``REPEATS`` timings.
    """
    for part in parts:
        if part not in PARTS:
            raise unknown("part of the benchmark", part, PARTS)
    console = Console(stderr=True)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        fabric = make_fabric(settings, accelerator=accelerator)
        if settings.compile is None:  # a few epochs stand for a long run
            settings = replace(settings, compile=fabric.device.type == "cuda")
        data = prepare_data(replace(settings, method=methods[0]), RunFolder(scratch), fabric)
        if data.table.multilabel and set(parts) != {"epochs"}:
            raise InputError(
                "ceiling and reference need one label per image. Measure the epochs alone: --parts epochs."
            )
        for backbone in backbones:
            row: dict[str, Any] = {"backbone": backbone}
            for method in methods if "epochs" in parts else ():
                console.print(f"{backbone}: {method}, whole epochs …", highlight=False)
                chosen = replace(settings, backbone=backbone, method=method, epochs=epochs + 1)
                rates, first_step = _epochs(chosen, data, Path(scratch) / f"{backbone}-{method}", accelerator)
                row[method] = statistics.median(rates[1:])
                row[f"{method}_epochs"] = rates
                row[f"{method}_first_step_seconds"] = first_step
            chosen = replace(settings, backbone=backbone, method="hard")
            if "ceiling" in parts:
                console.print(f"{backbone}: ceiling …", highlight=False)
                row["ceiling"] = _ceiling(chosen, data, accelerator)
            if "reference" in parts:
                console.print(f"{backbone}: reference …", highlight=False)
                files = _write_files(data.table, Path(scratch) / "files")
                row["reference"] = _reference(chosen, data, files, fabric.device)
            rows.append({**row, **_ratios(row, methods)})
    device, commit = fabric.device, source_commit()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "compile_workers": torch._inductor.config.compile_threads,
        "commit": commit and asdict(commit),
        "versions": versions(),
        "settings": {
            "batch_size": settings.batch_size, "crop": settings.augment.crop, "seed": settings.seed,
            "images": len(data.rows("train")), "precision": str(fabric._precision.precision),
            "epochs": epochs, "repeats": REPEATS, "methods": list(methods),
        },
        "rows": rows,
    }  # fmt: skip


def _ratios(row: dict[str, Any], methods: Sequence[str]) -> dict[str, float]:
    """Return the ratios of the speeds in a row that were measured.

    >>> _ratios({"hard": 90.0, "ccl": 75.0, "ceiling": 100.0}, ["hard", "ccl"])
    {'of_ceiling': 0.9, 'ccl_over_hard': 1.2}
    """
    pairs = {"of_ceiling": ("hard", "ceiling"), "over_reference": ("hard", "reference")}
    pairs.update({f"{method}_over_hard": ("hard", method) for method in methods if method != "hard"})
    return {name: row[a] / row[b] for name, (a, b) in pairs.items() if a in row and b in row}


def _fields(row: dict[str, Any], methods: Sequence[str]) -> list[str]:
    """Return the cells of a row: speeds, ratios and the longest start-up; – for what was not measured."""

    def field(key: str, form: str, unit: str = "") -> str:
        return f"{row[key]:{form}}{unit}" if key in row else "–"

    starts = [row[key] for method in methods if (key := f"{method}_first_step_seconds") in row]
    return [
        *(field(key, ",.0f") for key in ("ceiling", *methods, "reference")),
        field("of_ceiling", ".2f"),
        *(field(f"{method}_over_hard", ".3f", " x") for method in methods if method != "hard"),
        field("over_reference", ".1f", " x"),
        f"{max(starts):.0f} s" if starts else "–",
    ]


def _grid(measured: dict[str, Any]) -> list[list[str]]:
    """Return the header and the rows, without columns in which nothing was measured."""
    methods = measured["settings"].get("methods", METHODS)
    times = [f"{method} time" for method in methods if method != "hard"]
    heads = ["backbone", "ceiling", *methods, "DataLoader", "of ceiling", *times, "over DataLoader", "start-up"]
    rows = [[row["backbone"], *_fields(row, methods)] for row in measured["rows"]]
    known = [column for column in range(len(heads)) if any(row[column] != "–" for row in rows)]
    return [[line[column] for column in known] for line in (heads, *rows)]


def results_table(measured: dict[str, Any]) -> Table:
    """Return the measurements as a table for the terminal."""
    heads, *rows = _grid(measured)
    columns = (Column(name, justify="left" if name == "backbone" else "right") for name in heads)
    table = Table(*columns, title=f"images per second, {measured['device']}", title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(measured: dict[str, Any]) -> str:
    """Return the measurements as Markdown."""
    settings = measured["settings"]
    heads, *rows = _grid(measured)
    lines = [
        f"{measured['device']}, {measured['cores']} cores, {settings['crop']} px, batch {settings['batch_size']}, "
        f"{settings['precision']}, torch {measured['versions']['torch']}, images per second:",
        "",
        f"| {' | '.join(heads)} |",
        "|---|" + "--:|" * (len(heads) - 1),
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _epochs(settings: Settings, data: PreparedData, folder: Path, accelerator: str) -> tuple[list[float], float]:
    """Return the images per second of each epoch, and the seconds from set-up to the end of the first step."""
    fabric = make_fabric(settings, accelerator=accelerator)
    folder.mkdir(parents=True)
    # An empty compiler cache, so that the start-up is that of the first run on a machine.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
    began = time.monotonic()
    training = Training(settings, RunFolder(folder), fabric, data)
    training.step(next(iter(training.loader.epoch(0))))
    _synchronize(fabric.device)
    first_step = time.monotonic() - began
    training.fit(progress=False)
    return [record["images_per_second"] for record in training.records], first_step


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _ceiling(settings: Settings, data: PreparedData, accelerator: str) -> float:
    """Return the images per second of the network alone on a fixed batch: after a warm-up, the median of ``REPEATS``
    timings of at least half a second."""
    fabric = make_fabric(settings, accelerator=accelerator)
    on_gpu = fabric.device.type == "cuda"
    compiling = bool(settings.compile)
    network = make_network(settings, data).to(memory_format=torch.channels_last)
    optimizer = make_optimizer(settings, network, on_gpu)
    wrapped = fabric.setup_module(compiled(network) if compiling else network)
    optimizer.param_groups[0]["params"] = list(network.classifier.parameters())
    size = settings.augment.crop
    images = torch.randn(settings.batch_size, 3, size, size, device=fabric.device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(data.table.num_classes, (settings.batch_size,), device=fabric.device)

    def compute_gradients() -> None:
        loss: Loss = wrapped(images, labels)
        fabric.backward(loss.total)
        if settings.clip > 0:
            torch.nn.utils.clip_grad_norm_(network.parameters(), settings.clip)

    graph = capture_graph(compute_gradients, optimizer) if on_gpu and compiling else None

    def step() -> None:
        if graph is None:
            optimizer.zero_grad()
            compute_gradients()
        else:
            graph.replay()
        optimizer.step()

    for _ in range(3):
        step()
    count = 1
    rates: list[float] = []
    while len(rates) < REPEATS:
        _synchronize(fabric.device)
        began = time.perf_counter()
        for _ in range(count):
            step()
        _synchronize(fabric.device)
        seconds = time.perf_counter() - began
        if seconds < 0.5:
            count *= 2
        else:
            rates.append(count * settings.batch_size / seconds)
    return statistics.median(rates)


def _write_files(table: ImageTable, folder: Path) -> list[Path]:
    """Return the image files; images in memory are written as JPEG first."""
    if not isinstance(table.images, np.ndarray):
        return list(table.images)
    paths = [folder / f"{i}.jpg" for i in range(len(table))]
    if folder.exists():  # written for the previous backbone
        return paths
    folder.mkdir(parents=True)
    for path, pixels in zip(paths, table.images, strict=True):
        Image.fromarray(pixels).save(path, quality=92)
    return paths


class _Files(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, paths: Sequence[Path], labels: Sequence[int], transform: Any) -> None:
        self.paths, self.labels, self.transform = paths, labels, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB")), self.labels[index]


def _reference(settings: Settings, data: PreparedData, files: Sequence[Path], device: torch.device) -> float:
    """Return the images per second of a usual script: torchvision v2, DataLoader, timm, autocast, SGD.

    One epoch is timed after one to warm up.
    """
    from torchvision.transforms import v2

    augment = settings.augment
    transform = v2.Compose(
        [
            v2.Resize(settings.short_side),
            v2.RandomCrop(augment.crop),
            v2.RandomHorizontalFlip(),
            v2.RandomVerticalFlip(),
            v2.ColorJitter(augment.brightness, augment.contrast, augment.saturation, augment.hue),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(settings.input_mean), list(settings.input_std)),
        ]
    )
    rows = data.rows("train")
    labels = [int(data.table.labels[i]) for i in rows]
    on_gpu = device.type == "cuda"
    loader = torch.utils.data.DataLoader(
        _Files([files[i] for i in rows], labels, transform),
        settings.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=os.cpu_count() or 1,
        pin_memory=on_gpu,
        persistent_workers=True,
    )
    size = image_size_settings(settings.backbone, (settings.augment.crop, settings.augment.crop))
    model = timm.create_model(settings.backbone, num_classes=data.table.num_classes, **size).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def steps() -> Iterator[int]:
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield len(images)

    list(steps())  # starts the workers, fills the page cache, warms up cuDNN
    _synchronize(device)
    began = time.perf_counter()
    count = sum(steps())
    _synchronize(device)
    return count / (time.perf_counter() - began)
