"""Images per second of training, fine-tuning and prediction on one GPU, and where the time of an epoch goes.

    python benchmarks/gpu_speed.py ISIC2018 --weights FOLDER --out results/gpu_speed.json --max-minutes 6
    python benchmarks/gpu_speed.py --smoke --accelerator cpu --out speed.json    # tiny networks, in half a minute
    python benchmarks/gpu_speed.py --tables                    # writes the tables of docs/speed.md

FOLDER has the weights of what is fine-tuned, MODEL.safetensors. The result is written after every measurement; what it
has already is not measured again, so a second call continues. Compiling takes minutes and can be done side by side,
measuring takes seconds and needs the machine alone. So every network is a process of its own: all of a stage get ready
together, then each works in its turn while the others wait; hard labels and a method change places after every epoch.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cclnet.api import run_settings
from cclnet.deploy.predict import Inputs, open_model, predict
from cclnet.files import read_json, write_json, write_whole
from cclnet.pretrained import input_settings
from cclnet.runs.folder import RunFolder
from cclnet.runs.provenance import origin
from cclnet.training import benchmark, duration, loop, setup

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
RESULT = Path(__file__).parents[1] / "results" / "gpu_speed.json"
EPOCHS = {True: 20, False: 8}  # of a run, more than it has turns; eight are few enough not to be compiled by default
TURNS = {True: 5, False: 3}  # measured epochs: of a method and of hard labels each, in turn; of a run alone
READY = (0.6, 0.85)  # of the minutes, until which the processes of a stage may get ready
# In two stages by their worth, because some compile long: what is measured, preset, backbone, method.
STAGES = (
    (
        "ceiling paper resnet18 hard compiled", "epochs paper resnet18 ccl compiled",
        "epochs paper resnet18 ccl-confusion compiled", "epochs paper resnet18 ccl-forward compiled",
        "parts paper resnet18 ccl compiled",
        "epochs best tf_efficientnet_lite4 hard", "epochs finetune tf_efficientnet_lite0 hard",
        "prediction paper resnet18 hard", "prediction best tf_efficientnet_lite4 hard",
    ),
    (
        "ceiling paper mobilenetv2_100 hard compiled", "epochs paper mobilenetv2_100 ccl compiled",
        "ceiling paper efficientnet_b0 hard compiled", "epochs paper efficientnet_b0 ccl compiled",
        "epochs best tf_efficientnet_lite4 hard compiled", "epochs finetune tf_efficientnet_lite0 hard compiled",
    ),
)  # fmt: skip
SMOKE = (
    ("ceiling paper test_resnet hard", "epochs paper test_resnet ccl", "parts paper test_resnet ccl"),
    ("epochs finetune test_efficientnet hard", "prediction finetune test_efficientnet hard"),
)


def jobs_of(name: str) -> list[str]:
    """The processes that take turns in a measurement: epochs of a method follow those of hard labels."""
    kind, _, _, method, *_ = name.split()
    return [name.replace(f" {method}", " hard"), name] if kind == "epochs" and method != "hard" else [name]


def run_job(job: str, options: argparse.Namespace, pipe: Any) -> None:
    """Prepare and measure, in turns."""
    kind, preset, backbone, method, *compiled = job.split()
    on_gpu, usual = options.accelerator != "cpu" and torch.cuda.is_available(), kind == "parts"
    epochs = EPOCHS[bool(compiled) and not usual]
    weights = f"{options.weights}/{backbone}.safetensors" if options.weights and preset != "paper" else ""
    values: dict[str, Any] = {
        "backbone": backbone, "method": method, "compile": True if compiled and on_gpu else None, "folds": 0,
        "cache_dir": str(options.scratch / "cache"), "pretrained": False, "weights": weights, "tta": "none",
        "epochs": epochs, "validate_every": 1 if usual else epochs, "logger": "" if usual else "none",
    }  # fmt: skip
    if options.smoke:
        values |= {"batch_size": 32, "short_side": 32, "test_short_side": 32, "augment": {"crop": 28}}
    elif preset != "paper":
        values |= input_settings(backbone, 300 if "lite4" in backbone else None)  # its weights are for 380
    settings = run_settings(options.data, None, values, preset)
    run = RunFolder(options.scratch / job / "run")
    run.create(settings)
    fabric = setup.make_fabric(settings, accelerator=options.accelerator)
    data = setup.prepare_data(settings, RunFolder(options.scratch / job), fabric, progress=False)
    about = {
        "kind": kind, "preset": preset, "backbone": backbone, "method": method, "compiled": bool(compiled),
        "data": Path(options.data).name, "batch_size": settings.batch_size, "crop": settings.augment.crop,
        "training_images": len(data.rows("train")), "validation_images": len(data.rows("val")),
        "precision": "32-true" if kind == "prediction" else str(fabric._precision.precision),
        "weights": Path(settings.weights).name, **origin(duration.device_name(fabric.device)), "cores": os.cpu_count(),
    }  # fmt: skip

    def wait(measured: dict[str, float] | None) -> None:  # reports, and returns when it is the turn of the process
        pipe.send(measured or about)
        pipe.recv()

    measure = {"ceiling": ceiling, "epochs": whole_epochs, "parts": parts, "prediction": prediction}[kind]
    measure(settings, data, fabric, run, wait)


def ceiling(settings: Any, data: Any, fabric: Any, run: RunFolder, wait: Any) -> None:
    """The network alone on one fixed batch."""
    synchronize = benchmark._synchronize

    def wait_once(device: torch.device) -> None:  # called before the first timing, when all is compiled
        benchmark._synchronize = synchronize
        synchronize(device)
        wait(None)

    benchmark._synchronize = wait_once
    wait({"ceiling": benchmark._ceiling(settings, data, fabric.device.type)})


def whole_epochs(settings: Any, data: Any, fabric: Any, run: RunFolder, wait: Any) -> None:
    """A whole epoch in each turn."""
    train_epoch = loop.Training._train_epoch

    def in_turn(training: loop.Training, *arguments: Any) -> bool:
        if records := training.records:  # the first epoch fills caches
            benchmark._synchronize(fabric.device)
            wait({settings.method: records[-1]["images_per_second"]} if len(records) > 1 else None)
        return train_epoch(training, *arguments)

    loop.Training._train_epoch = in_turn
    loop.Training._save = lambda training: None  # checkpoints would take time between the turns
    benchmark._epochs(settings, data, run.path / "epochs", fabric.device.type)


def parts(settings: Any, data: Any, fabric: Any, run: RunFolder, wait: Any) -> None:
    """The seconds of the parts of an epoch of a usual run, means over all epochs but the first and the last."""
    seconds = defaultdict[str, float](float)
    marks: list[dict[str, float]] = []  # the seconds at the start of each epoch, and its time

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        benchmark._synchronize(fabric.device)
        began = time.perf_counter()
        if part == "steps":
            marks.append({"epoch": began, **seconds})
        yield
        benchmark._synchronize(fabric.device)
        seconds[part] += time.perf_counter() - began

    training = loop.Training(settings, run, fabric, data)
    training.step(next(iter(training.loader.epoch(0))))  # compiles

    def epoch(number: int, start: int = 0, draw: Any = training.loader.epoch) -> Iterator[Any]:
        batches = timed("order")(draw)(number, start)
        return itertools.chain([timed("first batch")(next)(batches)], batches)

    training.loader.epoch = epoch
    training._train_epoch = timed("steps")(training._train_epoch)
    training._save = timed("checkpoint")(training._save)
    training.network.method.end_epoch = timed("end of the method's epoch")(training.network.method.end_epoch)
    training._validation.scores = timed("validation")(training._validation.scores)
    wait(None)
    training.fit(progress=False)
    found = {part: (value - marks[1][part]) / (len(marks) - 2) for part, value in marks[-1].items()}
    found["steps"] -= found["order"] + found["first batch"]
    wait({**found, "rest": 2 * found["epoch"] - sum(found.values())})


def prediction(settings: Any, data: Any, fabric: Any, run: RunFolder, wait: Any) -> None:
    """The first images of the data, from the decoded cache as in evaluation, and from their files as by the command."""
    training = loop.Training(settings, run, fabric, data)
    training.finish()  # writes the model, which is untrained
    files = benchmark._write_files(data.table, run.path / "files")[:4000]
    inputs, works = Inputs([file.name for file in files], files), dict[str, Callable[[], Any]]()
    for views in ("none", "flips"):
        tester = training._tester(list(range(len(files))), views)
        model = open_model(run.path, len(files), fabric.device.type, tta=views)
        works[f"{views}, decoded"] = partial(tester.logits, training.shipped_classifier)
        works[f"{views}, files"] = partial(predict, model, inputs, progress=False)

    def images_per_second(work: Callable[[], Any]) -> float:
        began = time.perf_counter()
        work()
        return len(files) / (time.perf_counter() - began)

    for report in (lambda _: wait(None), wait):  # the first time fills caches
        report({name: images_per_second(work) for name, work in works.items()})


def turn(pipe: Any, until: float) -> dict[str, Any]:
    """What a process reports next."""
    if not pipe.poll(max(until - time.monotonic(), 0.0)):
        raise TimeoutError("the time is over")
    return pipe.recv()


def measure_stage(names: Sequence[str], options: argparse.Namespace, ready: float, until: float) -> None:
    """Measure what is ready in time, and add it to the file of the results."""
    # CUDA needs new processes; without it, forked ones need not import torch again.
    context: Any = multiprocessing.get_context("fork" if options.accelerator == "cpu" else "spawn")
    jobs = list(dict.fromkeys(job for name in names for job in jobs_of(name)))
    processes, pipes, about = dict[str, Any](), dict[str, Any](), dict[str, dict[str, Any]]()
    try:
        for job in jobs:
            pipes[job], other = context.Pipe()
            processes[job] = context.Process(target=run_job, args=(job, options, other))
            processes[job].start()
            other.close()
        for job in jobs:
            try:
                about[job] = turn(pipes[job], ready)
            except (EOFError, OSError) as error:
                print(f"{job} is not ready: {error!r}", flush=True)
                processes[job].kill()  # it would disturb the measurements
        print(f"{time.monotonic() - options.began:.0f} s: {len(about)} of {len(jobs)} are ready", flush=True)
        for name in (name for name in names if all(job in about for job in jobs_of(name))):
            found, turns = defaultdict[str, list[float]](list), jobs_of(name)
            try:
                for job in turns * (TURNS[len(turns) > 1] if name.startswith("epochs") else 1):
                    pipes[job].send(None)
                    for what, value in turn(pipes[job], until).items():
                        found[what].append(float(f"{value:.5g}"))
            except (EOFError, OSError) as error:  # its process ended, or the time is over
                print(f"{name} is not measured: {error!r}", flush=True)
                continue
            entries = [*entries_of(options.out).values(), {"name": name, "measured": found, **about[name]}]
            write_json(options.out, {**origin(about[name]["device"]), "entries": entries})
            print(f"{time.monotonic() - options.began:.0f} s: {name}: {dict(found)}", flush=True)
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def entries_of(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a result, by name."""
    return {own["name"]: own for own in read_json(path)["entries"]} if path.is_file() else {}


