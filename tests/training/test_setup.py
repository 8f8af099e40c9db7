"""Processes of a run, learning rate schedule, messages of Fabric."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from PIL import Image
from safetensors.torch import save

import cclnet
from cclnet.data.sources import open_data
from cclnet.errors import InputError
from cclnet.runs.checksums import write_covered
from cclnet.settings import Settings, make_settings
from cclnet.training import setup
from cclnet.training.setup import find_launch, rate_factor, read_weights

ALLOCATION = {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}
STEP = ALLOCATION | {
    "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07,09]", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
}  # fmt: skip


@pytest.mark.parametrize("variables", [{}, ALLOCATION, STEP | {"SLURM_PTY_PORT": "4567"}])
def test_a_process_outside_a_step_is_alone(variables: dict[str, str]) -> None:
    launch = find_launch(None, variables)
    assert (launch.devices, launch.nodes, launch.variables) == (1, 1, {})
    assert launch.environment is LightningEnvironment
    assert find_launch(2, variables).devices == 2  # also in a shell of an allocation


def test_torchrun_takes_precedence_over_slurm() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "6"}
    launch = find_launch(1, STEP | torchrun)
    assert (launch.devices, launch.nodes, launch.environment) == (3, 2, TorchElasticEnvironment)


def test_tasks_of_srun_get_their_ranks() -> None:
    launch = find_launch(None, STEP)
    assert (launch.devices, launch.nodes, launch.environment) == (2, 2, TorchElasticEnvironment)
    variables = launch.variables
    assert variables["MASTER_ADDR"] == "gpu07"
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"], variables["GROUP_RANK"]) == (
        "3",
        "4",
        "1",
        "1",
    )
    assert find_launch(None, STEP | {"SLURM_PROCID": "0"}).variables["MASTER_PORT"] == variables["MASTER_PORT"]
    assert find_launch(None, STEP | {"SLURM_STEP_ID": "2"}).variables["MASTER_PORT"] != variables["MASTER_PORT"]
    assert find_launch(None, STEP | {"MASTER_PORT": "29500"}).variables["MASTER_PORT"] == "29500"
    for nodes, first in (("gpu[03-05,9]", "gpu03"), ("a1,a2", "a1"), ("login", "login")):
        assert find_launch(None, STEP | {"SLURM_STEP_NODELIST": nodes}).variables["MASTER_ADDR"] == first


def test_a_task_that_sees_one_gpu_counts_as_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launch = find_launch(None, STEP)
    assert (launch.devices, launch.nodes) == (1, 4)
    assert (launch.variables["LOCAL_RANK"], launch.variables["GROUP_RANK"]) == ("0", "3")


def test_nodes_need_the_same_number_of_tasks() -> None:
    with pytest.raises(InputError, match="ntasks-per-node"):
        find_launch(None, STEP | {"SLURM_STEP_NUM_TASKS": "3"})


def test_subgroups_need_columns_of_the_table() -> None:
    table = open_data("synthetic:images=14,size=16")
    with pytest.raises(InputError, match=r"pigmen.*did you mean 'pigment'"):
        setup.check_columns("pigmen", table)
    with pytest.raises(InputError, match=r"'sex' need a table with such a column.*--by"):
        setup.check_columns("sex", replace(table, extra=table.extra[[]]))


def test_short_runs_start_at_the_initial_rate() -> None:
    for epochs in (1, 2, 3, 4):
        settings = make_settings({"epochs": epochs, "drops": [0.5, 0.75]})
        rates = [rate_factor(settings, epoch) for epoch in range(epochs)]
        assert rates[0] == 1.0 and all(b >= 0.099 * a for a, b in itertools.pairwise(rates))  # one drop at a time


def test_step_schedule_drops_twice() -> None:
    settings = Settings(epochs=160, drops=(0.5, 0.75))
    factors = [rate_factor(settings, epoch) for epoch in range(160)]
    assert factors == pytest.approx([1.0] * 80 + [0.1] * 40 + [0.01] * 40)


def test_cosine_and_warm_up() -> None:
    settings = Settings(epochs=10, schedule="cosine", warmup_epochs=2)
    assert rate_factor(settings, 5) == pytest.approx(0.5)
    assert rate_factor(settings, 10) == pytest.approx(0.0, abs=1e-12)
    assert 0 < rate_factor(settings, 0) < 1e-3
    assert rate_factor(Settings(epochs=10, schedule="constant", warmup_epochs=2), 1) == pytest.approx(0.5)
    assert rate_factor(Settings(epochs=10, schedule="constant"), 9.9) == 1.0


def test_advice_of_lightning_is_silenced() -> None:
    """Also after lightning.pytorch was imported, through whose logger Fabric then writes."""
    make = "import lightning.pytorch; make_fabric(make_settings({'data': 'x', 'precision': 'bf16'}, {}))"
    imports = "from cclnet.training.setup import make_fabric; from cclnet.settings import make_settings"
    done = subprocess.run([sys.executable, "-c", f"{imports}; {make}"], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".txt"])
@pytest.mark.parametrize("content", [b"", b"hello world", b"\x80", b"PK\x03\x04", b"l", b"\0" * 100, b"(dp0\n."])
def test_weights_that_are_something_else(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is refused|holds no state dict"):
        read_weights(path)


def test_names_that_model_json_does_not_take_are_refused_before_training(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (8, 8)).save(tmp_path / "data" / label / f"{i}.png")
    (tmp_path / "table.csv").write_text(
        "image,label\n" + "".join(f"data/{label}/{i}.png,{label * 1001}\n" for label in "ab" for i in range(3))
    )
    with pytest.raises(InputError, match="a class has a name of 1,001 characters"):
        cclnet.train(tmp_path / "table.csv", tmp_path / "run", backbone="test_resnet", progress=False)
    assert not (tmp_path / "run" / "model.json").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_damaged_weights_of_a_run_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".pt"):
        torch.save({"a": torch.ones(3)}, path)
    else:
        path.write_bytes(save({"a": torch.ones(3)}))
    write_covered(path, path.read_bytes())
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(InputError, match="SHA-256"):
        read_weights(path)
    (tmp_path / "model.json").unlink()
    (tmp_path / "SHA256SUMS").write_text("checksums of another program\n")
    with suppress(InputError):  # a .pt file has a checksum of its own
        assert set(read_weights(path)) == {"a"}


def test_a_mutated_state_dict_is_read_or_refused(tmp_path: Path) -> None:
    path, generator = tmp_path / "weights.pt", random.Random(0)
    torch.save({"a": torch.ones(3)}, path)
    content = path.read_bytes()
    for _ in range(40):
        mutated = bytearray(content)
        mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        path.write_bytes(mutated)
        with suppress(InputError):
            assert all(isinstance(value, torch.Tensor) for value in read_weights(path).values())
    for other in ([1], {"a": 1}, {1: torch.ones(1)}, {"state_dict": 3}):
        torch.save(other, path)
        with pytest.raises(InputError, match="holds no state dict"):
            read_weights(path)


def test_several_nodes_decode_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of each node decodes; what is wrong with the data is left to rank 0."""
    for label in ("a", "b"):
        for i in range(3):
            picture = tmp_path / "data" / label / f"{i}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20), (40 * i, 9, 9)).save(picture)
    given = {"data": str(tmp_path / "data"), "cache_dir": str(tmp_path / "cache"), "short_side": 16}
    settings = make_settings({**given, "augment": {"crop": 16}})
    first, second = (cast(Fabric, SimpleNamespace(local_rank=rank)) for rank in range(2))
    setup.decode_together(settings, first)
    monkeypatch.setattr(setup, "find_launch", lambda: setup.Launch(nodes=2))
    setup.decode_together(settings, second)
    assert not (tmp_path / "cache").exists()
    setup.decode_together(settings, first)
    assert any((tmp_path / "cache").rglob("shard-*.bin"))
    setup.decode_together(replace(settings, data="nowhere"), first)


