"""Measure `cclnet serve` under load: 32 clients for one minute, and one client alone. Writes results/serve.json.

    python benchmarks/serve.py                    # a ResNet-18 at 224 pixels with random weights, on synthetic images
    python benchmarks/serve.py --run runs/mine    # your own run or ensemble
    python benchmarks/serve.py --run runs/both --name serve_ensemble

The clients run on the same machine and use some of its CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image, ImageFilter

from cclnet.data.parallel import available_cores
from cclnet.files import write_whole
from cclnet.runs.folder import RunFolder
from cclnet.runs.provenance import origin, package_versions

PHOTOGRAPHS = 32
SIZE = (600, 450)  # as in ISIC 2018
CLASSES = ["AKIEC", "BCC", "BKL", "DF", "MEL", "NV", "VASC"]


def write_run(folder: Path, backbone: str, size: int) -> Path:
    """Write a run folder with an untrained network; only its speed matters here."""
    from safetensors.torch import save_file

    from cclnet.network import TimmClassifier

    folder.mkdir()
    model = TimmClassifier(backbone, len(CLASSES)).shipped
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    description = {
        "format": 1, "backbone": backbone, "method": "hard", "classes": CLASSES, "multilabel": False,
        "short_side": size * 8 // 7, "crop": [size, size], "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
        "temperature": 1.0,
    }  # fmt: skip
    (folder / "model.json").write_text(json.dumps(description), encoding="utf-8")
    return folder


def photographs() -> list[bytes]:
    """Return JPEGs of about the size and decoding cost of dermatoscopic images: smooth colours under fine noise."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(PHOTOGRAPHS):
        coarse = Image.fromarray(generator.integers(60, 220, (9, 12, 3), dtype=np.uint8)).resize(
            SIZE, Image.Resampling.BICUBIC
        )
        noise = Image.fromarray(generator.integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8))
        file = io.BytesIO()
        Image.blend(coarse, noise.filter(ImageFilter.GaussianBlur(1)), 0.15).save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


@contextlib.contextmanager
def serving(run: Path) -> Iterator[tuple[str, int, str]]:
    """Run `cclnet serve` in a process; yield its address, its process id, and its engine and device."""
    command = [sys.executable, "-m", "cclnet", "serve", str(run), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            message = server.stderr.readline()
            found = re.search(r"(http://\S+:\d+) \((\w+ on \w+)", message)
            if not found:
                raise SystemExit(message + server.stderr.read())
            yield found[1], server.pid, found[2]
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)
        finally:
            server.kill()


def processes_of(pid: int) -> list[int]:
    children = [child for own in Path(f"/proc/{pid}/task").glob("*/children") for child in own.read_text().split()]
    return [pid] + [below for child in children for below in processes_of(int(child))]


def memory_mb(pid: int) -> float:
    """Return the memory of a process tree, shared pages counted once (proportional set size)."""
    sizes = [Path(f"/proc/{one}/smaps_rollup").read_text() for one in processes_of(pid)]
    return sum(int(found[1]) for text in sizes if (found := re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE))) / 1024


async def send(client: httpx.AsyncClient, image: bytes) -> tuple[float, str]:
    """Return the seconds until the answer, and the error or ""."""
    start = time.perf_counter()
    try:
        answer = await client.post("/predict", content=image, headers={"content-type": "image/jpeg"})
        wrong = "" if answer.status_code == 200 else f"{answer.status_code}: {answer.text[:200]}"
    except httpx.HTTPError as error:
        wrong = repr(error)
    return time.perf_counter() - start, wrong


async def alone(address: str, images: list[bytes], requests: int) -> list[float]:
    """Return the latencies of one client, without the first ten requests."""
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        found = [await send(client, images[i % len(images)]) for i in range(requests + 10)]
    if errors := {wrong for _, wrong in found if wrong}:
        raise SystemExit(f"the server failed: {errors}")
    return [seconds for seconds, _ in found[10:]]


