"""Who trains together is known from what started the processes."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from cclnet.errors import InputError
from cclnet.training.setup import find_launch

ALLOCATION = {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}
STEP = ALLOCATION | {
    "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07,09]", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
}  # fmt: skip


@pytest.mark.parametrize("variables", [{}, ALLOCATION, STEP | {"SLURM_PTY_PORT": "4567"}])
def test_a_process_by_itself_is_alone(variables: dict[str, str]) -> None:
    alone = find_launch(None, variables)
    assert (alone.devices, alone.nodes, alone.variables) == (1, 1, {})
    assert alone.environment is LightningEnvironment
    assert find_launch(2, variables).devices == 2  # as asked for, in a shell of an allocation too


def test_torchrun_knows_better_than_slurm() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "6"}
    together = find_launch(1, STEP | torchrun)
    assert (together.devices, together.nodes, together.environment) == (3, 2, TorchElasticEnvironment)


def test_srun_s_tasks_are_told_apart() -> None:
    together = find_launch(None, STEP)
    assert (together.devices, together.nodes, together.environment) == (2, 2, TorchElasticEnvironment)
    told = together.variables
    assert told["MASTER_ADDR"] == "gpu07"
    assert (told["RANK"], told["WORLD_SIZE"], told["LOCAL_RANK"], told["GROUP_RANK"]) == ("3", "4", "1", "1")
    assert find_launch(None, STEP | {"SLURM_PROCID": "0"}).variables["MASTER_PORT"] == told["MASTER_PORT"]
    assert find_launch(None, STEP | {"SLURM_STEP_ID": "2"}).variables["MASTER_PORT"] != told["MASTER_PORT"]
    assert find_launch(None, STEP | {"MASTER_PORT": "29500"}).variables["MASTER_PORT"] == "29500"


def test_a_task_that_sees_one_gpu_is_a_node_to_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    together = find_launch(None, STEP)
    assert (together.devices, together.nodes) == (1, 4)
    assert (together.variables["LOCAL_RANK"], together.variables["GROUP_RANK"]) == ("0", "3")


def test_nodes_have_as_many_tasks_each() -> None:
    with pytest.raises(InputError, match="ntasks-per-node"):
        find_launch(None, STEP | {"SLURM_STEP_NUM_TASKS": "3"})
