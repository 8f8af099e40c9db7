"""What the Trainer's model and callback do; the callback needs transformers, the model does not."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cclnet import CCLNet, InputError
from cclnet.integrations.huggingface import TrainerModel, method_callback


def network() -> CCLNet:
    torch.manual_seed(0)
    return CCLNet(nn.Linear(5, 6), 3, "ols", feature_width=6)


def test_the_model_gives_what_the_trainer_asks_for() -> None:
    model, (images, labels) = TrainerModel(network()), (torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))
    assert set(model(images, labels)) == {"loss"}
    torch.testing.assert_close(model(images, labels)["loss"], model.network(images, labels).total)
    evaluated = model.eval()(images, labels)
    torch.testing.assert_close(evaluated["loss"], F.cross_entropy(evaluated["logits"], labels))
    torch.testing.assert_close(model(images)["logits"], evaluated["logits"])


def test_several_labels_have_a_binary_loss() -> None:
    model = TrainerModel(CCLNet(nn.Linear(5, 6), 3, "bce", feature_width=6)).eval()
    images, targets = torch.randn(4, 5), torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    found = model(images, targets)
    torch.testing.assert_close(found["loss"], F.binary_cross_entropy_with_logits(found["logits"], targets.float()))


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: object, **kwargs: object) -> object:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match=r"pip install 'cclnet\[huggingface\]'"):
        method_callback(network())


def run(folder: Path, net: CCLNet, clip_norm: float | None, **options: object) -> dict:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    images, labels = torch.randn(24, 5), torch.arange(24) % 3
    dataset = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    trainer = transformers.Trainer(
        model=TrainerModel(net),
        args=transformers.TrainingArguments(str(folder), num_train_epochs=2, **{**quiet, **options}),
        train_dataset=dataset,
        eval_dataset=dataset,
        optimizers=(torch.optim.SGD(net.param_groups(lr=0.1)), None),
        callbacks=[method_callback(net, clip_norm)],
    )
    trainer.train()
    return trainer.evaluate()


def test_epochs_end_and_evaluation_is_plain_cross_entropy(tmp_path: Path) -> None:
    net = network()
    scores = run(tmp_path, net, None)
    assert 0 < scores["eval_loss"] < 5
    assert float(net.method.seen.sum()) == 0
    assert not torch.allclose(net.soft_labels(), torch.full((3, 3), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_grad_norm": 1.0}, r"got 1.0, .* Use TrainingArguments\(max_grad_norm=0\)"),
        ({"max_grad_norm": 0, "fp16": True}, r"clip_norm .* fp16, .* Use TrainingArguments\(bf16=True\)"),
    ],
)
def test_clipping_twice_or_scaled_is_refused(tmp_path: Path, options: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        run(tmp_path, network(), 0.5, **options)
