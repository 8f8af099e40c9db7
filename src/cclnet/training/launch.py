"""Which processes train together: those that torchrun or SLURM's srun started, those asked for, or this one alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from cclnet.errors import InputError

FIRST_PORT, PORTS = 15000, 10000


@dataclass(frozen=True)
class Launch:
    """How many processes there are, and where.

    Attributes:
        devices: processes on this node, one a device.
        nodes: how many nodes.
        environment: what tells each process its rank; said outright, for Lightning would guess from SLURM's variables,
            and guesses wrong where a job has a usual name or its tasks are not counted by node.
        variables: that torchrun would have set, and SLURM has under other names.
    """

    devices: int = 1
    nodes: int = 1
    environment: type[ClusterEnvironment] = LightningEnvironment
    variables: Mapping[str, str] = field(default_factory=dict)


def find_launch(devices: int | None = None, variables: Mapping[str, str] = os.environ) -> Launch:
    """``devices`` is what was asked for; whoever started the processes knows better."""
    if "TORCHELASTIC_RUN_ID" in variables:
        here = int(variables["LOCAL_WORLD_SIZE"])
        return Launch(here, int(variables["WORLD_SIZE"]) // here, TorchElasticEnvironment)
    # Only what srun starts has a step; a shell in an allocation (salloc, sbatch without srun, --pty) is one process,
    # whatever number of tasks was asked for.
    tasks = 1 if "SLURM_PTY_PORT" in variables else int(variables.get("SLURM_STEP_NUM_TASKS", "1"))
    return _of_slurm(tasks, variables) if tasks > 1 else Launch(devices or 1)


def _of_slurm(tasks: int, variables: Mapping[str, str]) -> Launch:
    nodes = int(variables["SLURM_STEP_NUM_NODES"])
    if tasks % nodes:
        raise InputError(f"{tasks} tasks on {nodes} nodes: every node must have as many. Use srun --ntasks-per-node.")
    here, local_rank, node = tasks // nodes, variables["SLURM_LOCALID"], variables["SLURM_NODEID"]
    if here > 1 and torch.cuda.device_count() == 1:  # --gpus-per-task=1: each sees its own only, as if alone on a node
        here, nodes, local_rank, node = 1, tasks, "0", variables["SLURM_PROCID"]
    job, step = int(variables["SLURM_JOB_ID"]), int(variables["SLURM_STEP_ID"])
    return Launch(here, nodes, TorchElasticEnvironment, {
        # The first host of the step, and a port that all of the step compute alike and other steps seldom do.
        "MASTER_ADDR": variables.get("MASTER_ADDR") or first_host(variables["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": variables.get("MASTER_PORT") or str(FIRST_PORT + (31 * job + step) % PORTS),
        "WORLD_SIZE": str(tasks),
        "RANK": variables["SLURM_PROCID"],
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node,
    })  # fmt: skip


def first_host(nodes: str) -> str:
    """Of SLURM's list.

    >>> first_host("gpu[03-05,9]"), first_host("a1,a2"), first_host("login")
    ('gpu03', 'a1', 'login')
    """
    return SLURMEnvironment.resolve_root_node_address(nodes)
