"""CCL-Net in the Hugging Face Trainer. The three examples train the same network to the same losses.

pip install 'cclnet[huggingface]'
python examples/huggingface.py
"""

import json
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from cclnet import CCLNet
from cclnet.integrations.huggingface import TrainerModel, method_callback

torch.manual_seed(0)
labels = torch.randint(4, (80,))
images = torch.randn(80, 3, 8, 8, dtype=torch.float64) + labels.view(-1, 1, 1, 1)  # brighter from class to class
dataset = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]

backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU())
head = {"widths": (32, 16), "patience": 1}  # so impatient that the dictionary freezes within four epochs
network = CCLNet(backbone, num_classes=4, feature_width=16, method_settings=head).double()


class InOrder(Trainer):
    """The images in the order of the other two examples. Without this the Trainer shuffles them."""

    def get_train_dataloader(self) -> DataLoader:
        loader = DataLoader(self.train_dataset, batch_size=16, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


losses: list[float] = []
model = TrainerModel(network)
model.register_forward_hook(lambda module, inputs, outputs: losses.append(outputs["loss"].item()))

# Two parameter groups, each with its own learning rate: the network's and the head's.
optimizer = torch.optim.SGD(network.param_groups(lr=0.05, lr_ccl=0.2), momentum=0.9)

with tempfile.TemporaryDirectory() as folder:
    trainer = InOrder(
        model=model,
        args=TrainingArguments(
            folder,
            num_train_epochs=4,
            lr_scheduler_type="constant",
            max_grad_norm=0,  # the callback clips instead, each group by its own norm
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=dataset,
        optimizers=(optimizer, None),
        callbacks=[method_callback(network, clip_norm=0.5)],  # and the freeze rule at the end of each epoch
    )
    trainer.train()

print(json.dumps({"losses": losses, "frozen": network.method.head.frozen}))
