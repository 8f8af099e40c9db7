"""A plain timm fine-tuning loop, written as people write it: the reference for the score and the time of cclnet.

    python benchmarks/timm_loop.py DATA --weights tf_efficientnet_lite0.safetensors --out runs/timm-fold0
    python benchmarks/timm_loop.py DATA --split runs/finetune/fold0/split.csv --out runs/timm-fold0

timm's transforms and AdamW, a DataLoader over the image files, autocast, cosine with warm-up, the last epoch. Nothing
of cclnet is in the loop: cclnet only lists the images and their split before it, and evaluates the predictions after
it. Writes OUT/predictions.csv and OUT/timm_loop.json with the seconds from listing the images to the last prediction.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_data_config
from timm.optim import create_optimizer_v2
from torch.utils.data import DataLoader, Dataset

from cclnet.data.sources import open_data
from cclnet.data.split import make_split, read_split
from cclnet.files import make_folder, write_whole
from cclnet.runs.predictions import Predictions, write_predictions
from cclnet.runs.provenance import origin
from cclnet.settings import SplitSettings


class ImageFiles(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, files: Sequence[Path], labels: Sequence[int], transform: Any) -> None:
        self.files, self.labels, self.transform = files, labels, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.open(self.files[index]).convert("RGB")), self.labels[index]


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    began, options = time.perf_counter(), arguments(words)
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = open_data(options.data)
    folds = SplitSettings(by=options.by, folds=options.folds, fold=options.fold)
    splits = read_split(options.split, table) if options.split else make_split(table, folds)
    train_rows, test_rows = np.flatnonzero(splits == "train"), np.flatnonzero(splits == "val")

    drop = {"drop_rate": 0.2, "drop_path_rate": 0.1}
    model = timm.create_model(options.model, pretrained=not options.weights, num_classes=table.num_classes, **drop)
    if options.weights:
        last = model.pretrained_cfg["classifier"]
        state = {name: value for name, value in load_file(options.weights).items() if not name.startswith(last)}
        model.load_state_dict(state, strict=False)
    model = model.to(device)
    config = resolve_data_config({}, model=model)
    if options.size:
        config["input_size"] = (3, options.size, options.size)

    def loader(rows: Sequence[int], training: bool) -> DataLoader[Any]:
        transform = create_transform(**config, is_training=training, vflip=0.5 if training else 0.0, scale=(0.4, 1.0))
        files = ImageFiles([table.images[i] for i in rows], [int(table.labels[i]) for i in rows], transform)
        return DataLoader(
            files, options.batch_size, shuffle=training, drop_last=training, num_workers=options.workers,
            pin_memory=device.type == "cuda", persistent_workers=options.workers > 0,
        )  # fmt: skip

    train_loader, test_loader = loader(train_rows, True), loader(test_rows, False)
    optimizer = create_optimizer_v2(model, "adamw", lr=options.lr, weight_decay=0.05)
    steps, warmup = options.epochs * len(train_loader), len(train_loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    criterion = torch.nn.CrossEntropyLoss()
    epoch_seconds = []
    for epoch in range(options.epochs):
        epoch_began = time.perf_counter()
        model.train()
        total = 0.0
        for images, labels in train_loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        probabilities, labels = predict(model, test_loader, device)
        accuracy = (probabilities.argmax(1) == labels).mean()
        epoch_seconds.append(round(time.perf_counter() - epoch_began, 2))  # with validation
        print(f"epoch {epoch + 1} loss {total / len(train_loader):.4f} accuracy {accuracy:.4f}", flush=True)

    make_folder(options.out)
    groups = None if table.groups is None else table.groups[test_rows]
    names = np.array([table.names[i] for i in test_rows])
    found = Predictions(names, table.labels[test_rows], probabilities, table.classes, groups, splits[test_rows])
    write_predictions(options.out / "predictions.csv", found)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    result = {
        "model": options.model, "epochs": options.epochs, "batch_size": options.batch_size, "seed": options.seed,
        "size": config["input_size"][1], "fold": options.fold, "accuracy": float(accuracy),
        "class_counts": table.class_counts(train_rows).tolist(),
        "seconds": round(time.perf_counter() - began, 1), "epoch_seconds": epoch_seconds, **origin(name),
    }  # fmt: skip
    write_whole(options.out / "timm_loop.json", json.dumps(result, indent=1) + "\n")
    return result


@torch.no_grad()
def predict(model: torch.nn.Module, loader: DataLoader[Any], device: torch.device) -> tuple[Any, Any]:
    model.eval()
    found = [(model(images.to(device)).softmax(1).double().cpu(), labels) for images, labels in loader]
    return torch.cat([p for p, _ in found]).numpy(), torch.cat([y for _, y in found]).numpy()


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights", type=Path, help="a .safetensors file; default: from the hub")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--split", type=Path, help="split.csv of a run; default: --fold of --folds")
    parser.add_argument("--by", default="auto")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--fold", type=int, default=0)
    parser.add_argument("--size", type=int, default=0, help="default: that of the model")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
