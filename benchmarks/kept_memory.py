"""What keeping freed memory gains on a CPU: training and prediction of a network with and without it, in turn.

    python benchmarks/kept_memory.py --out results/kept_memory.json

Each measurement is a process of its own, because the setting of the C library lasts: the median of several steps with
one fixed batch, without data loading.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cclnet.files import read_json, write_json
from cclnet.runs.provenance import origin

RESULT = Path(__file__).parents[1] / "results" / "kept_memory.json"
BACKBONE, BATCH, STEPS = "tf_efficientnet_lite0", 64, 6
SIZES = (96, 224)


def images_per_second(size: int, training: bool, kept: bool) -> float:
    """The speed of this process."""
    import timm
    import torch

    from cclnet.memory import keep_freed_memory

    if kept:
        keep_freed_memory()
    torch.manual_seed(0)
    network = timm.create_model(BACKBONE, num_classes=7).to(memory_format=torch.channels_last).train(training)
    images = torch.randn(BATCH, 3, size, size).to(memory_format=torch.channels_last)
    labels, optimizer = torch.randint(0, 7, (BATCH,)), torch.optim.AdamW(network.parameters())
    seconds = []
    for _ in range(STEPS + 2):  # two to warm up
        began = time.perf_counter()
        with torch.set_grad_enabled(training):
            output = network(images)
            if training:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(output, labels).backward()
                optimizer.step()
        seconds.append(time.perf_counter() - began)
    return BATCH / statistics.median(seconds[2:])


def measure(rounds: int) -> dict[str, Any]:
    rows = []
    for size in SIZES:
        for task in ("training", "prediction"):
            found: dict[str, list[float]] = {"freed": [], "kept": []}
            for _ in range(rounds):
                for name, speeds in found.items():
                    words = [sys.executable, __file__, "--one", str(size), task, name]
                    done = subprocess.run(words, capture_output=True, text=True, check=True)
                    speeds.append(round(float(done.stdout), 1))
            gain = statistics.median(found["kept"]) / statistics.median(found["freed"])
            rows.append({"size": size, "task": task, **found, "gain": round(gain, 3)})
            print(json.dumps(rows[-1]), flush=True)
    facts = {"backbone": BACKBONE, "batch_size": BATCH, "steps": STEPS, "load_average": round(os.getloadavg()[1], 1)}
    return {"rows": rows, **facts, **origin()}


def table() -> str:
    """The table of docs/speed.md."""
    lines = ["| images | task | memory returned, images/s | memory kept, images/s | gain |", "|--:|---|--:|--:|--:|"]
    for row in read_json(RESULT)["rows"]:
        freed, kept = (statistics.median(row[name]) for name in ("freed", "kept"))
        lines.append(f"| {row['size']} px | {row['task']} | {freed:.0f} | {kept:.0f} | {row['gain']:.2f} x |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--one", nargs=3, metavar=("SIZE", "TASK", "MEMORY"), help="measure this process alone")
    options = parser.parse_args(words)
    if options.one:
        size, task, memory = options.one
        print(images_per_second(int(size), task == "training", memory == "kept"))
    else:
        write_json(options.out, measure(options.rounds))


if __name__ == "__main__":
    main()
