"""Does ONNX say what PyTorch says, is it faster, and does `cclnet predict` keep the cores busy?

    python benchmarks/deploy.py [--images FOLDER] [--runs RUN ...]     # about five minutes on two cores

- agreement: the largest difference in probability between ONNX Runtime and PyTorch over 500 images, one image at a time
  and 32 at once, for each backbone of the paper; and in the class activation maps, relative to their largest value.
- latency: milliseconds of one image, PyTorch (eager; with weights as they are, and channels last) against ONNX
  Runtime with the same number of threads, from prepared pixels to probabilities. They take turns, so that a busy
  machine harms all alike.
- predict: images per second from JPEG files to predictions, beside decoding alone and the network alone on the same
  cores. Both together is what the cores must do: its time is the sum of the two. They take turns here too.

FOLDER holds any images (default: drawn ones, as JPEG files of 600 x 450). RUN is a trained run for each backbone; where
none is given the network has random weights whose norms and classifier are fitted to the images, so that it tells them
apart. Results go into results/deploy.json and docs/export.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from cclnet.data.parallel import available_cores
from cclnet.data.synthetic import SyntheticSettings, synthetic
from cclnet.deploy.engines import Engine, OnnxEngine, TorchEngine
from cclnet.deploy.export import onnx_program
from cclnet.deploy.predict import Inputs, gather, predict, prepared
from cclnet.deploy.predictor import Model
from cclnet.deploy.shipped import Shipped, read_shipped
from cclnet.files import write_whole
from cclnet.network import TimmClassifier
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import ModelDescription

RESULTS = Path(__file__).parents[1] / "results" / "deploy.json"
PAGE = Path(__file__).parents[1] / "docs" / "export.md"
PAPER = ("resnet18", "mobilenetv2_100", "efficientnet_b0")
CLASSES = tuple("ABCDEFG")
CALIBRATION = CalibrationMap(1.3)
Pixels = npt.NDArray[np.uint8]


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = ("torch", "timm", "onnx", "onnxscript", "onnxruntime", "numpy", "pillow")
    return {
        "device": "CPU",
        "cpu": models[0] if models else platform.processor(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def draw_files(folder: Path, count: int) -> None:
    """The synthetic set as JPEG files of the size that ISIC images are often shared in."""
    table = synthetic(SyntheticSettings(images=count, size=64))
    for name, image in zip(table.names, np.asarray(table.images), strict=True):
        large = Image.fromarray(image).resize((600, 450), Image.Resampling.BICUBIC)
        large.save(folder / f"{Path(name).stem}.jpg", quality=90)


@torch.no_grad()
def fitted(backbone: str, description: ModelDescription, pixels: Pixels) -> Shipped:
    """Random weights that tell the images apart: norms with the images' own statistics that leave most units alive
    (a deep random network is else chaotic, and rounding grows in it as in no trained one), logits of spread 2."""
    torch.manual_seed(0)
    model: Any = TimmClassifier(backbone, len(CLASSES)).shipped
    for norm in (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        norm.momentum = None
        norm.weight.uniform_(0.4, 0.6)
        norm.bias.uniform_(0.5, 1)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    images = (images - torch.tensor(description.mean).view(3, 1, 1)) / torch.tensor(description.std).view(3, 1, 1)
    for part in images.split(16):
        model.train()(part)
    linear, logits = model.get_classifier(), model.eval()(images)
    linear.weight.mul_(2 / logits.std(dim=0)[:, None])
    linear.bias.sub_(model(images).mean(dim=0))
    return Shipped(model, description, CALIBRATION)


def in_batches(engine: Engine, pixels: Pixels, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    parts = [engine.run(pixels[start : start + size], maps=True) for start in range(0, len(pixels), size)]
    return np.concatenate([p for p, *_ in parts]), np.concatenate([m for _, m, _ in parts if m is not None])


def measure_agreement(engines: tuple[Engine, Engine], pixels: Pixels) -> list[dict[str, Any]]:
    rows = []
    for size in (1, 32):
        (ours, our_maps), (theirs, their_maps) = (in_batches(engine, pixels, size) for engine in engines)
        same_top = ours.argmax(axis=1) == theirs.argmax(axis=1)
        rows.append(
            {
                "batch": size,
                "images": len(pixels),
                "largest_difference": float(np.abs(ours - theirs).max()),
                "same_class": float(same_top.mean()),
                "largest_difference_of_maps": float(
                    np.abs(our_maps - their_maps)[same_top].max() / np.abs(our_maps).max()
                ),
                "spread_of_probability": float(np.ptp(ours, axis=0).max()),
            }
        )
    return rows


def in_turn(works: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each work, after one run to warm up, turn by turn."""
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        for work, times in zip(works, seconds, strict=True):
            began = time.perf_counter()
            work()
            if turn:
                times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in seconds]


def measure_latency(shipped: Shipped, onnx: Engine, pixels: Pixels, repeats: int) -> dict[str, float]:
    image = pixels[:1]
    eager, tuned = TorchEngine(shipped, "cpu"), TorchEngine(copy.deepcopy(shipped), "cpu")
    tuned.shipped.model.to(memory_format=torch.channels_last)
    works = {
        "torch_ms": lambda: eager.run(image, maps=False),
        "torch_channels_last_ms": lambda: tuned.run(image, maps=False),
        "onnx_ms": lambda: onnx.run(image, maps=False),
        "onnx_with_maps_ms": lambda: onnx.run(image, maps=True),
    }
    found = {name: 1e3 * seconds for name, seconds in zip(works, in_turn(list(works.values()), repeats), strict=True)}
    return {**found, "times_as_fast": found["torch_ms"] / found["onnx_ms"]}


