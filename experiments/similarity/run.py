"""Run the study of what soft labels follow, and write its tables from the results. PLAN.md says what it asks.

python experiments/similarity/run.py all --data ISIC2018 --out runs/similarity --parallel 4
python experiments/similarity/run.py all --results results/isic2018 --tables-only --documents
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cclnet.cli import parse_list, parse_seeds
from cclnet.data.sources import open_data
from cclnet.errors import InputError
from cclnet.reproduce.experiments import SMOKE_DATA, PaperCell, check_data, decode_once, print_pages, select, unique
from cclnet.reproduce.tables import write_documents
from cclnet.sweep.cells import SweepOptions, SweepSummary, parse_shard
from cclnet.sweep.executors import run_sweep
from similarity_cells import (
    TUNING,
    everything,
    similarity,
    study_recipes,
    tune,
    tune_similarity,
    uses,
    write_tuning_data,
)
from similarity_tables import check_has_study_results, study_blocks, write_study

ALIASES = {"looks": "similarity", "tune-looks": "tune-similarity"}  # names before version 0.2


def cells_of(options: argparse.Namespace) -> list[PaperCell]:
    """The requested cells, each once."""
    seeds, chosen = parse_seeds(options.seeds), []
    for name in options.what:
        if name == "all":  # with the seeds that are reported; open choices are made, not run again
            chosen += everything()
        elif name == "similarity":
            given = {"backbones": parse_list(options.backbones), "rows": parse_list(options.methods)}
            chosen += similarity(seeds, **{key: names for key, names in given.items() if names})
        else:
            chosen += {"tune": tune, "tune-similarity": tune_similarity, "uses": uses}[name](seeds)
    return select(unique(chosen), parse_list(options.only))


def run(options: argparse.Namespace, console: Console) -> SweepSummary:
    """Run the requested cells that have no result yet, then write the tables of all results."""
    began = time.time()
    check_data(options.data, options.smoke)
    cells, recipes = cells_of(options), study_recipes()
    sweep = SweepOptions(
        out=options.out,
        results=options.results,
        max_minutes=options.max_minutes,
        parallel=options.parallel,
        shard=parse_shard(options.shard),
        accelerator=options.accelerator,
        cache_dir=options.cache_dir,
    )
    source = SMOKE_DATA if options.smoke else options.data
    data = dict.fromkeys(recipes, source)
    for split in {cell.split for cell in cells} & set(TUNING):
        data[split] = str(write_tuning_data(open_data(source), recipes[split], options.out / f"{split}-data"))
    if not options.smoke:
        for own in sorted({data[cell.split] for cell in cells}):
            decode_once(own, recipes["paper"], sweep)
    requested = {"what": options.what, "seeds": parse_seeds(options.seeds), "parallel": options.parallel}
    made = [cell.cell(recipes[cell.split], data[cell.split], options.smoke) for cell in cells]
    summary = run_sweep(made, sweep, requested, console, began)
    print_pages(write_study(options.results), console)
    console.print(summary.text(), highlight=False, markup=False)
    return summary


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("all", "similarity", "tune", "tune-similarity", "uses")
    parser.add_argument("what", nargs="+", type=lambda name: ALIASES.get(name, name), choices=names)
    parser.add_argument("--data", default="", help="the ISIC 2018 images, as downloaded")
    parser.add_argument("--out", type=Path, default=Path("runs/similarity"), help="folder for the runs")
    parser.add_argument("--results", type=Path, help="folder for results and tables; default: OUT/results")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    parser.add_argument("--backbones", default="", help="of similarity; default: resnet18")
    parser.add_argument("--methods", default="", help="rows of similarity; default: all")
    parser.add_argument("--only", default="", help="cells by name, with * and ?, in this order")
    parser.add_argument("--shard", default="1/1", help="i/n: this is machine i of n that share the cells")
    parser.add_argument("--max-minutes", type=float, default=0.0)
    parser.add_argument("--parallel", type=int, default=1, help="cells trained at once")
    parser.add_argument("--smoke", action="store_true", help="tiny settings on synthetic images")
    parser.add_argument("--tables-only", action="store_true", help="run nothing; write the tables from the results")
    parser.add_argument("--documents", action="store_true", help="also update the tables in docs/")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--cache-dir", type=Path, help="folder for decoded images")
    options = parser.parse_args(words)
    options.results = options.results or options.out / "results"
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    console, failed = Console(), False
    try:
        if options.tables_only:
            check_has_study_results(options.results)
            print_pages(write_study(options.results), console)
        else:
            failed = bool(run(options, console).failed)
        if options.documents:
            check_has_study_results(options.results)
            write_documents(Path(), study_blocks(options.results))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
