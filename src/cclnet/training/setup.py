"""What a run needs before its first step: processes and Fabric, data, network, optimizer, learning rate schedule."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch._inductor.config
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from cclnet.data.augment import matching_short_side
from cclnet.data.cache import DecodedImages, decode, decode_readable
from cclnet.data.loader import Loader, Rows
from cclnet.data.screening import screen
from cclnet.data.sources import open_data
from cclnet.data.split import make_split, read_split, split_table
from cclnet.data.table import ImageTable, listed
from cclnet.errors import InputError, first_line, unknown
from cclnet.memory import keep_freed_memory
from cclnet.methods import check_method_fits
from cclnet.network import CCLNet, Classifier, TimmClassifier, image_size_settings
from cclnet.runs.checksums import checking, is_there
from cclnet.runs.data_summary import DataSummary
from cclnet.runs.decision_rule import DecisionRule, make_rule
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import MAX_TEXT
from cclnet.settings import Settings
from cclnet.training.duration import first_estimate

ACCELERATORS = ("auto", "cpu", "cuda", "gpu")
# Pixels of a whole training run from which compiling repays its seconds of start-up (10 to 100 s with an empty compiler
# cache). One H200, ResNet-18, EfficientNet-Lite0 and Lite4 at 224 to 300 px: from 1.9e10 to 3.5e10 (docs/speed.md).
PIXELS_WORTH_COMPILING = 2e10
FIRST_PORT, PORTS = 15000, 10000  # range of the rendezvous port under SLURM


def make_fabric(settings: Settings, devices: int | None = None, accelerator: str = "auto") -> Fabric:
    """Return Fabric for this process. torchrun and SLURM override ``devices``."""
    # Advice on speed that does not apply: training runs in bf16, and evaluation in float32 on purpose.
    for package in ("fabric", "pytorch"):  # Fabric logs through lightning.pytorch once that is imported
        logging.getLogger(f"lightning.{package}").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
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
    if not on_gpu:
        keep_freed_memory()
    return Fabric(
        # Lightning's own "auto" may choose MPS, which has no float64 for the sums over an epoch.
        accelerator="cpu" if accelerator == "auto" and not on_gpu else accelerator,
        strategy="ddp" if launch.devices * launch.nodes > 1 else "auto",
        devices=launch.devices,
        num_nodes=launch.nodes,
        precision=precision,
        plugins=[launch.environment()],
    )


def make_deterministic() -> None:
    """Restrict torch to deterministic algorithms."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    if hasattr(torch._inductor.config, "deterministic"):  # else the compiler chooses between kernels by their time
        torch._inductor.config.deterministic = True


@dataclass(frozen=True)
class Launch:
    """The processes of a run."""

    devices: int = 1  # processes on this node, one per device
    nodes: int = 1
    # How each process learns its rank. Explicit, because Lightning's detection of SLURM fails for jobs named like a
    # shell and for tasks that are not counted by node.
    environment: type[ClusterEnvironment] = LightningEnvironment
    variables: Mapping[str, str] = field(default_factory=dict)  # that torchrun would have set, derived from SLURM's


