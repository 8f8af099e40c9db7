"""CCL-Net in a plain PyTorch loop. The three examples train the same network to the same losses.

python examples/plain.py
"""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cclnet import CCLNet

torch.manual_seed(0)
labels = torch.randint(4, (80,))
images = torch.randn(80, 3, 8, 8, dtype=torch.float64) + labels.view(-1, 1, 1, 1)  # brighter from class to class
loader = DataLoader(TensorDataset(images, labels), batch_size=16)

backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU())
head = {"widths": (32, 16), "patience": 1}  # so impatient that the dictionary freezes within four epochs
network = CCLNet(backbone, num_classes=4, feature_width=16, method_settings=head).double()

# Two parameter groups, each with its own learning rate: the network's and the head's.
optimizer = torch.optim.SGD(network.param_groups(lr=0.05, lr_ccl=0.2), momentum=0.9)

losses = []
for _epoch in range(4):
    network.train()
    for batch_images, batch_labels in loader:
        loss = network(batch_images, batch_labels)
        optimizer.zero_grad()
        loss.total.backward()
        for group in optimizer.param_groups:  # each by its own norm, or the two become coupled
            nn.utils.clip_grad_norm_(group["params"], 0.5)
        optimizer.step()
        losses.append(loss.total.item())
    network.method.end_epoch()  # the freeze rule

print(json.dumps({"losses": losses, "frozen": network.method.head.frozen}))