def measure_predict(model: Model, inputs: Inputs, batch_size: int, repeats: int) -> dict[str, Any]:
    workers = available_cores()
    chunks = list(prepared(model.description, inputs, batch_size, workers))

    def decode() -> None:
        for _ in prepared(model.description, inputs, batch_size, workers):
            pass

    def network() -> None:
        for chunk in chunks:
            model.run(chunk.pixels)

    decoding, running, whole = in_turn(
        [decode, network, lambda: predict(model, inputs, batch_size=batch_size, progress=False)], repeats
    )
    count = len(inputs)
    return {
        "images": count,
        "batch_size": batch_size,
        "engine": model.engine,
        "decode": count / decoding,
        "network": count / running,
        "decode_and_network": count / (decoding + running),
        "predict": count / whole,
        "of_decode_and_network": (decoding + running) / whole,
    }


def prepare_network(backbone: str, run: Path | None, inputs: Inputs) -> tuple[ModelDescription, Shipped, Pixels]:
    """The network of a run, or a random one, and the prepared images."""
    if run is None:
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        description = ModelDescription(backbone, CLASSES, False, 256, (224, 224), mean, std)
    else:
        description = RunFolder(run).read_model()
    chunks = prepared(description, inputs, 32, available_cores())
    pixels = np.concatenate([chunk.pixels for chunk in chunks])
    if run is None:
        return description, fitted(backbone, description, pixels[:64]), pixels
    return description, read_shipped(run / "model.safetensors", description, CALIBRATION), pixels


def measure(given: argparse.Namespace, every: Inputs) -> dict[str, Any]:
    runs = {RunFolder(run).read_model().backbone: run for run in given.runs}
    rows: list[dict[str, Any]] = []
    predicting: dict[str, Any] = {}
    for backbone in given.backbones:
        inputs = Inputs(every.names[: given.count], every.images[: given.count])
        description, shipped, pixels = prepare_network(backbone, runs.get(backbone), inputs)
        engines = (
            TorchEngine(shipped, "cpu"),
            OnnxEngine(onnx_program(shipped, description, CALIBRATION), description, CALIBRATION, "cpu"),
        )
        row = {
            "backbone": backbone,
            "weights": "trained" if backbone in runs else "random",
            "crop": list(description.crop),
            "latency": measure_latency(shipped, engines[1], pixels, given.repeats),
            "agreement": measure_agreement(engines, pixels),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
        if not predicting:
            files = Inputs(every.names[: given.predicted], every.images[: given.predicted])
            model = Model(description, engines[1], Path())
            predicting = {"backbone": backbone, **measure_predict(model, files, 16, repeats=3)}
            print(json.dumps(predicting), flush=True)
    return {"rows": rows, "predict": predicting}


def in_words(results: Mapping[str, Any]) -> str:
    """The results as docs/export.md tells them."""
    lines = [
        f"{results['cpu']}, {results['cores']} cores, PyTorch {results['versions']['torch']}, ONNX Runtime "
        f"{results['versions']['onnxruntime']}.",
        "",
        "| Backbone | PyTorch, one image | weights channels last | ONNX Runtime | times as fast as PyTorch "
        "| largest difference, batch 1 | batch 32 |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["rows"]:
        speed, apart = row["latency"], {part["batch"]: part["largest_difference"] for part in row["agreement"]}
        names = ("torch_ms", "torch_channels_last_ms", "onnx_ms")
        times = " | ".join([*(f"{speed[name]:.1f} ms" for name in names), f"{speed['times_as_fast']:.1f}"])
        lines.append(f"| {row['backbone']} | {times} | {apart[1]:.1g} | {apart[32]:.1g} |")
    whole, count = results["predict"], results["rows"][0]["agreement"][0]["images"]
    both, speed = whole["of_decode_and_network"], whole["predict"]
    lines += [
        "",
        f"Differences are in probability, over {count} images. `cclnet predict` with {whole['backbone']} in "
        f"{whole['engine']} takes {speed:.0f} JPEG files",
        f"a second, {both:.0%} of what decoding ({whole['decode']:.0f} a second by itself) and the network "
        f"({whole['network']:.0f}) allow together.",
    ]
    return "\n".join(lines)


def write_into(page: Path, text: str) -> None:
    before, start, rest = page.read_text(encoding="utf-8").partition("<!-- deploy -->\n")
    _, end, after = rest.partition("<!-- /deploy -->")
    write_whole(page, f"{before}{start}{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    parser.add_argument("--backbones", nargs="*", default=PAPER)
    parser.add_argument("--count", type=int, default=500, help="images to agree on")
    parser.add_argument("--predicted", type=int, default=256, help="images to predict")
    parser.add_argument("--repeats", type=int, default=40, help="of the latency")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(available_cores())
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        if given.images is None:
            draw_files(Path(scratch), max(given.count, given.predicted))
        measured = measure(given, gather([given.images or scratch]))
    settings = {
        "images": "drawn" if given.images is None else given.images.name,
        "count": given.count,
        "predicted": given.predicted,
        "repeats": given.repeats,
    }
    results = {**machine(), "settings": settings, "seconds": time.perf_counter() - began, **measured}
    write_whole(given.out, json.dumps(results, indent=1) + "\n")
    if given.out == RESULTS:
        write_into(PAGE, in_words(results))


if __name__ == "__main__":
    main()
