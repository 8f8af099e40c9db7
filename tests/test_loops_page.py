"""The recipes of docs/loops.md and docs/frameworks.md are run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cclnet import CCLNet

DOCS = Path(__file__).parents[1] / "docs"
PAGE = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("loops.md", "frameworks.md"))


def recipe(name: str) -> dict[str, Any]:
    """The names that the marked block of code defines."""
    found = re.search(rf"<!-- {name}: run by the tests -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"neither page has a block marked '{name}: run by the tests'"
    names: dict[str, Any] = {}
    exec(compile(found[1], f"block {name}", "exec"), names)
    return names


def test_timm_trains_the_task() -> None:
    pytest.importorskip("timm.task", reason="this timm has no tasks")
    from timm.data import resolve_data_config
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2

    names = recipe("timm")
    network = CCLNet("test_resnet", 3, "ccl", method_settings={"widths": (8, 4)})
    assert resolve_data_config({}, model=network.classifier.model)["input_size"][0] == 3
    groups = network.param_groups(lr=0.1, lr_ccl=0.01, weight_decay=1e-4)
    optimizer = create_optimizer_v2(groups, opt="sgd", lr=0.1, weight_decay=1e-4, momentum=0.9)
    optimizer.register_step_pre_hook(names["clip_each_group"])
    schedule, _ = create_scheduler_v2(optimizer, sched="step", num_epochs=4, decay_epochs=1, decay_rate=0.5)
    task = names["MethodTask"](network, verbose=False)
    images, labels = torch.randn(6, 3, 64, 64), torch.tensor([0, 1, 2, 0, 1, 2])
    losses = []
    for epoch in range(3):
        result = task.train()(images, labels)
        optimizer.zero_grad()
        (100.0 * result["loss"]).backward()  # so large that it has to be clipped
        optimizer.step()
        for group in optimizer.param_groups:
            norm = torch.nn.utils.get_total_norm([p.grad for p in group["params"] if p.grad is not None])
            assert float(norm) == pytest.approx(1.0, rel=1e-3)
        losses.append(float(result["loss"].detach()))
        network.method.end_epoch()
        schedule.step(epoch + 1)
    assert set(result) == {"loss", "cross_entropy", "kl", "head_cross_entropy", "class_correlation"}
    assert losses[-1] < losses[0]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 / 8, 0.01 / 8])
    assert task.get_eval_model().eval()(images).shape == (6, 3)
    assert "method.head.live_dictionary" in task.get_checkpoint_state()["state_dict"]


def test_monai_trains_through_its_own_trainer() -> None:
    pytest.importorskip("monai", reason="monai is not installed")
    pytest.importorskip("ignite", reason="pytorch-ignite is not installed")
    names = recipe("monai")
    images, labels = torch.randn(8, 1, 32, 32, 32), torch.arange(8) % 2
    loader = [{"image": images[i : i + 4], "label": labels[i : i + 4]} for i in (0, 4)]
    trainer, network = names["build_trainer"](loader, num_classes=2, epochs=2, method="ols")
    before = [p.clone() for p in network.parameters()]
    trainer.run()
    assert trainer.state.iteration == 4
    assert any(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert float(network.method.seen.sum()) == 0  # both epochs were closed
    assert network.eval()(images).shape == (8, 2)


def test_the_copied_head_works_without_the_package(tmp_path: Path) -> None:
    found = re.search(r"<!-- vendor: run by the tests -->\n```sh\n(.*?)```", PAGE, re.DOTALL)
    assert found, "docs/loops.md has no block marked 'vendor: run by the tests'"
    root = Path(__file__).parents[1]
    commands = found[1].replace("src/", f"{root}/src/").replace("LICENSE", f"{root}/LICENSE")
    subprocess.run(["sh", "-e", "-c", commands], cwd=tmp_path, check=True)
    assert sorted(path.name for path in (tmp_path / "mypackage" / "ccl").iterdir()) == [
        "LICENSE", "__init__.py", "errors.py", "functional.py", "head.py"
    ]  # fmt: skip
    program = """
import sys
sys.modules["cclnet"] = None  # importing it is an error
import torch
from mypackage.ccl.head import CCLHead
torch.manual_seed(0)
head = CCLHead(in_features=8, num_classes=3, widths=(16, 4))
terms = head(torch.randn(6, 8), torch.tensor([0, 1, 2, 0, 1, 2]))
sum(terms.values()).backward()
head.end_epoch()
print(sorted(terms), tuple(head.soft_labels().shape))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['class_correlation', 'head_cross_entropy'] (3, 3)"
