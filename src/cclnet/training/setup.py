"""What a run needs before its first step: Fabric, the data, the network."""

from __future__ import annotations

import logging
import math
import os
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from cclnet.data.cache import DecodedImages, decode
from cclnet.data.loader import Loader
from cclnet.data.sources import open_data
from cclnet.data.split import make_split, read_split, write_split
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, first_line, unknown
from cclnet.methods import check_method_fits
from cclnet.network import CCLNet, image_size_settings
from cclnet.runs.folder import RunFolder
from cclnet.settings import Settings

# The learning rate over a run, as a factor on every group's own rate.


def drop_epochs(settings: Settings) -> list[int]:
    """After how many epochs each drop comes. However short a run is, each rate is trained at for an epoch at least, and
    drops for which there is no room are left out.

    >>> [drop_epochs(Settings(epochs=epochs, drops=(0.5, 0.75))) for epochs in (1, 2, 3, 160)]
    [[], [1], [2], [80, 120]]
    """
    starts: list[int] = []
    for drop in settings.drops:
        starts.append(max(round(drop * settings.epochs), starts[-1] + 1 if starts else 1))
    return [start for start in starts if start < settings.epochs]


def rate_factor(settings: Settings, epoch: float) -> float:
    """The factor at ``epoch`` (0 at the start, fractions inside an epoch).

    ``step`` multiplies by ``drop_factor`` at each drop, on a whole epoch; ``cosine`` falls to zero at the last
    epoch; a warm-up rises linearly to whatever the schedule says.

    >>> from cclnet.settings import Settings
    >>> [round(rate_factor(Settings(epochs=100), e), 3) for e in (0, 49.9, 50, 75)]
    [1.0, 1.0, 0.1, 0.01]
    """
    factor = 1.0
    if settings.schedule == "step":
        factor = settings.drop_factor ** sum(epoch >= start for start in drop_epochs(settings))
    elif settings.schedule == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * min(epoch / settings.epochs, 1.0)))
    if epoch < settings.warmup_epochs:
        # One step's worth above zero, so that the very first step already moves.
        factor *= max(epoch, 1e-3) / settings.warmup_epochs
    return factor


# Starting from weights of elsewhere, for people without a network.


