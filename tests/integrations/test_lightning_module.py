"""What the Lightning module adds: clipping by group, the end of an epoch, scores in validation."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cclnet import CCLNet
from cclnet.integrations.lightning import LightningClassifier


def network(method: str = "ccl") -> CCLNet:
    torch.manual_seed(0)
    settings = {"widths": (8, 4)} if method == "ccl" else {}
    return CCLNet(nn.Linear(5, 6), 3, method, feature_width=6, method_settings=settings)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(24, 5), torch.arange(24) % 3), batch_size=8)


def trainer(**options: object) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", **{"enable_checkpointing": False, **quiet, **options})


class GroupNorms(pl.Callback):
    """The norm of each group's gradient as the optimizer finds it."""

    def __init__(self) -> None:
        self.norms: list[list[float]] = []

    def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: object) -> None:
        groups = [[p.grad for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
        if all(groups):
            self.norms.append([float(nn.utils.get_total_norm(grads)) for grads in groups])


@pytest.mark.parametrize(("algorithm", "whole"), [(None, True), ("norm", True), ("value", False)])
def test_each_group_is_clipped_by_its_own_norm(algorithm: str | None, whole: bool) -> None:
    seen = GroupNorms()
    module = LightningClassifier(network(), lr=0.1, lr_ccl=0.1)
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm, "callbacks": [seen]}
    trainer(max_epochs=2, **options).fit(module, loader())
    assert len(seen.norms) >= 5
    for norms in seen.norms:
        if whole:
            assert norms == pytest.approx([0.01, 0.01], rel=1e-3)  # joint clipping would give this to their sum
        else:
            assert max(norms) > 0.02  # each value is clipped, not the norm


@pytest.mark.parametrize("method", ["bce", "ccl-multilabel"])
def test_several_labels_are_validated_one_by_one(method: str) -> None:
    targets = (torch.rand(24, 3) > 0.5).float()
    data = DataLoader(TensorDataset(torch.randn(24, 5), targets), batch_size=24)
    module = LightningClassifier(network(method))
    (scores,) = trainer().validate(module, data, verbose=False)
    logits = module(data.dataset.tensors[0]).detach()
    assert scores["val_loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(logits, targets)), rel=1e-5)
    assert scores["val_accuracy"] == pytest.approx(float(((logits > 0) == (targets > 0)).float().mean()))


def test_without_clipping_gradients_are_left_alone() -> None:
    seen = GroupNorms()
    trainer(max_epochs=2, callbacks=[seen]).fit(LightningClassifier(network()), loader())
    assert all(max(norms) > 0.1 for norms in seen.norms)


def test_terms_scores_and_the_epochs_end_are_logged() -> None:
    module, data = LightningClassifier(network("ols")), loader()
    fit = trainer(max_epochs=1)
    fit.fit(module, data, data)
    logged = fit.callback_metrics
    assert {"cross_entropy", "online_cross_entropy", "softness", "val_loss", "val_accuracy"} <= set(logged)
    assert float(logged["softness"]) == pytest.approx(float(module.network.soft_labels().diagonal().mean()))
    assert float(module.network.method.seen.sum()) == 0  # the epoch was closed
    images, labels = data.dataset.tensors
    with torch.no_grad():
        logits = module.eval()(images)
    torch.testing.assert_close(logged["val_accuracy"], (logits.argmax(dim=1) == labels).float().mean())
    torch.testing.assert_close(logged["val_loss"], F.cross_entropy(logits, labels))


def test_an_optimizer_of_ones_own_gets_both_groups() -> None:
    module = LightningClassifier(network(), torch.optim.AdamW, lr=0.02, lr_ccl=0.03, weight_decay=0.5)
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.03]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_checkpoint_holds_the_methods_state(tmp_path: Path) -> None:
    module = LightningClassifier(network("ols"))
    fit = trainer(max_epochs=1)
    fit.fit(module, loader())
    fit.save_checkpoint(tmp_path / "run.ckpt")
    state = torch.load(tmp_path / "run.ckpt", weights_only=False)["state_dict"]
    torch.testing.assert_close(state["network.method.table"], module.network.soft_labels())


def test_testing_and_predicting() -> None:
    module = LightningClassifier(network())
    (scores,) = trainer().test(module, loader(), verbose=False)
    assert set(scores) == {"test_loss", "test_accuracy"}
    said = torch.cat(trainer().predict(module, loader()))  # batches with labels, as they come
    images = torch.cat([images for images, _ in DataLoader(loader().dataset, batch_size=24)])
    assert said.shape == (24, 3) and images.shape == (24, 5)
    alone = torch.cat(trainer().predict(module, DataLoader(images, batch_size=24)))
    assert alone.shape == (24, 3)