def find_launch(devices: int | None = None, variables: Mapping[str, str] = os.environ) -> Launch:
    """Return the processes that torchrun or srun started; else ``devices`` processes on this node, by default one."""
    if "TORCHELASTIC_RUN_ID" in variables:
        local = int(variables["LOCAL_WORLD_SIZE"])
        return Launch(local, int(variables["WORLD_SIZE"]) // local, TorchElasticEnvironment)
    # Only srun creates a step. A shell in an allocation (salloc, sbatch without srun, --pty) is one process, however
    # many tasks were requested.
    tasks = 1 if "SLURM_PTY_PORT" in variables else int(variables.get("SLURM_STEP_NUM_TASKS", "1"))
    return _slurm_launch(tasks, variables) if tasks > 1 else Launch(devices or 1)


def _slurm_launch(tasks: int, variables: Mapping[str, str]) -> Launch:
    nodes = int(variables["SLURM_STEP_NUM_NODES"])
    if tasks % nodes:
        raise InputError(
            f"every node needs the same number of tasks, got {tasks} tasks on {nodes} nodes. Use srun "
            "--ntasks-per-node."
        )
    local, local_rank, node = tasks // nodes, variables["SLURM_LOCALID"], variables["SLURM_NODEID"]
    if local > 1 and torch.cuda.device_count() == 1:  # --gpus-per-task=1: a task sees one GPU, like a node of its own
        local, nodes, local_rank, node = 1, tasks, "0", variables["SLURM_PROCID"]
    job, step = int(variables["SLURM_JOB_ID"]), int(variables["SLURM_STEP_ID"])
    first_host = SLURMEnvironment.resolve_root_node_address(variables["SLURM_STEP_NODELIST"])
    return Launch(local, nodes, TorchElasticEnvironment, {
        # The first host of the step, and a port that is the same for all of its tasks and rarely for other steps.
        "MASTER_ADDR": variables.get("MASTER_ADDR") or first_host,
        "MASTER_PORT": variables.get("MASTER_PORT") or str(FIRST_PORT + (31 * job + step) % PORTS),
        "WORLD_SIZE": str(tasks),
        "RANK": variables["SLURM_PROCID"],
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node,
    })  # fmt: skip


def is_rank_zero() -> bool:
    """Return whether this process is the only one or the first of those that train together."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_rank() == 0


@dataclass(frozen=True)
class PreparedData:
    """The table, the split of each image, and the decoded images."""

    table: ImageTable
    splits: npt.NDArray[np.str_]
    images: DecodedImages
    # Those that are tested, if they are to have another short side than the training images.
    test_images: DecodedImages | None = None
    test_short_side: int | None = None

    def rows(self, split: str) -> npt.NDArray[np.intp]:
        """Return the indices of the images in a split."""
        return np.flatnonzero(self.splits == split)


Divide = Callable[[ImageTable], tuple[ImageTable, npt.NDArray[np.str_]]]


def prepare_data(
    settings: Settings, run: RunFolder, fabric: Fabric, progress: bool = True, divide: Divide | None = None
) -> PreparedData:
    """Open the data, split it (a resumed run keeps its split), and decode the images into the cache.

    ``divide`` selects images and splits them in another way than the settings say. Others are not decoded.
    """
    progress = progress and fabric.is_global_zero
    if divide is None:
        decode_together(settings, fabric)
    with fabric.rank_zero_first():  # the other ranks find the split and the decoded images
        table = open_data(settings.data, settings)
        balanced = settings.class_weights or settings.balanced_sampling
        check_method_fits(settings.method, table.multilabel, balanced)  # before anything is decoded
        known = DecisionRule(weights=(1.0,) * table.num_classes)  # the class frequencies are not known yet
        make_rule(table.classes, table.multilabel, known, settings.decision, settings.cost)
        check_columns(settings.by, table)
        check_class_names(table)
        if is_there(run.split):
            left_out = run.read_data_summary().left_out
            table = table.select(np.array([i for i, name in enumerate(table.names) if name not in left_out], np.intp))
            splits = read_split(run.split, table)
            _print_estimate(settings, table, splits, fabric, progress)
            images = decode(table, settings.short_side, cache_dir=settings.cache_folder, progress=progress)
        else:
            table, splits = (table, make_split(table, settings.split)) if divide is None else divide(table)
            if progress:
                Console(stderr=True).print(table.in_words(splits), highlight=False, markup=False, soft_wrap=True)
            _print_estimate(settings, table, splits, fabric, progress)
            screened = screen(table, splits, settings, progress)
            table, splits, images = screened.table, screened.splits, screened.images
            run.write_data_summary(screened.summary)
            run.write_split(split_table(table, splits))
            print_notes(screened.summary, progress)
        data = PreparedData(table, splits, images)
        if (short_side := test_short_side(settings, data)) != settings.short_side:
            # Training images too: the statistics of the features are those of images as they are tested.
            test_images = decode(table, short_side, cache_dir=settings.cache_folder, progress=progress)
            data = replace(data, test_images=test_images, test_short_side=short_side)
    if not (splits == "train").any():
        raise InputError("the training split has no images: choose other shares.")
    if not np.isin(splits, ("val", "test")).any():
        raise InputError("neither the split 'val' nor 'test' has images: choose other shares.")
    return data


def print_notes(summary: DataSummary, progress: bool) -> None:
    """Print what was found out about the data."""
    for line in summary.in_words() if progress else ():
        Console(stderr=True).print(f"! {line}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def decode_together(settings: Settings, fabric: Fabric) -> None:
    """Decode the images on all nodes at once, if there are several and they share the cache: the first process of each
    takes the images that no other is decoding. What is wrong with the data is reported by rank 0, later."""
    if find_launch().nodes == 1 or fabric.local_rank > 0:
        return
    with contextlib.suppress(InputError):
        decode_readable(open_data(settings.data, settings), settings.short_side, settings.cache_folder, progress=False)


def _print_estimate(
    settings: Settings, table: ImageTable, splits: npt.NDArray[np.str_], fabric: Fabric, progress: bool
) -> None:
    """Print how long the run will take, before the images are decoded."""
    for line in first_estimate(settings, table, splits, fabric.device) if progress else ():
        Console().print(line, highlight=False, soft_wrap=True)


def test_short_side(settings: Settings, data: PreparedData) -> int:
    """Return the short side of the images that are tested."""
    if settings.test_short_side is not None:
        return settings.test_short_side
    if settings.augment.resized_crop is None and settings.augment.zoom is None:
        return settings.short_side
    rows = data.rows("train")
    return matching_short_side(
        settings.augment, settings.short_side, data.images.heights[rows], data.images.widths[rows]
    )


def check_class_names(table: ImageTable) -> None:
    """Refuse names of classes that model.json, which is written after training, does not take."""
    if long := [name for name in table.classes if len(name) > MAX_TEXT]:
        raise InputError(
            f"a class has a name of {len(long[0]):,} characters, at most {MAX_TEXT:,} are allowed: {long[0][:60]}…. Is "
            "that the column of the labels?"
        )


def check_columns(by: str, table: ImageTable) -> None:
    """Refuse columns for subgroups that the data does not have."""
    for name in filter(None, (word.strip() for word in by.split(","))):
        if table.extra.empty:
            raise InputError(
                f"subgroups by '{name}' need a table with such a column, and {table.source} at {table.root} has none "
                "beside image, label, group and split. Leave out by (--by), or give a table that has it."
            )
        if name not in table.extra:
            raise unknown("column for subgroups", name, map(str, table.extra))


def train_loader(settings: Settings, data: PreparedData, fabric: Fabric) -> Loader:
    """Return the loader of the training split."""
    rows = data.rows("train")
    weights = None
    if settings.class_weights:
        if data.table.multilabel:
            raise InputError("class_weights needs one label per image; this data set has several labels per image.")
        # The mean over the training images is one, so that the scale of the loss does not change.
        counts = np.maximum(data.table.class_counts(rows), 1)
        weights = (len(rows) / (np.count_nonzero(data.table.class_counts(rows)) * counts))[data.table.labels]
    return make_loader(
        settings,
        data,
        rows,
        fabric,
        augment=settings.augment,
        num_classes=data.table.num_classes,
        weights=weights,
        balanced=settings.balanced_sampling,
    )


def make_loader(settings: Settings, data: PreparedData, rows: Rows, fabric: Fabric, **options: Any) -> Loader:
    """Return a loader of ``rows``, to train with the option ``augment``, else to test; ``options`` are further
    arguments of Loader."""
    return Loader(
        data.images if "augment" in options or data.test_images is None else data.test_images,
        data.table.labels,
        rows,
        batch_size=settings.batch_size,
        seed=settings.seed,
        resident=settings.resident,
        device=fabric.device,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        **options,
    )


def make_network(settings: Settings, data: PreparedData, resumed: bool = False) -> CCLNet:
    """Return the network with its initial weights, the same on every rank.

    A resumed run does not load pretrained weights, because all of its weights come from the checkpoint.
    """
    torch.manual_seed(settings.seed)
    network = CCLNet(
        settings.backbone,
        data.table.num_classes,
        settings.method,
        pretrained=settings.pretrained and not resumed,
        class_counts=data.table.class_counts(data.rows("train")).tolist(),
        method_settings=settings.method_settings,
        backbone_settings=backbone_settings(settings),
        logit_adjustment=settings.logit_adjustment,
        pooling=settings.pooling,
    )
    if (settings.weights or settings.pretrained) and not resumed and isinstance(network.classifier, TimmClassifier):
        if network.classifier.model.pretrained_cfg.get("num_classes") != data.table.num_classes or settings.weights:
            network.classifier.shrink_last_layer()
        if settings.weights:
            weights = fitting_weights(network.classifier, Path(settings.weights))
            network.classifier.shipped.load_state_dict(weights, strict=False)
    if settings.prior_bias and not resumed:
        start_at_class_frequencies(network, settings, data)
    crop = settings.augment.crop
    try:  # an image size that the backbone does not support shows only in its first forward pass
        with torch.no_grad():
            network.eval()(torch.zeros(1, 3, crop, crop))
    except (RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
        size = f"{crop} px (augment.crop)"
        raise InputError(f"backbone {settings.backbone} cannot take images of {size}: {first_line(error)}.") from error
    return network.train()


@torch.no_grad()
def start_at_class_frequencies(network: CCLNet, settings: Settings, data: PreparedData) -> None:
    """Set the bias of the classifier so that the network predicts the class frequencies before its first step.

    Training that balances the classes, by weights, sampling or logit adjustment, sees equal frequencies, and begins
    without a bias.
    """
    bias = dict(network.classifier.shipped.named_parameters()).get(f"{network.classifier.last_layer}bias")
    balanced = settings.class_weights or settings.balanced_sampling or settings.logit_adjustment
    if balanced or bias is None:
        return
    rows = data.rows("train")
    share = torch.tensor(data.table.class_counts(rows), dtype=torch.float64).clamp(min=0.5) / len(rows)
    start = torch.logit(share.clamp(max=1 - 0.5 / len(rows))) if data.table.multilabel else share.log()
    bias.copy_(start)


def check_batch_size(settings: Settings, network: CCLNet, world_size: int) -> None:
    """Refuse a batch with fewer than two images per process and chunk where batch norm needs them."""
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
    images = 2 if normed and settings.batch_norm == "batch" else 1
    least = images * world_size * settings.accumulate
    if settings.batch_size < least:
        raise InputError(
            f"a batch of {settings.batch_size} is too small for {world_size} processes with accumulate = "
            f"{settings.accumulate}: the network needs at least {images} images at a time. Set batch_size to {least} "
            "or more."
        )


def backbone_settings(settings: Settings) -> dict[str, Any]:
    """Return the keyword arguments for ``timm.create_model``."""
    crop = settings.augment.crop
    dropout = {"drop_rate": settings.drop_rate, "drop_path_rate": settings.drop_path_rate}
    return {name: rate for name, rate in dropout.items() if rate} | image_size_settings(settings.backbone, (crop, crop))


def fitting_weights(classifier: Classifier, path: Path) -> dict[str, Tensor]:
    """Read initial weights from a file. The last layer is left out if it is for other classes; any other mismatch is an
    error that lists the names."""
    given = read_weights(path)
    own, last = classifier.shipped.state_dict(), classifier.last_layer
    fits = {name: value for name, value in given.items() if name in own and value.shape == own[name].shape}
    missing = [name for name in own if name not in fits and not name.startswith(last)]
    unused = [f"{name} {list(value.shape)}" for name, value in given.items() if name not in fits]
    unused = [name for name in unused if not name.startswith(last)]
    if missing or unused:
        raise InputError(
            f"{path} does not fit the backbone. Missing or of another shape: {listed(missing, 12) or 'none'}. "
            f"Not used: {listed(unused, 12) or 'none'}. Choose the backbone these weights were made for, and for "
            "a transformer the image size, augment.crop."
        )
    return fits


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Read the tensors of a .safetensors file, or of a state dict saved by torch; pickled objects are refused, and
    files of a run or an export that have another checksum than theirs."""
    if "\0" in str(path) or not path.is_file():
        raise InputError(f"there is no weights file {path}.")
    try:
        with checking(path) if (path.parent / "model.json").is_file() else contextlib.nullcontext():
            if path.suffix == ".safetensors":
                return load_file(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # damaged bytes make torch's reader fail in any way
        reason = first_line(error)
        raise InputError(f"{path} is refused: it is not a .safetensors file or plain state dict ({reason}).") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise InputError(f"{path} holds no state dict: expected names with tensors.")
    return state


def compiles(settings: Settings, images: int, on_gpu: bool) -> bool:
    """Return whether the network is compiled: as the settings say, by default on a GPU if the run is long enough.

    >>> compiles(Settings(epochs=160), 8012, on_gpu=True), compiles(Settings(epochs=20), 8012, on_gpu=True)
    (True, False)
    """
    if settings.compile is not None:
        return settings.compile
    return on_gpu and float(settings.epochs * images) * settings.augment.crop**2 >= PIXELS_WORTH_COMPILING


def make_optimizer(settings: Settings, network: CCLNet, on_gpu: bool) -> torch.optim.Optimizer:
    """Return SGD or AdamW over the parameter groups of the network and the method."""
    groups = network.param_groups(
        settings.lr,
        settings.lr_ccl,
        settings.weight_decay,
        layer_decay=settings.layer_decay,
        decay_norms=settings.decay_norms,
    )
    for group in groups:
        group["initial_lr"] = group["lr"]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=on_gpu)
    return torch.optim.SGD(groups, momentum=settings.momentum, fused=on_gpu)


def drop_epochs(settings: Settings) -> list[int]:
    """Return the epochs at which the step schedule drops the learning rate.

    Each rate is used for at least one epoch. Drops for which a short run has no epoch are left out.

    >>> [drop_epochs(Settings(epochs=epochs, drops=(0.5, 0.75))) for epochs in (1, 2, 3, 160)]
    [[], [1], [2], [80, 120]]
    """
    starts: list[int] = []
    for drop in settings.drops:
        starts.append(max(round(drop * settings.epochs), starts[-1] + 1 if starts else 1))
    return [start for start in starts if start < settings.epochs]


def rate_factor(settings: Settings, epoch: float) -> float:
    """Return the factor on the initial learning rates at ``epoch`` (0 at the start, fractions within an epoch).

    ``step`` multiplies by ``drop_factor`` at each drop, ``cosine`` falls to zero at the last epoch. A warm-up rises
    linearly to the value of the schedule.

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
        factor *= max(epoch, 1e-3) / settings.warmup_epochs  # above zero, so that the first step changes the weights
    return factor
