"""The command line: one function a command, each a few lines over the API."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape

from cclnet.errors import InputError

app = typer.Typer(
    help="CCL-Net: train medical image classifiers with soft labels learned from the images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(help="Look at a data set before training on it.", no_args_is_help=True)
app.add_typer(data_app, name="data")


# What can be said about the data, the same for every command that reads it.
Data = Annotated[str, typer.Argument(help="Folder, CSV, Parquet, .npz, medmnist:NAME or synthetic.")]
ImageColumn = Annotated[str | None, typer.Option(help="Column of a manifest that names the images.")]
LabelColumn = Annotated[str | None, typer.Option(help="Column of class names; or columns of 0 and 1: A,B,C.")]
GroupColumn = Annotated[str | None, typer.Option(help="Column of what must stay together: patient, lesion.")]
PartColumn = Annotated[str | None, typer.Option(help="Column of train, val and test.")]


@app.command()
def train(
    data: Annotated[
        str, typer.Argument(help="Folder, CSV, .npz or 'synthetic'. None: the embedded set, small settings.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The run folder to make. Default: runs/NAME.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, exactly.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Settings from a TOML file.")] = None,
    method: Annotated[str | None, typer.Option(help="Label-softening method; see `cclnet methods`.")] = None,
    backbone: Annotated[str | None, typer.Option(help="Any timm model name.")] = None,
    pretrained: Annotated[bool | None, typer.Option(help="Start from timm's pretrained weights.")] = None,
    weights: Annotated[str | None, typer.Option(help="Start from a .safetensors file or plain state dict.")] = None,
    epochs: Annotated[int | None, typer.Option()] = None,
    batch_size: Annotated[int | None, typer.Option(help="Over all devices together.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the network.")] = None,
    lr_ccl: Annotated[float | None, typer.Option(help="Learning rate of the CCL head.")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    compile: Annotated[bool | None, typer.Option(help="torch.compile. Default: on a GPU only.")] = None,
    deterministic: Annotated[bool | None, typer.Option(help="The same bits every time, slower.")] = None,
    max_minutes: Annotated[float | None, typer.Option(help="Stop training after so long.")] = None,
    source: Annotated[str | None, typer.Option(help="The layout of the data, where two fit.")] = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    group_column: GroupColumn = None,
    part_column: PartColumn = None,
    strict: Annotated[bool | None, typer.Option(help="Refuse images without label, labels without image.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, name=value: --set augment.hue=0.1 --set clip=5"),
    ] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    devices: Annotated[int | None, typer.Option(help="Devices to train on. torchrun and SLURM say themselves.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where decoded images are kept.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Train a classifier on DATA and write its run folder: model, predictions, scores, report.

    Without arguments it trains on the embedded synthetic set, in a few minutes on two CPU cores.
    """
    from cclnet.training import quick_start
    from cclnet.training.loop import Interrupted
    from cclnet.training.loop import train as run_training
    from cclnet.training.run_folder import free_name
    from cclnet.training.settings import make_settings, parse_overrides, read_settings

    named: dict[str, Any] = {
        "data": data or None, "method": method, "backbone": backbone, "pretrained": pretrained, "weights": weights,
        "epochs": epochs, "batch_size": batch_size, "lr": lr, "lr_ccl": lr_ccl, "seed": seed, "compile": compile,
        "deterministic": deterministic, "max_minutes": max_minutes, "source": source, "image_column": image_column,
        "label_column": label_column, "group_column": group_column, "part_column": part_column, "strict": strict,
    }  # fmt: skip
    given = {name: value for name, value in named.items() if value is not None}
    overrides = parse_overrides(set_ or [])
    if resume is None:
        base = read_settings(recipe) if recipe else {} if data else quick_start()
        settings = make_settings(base, given, overrides)
        folder = out or free_name(Path("runs"), settings)
    elif out or recipe or given or overrides:
        raise InputError("--resume goes on with the settings of the run: give no others beside it.")
    else:
        settings, folder = None, resume
    try:
        run = run_training(
            settings, folder, devices=devices, accelerator=accelerator, cache_dir=cache_dir, progress=not quiet
        )
    except Interrupted as stopped:
        Console(stderr=True).print(f"[yellow]{stopped}[/yellow]", highlight=False)
        raise typer.Exit(128 + stopped.signal) from None
    from cclnet.report.terminal import print_summary

    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0:  # one process speaks for all
        print_summary(run)