def tables(path: Path = RESULT) -> str:
    """The tables of docs/speed.md, with a row for each entry."""
    entries, rows = list(entries_of(path).values()), defaultdict[str, list[dict[str, str]]](list)
    ceilings = {own["backbone"]: own["measured"]["ceiling"][0] for own in entries if own["kind"] == "ceiling"}
    for own in entries:
        found = {name: median(values) for name, values in own["measured"].items()}
        speeds = {name: f"{value:,.0f}" for name, value in found.items()}
        row = {"backbone": own["backbone"], "px": f"{own['crop']}", "batch": f"{own['batch_size']}"}
        if own["kind"] == "parts":
            row |= {"method": own["method"], "images": f"{own['training_images']:,}, {own['validation_images']:,}"}
            row |= {name: f"{value:.3f} ({value / found['epoch']:.0%})" for name, value in found.items()}
            rows["Seconds of an epoch, images to train and to validate on:"].append(row)
        elif own["kind"] == "prediction":
            rows["Prediction in full precision, images per second, by views and source:"].append(row | speeds)
        elif len(found) == 2:  # hard labels and a method
            top = ceilings.get(own["backbone"], float("nan"))
            ratios = [hard / rate for hard, rate in zip(*own["measured"].values(), strict=True)]
            row |= {"ceiling": f"{top:,.0f}", "hard": speeds["hard"], "of ceiling": f"{found['hard'] / top:.2f}"}
            row |= {"method": own["method"], "with it": speeds[own["method"]]}
            row["time of the method"] = f"{median(ratios):.3f} x ({min(ratios):.3f} to {max(ratios):.3f})"
            rows["Training, images per second:"].append(row)
        elif own["kind"] == "epochs":
            row |= {"preset": own["preset"], "step": "compiled" if own["compiled"] else "CUDA graph"}
            rows["Fine-tuning, images per second:"].append(row | {"images/s": speeds["hard"]})
    about = sorted({f"{own['device']}, {own['cores']} cores, torch {own['versions']['torch']}" for own in entries})
    lines = [f"{' and '.join(about)}; medians." if entries else "Not measured yet."]
    for title, own in rows.items():
        cells = [list(own[0]), ["--:" if text[0].isdigit() else "---" for text in own[0].values()]]
        lines += ["", title, "", *(f"| {' | '.join(each)} |" for each in [*cells, *(row.values() for row in own)])]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="synthetic:images=400,size=32")
    parser.add_argument("--weights", type=Path, help="folder; without it, networks begin with random weights")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--max-minutes", type=float, default=6.0)
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--tables", action="store_true")
    options = parser.parse_args(words)
    if options.tables:
        before, begin, rest = PAGE.read_text(encoding="utf-8").partition("<!-- gpu speed -->\n")
        _, end, after = rest.partition("\n<!-- /gpu speed -->")
        if end:
            write_whole(PAGE, f"{before}{begin}{tables(options.out)}{end}{after}")
        return
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # several processes compile at once
    options.began = began = time.monotonic()
    seconds, stages = 60 * options.max_minutes, SMOKE if options.smoke else STAGES
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        options.scratch = Path(scratch)
        for names, share in zip(stages, READY, strict=True):
            if left := [name for name in names if name not in entries_of(options.out)]:
                measure_stage(left, options, began + share * seconds, began + seconds)
    print("not measured:", [name for names in stages for name in names if name not in entries_of(options.out)])


if __name__ == "__main__":
    main()
