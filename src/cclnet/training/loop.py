"""The training loop: read it from ``train`` downwards."""

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

from cclnet.errors import InputError, Interrupted, NotFinite
from cclnet.functional import inverse_of
from cclnet.network import CCLNet, Classifier
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import TrainedInfo
from cclnet.settings import Settings
from cclnet.training.checkpoint import CheckpointWriter, checkpoints, load_latest
from cclnet.training.console import Display, StopRequest, softness_in_words
from cclnet.training.cuda_graph import compiled, rehearsal
from cclnet.training.setup import (
    PreparedData,
    check_shares,
    make_deterministic,
    make_fabric,
    make_network,
    make_optimizer,
    prepare_data,
    rate_factor,
    train_loader,
)
from cclnet.training.step import TrainStep
from cclnet.training.validate import Tester, WeightAverage, describe, write_outcome

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
    """Train a classifier and write its run folder; returns the folder.

    Args:
        settings: what to run; None resumes the run in ``out`` with its own settings, exactly where it stopped.
        out: the run folder.
        devices: processes to start here (one a device). Under torchrun or SLURM they say.
        accelerator: "auto", "cpu" or "cuda".
        cache_dir: folder for decoded images, instead of the one in the settings; a new run records it.
        progress: show a live bar and a line an epoch.
        on_epoch: called after each epoch with its record and the network.
        on_step: called after each step with the epoch and the step, both counted from 1.
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
    if fabric.is_global_zero and not resumed:
        run.create(settings)
    fabric.barrier()
    try:
        data = prepare_data(settings, run, fabric)
        training = Training(settings, run, fabric, data)
    except Exception:
        if fabric.is_global_zero and not resumed:
            run.discard()  # nothing was begun: the folder stays free for a better start
        raise
    if resumed:
        training.restore()
    try:
        training.fit(progress, on_epoch, on_step)
    except Exception:
        if fabric.is_global_zero and not resumed:
            run.discard()  # where no checkpoint was reached there is nothing to go on with
        raise
    training.finish()
    return run.path


class Training:
    """A run in the making. What a checkpoint holds is exactly what ``state`` returns."""

    def __init__(self, settings: Settings, run: RunFolder, fabric: Fabric, data: PreparedData) -> None:
        self.settings, self.run, self.fabric, self.data = settings, run, fabric, data
        on_gpu = fabric.device.type == "cuda"
        compiling = on_gpu if settings.compile is None else settings.compile
        if compiling:
            torch._dynamo.reset()  # it keeps few versions of a function: those of earlier runs must not use them up
        begun = bool(checkpoints(run.checkpoints))  # all weights will come from there
        self.network = make_network(settings, data, begun).to(memory_format=torch.channels_last)
        check_shares(settings, self.network, fabric.world_size)
        if settings.unsoften:
            target = self.network.method.target()
            if target is None:
                raise InputError(f"there are no soft labels to take out again (unsoften): {settings.method} has none.")
            inverse_of(target.double())  # refuses labels that cannot be taken out, before anything is trained
        if settings.batch_norm == "sync":
            if not on_gpu:
                raise InputError("batch_norm 'sync' needs GPUs: on a CPU use 'batch' or 'frozen'.")
            self.network = nn.SyncBatchNorm.convert_sync_batchnorm(self.network)
        self.loader = train_loader(settings, data, fabric)
        wrapped = fabric.setup_module(compiled(self.network) if compiling else self.network)
        self.optimizer = make_optimizer(settings, self.network, on_gpu)
        self.average = None
        if settings.ema:
            self.average = WeightAverage(self.network.classifier, settings.ema)
        dtype = torch.float64 if settings.precision == "64" else torch.float32
        self.mean = torch.tensor(settings.input_mean, dtype=dtype, device=fabric.device)
        self.std = torch.tensor(settings.input_std, dtype=dtype, device=fabric.device)
        self.step = TrainStep(
            wrapped,
            self.optimizer,
            fabric.backward,
            settings.augment,
            self.mean,
            self.std,
            settings.clip,
            settings.accumulate,
            compile=compiling,
            capture=compiling and on_gpu and fabric.world_size == 1,
            rehearsal=self._rehearsal,
        )
        self.records: list[dict[str, Any]] = []
        self.epoch = 0  # whole epochs done
        self.steps = 0  # steps of the next epoch done
        self.sums: Tensor | None = None  # losses of those steps, summed
        self.bad_step = torch.tensor(-1, device=fabric.device)  # the first whose loss is not finite, if any
        self.seconds = 0.0  # of training, over all resumes
        self.best: dict[str, float] = {}
        self.writer = CheckpointWriter(run.checkpoints)
        rows = data.rows("val")
        self._validation = self._tester(rows) if len(rows) else None

    # ---- the loop ----------------------------------------------------------------------------------------------

    def fit(self, progress: bool, on_epoch: EpochHook | None = None, on_step: StepHook | None = None) -> None:
        """Train from where the run stands to its last epoch (or the last minute it is given)."""
        began = time.monotonic()
        before = self.seconds
        done = self.epoch * len(self.loader) + self.steps
        first = self.fabric.is_global_zero
        display = Display(self.run, self.settings.epochs, len(self.loader), done, progress and first, written=first)
        with StopRequest(self.fabric, self.settings.max_minutes) as stop, display, closing(self.writer):
            while self.epoch < self.settings.epochs and not stop.asked():
                whole = self._train_epoch(stop, display, on_step)
                self.seconds = before + time.monotonic() - began
                if not whole:
                    self.sums = self._check_losses()  # of all ranks: one of them saves for all
                    self._save()
                    break
                record = self._close_epoch()
                self.seconds = before + time.monotonic() - began
                display.epoch(record, self.network.soft_labels(), self.data.table.classes, self._words(record))
                self._save()
                if on_epoch is not None:
                    on_epoch(record, self.network)
            if stop.received:
                raise Interrupted(self.run.path, stop.received)

    def _train_epoch(self, stop: StopRequest, display: Display, on_step: StepHook | None = None) -> bool:
        """Train to the end of the epoch; False if it was asked to stop before."""
        if self.steps == 0:
            # Keyed like the data, so that what dropout draws does not depend on how often a run was resumed.
            torch.manual_seed(_mix(self.settings.seed, self.epoch, self.fabric.global_rank))
        self._training_mode()
        self._epoch_began, self._first_step = time.monotonic(), self.steps
        words = self._words(self.records[-1] if self.records else {})
        for step, batch in enumerate(self.loader.epoch(self.epoch, start=self.steps), start=self.steps):
            self._set_rates(self.epoch + step / len(self.loader))
            try:
                losses = self.step(batch).double()
            except NotFinite as error:
                raise self._diverged(str(error), step + 1, self.epoch + 1) from error
            self.sums = losses if self.sums is None else self.sums + losses
            self.bad_step = torch.where((self.bad_step < 0) & ~losses.isfinite().all(), step + 1, self.bad_step)
            self.steps = step + 1
            if self.average is not None:
                self.average.update_parameters(self.network.classifier)
            loss = display.step(self.epoch, step, self._images_seen(), self._epoch_began, self.sums, words)
            if loss is not None and not math.isfinite(loss):
                self._check_losses(of_this_rank=True)  # the others are not here to be asked
            if on_step is not None:
                on_step(self.epoch + 1, self.steps)
            if self.steps < len(self.loader) and stop.asked(step):
                return False
        return True

    def _images_seen(self) -> int:
        """Images of this epoch, over all ranks, since it was begun or resumed."""
        return (self.steps - self._first_step) * self.loader.batch_size

    def _close_epoch(self) -> dict[str, Any]:
        """Check and log the epoch, apply the method's end-of-epoch rule, move on to the next."""
        sums = self._check_losses()  # waits for the device: the epoch's time is complete after it
        seconds = time.monotonic() - self._epoch_began
        means = (sums / self.steps).tolist()
        record: dict[str, Any] = {"epoch": self.epoch + 1, **dict(zip(self.step.terms, means, strict=True))}
        rates = [group["lr"] for group in self.optimizer.param_groups]
        record.update(zip(("lr", "lr_method"), rates, strict=False))
        record.update(self.network.method.end_epoch())  # after lr: the report reads the keys before it as loss terms
        record.update(seconds=seconds, images_per_second=self._images_seen() / seconds)
        self.epoch, self.steps, self.sums = self.epoch + 1, 0, None
        if self.epoch % self.settings.validate_every == 0 or self.epoch == self.settings.epochs:
            record.update(self._validate())
        self.records.append(record)
        if self.fabric.is_global_zero:
            self.run.write_history(self.records)
        return record

    def _check_losses(self, of_this_rank: bool = False) -> Tensor:
        """The summed losses, averaged over ranks; a loss that is not finite ends the run, with nothing written."""
        assert self.sums is not None
        sums: Tensor = self.sums if of_this_rank else self.fabric.all_reduce(self.sums, reduce_op="mean")
        if not bool(torch.isfinite(sums).all()):
            bad = ", ".join(n for n, v in zip(self.step.terms, sums.tolist(), strict=True) if not math.isfinite(v))
            raise self._diverged(f"not finite: {bad}", int(self.bad_step), self.epoch + 1)
        return sums.cpu()

    def _check_logits(self, finite: bool) -> None:
        """Weights can run away in the last steps of an epoch, after its losses."""
        if not finite:
            raise self._diverged("what it says of images is not finite", len(self.loader), self.epoch)

    def _diverged(self, what: str, step: int, epoch: int) -> NotFinite:
        self.writer.close()  # what is still being written is good
        kept = checkpoints(self.run.checkpoints)
        good = f"the last good checkpoint is {kept[-1]}" if kept else "there is no earlier checkpoint"
        return NotFinite(
            f"training diverged at step {step} of epoch {epoch} ({what}). Nothing was overwritten; {good}. "
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

    def _words(self, record: dict[str, Any]) -> str:
        return softness_in_words(record, self.network.method.collapse_softness)

    @property
    def tested(self) -> Classifier:
        """The classifier that is tested and shipped: the averaged one where there is one."""
        return self.network.classifier if self.average is None else cast(Classifier, self.average.module)

    def _validate(self) -> dict[str, float]:
        self._agree_on_averages()
        scores = self._validation.validate(self.tested) if self._validation else {}
        self._check_logits(math.isfinite(scores.get("val_loss", 0.0)))
        if scores.get("val_accuracy", -1.0) > self.best.get("val_accuracy", -1.0):
            self.best = {"val_accuracy": scores["val_accuracy"], "epoch": float(self.epoch)}
        return scores

    def _agree_on_averages(self) -> None:
        """The averages of batch norm are each rank's own after a step; what is tested is what is shipped, rank 0's."""
        if self.fabric.world_size > 1:
            for buffer in self.tested.buffers():
                torch.distributed.broadcast(buffer, 0)

    def _tester(self, rows: npt.NDArray[np.intp]) -> Tester:
        return Tester(self.settings, self.data, rows, self.fabric, self.mean, self.std)

    def finish(self) -> None:
        """Test every part but the training part, and write what the run leaves behind."""
        rows = np.flatnonzero(self.data.splits != "train")
        self._agree_on_averages()
        logits = self._tester(rows).logits(self.tested)
        self._check_logits(bool(logits.isfinite().all()))
        if self.fabric.is_global_zero:
            self._write_outcome(rows, logits)
        self.fabric.barrier()  # nobody goes on to read what is still being written

    def _write_outcome(self, rows: npt.NDArray[np.intp], logits: Tensor) -> None:
        trained = TrainedInfo(epochs=self.epoch, best=self.best, seconds=round(self.seconds, 3))
        target = self.network.method.target() if self.settings.unsoften else None
        description = describe(
            self.settings, self.data, self.fabric, trained, self.network.method.collapse_softness, target
        )
        write_outcome(self.run, self.data, self.network, self.tested, rows, logits, description)

    def _rehearsal(self) -> Callable[[], None]:
        """What libraries do when they first see the network, to be done beside the compiling."""
        size = self.settings.augment.crop
        images = self.loader.batch_size // self.fabric.world_size // self.settings.accumulate
        shape = (images, 3, size, size)
        return rehearsal(self.network.classifier, shape, self.fabric.device, self.fabric.autocast)

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
        self.records = self.run.read_history()[: self.epoch]
        if len(state["random"]) == self.fabric.world_size:  # else the next epoch draws its own
            # Copies: torch reads a row of a table from the wrong place.
            torch.set_rng_state(state["random"][self.fabric.global_rank].clone())
            if self.fabric.device.type == "cuda" and state["device_random"].numel():
                torch.cuda.set_rng_state(state["device_random"][self.fabric.global_rank].clone())


def _mix(*numbers: int) -> int:
    """One seed from several numbers, without the collisions of adding them."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