@app.command()
def benchmark(
    data: Annotated[str, typer.Argument(help="Any data set. None: drawn images of the right size.")] = "",
    backbones: Annotated[str, typer.Option(help="timm names, separated by commas.")] = (
        "resnet18,mobilenetv2_100,efficientnet_b0"
    ),
    size: Annotated[int, typer.Option(help="Side of the crop; images have a short side of 8/7 of it.")] = 224,
    batch_size: Annotated[int, typer.Option()] = 128,
    epochs: Annotated[int, typer.Option(help="Timed epochs, after one for warming up.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Measure training on this machine: against the network's own ceiling and against a DataLoader."""
    from cclnet.files import write_whole
    from cclnet.training.benchmark import benchmark as measure
    from cclnet.training.benchmark import results_table
    from cclnet.training.settings import make_settings

    short_side = size * 8 // 7
    drawn = f"synthetic:images=2048,size={short_side}"
    settings = make_settings(
        {"data": data or drawn, "short_side": short_side, "batch_size": batch_size, "augment": {"crop": size}}
    )
    measured = measure(settings, backbones.split(","), epochs=epochs, accelerator=accelerator)
    Console().print(results_table(measured))
    if out:
        write_whole(out, json.dumps(measured, indent=1) + "\n")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or a predictions.csv.")],
    out: Annotated[Path | None, typer.Option(help="Where to write. Default: the run folder, or the file's.")] = None,
    data: Annotated[str | None, typer.Option(help="Where the images are, if they have moved since training.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Bootstrap draws behind the intervals.")] = 1000,
) -> None:
    """Judge RUN from its predictions alone: scores.json, report.html and report.md."""
    from cclnet.evaluation.judge import judge
    from cclnet.report import write_report
    from cclnet.report.terminal import print_judged

    folder = out or (run if run.is_dir() else run.parent)
    judged = judge(run, folder, draws)
    print_judged(judged, write_report(run, judged, folder, data))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or predictions.csv files.")],
    out: Annotated[Path, typer.Option(help="The folder to write comparison.html, .md and .json into.")],
    against: Annotated[str | None, typer.Option(help="Compare every method with this one. Default: all pairs.")] = None,
    primary: Annotated[str | None, typer.Option(help="The score the verdict speaks of. Default: accuracy.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Bootstrap draws behind the intervals.")] = 1000,
) -> None:
    """Compare RUNS on the same images: paired tests, and a verdict in words. Runs of one method are its seeds."""
    from cclnet.evaluation.compare import compare as compare_runs
    from cclnet.report import write_comparison
    from cclnet.report.terminal import print_comparison

    compared = compare_runs(runs, against, primary, draws)
    print_comparison(compared, write_comparison(out, compared))


@app.command()
def reproduce(
    what: Annotated[list[str], typer.Argument(help="table1, table2, figures, tune: one or several.")],
    data: Annotated[str, typer.Option(help="The ISIC 2018 images, as downloaded.")] = "",
    out: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/reproduce"),
    results: Annotated[Path | None, typer.Option(help="Where results and tables go. Default: OUT/results.")] = None,
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    backbones: Annotated[str, typer.Option(help="Of table1, separated by commas. Default: the paper's three.")] = "",
    methods: Annotated[str, typer.Option(help="Of table1, separated by commas. Default: the paper's six.")] = "",
    split: Annotated[str, typer.Option(help="paper, or lesion: no lesion on both sides.")] = "paper",
    max_minutes: Annotated[float, typer.Option(help="For all of it; what is unfinished goes on next time.")] = 0.0,
    parallel: Annotated[int, typer.Option(help="Cells trained at once, spread over the GPUs.")] = 1,
    shard: Annotated[str, typer.Option(help="i/n: the i-th of n machines that share the cells.")] = "1/1",
    smoke: Annotated[bool, typer.Option("--smoke", help="Everything, tiny, on drawn images.")] = False,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="Run nothing: tables from the results.")] = False,
    documents: Annotated[
        bool, typer.Option("--documents", help="Also put the tables into docs/reproduce.md and README.md here.")
    ] = False,
    recipes: Annotated[Path | None, typer.Option(help="The folder of paper.toml and lesion.toml.")] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    cache_dir: Annotated[Path | None, typer.Option(help="Where decoded images are kept.")] = None,
) -> None:
    """Run the paper's experiments on ISIC 2018 and write its tables and figures beside the published numbers."""
    from cclnet.reproduce import command

    folder = results or out / "results"
    console = Console()
    failed = False
    if tables_only:
        for page in command.write_all(folder):
            console.print(str(page), highlight=False, soft_wrap=True)
    else:
        request = command.Request(
            what=tuple(what),
            data=data,
            out=out,
            results=folder,
            seeds=command.parse_seeds(seeds),
            backbones=command.parse_list(backbones),
            methods=command.parse_list(methods),
            split=split,
            max_minutes=max_minutes,
            parallel=parallel,
            shard=command.parse_shard(shard),
            smoke=smoke,
            recipes=recipes or command.RECIPES,
            accelerator=accelerator,
            cache_dir=cache_dir,
        )
        failed = bool(command.reproduce(request, console).failed)
    if documents:
        from cclnet.reproduce.pages import write_documents

        write_documents(Path(), folder)
    if failed:
        raise typer.Exit(1)