async def together(address: str, images: list[bytes], clients: int, seconds: float, pid: int) -> dict[str, Any]:
    """Run clients that each send the next image after the answer, and record the memory every second."""
    begin = time.perf_counter()
    answers: list[tuple[float, str]] = []
    memory: list[tuple[float, float]] = []

    async def client_loop(index: int) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            turn = index
            while time.perf_counter() - begin < seconds:
                answers.append(await send(client, images[turn % len(images)]))
                turn += 1

    async def watch() -> None:
        while time.perf_counter() - begin < seconds:
            memory.append((round(time.perf_counter() - begin, 1), round(await asyncio.to_thread(memory_mb, pid), 1)))
            await asyncio.sleep(1)

    await asyncio.gather(watch(), *[client_loop(index) for index in range(clients)])
    return {
        "clients": clients,
        "seconds": time.perf_counter() - begin,
        "requests": len(answers),
        "errors": sorted({wrong for _, wrong in answers if wrong}),
        "failed": sum(bool(wrong) for _, wrong in answers),
        "latencies": [latency for latency, _ in answers],
        "memory_mb": memory,
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    named = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {name: round(1e3 * float(np.percentile(seconds, share)), 2) for name, share in named.items()}


def batches(address: str) -> dict[str, float]:
    """Return the number of images and batches so far, from the metrics of the server."""
    text = httpx.get(f"{address}/metrics").text
    found = dict(re.findall(r"^cclnet_batch_images_(sum|count) (\S+)$", text, re.MULTILINE))
    return {"images": float(found["sum"]), "batches": float(found["count"])}


def measure(run: Path, clients: int, seconds: float) -> dict[str, Any]:
    images, model = photographs(), RunFolder(run).read_model()
    with serving(run) as (address, pid, engine):
        card = httpx.get(f"{address}/model").json()
        single = percentiles(asyncio.run(alone(address, images, 100)))
        before = batches(address)
        load = asyncio.run(together(address, images, clients, seconds, pid))
        after = batches(address)
    latency = percentiles(load.pop("latencies"))
    settled = [mb for at, mb in load["memory_mb"] if at >= min(10.0, seconds / 4)]
    third = max(1, len(settled) // 3)
    return {
        "engine": engine,
        "backbone": card["backbone"],
        "crop": card["crop"],
        "members": max(1, len(model.members)),
        "forward_passes": model.passes,
        "image": {"pixels": list(SIZE), "bytes": round(float(np.mean([len(image) for image in images])))},
        "single_ms": single,
        "load": {
            **load,
            "latency_ms": latency,
            "requests_per_second": round(load["requests"] / load["seconds"], 1),
            "mean_batch": round((after["images"] - before["images"]) / (after["batches"] - before["batches"]), 2),
        },
        "p99_over_single": round(latency["p99"] / single["p50"], 2),
        "memory_growth_mb": round(float(np.mean(settled[-third:]) - np.mean(settled[:third])), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, help="a run folder; default: an untrained network")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--name", default="serve", help="of the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or write_run(Path(folder) / options.backbone, options.backbone, options.size)
        found = measure(run, options.clients, options.seconds)
    packages = ("fastapi", "uvicorn", "onnxruntime", "torch", "numpy", "Pillow")
    found |= origin(f"CPU, {available_cores()} cores, clients included")
    found["versions"] |= package_versions(packages)
    found["holds"] = {
        "no error": found["load"]["failed"] == 0,
        "p99 under 20 times one image alone": found["p99_over_single"] < 20,
        "memory steady, within 5%": abs(found["memory_growth_mb"]) < 0.05 * found["load"]["memory_mb"][-1][1],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(options.out / f"{options.name}.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "load"}, indent=1))
    print(json.dumps({name: value for name, value in found["load"].items() if name != "memory_mb"}, indent=1))
    if not all(found["holds"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
