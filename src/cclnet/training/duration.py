"""How long a run will take: a first estimate before images are decoded, and another from its first steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cclnet.data.split import SplitNames
from cclnet.data.table import ImageTable
from cclnet.network import CCLNet, image_size_settings
from cclnet.runs.predictions import counted, duration_text
from cclnet.settings import Settings

CPU_PRESET = "quick"  # the preset that trains in minutes on a CPU
LONG_ON_CPU = 2 * 3600.0  # seconds from which advice is given
SMALL = 128  # pixels: smaller images would not make a run much shorter
WORTH_A_LINE = 60.0  # seconds: shorter runs need no estimate
MEASURED_STEPS = 3  # of training, from which the second estimate is made
PROBE_IMAGES = 8
PROBED_RUN = 20_000  # images over all epochs from which a run on a CPU may be long, so that it is probed
FORWARD_SHARE = 1 / 3  # of a training step: a backward pass costs twice a forward pass


@dataclass(frozen=True)
class RunLength:
    """What is left of a run."""

    images: int  # of the training split
    epochs: int
    steps: int  # per epoch
    left: int  # steps, over all epochs
    validation: float  # batches of a validation, times their number
    device: str  # its name
    on_cpu: bool
    crop: int  # pixels
    max_minutes: float = 0.0

    @classmethod
    def of(
        cls, settings: Settings, splits: SplitNames, device: torch.device, steps: int | None = None, done: int = 0
    ) -> RunLength:
        """The length of a run with these splits, after ``done`` steps."""
        images, held_out = int((splits == "train").sum()), int((splits == "val").sum())
        steps = steps or max(images // settings.batch_size, 1)
        left = settings.epochs * steps - done
        times = left / steps / settings.validate_every
        batches = times * held_out / settings.batch_size
        on_cpu, name = device.type == "cpu", device_name(device)
        return cls(
            images, settings.epochs, steps, left, batches, name, on_cpu, settings.augment.crop, settings.max_minutes
        )

    def seconds(self, per_step: float) -> float:
        """The expected time, with validation."""
        return per_step * (self.left + FORWARD_SHARE * self.validation)

    def lines(self, per_step: float, measured: str) -> list[str]:
        """The estimate for people, and advice where a run on a CPU is long; nothing for a short run.

        ``measured``: what the seconds per step were measured on.
        """
        seconds = self.seconds(per_step)
        if seconds < WORTH_A_LINE:
            return []
        limit = 60 * self.max_minutes if self.max_minutes else seconds
        cut = f", cut after {duration_text(limit)} (max_minutes)" if limit < seconds else ""
        lines = [
            f"{counted(self.images, 'training image')}, {counted(self.left, 'step')} ({counted(self.epochs, 'epoch')} "
            f"of {self.steps:,}), {per_step:.3g} s per step ({measured}) on {self.device}: expected time "
            f"{duration_text(seconds)}{cut}."
        ]
        if self.on_cpu and min(limit, seconds) > LONG_ON_CPU:
            small = self.crop <= SMALL  # as preset quick has it
            preset, image = (
                ("", "") if small else (f"--preset {CPU_PRESET}, ", f" or image (--set augment.crop={SMALL})")
            )
            lines.append(
                f"This is longer than {duration_text(LONG_ON_CPU)} on a CPU. Shorter: {preset}fewer --epochs, a "
                f"smaller --backbone{image}, or a machine with a GPU."
            )
        return lines


def device_name(device: torch.device) -> str:
    cpu = f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu


def first_estimate(settings: Settings, table: ImageTable, splits: SplitNames, device: torch.device) -> list[str]:
    """The lines to print before images are decoded, which may take minutes; none on a GPU or for a short run."""
    length = RunLength.of(settings, splits, device)
    if not length.on_cpu or length.left * settings.batch_size < PROBED_RUN:
        return []
    per_step = seconds_per_image(settings, table, splits) * min(settings.batch_size, length.images)
    return length.lines(per_step, "first estimate, from the network alone")


def seconds_per_image(settings: Settings, table: ImageTable, splits: SplitNames) -> float:
    """The seconds per image of a training step on this CPU, of a network that is then thrown away. The random state
    stays as it is, so that the run does not depend on it."""
    crop, count = settings.augment.crop, min(PROBE_IMAGES, settings.batch_size)
    with torch.random.fork_rng(devices=[]):
        network = CCLNet(
            settings.backbone,
            table.num_classes,
            settings.method,
            class_counts=table.class_counts(np.flatnonzero(splits == "train")).tolist(),
            method_settings=settings.method_settings,
            backbone_settings=image_size_settings(settings.backbone, (crop, crop)),
            pooling=settings.pooling,
        ).to(memory_format=torch.channels_last)
        images = torch.randn(count, 3, crop, crop).to(memory_format=torch.channels_last)
        labels: Tensor = torch.arange(count) % table.num_classes
        if table.multilabel:
            labels = torch.nn.functional.one_hot(labels, table.num_classes).float()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        for used in (min(2, count), count):  # the first pass loads libraries and allocates memory
            began = time.perf_counter()
            network(images[:used], labels[:used]).total.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - began
    return seconds / count