@app.command()
def methods(
    name: Annotated[str, typer.Argument(help="A method, to read its card; none to list them all.")] = "",
) -> None:
    """List the label-softening methods, or read the card of one."""
    from cclnet.methods import METHODS, method_card, method_settings

    console = Console()
    if name:
        console.print(Markdown(method_card(name)))
        return
    for known in METHODS:
        settings = ", ".join(f"{key}={value}" for key, value in method_settings(known).items())
        console.print(f"[bold]{known}[/bold]  {settings}", highlight=False)


@data_app.command("show")
def data_show(
    data: Data,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    group_column: GroupColumn = None,
    part_column: PartColumn = None,
    label_separator: Annotated[str | None, typer.Option(help="What stands between several labels in a cell.")] = None,
    image_folder: Annotated[Path | None, typer.Option(help="Where the names in a manifest start from.")] = None,
    source: Annotated[str | None, typer.Option(help="The layout, where two fit.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse images without label and the reverse.")] = False,
    follow_links: Annotated[bool, typer.Option("--follow-links", help="Allow links out of the folder.")] = False,
) -> None:
    """Say how DATA is read, and what is in it: classes, groups, parts, sizes, problems."""
    from cclnet.data.describe import describe
    from cclnet.data.sources import open_data

    table = open_data(
        data,
        image_column=image_column,
        label_column=label_column,
        group_column=group_column,
        part_column=part_column,
        label_separator=label_separator,
        image_folder=image_folder,
        source=source,
        strict=strict,
        follow_links=follow_links,
    )
    Console().print(describe(table), highlight=False)


@data_app.command("audit")
def data_audit(
    data: Data,
    split_by: Annotated[str, typer.Option(help="The split to look at: auto, given, group or class.")] = "auto",
    split_file: Annotated[str, typer.Option(help="A split.csv to look at instead.")] = "",
    val: Annotated[float, typer.Option(help="Share of the images to hold out.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for audit.csv.")] = Path(),
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    group_column: GroupColumn = None,
    part_column: PartColumn = None,
    source: Annotated[str | None, typer.Option(help="The layout, where two fit.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where decoded images are kept.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one a core.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Look for what is wrong with DATA: broken files, duplicates, leaks, label conflicts, odd sizes."""
    from cclnet.data.audit import audit
    from cclnet.data.audit_text import audit_tables
    from cclnet.data.sources import open_data
    from cclnet.data.split import SplitSettings
    from cclnet.files import make_folder

    table = open_data(
        data,
        image_column=image_column,
        label_column=label_column,
        group_column=group_column,
        part_column=part_column,
        source=source,
    )
    split = SplitSettings(by=split_by, file=split_file, val=val, seed=seed)
    make_folder(out)
    found = audit(table, split, cache_dir=cache_dir, workers=workers, progress=not quiet)
    found.write(out / "audit.csv")
    Console().print(audit_tables(found, str(out / "audit.csv")), highlight=False)


def main() -> None:
    """Run a command; what the user can mend is one line on stderr and exit code 2, never a traceback."""
    try:
        app(prog_name="cclnet")
    except InputError as error:
        # Escaped, for names and hints such as cclnet[dicom] hold brackets that are no markup.
        Console(stderr=True).print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False)
        sys.exit(2)
