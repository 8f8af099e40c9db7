"""The training loop: read it from ``train`` downwards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cclnet.data.augment import normalise
from cclnet.data.loader import Loader
from cclnet.errors import NotFinite
from cclnet.evaluation.predictions import Predictions, write_predictions
from cclnet.functional import collapse_point
from cclnet.network import CCLNet, Classifier
from cclnet.training.checkpoint import CheckpointWriter, checkpoints, load_latest
from cclnet.training.interrupt import StopRequest
from cclnet.training.prepare import (
    PreparedData,
    make_deterministic,
    make_fabric,
    make_network,
    prepare_data,
    test_loader,
    train_loader,
)
from cclnet.training.progress import Display, softness_in_words
from cclnet.training.run_folder import RunFolder, versions
from cclnet.training.schedule import rate_factor
from cclnet.training.settings import Settings
from cclnet.training.step import TrainStep

EpochHook = Callable[[dict[str, Any], CCLNet], None]


class Interrupted(Exception):
    """A signal ended the run between two steps; a checkpoint was written."""

    def __init__(self, run: Path, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}. Go on with: cclnet train --resume {run}")
        self.signal = signal


def train(
    settings: Settings | None,
    out: str | Path,
    *,
    devices: int | None = None,
    accelerator: str = "auto",
    cache_dir: Path | None = None,
    progress: bool = True,
    on_epoch: EpochHook | None = None,
) -> Path:
    """Train a classifier and write its run folder; returns the folder.

    Args:
        settings: what to run; None resumes the run in ``out`` with its own settings, exactly where it stopped.
        out: the run folder.
        devices: processes to start here (one a device). Under torchrun or SLURM they say.
        accelerator: "auto", "cpu" or "cuda".
        cache_dir: where decoded images are kept; by default the user's cache folder.
        progress: show a live bar and a line an epoch.
        on_epoch: called after each epoch with its record and the network.
    """
    run = RunFolder(out)
    resumed = settings is None
    settings = settings or run.read_settings()
    if settings.deterministic:
        make_deterministic()
    fabric = make_fabric(settings, devices, accelerator)
    fabric.launch()
    if fabric.is_global_zero and not resumed:
        run.create(settings)
    fabric.barrier()
    data = prepare_data(settings, run, fabric, cache_dir)
    training = Training(settings, run, fabric, data)
    if resumed:
        training.restore()
    training.fit(progress, on_epoch)
    training.finish()
    return run.path


class Training:
    """A run in the making. What a checkpoint holds is exactly what ``state`` returns."""

    def __init__(self, settings: Settings, run: RunFolder, fabric: Fabric, data: PreparedData) -> None:
        self.settings, self.run, self.fabric, self.data = settings, run, fabric, data
        on_gpu = fabric.device.type == "cuda"
        compiled = on_gpu if settings.compile is None else settings.compile
        if compiled:
            torch._dynamo.reset()  # it keeps few versions of a function: those of earlier runs must not use them up
        self.network = make_network(settings, data).to(memory_format=torch.channels_last)
        if settings.batch_norm == "sync":
            self.network = nn.SyncBatchNorm.convert_sync_batchnorm(self.network)
        self.loader = train_loader(settings, data, fabric)
        wrapped = fabric.setup_module(torch.compile(self.network) if compiled else self.network)
        self.optimizer = make_optimizer(settings, self.network, on_gpu)
        self.average = None
        if settings.ema:
            average = get_ema_multi_avg_fn(settings.ema)
            self.average = AveragedModel(self.network.classifier, multi_avg_fn=average, use_buffers=True)
        dtype = torch.float64 if settings.precision == "64" else torch.float32
        self.mean = torch.tensor(settings.mean, dtype=dtype, device=fabric.device)
        self.std = torch.tensor(settings.std, dtype=dtype, device=fabric.device)
        self.step = TrainStep(
            wrapped,
            self.optimizer,
            fabric.backward,
            settings.augment,
            self.mean,
            self.std,
            settings.clip,
            compile=compiled,
            capture=compiled and on_gpu and fabric.world_size == 1,
        )
        self.records: list[dict[str, Any]] = []
        self.epoch = 0  # whole epochs done
        self.steps = 0  # steps of the next epoch done
        self.sums: Tensor | None = None  # losses of those steps, summed
        self.bad_step = torch.tensor(-1, device=fabric.device)  # the first whose loss is not finite, if any
        self.seconds = 0.0  # of training, over all resumes
        self.best: dict[str, float] = {}
        self.writer = CheckpointWriter(run.checkpoints)
        self._validation = self._validation_loader()

    # ---- the loop ----------------------------------------------------------------------------------------------

    def fit(self, progress: bool, on_epoch: EpochHook | None = None) -> None:
        """Train from where the run stands to its last epoch (or its last minute)."""
        began = time.monotonic() - self.seconds
        done = self.epoch * len(self.loader) + self.steps
        shown = progress and self.fabric.is_global_zero
        display = Display(
            self.run, self.settings.epochs, len(self.loader), done, shown, written=self.fabric.is_global_zero
        )
        with StopRequest(self.fabric) as stop, display, closing(self.writer):
            while self.epoch < self.settings.epochs and not self._out_of_time(began):
                self._train_epoch(stop, display, began)
                record = self._close_epoch(began)
                matrix = self.network.soft_labels()
                display.epoch(record, matrix, self.data.table.classes, self._words(record))
                self._save()
                if on_epoch is not None:
                    on_epoch(record, self.network)
                if signal := stop.asked():
                    raise Interrupted(self.run.path, signal)

    def _train_epoch(self, stop: StopRequest, display: Display, began: float) -> None:
        if self.steps == 0:
            # Keyed like the data, so that what dropout draws does not depend on how often a run was resumed.
            torch.manual_seed(_mix(self.settings.seed, self.epoch, self.fabric.global_rank))
        self._training_mode()
        self._epoch_began = time.monotonic()
        first, words = self.steps, self._words(self.records[-1] if self.records else {})
        for step, batch in enumerate(self.loader.epoch(self.epoch, start=self.steps), start=self.steps):
            self._set_rates(self.epoch + step / len(self.loader))
            try:
                losses = self.step(batch).double()
            except NotFinite as error:
                raise self._diverged(str(error), step + 1) from error
            self.sums = losses if self.sums is None else self.sums + losses
            self.bad_step = torch.where((self.bad_step < 0) & ~losses.isfinite().all(), step + 1, self.bad_step)
            self.steps = step + 1
            if self.average is not None:
                self.average.update_parameters(self.network.classifier)
            images = (step + 1 - first) * self.settings.batch_size
            loss = display.step(self.epoch, step, images, self._epoch_began, self.sums, words)
            if loss is not None and not math.isfinite(loss):
                self._check_losses()
            if signal := stop.asked(step):
                self.seconds = time.monotonic() - began
                self._check_losses()
                self._save()
                raise Interrupted(self.run.path, signal)

    def _close_epoch(self, began: float) -> dict[str, Any]:
        """Check and log the epoch, apply the method's end-of-epoch rule, move on to the next."""
        sums = self._check_losses()  # waits for the device: the epoch's time is complete after it
        seconds = time.monotonic() - self._epoch_began
        images = self.steps * min(self.settings.batch_size, len(self.data.rows("train")))
        means = (sums / self.steps).tolist()
        record: dict[str, Any] = {"epoch": self.epoch + 1, **dict(zip(self.step.terms, means, strict=True))}
        record.update(self.network.method.end_epoch())
        rates = [group["lr"] for group in self.optimizer.param_groups]
        record.update(zip(("lr", "lr_method"), rates, strict=False))
        record.update(seconds=seconds, images_per_second=images / seconds)
        self.epoch, self.steps, self.sums = self.epoch + 1, 0, None
        if self._validation and (self.epoch % self.settings.validate_every == 0 or self.epoch == self.settings.epochs):
            record.update(self._validate())
        self.seconds = time.monotonic() - began
        self.records.append(record)
        if self.fabric.is_global_zero:
            self.run.write_metrics(self.records)
        return record

    def _check_losses(self) -> Tensor:
        """The summed losses, averaged over ranks; a loss that is not finite ends the run, with nothing written."""
        assert self.sums is not None
        sums: Tensor = self.fabric.all_reduce(self.sums, reduce_op="mean")
        if not bool(torch.isfinite(sums).all()):
            bad = ", ".join(n for n, v in zip(self.step.terms, sums.tolist(), strict=True) if not math.isfinite(v))
            raise self._diverged(f"not finite: {bad}", int(self.bad_step))
        return sums.cpu()

    def _diverged(self, what: str, step: int) -> NotFinite:
        self.writer.close()  # what is still being written is good
        kept = checkpoints(self.run.checkpoints)
        good = f"the last good checkpoint is {kept[-1]}" if kept else "there is no earlier checkpoint"
        return NotFinite(
            f"training diverged at step {step} of epoch {self.epoch + 1} ({what}). Nothing was overwritten; {good}. "
            "Lower lr, set clip or warmup_epochs, or check the images."
        )

    # ---- what the loop uses ------------------------------------------------------------------------------------

    def _training_mode(self) -> None:
        self.network.train()
        if self.settings.batch_norm == "frozen":
            for module in self.network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def _set_rates(self, epoch: float) -> None:
        factor = rate_factor(self.settings, epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def _out_of_time(self, began: float) -> bool:
        limit = self.settings.max_minutes * 60
        over = torch.tensor(float(limit and time.monotonic() - began > limit), device=self.fabric.device)
        return bool(self.fabric.all_reduce(over, reduce_op="max") > 0)

    def _words(self, record: dict[str, Any]) -> str:
        return softness_in_words(record, self._collapse_softness())

    def _collapse_softness(self) -> float:
        margin = self.settings.method_settings.get("margin", 2.0)
        return collapse_point(self.data.table.num_classes, margin)[1]

    # ---- testing -----------------------------------------------------------------------------------------------

    @property
    def tested(self) -> Classifier:
        """The classifier that is tested and shipped: the averaged one where there is one."""
        return self.network.classifier if self.average is None else cast(Classifier, self.average.module)

    def _validation_loader(self) -> Loader | None:
        rows = self.data.rows("val")
        return test_loader(self.settings, self.data, rows, self.fabric) if len(rows) else None

    def _validate(self) -> dict[str, float]:
        assert self._validation is not None
        logits = self.logits(self._validation, len(self.data.rows("val")))
        labels = torch.as_tensor(self.data.table.labels[self.data.rows("val")])
        if self.data.table.multilabel:
            return {"val_loss": float(nn.functional.binary_cross_entropy_with_logits(logits, labels.double()))}
        accuracy = float((logits.argmax(dim=1) == labels).double().mean())
        if accuracy > self.best.get("val_accuracy", -1.0):
            self.best = {"val_accuracy": accuracy, "epoch": float(self.epoch)}
        return {"val_loss": float(nn.functional.cross_entropy(logits, labels)), "val_accuracy": accuracy}

    @torch.no_grad()
    def logits(self, loader: Loader, count: int) -> Tensor:
        """Logits of the loader's images in their order, [count, K] float64 on the CPU, on every rank.

        In full precision: half precision is for speed in training, and would show in the probabilities. Each rank
        fills in its share of zeros, so the sum over ranks counts each image once."""
        classifier = self.tested.eval()
        own = torch.zeros(count, self.data.table.num_classes, dtype=self.mean.dtype, device=self.fabric.device)
        place = {int(row): position for position, row in enumerate(loader.rows)}
        for batch in loader.epoch(0):
            images = normalise(batch.crops, self.mean, self.std).to(own.dtype)
            at = torch.tensor([place[int(row)] for row in batch.rows], device=self.fabric.device)
            own[at] = classifier.logits(classifier.features(images)).to(own.dtype)
        total: Tensor = self.fabric.all_reduce(own, reduce_op="sum") if self.fabric.world_size > 1 else own
        return total.double().cpu()

    # ---- keeping -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        random = torch.get_rng_state()
        device_random = torch.cuda.get_rng_state() if self.fabric.device.type == "cuda" else torch.empty(0)
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "epoch": self.epoch,
            "steps": self.steps,
            "sums": self.sums,
            "terms": self.step.terms,
            "seconds": self.seconds,
            "best": self.best,
            # One row a rank: dropout draws differ between them.
            "random": self.fabric.all_gather(random.to(self.fabric.device)).cpu().view(-1, len(random)),
            "device_random": self.fabric.all_gather(device_random.to(self.fabric.device))
            .cpu()
            .view(self.fabric.world_size, -1),
        }

    def _save(self) -> None:
        state = self.state()
        if self.fabric.is_global_zero:
            self.writer.save(state, self.epoch, self.steps)

    def restore(self) -> None:
        """Go on from the newest checkpoint; without one, from the beginning."""
        state = load_latest(self.run.checkpoints)
        if state is None:
            return
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.epoch, self.steps = state["epoch"], state["steps"]
        self.sums = None if state["sums"] is None else state["sums"].to(self.fabric.device)
        self.step.terms = state["terms"]
        self.seconds, self.best = state["seconds"], state["best"]
        self.records = self.run.read_metrics()[: self.epoch]
        if len(state["random"]) == self.fabric.world_size:  # else the next epoch draws its own
            torch.set_rng_state(state["random"][self.fabric.global_rank])
            if self.fabric.device.type == "cuda" and state["device_random"].numel():
                torch.cuda.set_rng_state(state["device_random"][self.fabric.global_rank])

    def finish(self) -> None:
        """Write what the run leaves behind: model, correlation matrix, predictions of every part but train."""
        table, parts = self.data.table, self.data.parts
        rows = np.flatnonzero(parts != "train")
        logits = self.logits(test_loader(self.settings, self.data, rows, self.fabric), len(rows))
        if not self.fabric.is_global_zero:
            return
        self.run.write_model(self.tested.shipped.state_dict(), self._description())
        matrix = self.network.soft_labels()
        if matrix is not None:
            self.run.write_correlation(matrix, table.classes)
        write_predictions(self.run.predictions, self._predictions(rows, logits))

    def _predictions(self, rows: npt.NDArray[np.intp], logits: Tensor) -> Predictions:
        table = self.data.table
        probabilities = torch.sigmoid(logits) if table.multilabel else torch.softmax(logits, dim=1)
        return Predictions(
            images=np.array([table.names[i] for i in rows]),
            labels=table.labels[rows],
            probabilities=probabilities.numpy(),
            classes=table.classes,
            groups=None if table.groups is None else table.groups[rows],
            parts=self.data.parts[rows],
        )

    def _description(self) -> dict[str, Any]:
        """model.json: what someone needs to use the weights, and where they come from."""
        settings, table = self.settings, self.data.table
        device = self.fabric.device
        cpu = f"CPU, {torch.get_num_threads()} threads"
        return {
            "format": 1,
            "backbone": settings.backbone,
            "method": settings.method,
            "method_settings": settings.method_settings,
            "classes": list(table.classes),
            "multilabel": table.multilabel,
            "short_side": settings.short_side,
            "crop": [settings.augment.crop, settings.augment.crop],
            "mean": list(settings.mean),
            "std": list(settings.std),
            "temperature": None,
            "collapse_softness": self._collapse_softness(),
            "class_counts": table.class_counts(self.data.rows("train")).tolist(),
            "trained": {
                "epochs": self.epoch,
                "of_epochs": settings.epochs,
                "best": self.best,
                "seed": settings.seed,
                "seconds": round(self.seconds, 3),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
                "devices": self.fabric.world_size,
                "precision": str(self.fabric._precision.precision),
                "versions": versions(),
                "images": len(self.data.rows("train")),
                "data": settings.data,
            },
        }


def make_optimizer(settings: Settings, network: CCLNet, on_gpu: bool) -> torch.optim.Optimizer:
    """SGD or AdamW over the network's and the method's parameter groups."""
    groups = network.param_groups(settings.lr, settings.lr_ccl, settings.weight_decay)
    for group in groups:
        group["initial_lr"] = group["lr"]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=on_gpu)
    return torch.optim.SGD(groups, momentum=settings.momentum, fused=on_gpu)


def _mix(*numbers: int) -> int:
    """One seed from several numbers, without the collisions of adding them."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
