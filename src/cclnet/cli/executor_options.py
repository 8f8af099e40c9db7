"""The options of commands that train several runs, which say where these are trained, and the executor they make."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from cclnet.cli import Address, CellCpus, CellGpus, CellMemory, Parallel, Shard, StallMinutes
from cclnet.cli import Executor as ExecutorName


def make_executor(
    parallel: Parallel = 1,
    shard: Shard = "1/1",
    stall_minutes: StallMinutes = 10.0,
    executor: ExecutorName = "local",
    address: Address = None,
    cell_cpus: CellCpus = None,
    cell_gpus: CellGpus = None,
    cell_memory: CellMemory = None,
) -> Any:
    """The :class:`~cclnet.sweep.cells.Executor` that the options ask for. The parameters are the options."""
    from cclnet.sweep.cells import Executor, choose_executor, parse_shard

    ray = choose_executor(executor, address=address, cell_cpus=cell_cpus, cell_gpus=cell_gpus, cell_memory=cell_memory)
    return Executor(parallel=parallel, shard=parse_shard(shard), stall_minutes=stall_minutes, ray=ray)


def with_executor(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the parameters of :func:`make_executor` in place of its parameter ``executor``.

    The command receives the :class:`~cclnet.sweep.cells.Executor`, or None if all options have their defaults: making
    it imports pandas, and errors in the settings come before.
    """
    options = inspect.signature(make_executor, eval_str=True).parameters

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in options}
        default = all(given[name] == option.default for name, option in options.items())
        command(**arguments, executor=None if default else make_executor(**given))

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameters += options.values() if parameter.name == "executor" else [parameter]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
