"""`cclnet tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cclnet.cli import Accelerator, Address, CellCpus, CellGpus, CellMemory, Data, Preset, with_settings
from cclnet.settings import Settings


@with_settings(Settings, without=("folds",))
def tune(
    space: Annotated[Path, typer.Option(help="TOML file of the settings to search over: lists of values and ranges.")],
    data: Data = "",
    metric: Annotated[str, typer.Option(help="The score to improve.")] = "balanced_accuracy",
    trials: Annotated[
        int, typer.Option(help="Number of trials, including those of an interrupted search in OUT.")
    ] = 20,
    minutes: Annotated[float, typer.Option(help="Time limit of the command. 0: none.")] = 0.0,
    out: Annotated[Path, typer.Option(help="Folder for best.preset.toml and tune.json.")] = Path("runs/tune"),
    val_share: Annotated[float, typer.Option(help="Share of the training split on which trials are compared.")] = 0.2,
    preset: Preset = "",
    recipe: Annotated[Path | None, typer.Option(help="Settings from a TOML file.")] = None,
    address: Address = None,
    cell_cpus: CellCpus = None,
    cell_gpus: CellGpus = None,
    cell_memory: CellMemory = None,
    accelerator: Accelerator = "auto",
    **settings: Any,
) -> None:
    """Search for settings that improve a score on DATA, with Ray Tune, and write the best as a preset file.

    Trials are compared on images of the training split, by patient or lesion where these are known. The validation and
    test splits are never read. The same command continues an interrupted search.
    """
    from cclnet.api import run_settings

    chosen = run_settings(data or None, recipe, settings, preset, announce=True, check=True)
    from cclnet.sweep import tune as search
    from cclnet.sweep.cells import choose_executor

    given = {"address": address, "cell_cpus": cell_cpus, "cell_gpus": cell_gpus, "cell_memory": cell_memory}
    ray = choose_executor("ray", **given)
    assert ray is not None
    request = search.Request(
        settings=chosen,
        space=space,
        out=out,
        metric=metric,
        trials=trials,
        minutes=minutes,
        val_share=val_share,
        ray=ray,
        accelerator=accelerator,
    )
    _, received = search.tune(request)
    if received:
        raise typer.Exit(128 + received)
