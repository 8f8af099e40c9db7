"""The training loop. Read it from ``train`` downwards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from cclnet.data.loader import Rows
from cclnet.errors import InputError, Interrupted, NotFinite, first_line
from cclnet.functional import inverse_of
from cclnet.methods.base import epoch_sums, sum_over_processes
from cclnet.network import CCLNet, Classifier
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import TrainedInfo
from cclnet.runs.out_of_distribution import FeatureStatistics
from cclnet.settings import Settings
from cclnet.training.checkpoint import CheckpointWriter, checkpoints, load_latest
from cclnet.training.console import Display, StopRequest, format_softness
from cclnet.training.cuda_graph import compiled, plan_convolutions
from cclnet.training.duration import RunLength
from cclnet.training.feature_statistics import noise_features, statistics_of
from cclnet.training.setup import (
    PreparedData,
    check_batch_size,
    compiles,
    make_deterministic,
    make_fabric,
    make_network,
    make_optimizer,
    prepare_data,
    rate_factor,
    train_loader,
)
from cclnet.training.step import TrainStep
from cclnet.training.validate import Tester, WeightAverage, describe, write_artifacts

EpochHook = Callable[[dict[str, Any], CCLNet], None]
StepHook = Callable[[int, int], None]


def train(
    settings: Settings | None,
    out: str | Path,
    *,
    devices: int | None = None,
    accelerator: str = "auto",
    cache_dir: str | Path | None = None,
    progress: bool = True,
    on_epoch: EpochHook | None = None,
    on_step: StepHook | None = None,
) -> Path:
    """Train a classifier, write its run folder and return the folder.

    ``settings`` None resumes the run in ``out`` with its own settings where it stopped. ``cache_dir`` replaces that of
    the settings. ``on_step`` is called after each step with the epoch and the step, both counted from 1. The other
    arguments are those of ``cclnet.train``.
    """
    run = RunFolder(out)
    resumed = settings is None
    settings = settings or run.read_settings()
    if cache_dir is not None:
        settings = replace(settings, cache_dir=str(cache_dir))
    if settings.deterministic:
        make_deterministic()
    fabric = make_fabric(settings, devices, accelerator)
    fabric.launch()
    if fabric.is_global_zero:
        if resumed:
            run.remove_partial()
        else:
            run.create(settings)
    fabric.barrier()
    if not fabric.is_global_zero and not resumed:
        settings = replace(run.read_settings(), cache_dir=settings.cache_dir)  # what rank 0 chose counts for all
    try:
        training = Training(settings, run, fabric, prepare_data(settings, run, fabric, progress))
        if resumed:
            training.restore()
        training.fit(progress, on_epoch, on_step)
    except Exception:
        if fabric.is_global_zero and not resumed:
            run.discard()  # without a checkpoint there is nothing to resume, and the folder can be used again
        raise
    training.finish()
    return run.path


class Training:
    """The state of a run. A checkpoint contains exactly what ``state`` returns."""

    def __init__(self, settings: Settings, run: RunFolder, fabric: Fabric, data: PreparedData) -> None:
        self.settings, self.run, self.fabric, self.data = settings, run, fabric, data
        on_gpu = fabric.device.type == "cuda"
        compiling = compiles(settings, len(data.rows("train")), on_gpu)
        if compiling:
            torch.compiler.reset()  # earlier runs in this process would use up the limit of versions per function
        resumed = bool(checkpoints(run.checkpoints))
        self.network = make_network(settings, data, resumed).to(memory_format=torch.channels_last)
        check_batch_size(settings, self.network, fabric.world_size)
        if settings.unsoften:
            target = self.network.method.target()
            if target is None:
                raise InputError(
                    f"unsoften needs a method with fixed soft labels, and method '{settings.method}' has none. Choose "
                    "another method, or turn unsoften off."
                )
            inverse_of(target.double())  # a singular matrix is refused before training
        if settings.batch_norm == "sync":
            if not on_gpu:
                raise InputError("batch_norm 'sync' needs GPUs: on a CPU use 'batch' or 'frozen'.")
            self.network = nn.SyncBatchNorm.convert_sync_batchnorm(self.network)
        self.loader = train_loader(settings, data, fabric)
        wrapped = fabric.setup_module(compiled(self.network) if compiling else self.network)
        self.optimizer = make_optimizer(settings, self.network, on_gpu)
        self.average = WeightAverage(self.network.classifier, settings.ema) if settings.ema else None
        dtype = torch.float64 if settings.precision == "64" else torch.float32
        self.mean = torch.tensor(settings.input_mean, dtype=dtype, device=fabric.device)
        self.std = torch.tensor(settings.input_std, dtype=dtype, device=fabric.device)
        self.step = TrainStep(
            wrapped,
            self.optimizer,
            fabric.backward,
            settings,
            self.mean,
            self.std,
            compile=compiling,
            capture=on_gpu and fabric.world_size == 1 and settings.compile is not False,
            during_warmup=self._plan_convolutions if compiling else lambda: None,
        )
        self.records: list[dict[str, Any]] = []  # one per epoch, the content of metrics.jsonl
        self.epoch = 0  # completed epochs
        self.steps = 0  # completed steps of the next epoch
        self.sums: Tensor | None = None  # sums of the losses over those steps
        self.bad_step = torch.tensor(-1, device=fabric.device)  # first step with a loss that is not finite
        self.seconds = 0.0  # training time, over all resumes
        self.best: dict[str, float] = {}
        self.cut = False  # whether max_minutes ended the run
        self.writer = CheckpointWriter(run.checkpoints)
        val_rows = data.rows("val")
        self._validation = self._tester(val_rows) if len(val_rows) else None

    def fit(self, progress: bool, on_epoch: EpochHook | None = None, on_step: StepHook | None = None) -> None:
        """Train to the last epoch, until ``max_minutes`` are over, or until a signal arrives."""
        began, seconds_before = time.monotonic(), self.seconds
        done = self.epoch * len(self.loader) + self.steps
        rank_zero = self.fabric.is_global_zero
        length = RunLength.of(self.settings, self.data.splits, self.fabric.device, len(self.loader), done)
        logger = self.settings.logger if rank_zero else "none"
        display = Display(self.run, length, show=progress and rank_zero, logger=logger)
        with StopRequest(self.fabric, self.settings.max_minutes) as stop, display, closing(self.writer):
            while self.epoch < self.settings.epochs and not stop.requested():
                completed = self._train_epoch(stop, display, on_step)
                self.seconds = seconds_before + time.monotonic() - began
                if not completed:
                    self.sums = self._check_losses()  # averaged over the ranks, because rank 0 saves for all
                    self._save()
                    break
                record = self._end_epoch()
                self.seconds = seconds_before + time.monotonic() - began
                display.epoch(record, self.network.soft_labels(), self._softness(record))
                self._save()
                if on_epoch is not None:
                    on_epoch(record, self.network)
            if stop.received:
                raise Interrupted(self.run.path, stop.received)
            self.cut = self.epoch < self.settings.epochs
            if self.cut:
                display.cut(self.settings.max_minutes, self.epoch, self.steps)

    def _train_epoch(self, stop: StopRequest, display: Display, on_step: StepHook | None) -> bool:
        """Train to the end of the epoch; return False if stopped before it."""
        if self.steps == 0:
            # Seeded per epoch, so that dropout does not depend on how often a run was resumed.
            # One seed from several numbers, without the collisions of a sum.
            numbers = np.random.SeedSequence((self.settings.seed, self.epoch, self.fabric.global_rank))
            torch.manual_seed(int(numbers.generate_state(1, np.uint64)[0] >> np.uint64(1)))
        self.network.train()
        if self.settings.batch_norm == "frozen":
            for module in self.network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        self._epoch_began, self._first_step = time.monotonic(), self.steps
        softness = self._softness(self.records[-1] if self.records else {})
        for step, batch in enumerate(self.loader.epoch(self.epoch, start=self.steps), start=self.steps):
            factor = rate_factor(self.settings, self.epoch + step / len(self.loader))
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            try:
                losses = self.step(batch).double()
            except NotFinite as error:
                raise self._diverged(str(error), step + 1, self.epoch + 1) from error
            self.sums = losses if self.sums is None else self.sums + losses
            self.bad_step = torch.where((self.bad_step < 0) & ~losses.isfinite().all(), step + 1, self.bad_step)
            self.steps = step + 1
            if self.average is not None:
                self.average.update_parameters(self.network.classifier)
            loss = display.step(self.epoch, step, self._images_seen(), self._epoch_began, self.sums, softness)
            if loss is not None and not math.isfinite(loss):
                self._check_losses(local=True)  # the other ranks are not at this point
            if on_step is not None:
                on_step(self.epoch + 1, self.steps)
            if self.steps < len(self.loader) and stop.requested(step):
                return False
        return True

    def _images_seen(self) -> int:
        """Return the images of this epoch over all ranks since it was started or resumed."""
        return (self.steps - self._first_step) * self.loader.batch_size

    def _end_epoch(self) -> dict[str, Any]:
        """Check the losses, end the method's epoch, validate, and return the record of the epoch."""
        sums = self._check_losses()  # waits for the device, so the time of the epoch is complete after it
        seconds = time.monotonic() - self._epoch_began
        means = (sums / self.steps).tolist()
        record: dict[str, Any] = {"epoch": self.epoch + 1, **dict(zip(self.step.terms, means, strict=True))}
        for key, name in (("lr", "network"), ("lr_method", "method")):
            rates = [group["lr"] for group in self.optimizer.param_groups if group["name"] == name]
            record |= {key: max(rates)} if rates else {}
        record.update(self.network.method.end_epoch())  # after lr: the report reads the keys before lr as loss terms
        record.update(seconds=seconds, images_per_second=self._images_seen() / seconds)
        self.epoch, self.steps, self.sums = self.epoch + 1, 0, None
        if self.epoch % self.settings.validate_every == 0 or self.epoch == self.settings.epochs:
            self._broadcast_buffers()
            scores = self._validation.scores(self.shipped_classifier) if self._validation else {}
            self._check_logits(math.isfinite(scores.get("val_loss", 0.0)))
            if scores.get("val_accuracy", -1.0) > self.best.get("val_accuracy", -1.0):
                self.best = {"val_accuracy": scores["val_accuracy"], "epoch": float(self.epoch)}
            record.update(scores)
        self.records.append(record)
        if self.fabric.is_global_zero:
            self.run.write_history(self.records)
        return record

    def _check_losses(self, local: bool = False) -> Tensor:
        """Return the summed losses, averaged over ranks unless ``local``; raise if they are not finite."""
        assert self.sums is not None
        sums: Tensor = self.sums if local else self.fabric.all_reduce(self.sums, reduce_op="mean")
        if not bool(torch.isfinite(sums).all()):
            bad = ", ".join(n for n, v in zip(self.step.terms, sums.tolist(), strict=True) if not math.isfinite(v))
            raise self._diverged(f"not finite: {bad}", int(self.bad_step), self.epoch + 1)
        return sums.cpu()

    def _check_logits(self, finite: bool) -> None:
        """Raise if the weights diverged in the last steps of an epoch, after its losses were computed."""
        if not finite:
            raise self._diverged("not finite: logits", len(self.loader), self.epoch)

    def _diverged(self, reason: str, step: int, epoch: int) -> NotFinite:
        self.writer.close()  # the checkpoint being written is good
        kept = checkpoints(self.run.checkpoints)
        good = f"the last good checkpoint is {kept[-1]}" if kept else "there is no earlier checkpoint"
        return NotFinite(
            f"training diverged at step {step} of epoch {epoch} ({reason}). Nothing was overwritten; {good}. "
            "Lower lr, set clip or warmup_epochs, or check the images."
        )

    def _softness(self, record: dict[str, Any]) -> str:
        return format_softness(record, self.network.method.collapse_softness)

    @property
    def shipped_classifier(self) -> Classifier:
        """The classifier that is evaluated and shipped: with averaged weights if ``ema`` is set."""
        return self.network.classifier if self.average is None else cast(Classifier, self.average.module)

    def _broadcast_buffers(self) -> None:
        """Copy the batch norm statistics of rank 0, which are shipped, to all ranks, which evaluate together."""
        if self.fabric.world_size > 1:
            for buffer in self.shipped_classifier.buffers():
                torch.distributed.broadcast(buffer, 0)

    def _tester(self, rows: Rows, tta: str = "none") -> Tester:
        return Tester(self.settings, self.data, rows, self.fabric, self.mean, self.std, tta)

    def finish(self) -> None:
        """Evaluate all splits except the training split and write the artifacts of the run."""
        rows = np.flatnonzero(self.data.splits != "train")
        self._broadcast_buffers()
        logits = self._tester(rows, self.settings.test_views).logits(self.shipped_classifier)
        self._check_logits(bool(logits.isfinite().all()))
        statistics = self._feature_statistics(rows)
        if self.fabric.is_global_zero:
            trained = TrainedInfo(
                epochs=self.epoch, best=self.best, seconds=round(self.seconds, 3), cut=self.cut or None
            )
            description = describe(self.settings, self.data, self.fabric, trained, self.network.method)
            soft_labels = self.network.soft_labels()
            write_artifacts(
                self.run, description, self.shipped_classifier, soft_labels, statistics, self.data, rows, logits
            )
        self.fabric.barrier()  # no rank reads the artifacts before they are written

    def _feature_statistics(self, held_out: Rows) -> FeatureStatistics | None:
        """Return the statistics of the features of the shipped classifier. Collective."""
        classifier, size = self.shipped_classifier, self.settings.augment.crop

        def of_noise() -> npt.NDArray[np.float64]:
            return noise_features(classifier, size, self.mean, self.std)

        def of_rows(rows: Rows) -> npt.NDArray[np.float64]:
            return self._tester(rows).features(classifier).numpy()

        labels = self.data.table.labels
        return statistics_of(self.data.rows("train"), held_out, labels, of_rows, of_noise, self.settings.seed)

    def _plan_convolutions(self) -> Callable[[], None] | None:
        size = self.settings.augment.crop
        images = self.loader.batch_size // self.fabric.world_size // self.settings.accumulate
        shape = (images, 3, size, size)
        device = self.fabric.device
        with self.fabric.autocast():
            half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        dtype = half or next(self.network.parameters()).dtype
        return plan_convolutions(self.network.classifier, shape, device, dtype)

    def state(self) -> dict[str, Any]:
        """Return the state to save. Collective: every rank must call it, because it gathers their random states
        and adds up their sums."""
        device = self.fabric.device
        random = torch.get_rng_state()
        device_random = torch.cuda.get_rng_state() if device.type == "cuda" else torch.empty(0)
        ranks = self.fabric.world_size
        network = self.network.state_dict()
        if self.steps:  # rank 0 saves for all; the sums are exact, so their total continues to the same bits
            network |= {name: sum_over_processes(share.clone()) for name, share in epoch_sums(self.network)}
        return {
            "network": network,
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "epoch": self.epoch,
            "steps": self.steps,
            "sums": self.sums,
            "terms": self.step.terms,
            "seconds": self.seconds,
            "best": self.best,
            # One row per rank, because dropout differs between ranks.
            "random": self.fabric.all_gather(random.to(device)).cpu().view(ranks, -1),
            "device_random": self.fabric.all_gather(device_random.to(device)).cpu().view(ranks, -1),
        }

    def _save(self) -> None:
        state = self.state()
        if self.fabric.is_global_zero:
            self.writer.save(state, self.epoch, self.steps)

    def restore(self) -> None:
        """Load the newest checkpoint; without one, start from the beginning."""
        state = load_latest(self.run.checkpoints, set_aside=self.fabric.is_global_zero)
        if state is None:
            return
        try:
            self.network.load_state_dict(state["network"])
            for _, share in epoch_sums(self.network) if self.fabric.global_rank else ():
                share.zero_()  # rank 0 has the total
            self.optimizer.load_state_dict(state["optimizer"])
            if self.average is not None:
                self.average.load_state_dict(state["average"])
            self.epoch, self.steps = state["epoch"], state["steps"]
            self.sums = None if state["sums"] is None else state["sums"].to(self.fabric.device)
            self.step.terms = state["terms"]
            self.seconds, self.best = state["seconds"], state["best"]
            random, device_random = state["random"], state["device_random"]
        except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise InputError(
                f"the checkpoint in {self.run.checkpoints} does not fit the settings of the run: {first_line(error)}. "
                "Was settings.toml changed, or a checkpoint of another run copied here?"
            ) from error
        self.records = self.run.read_history()[: self.epoch]
        if len(random) == self.fabric.world_size:  # else the ranks get new random states at the next epoch
            # Cloned, because set_rng_state ignores the offset of a row in its storage.
            torch.set_rng_state(random[self.fabric.global_rank].clone())
            if self.fabric.device.type == "cuda" and device_random.numel():
                torch.cuda.set_rng_state(device_random[self.fabric.global_rank].clone())
