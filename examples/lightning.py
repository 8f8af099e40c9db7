"""CCL-Net in Lightning's Trainer. The three examples train the same network to the same losses.

python examples/lightning.py
"""
# ruff: noqa: E402

import json
import sys
from pathlib import Path

# A script's own folder comes first on the path, where this file would hide the package it is named after.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cclnet import CCLNet
from cclnet.integrations.lightning import LightningClassifier

torch.manual_seed(0)
labels = torch.randint(4, (80,))
images = torch.randn(80, 3, 8, 8, dtype=torch.float64) + labels.view(-1, 1, 1, 1)  # brighter from class to class
loader = DataLoader(TensorDataset(images, labels), batch_size=16)

backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU())
head = {"widths": (32, 16), "patience": 1}  # so impatient that the dictionary freezes within four epochs
network = CCLNet(backbone, num_classes=4, feature_width=16, method_settings=head).double()


class KeepLosses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.losses.append(outputs["loss"].item())


kept = KeepLosses()
trainer = pl.Trainer(
    accelerator="cpu",
    max_epochs=4,
    gradient_clip_val=0.5,  # of each parameter group, by its own norm: the module sees to it
    callbacks=[kept],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
# Two parameter groups, each with its own learning rate; the freeze rule at the end of each epoch.
trainer.fit(LightningClassifier(network, lr=0.05, lr_ccl=0.2), loader)

print(json.dumps({"losses": kept.losses, "frozen": network.method.head.frozen}))