def load_weights(network: CCLNet, path: Path) -> None:
    """Start from the weights in a file. A classifier for other classes is left out and starts anew; any other
    mismatch is refused, listed by name."""
    given = read_weights(path)
    shipped, last = network.classifier.shipped, network.classifier.last_layer
    own = shipped.state_dict()
    fits = {name: value for name, value in given.items() if name in own and value.shape == own[name].shape}
    missing = [name for name in own if name not in fits and not name.startswith(last)]
    unused = [f"{name} {list(value.shape)}" for name, value in given.items() if name not in fits]
    unused = [name for name in unused if not name.startswith(last)]
    if missing or unused:
        raise InputError(
            f"{path} does not fit the backbone. Missing or of another shape: {_listed(missing)}. "
            f"Not used: {_listed(unused)}. Choose the backbone these weights were made for, and for a transformer "
            "the size of the images, augment.crop."
        )
    shipped.load_state_dict(fits, strict=False)


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a .safetensors file, or of a state dict saved by torch; pickled objects are refused."""
    if not path.is_file():
        raise InputError(f"there is no weights file {path}.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise InputError(f"{path} is refused: it is not a .safetensors file or plain state dict ({error}).") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{path} holds no state dict: expected names with tensors.")
    return state


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return (", ".join(names[:12]) or "none") + more


# Which processes train together: those that torchrun or SLURM's srun started, those asked for, or this one alone.


FIRST_PORT, PORTS = 15000, 10000


@dataclass(frozen=True)
class Launch:
    """How many processes there are, and where.

    Attributes:
        devices: processes on this node, one a device.
        nodes: how many nodes.
        environment: what tells each process its rank; said outright, for Lightning would guess from SLURM's variables,
            and guesses wrong where a job has a usual name or its tasks are not counted by node.
        variables: that torchrun would have set, and SLURM has under other names.
    """

    devices: int = 1
    nodes: int = 1
    environment: type[ClusterEnvironment] = LightningEnvironment
    variables: Mapping[str, str] = field(default_factory=dict)


def find_launch(devices: int | None = None, variables: Mapping[str, str] = os.environ) -> Launch:
    """``devices`` is what was asked for; whoever started the processes knows better."""
    if "TORCHELASTIC_RUN_ID" in variables:
        here = int(variables["LOCAL_WORLD_SIZE"])
        return Launch(here, int(variables["WORLD_SIZE"]) // here, TorchElasticEnvironment)
    # Only what srun starts has a step; a shell in an allocation (salloc, sbatch without srun, --pty) is one process,
    # whatever number of tasks was asked for.
    tasks = 1 if "SLURM_PTY_PORT" in variables else int(variables.get("SLURM_STEP_NUM_TASKS", "1"))
    return _of_slurm(tasks, variables) if tasks > 1 else Launch(devices or 1)


def _of_slurm(tasks: int, variables: Mapping[str, str]) -> Launch:
    nodes = int(variables["SLURM_STEP_NUM_NODES"])
    if tasks % nodes:
        raise InputError(f"{tasks} tasks on {nodes} nodes: every node must have as many. Use srun --ntasks-per-node.")
    here, local_rank, node = tasks // nodes, variables["SLURM_LOCALID"], variables["SLURM_NODEID"]
    if here > 1 and torch.cuda.device_count() == 1:  # --gpus-per-task=1: each sees its own only, as if alone on a node
        here, nodes, local_rank, node = 1, tasks, "0", variables["SLURM_PROCID"]
    job, step = int(variables["SLURM_JOB_ID"]), int(variables["SLURM_STEP_ID"])
    return Launch(here, nodes, TorchElasticEnvironment, {
        # The first host of the step, and a port that all of the step compute alike and other steps seldom do.
        "MASTER_ADDR": variables.get("MASTER_ADDR") or first_host(variables["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": variables.get("MASTER_PORT") or str(FIRST_PORT + (31 * job + step) % PORTS),
        "WORLD_SIZE": str(tasks),
        "RANK": variables["SLURM_PROCID"],
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node,
    })  # fmt: skip


def first_host(nodes: str) -> str:
    """Of SLURM's list.

    >>> first_host("gpu[03-05,9]"), first_host("a1,a2"), first_host("login")
    ('gpu03', 'a1', 'login')
    """
    return SLURMEnvironment.resolve_root_node_address(nodes)


ACCELERATORS = ("auto", "cpu", "cuda", "gpu")


def make_fabric(settings: Settings, devices: int | None = None, accelerator: str = "auto") -> Fabric:
    """Fabric for this process. Under torchrun or SLURM the number of devices and nodes is theirs to say."""
    _without_chatter()
    launch = find_launch(devices)
    os.environ.update(launch.variables)
    if accelerator not in ACCELERATORS:
        raise unknown("accelerator", accelerator, ACCELERATORS)
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    if accelerator in ("cuda", "gpu") and not on_gpu:
        raise InputError(f"accelerator '{accelerator}' needs a CUDA GPU, and torch finds none here. Use auto or cpu.")
    started_here = launch.environment is LightningEnvironment
    if on_gpu and started_here and launch.devices > torch.cuda.device_count():
        raise InputError(f"{launch.devices} devices are requested, but torch finds {torch.cuda.device_count()} GPUs.")
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
    splits: npt.NDArray[np.str_]
    images: DecodedImages

    def rows(self, part: str) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.splits == part)


def open_table(settings: Settings) -> ImageTable:
    """The data of a run, read as its settings say."""
    return open_data(settings.data, settings)


def prepare_data(settings: Settings, run: RunFolder, fabric: Fabric) -> PreparedData:
    """Read the table, split it (or take the split of the run that is resumed), decode it once."""
    with fabric.rank_zero_first():  # the others find the split and the decoded images made
        table = open_table(settings)
        balanced = settings.class_weights or settings.balanced_sampling
        check_method_fits(settings.method, table.multilabel, balanced)  # before anything is decoded
        if run.split.exists():
            parts = read_split(run.split, table)
        else:
            parts = make_split(table, settings.split)
            write_split(run.split, table, parts)
        images = decode(table, settings.short_side, cache_dir=settings.cache_folder, progress=fabric.is_global_zero)
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
