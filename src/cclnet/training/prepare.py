"""What a run needs before its first step: Fabric, the data, the network."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric import Fabric
from torch import nn

from cclnet.data.decode import DecodedImages, decode
from cclnet.data.loader import Loader
from cclnet.data.sources import open_data
from cclnet.data.split import make_split, read_split, write_split
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, first_line
from cclnet.methods import check_method_fits
from cclnet.network import CCLNet, image_size_settings
from cclnet.training.launch import find_launch
from cclnet.training.run_folder import RunFolder
from cclnet.training.settings import Settings
from cclnet.training.weights import load_weights

# Settings that ``open_data`` takes by the same name.
READING = (
    "source", "image_column", "label_column", "group_column", "part_column", "label_separator", "image_folder",
    "strict", "follow_links",
)  # fmt: skip


def make_fabric(settings: Settings, devices: int | None = None, accelerator: str = "auto") -> Fabric:
    """Fabric for this process. Under torchrun or SLURM the number of devices and nodes is theirs to say."""
    _without_chatter()
    launch = find_launch(devices)
    os.environ.update(launch.variables)
    on_gpu = torch.cuda.is_available() and accelerator in ("auto", "cuda", "gpu")
    auto = "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    precision = {"auto": auto, "32": "32-true", "bf16": "bf16-mixed", "64": "64-true"}[settings.precision]
    return Fabric(
        # Of what Lightning would take by itself, only CUDA has the float64 that sums over an epoch need.
        accelerator="cpu" if accelerator == "auto" and not on_gpu else accelerator,
        strategy="ddp" if launch.devices * launch.nodes > 1 else "auto",
        devices=launch.devices,
        num_nodes=launch.nodes,
        precision=precision,
        plugins=[launch.environment()],
    )


def _without_chatter() -> None:
    """Lightning's and the compiler's advice on speed does not apply here and hides what does: matrix products in
    training run in bf16, and testing is in full float32 on purpose."""
    for part in ("fabric", "pytorch"):  # Fabric speaks through the second's logger where that has been imported
        logging.getLogger(f"lightning.{part}").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")


def make_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@dataclass(frozen=True)
class PreparedData:
    """The table, its split, and the decoded images."""

    table: ImageTable
    parts: npt.NDArray[np.str_]
    images: DecodedImages

    def rows(self, part: str) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.parts == part)


def open_table(settings: Settings) -> ImageTable:
    """The data of a run, read as its settings say."""
    return open_data(settings.data, **{name: getattr(settings, name) for name in READING if getattr(settings, name)})


def prepare_data(settings: Settings, run: RunFolder, fabric: Fabric, cache_dir: Path | None = None) -> PreparedData:
    """Read the table, split it (or take the split of the run that is resumed), decode it once."""
    with fabric.rank_zero_first():  # the others find the split and the decoded images made
        table = open_table(settings)
        check_method_fits(settings.method, table.multilabel)  # before anything is decoded
        if run.split.exists():
            parts = read_split(run.split, table)
        else:
            parts = make_split(table, settings.split)
            write_split(run.split, table, parts)
        images = decode(table, settings.short_side, cache_dir=cache_dir, progress=fabric.is_global_zero)
    for part in ("train", "val"):
        if not (parts == part).any() and not (part == "val" and (parts == "test").any()):
            raise InputError(f"the split has no images in its part '{part}': choose other shares.")
    return PreparedData(table, parts, images)


def train_loader(settings: Settings, data: PreparedData, fabric: Fabric) -> Loader:
    rows = data.rows("train")
    weights = None
    if settings.class_weights:
        if data.table.multilabel:
            raise InputError("class_weights balance single labels; this set has several labels an image.")
        # Mean one over the training images, so that the size of the loss does not change.
        counts = np.maximum(data.table.class_counts(rows), 1)
        weights = (len(rows) / (np.count_nonzero(data.table.class_counts(rows)) * counts))[data.table.labels]
    return Loader(
        data.images,
        data.table.labels,
        rows,
        batch_size=settings.batch_size,
        augment=settings.augment,
        num_classes=data.table.num_classes,
        seed=settings.seed,
        device=fabric.device,
        resident=settings.resident,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        weights=weights,
        balanced=settings.balanced_sampling,
    )


def make_network(settings: Settings, data: PreparedData, begun: bool = False) -> CCLNet:
    """The network with its first weights, the same on every rank. Those of elsewhere are not asked for again where a
    run was ``begun``."""
    torch.manual_seed(settings.seed)
    network = CCLNet(
        settings.backbone,
        data.table.num_classes,
        settings.method,
        pretrained=settings.pretrained and not begun,
        class_counts=data.table.class_counts(data.rows("train")).tolist(),
        method_settings=settings.method_settings,
        backbone_settings=_backbone_settings(settings),
    )
    if settings.weights and not begun:
        load_weights(network, Path(settings.weights))
    _check_size(network, settings)
    return network


@torch.no_grad()
def _check_size(network: CCLNet, settings: Settings) -> None:
    """Some backbones take some sizes only, and say so in their own way when they see the first image."""
    try:
        network.eval()(torch.zeros(1, 3, settings.augment.crop, settings.augment.crop))
    except (RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
        size = f"{settings.augment.crop} px (augment.crop)"
        raise InputError(f"backbone {settings.backbone} cannot take images of {size}: {first_line(error)}.") from error
    network.train()


def check_shares(settings: Settings, network: CCLNet, world_size: int) -> None:
    """Batch norm needs two images at least, on every process and in every part of its batches."""
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
    least = (2 if normed and settings.batch_norm == "batch" else 1) * world_size * settings.accumulate
    if settings.batch_size < least:
        raise InputError(
            f"a batch of {settings.batch_size} is too small for {world_size} processes that take it in "
            f"{settings.accumulate} parts: the network needs {least // world_size // settings.accumulate} images at a "
            f"time. Set batch_size to {least} or more."
        )


def _backbone_settings(settings: Settings) -> dict[str, Any]:
    """What is asked of timm beyond the name; what is not asked for stays the model's own."""
    crop = settings.augment.crop
    dropout = {"drop_rate": settings.drop_rate, "drop_path_rate": settings.drop_path_rate}
    return {name: rate for name, rate in dropout.items() if rate} | image_size_settings(settings.backbone, (crop, crop))


def speaks_for_all() -> bool:
    """Whether this process is the one, of all that train together, that says how it went."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_rank() == 0


def make_optimizer(settings: Settings, network: CCLNet, on_gpu: bool) -> torch.optim.Optimizer:
    """SGD or AdamW over the network's and the method's parameter groups."""
    groups = network.param_groups(settings.lr, settings.lr_ccl, settings.weight_decay)
    for group in groups:
        group["initial_lr"] = group["lr"]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=on_gpu)
    return torch.optim.SGD(groups, momentum=settings.momentum, fused=on_gpu)