def _untrained(data: str, **changes: object) -> tuple[torch.nn.Module, setup.PreparedData]:
    settings = make_settings({"data": data, "backbone": "test_efficientnet", "short_side": 36, "batch_size": 8,
                              "augment": {"crop": 32}, "method": "hard", **changes})  # fmt: skip
    table = open_data(settings.data, settings)
    splits = setup.make_split(table, settings.split)
    prepared = setup.PreparedData(table, splits, setup.decode(table, settings.short_side))
    return setup.make_network(settings, prepared).classifier.shipped, prepared


def test_the_bias_starts_at_the_class_frequencies() -> None:
    network, data = _untrained("synthetic:images=700,size=40,imbalance=isic2018", prior_bias=True)
    counts = torch.tensor(data.table.class_counts(data.rows("train")), dtype=torch.float64)
    torch.testing.assert_close(network.classifier.bias.softmax(0).double(), counts / counts.sum(), rtol=1e-6, atol=0)
    assert counts.min() < counts.max()  # else nothing was tested


@pytest.mark.parametrize("balancing", [{"class_weights": True}, {"balanced_sampling": True}, {"logit_adjustment": 1.0}])
def test_balanced_training_starts_without_a_prior(balancing: dict[str, object]) -> None:
    network, _ = _untrained("synthetic:images=700,size=40,imbalance=isic2018", prior_bias=True, **balancing)
    plain, _ = _untrained("synthetic:images=700,size=40,imbalance=isic2018", **balancing)
    assert torch.equal(network.classifier.bias, plain.classifier.bias)
