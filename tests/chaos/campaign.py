"""Run the hostile corpus, and kills of runs, and write what came of it.

    python tests/chaos/campaign.py --cases 1000 --kills 40 --out results/chaos.json     # `make chaos`

Exit code 1 if a case failed: another exit code than expected, a traceback, more than 10 seconds of processor time, more
than 2 GB, a hang, an escape sequence for the terminal, or damage that was used without a word.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cclnet.runs.provenance import origin

sys.path.insert(0, str(Path(__file__).parent))
from corpus import Case, cases
from forked import MEGABYTES, SECONDS, Outcome, run_forked, warm_up
from material import Material, make_material

_NOTICED = re.compile(r"checksum|SHA-?256|damaged|refused|does not match|decoded again", re.IGNORECASE)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|terminate called")


def run_command(arguments: list[str]) -> None:
    """Run a command line; ``load RUN IMAGE`` predicts one image in a program."""
    if arguments[0] == "load":
        import cclnet

        try:
            cclnet.load(arguments[1], device="cpu").predict(arguments[2])
        except cclnet.InputError as error:
            print(error)
            sys.exit(2)
        return
    from cclnet.cli import main

    sys.argv = ["cclnet", *arguments]
    main()


def faults(case: Case, outcome: Outcome) -> list[str]:
    """What was wrong with the answer to a case."""
    wrong = []
    if outcome.hung:
        wrong.append("hang")
    elif outcome.code not in case.codes:
        wrong.append(f"exit code {outcome.code}")
    if _TRACEBACK.search(outcome.output):
        wrong.append("traceback")
    if outcome.seconds > SECONDS:
        wrong.append("over 10 seconds")
    if outcome.megabytes > MEGABYTES:
        wrong.append("over 2 GB")
    if set(outcome.output) & {"\x1b", "\x07"}:
        wrong.append("terminal control")
    if case.must_notice and outcome.code == 0 and not _NOTICED.search(outcome.output):
        wrong.append("silent acceptance")
    return wrong


def run_case(material: Material, count: int, seed: int, number: int) -> dict[str, Any]:
    """Prepare and run one case in a folder of its own."""
    kind, make = list(cases(count, seed))[number]
    folder = Path(tempfile.mkdtemp(dir=material.folder))
    try:
        case = make(material, folder)
        outcome = run_forked(partial(run_command, case.command), folder)
        wrong = faults(case, outcome)
        return {
            "number": number, "kind": kind, "case": case.name, "code": outcome.code, "faults": wrong,
            "seconds": round(outcome.seconds, 2), "wall": round(outcome.wall, 2),
            "megabytes": round(outcome.megabytes), "output": outcome.output[-3000:] if wrong else "",
        }  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_corpus(count: int, seed: int, workers: int, minutes: float = 0.0) -> list[dict[str, Any]]:
    """Run all cases, ``workers`` at once; each worker is a fork of this process, and each case a fork of a worker."""
    begin = time.monotonic()
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        material = make_material(Path(folder))
        results = []
        with ProcessPoolExecutor(workers, get_context("fork")) as pool:
            for result in pool.map(partial(run_case, material, count, seed), range(count), chunksize=4):
                results.append(result)
                if result["faults"]:
                    print(json.dumps(result, indent=1), flush=True)
                if minutes and time.monotonic() - begin > 60 * minutes:
                    pool.shutdown(cancel_futures=True)
                    break
        return results


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, int] = dict.fromkeys(
        ("traceback", "hang", "over 10 seconds", "over 2 GB", "silent acceptance", "terminal control", "exit code"), 0
    )
    codes: dict[str, int] = defaultdict(int)
    for result in results:
        codes[str(result["code"])] += 1
        for fault in result["faults"]:
            found["exit code" if fault.startswith("exit code") else fault] += 1
    kinds: dict[str, int] = defaultdict(int)
    for result in results:
        kinds[result["kind"]] += 1
    return {
        "cases": len(results), "failed": sum(bool(result["faults"]) for result in results), "faults": found,
        "exit_codes": dict(sorted(codes.items())), "kinds": dict(kinds),
        "processor_minutes": round(sum(result["seconds"] for result in results) / 60, 2),
        "largest_seconds": max(result["seconds"] for result in results),
        "largest_megabytes": max(result["megabytes"] for result in results),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no case after so long; 0: no limit")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases to run, with their output")
    given = parser.parse_args()
    if given.only:
        warm_up()
        with tempfile.TemporaryDirectory() as folder:
            material = make_material(Path(folder))
            for number in given.only:
                print(json.dumps(run_case(material, given.cases, given.seed, number), indent=1))
        return
    begin = time.monotonic()
    results = run_corpus(given.cases, given.seed, given.workers, given.minutes)
    content: dict[str, Any] = {**origin(), "seed": given.seed, "corpus": summary(results)}
    content["corpus"]["minutes"] = round((time.monotonic() - begin) / 60, 2)
    content["corpus"]["load_of_the_machine"] = round(os.getloadavg()[2], 1)  # processes that want to run; 15 minutes
    failed = [result for result in results if result["faults"]]
    print(json.dumps(content, indent=1))
    if given.out:
        given.out.write_text(json.dumps(content | {"failed": failed}, indent=1) + "\n")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
