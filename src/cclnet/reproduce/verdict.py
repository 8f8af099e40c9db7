"""What the paper's claim is worth, in figures of the kept results, and the generated blocks of the documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cclnet.report.text import signed_text
from cclnet.reproduce.experiments import BACKBONES, METHODS, PAPER_SCORES, PaperCell, published
from cclnet.reproduce.seeds import RANKING, PaperResult, SeedStatistics, plain_results, read_results, seeds_of
from cclnet.reproduce.tables import (
    HEADS,
    SPLIT_TITLES,
    markdown,
    number,
    paper_grids,
    part_of,
    points_field,
    runs_text,
    table1_grid,
)


def best_counts(results: Sequence[PaperResult], seeds: SeedStatistics) -> dict[str, int]:
    """On how many of the paper's 12 numbers (three backbones, four scores) each method is best here."""
    counts = dict.fromkeys(METHODS, 0)
    for backbone in BACKBONES:
        own = {method: seeds_of(results, PaperCell(backbone, method)) for method in METHODS}
        means = {method: seeds.mean(runs) for method, runs in own.items() if runs}
        for score in PAPER_SCORES if means else ():
            counts[max(means, key=lambda method: means[method][score]["mean"])] += 1
    return counts


def verdict_text(results: Sequence[PaperResult], seeds: SeedStatistics) -> str:
    """What the paper's claim is worth, in figures of the results."""
    counts = best_counts(results, seeds)
    if not sum(counts.values()):
        return "No cell has been run yet."
    paired = {}
    for split in SPLIT_TITLES:
        found = seeds.compare_all(plain_results(results, split, "resnet18"))
        paired[split] = next((p for p in found["pairs"] if p["b"] == METHODS["hard"]), None) if found else None
    lines = [
        "- **Best of six methods:** the paper reports CCL-Net as the best on all 12 numbers of Table 1 (three "
        f"backbones, four scores). Here it is the best on {counts['ccl']} of {sum(counts.values())}; "
        + ", ".join(f"{METHODS[m]} on {n}" for m, n in sorted(counts.items(), key=lambda c: -c[1]) if n and m != "ccl")
        + ". Most cells of the two other backbones have one seed.",
    ]
    paper_gain = published("resnet18", "ccl")["accuracy"] - published("resnet18", "hard")["accuracy"]
    for split, pair in paired.items():
        if pair is None:
            continue
        tests = {
            name: points_field(pair["metrics"][name]) for name in ("accuracy", *RANKING) if name in pair["metrics"]
        }
        detectable = pair["metrics"]["accuracy"]["detectable"]
        lines.append(
            f"- **Accuracy on ResNet-18, {SPLIT_TITLES[split]}:** CCL-Net minus hard labels is "
            f"{' '.join(tests['accuracy'][:2])} points over {pair['seeds']['a']} common seeds"
            + (f" (paper: {signed_text(100 * paper_gain, 1)}, one run)" if split == "paper" else "")
            + f". A true difference of {100 * detectable:.1f} points would be found in 80% of repetitions. "
            + "; ".join(f"{HEADS[name]} {' '.join(tests[name][:2])}" for name in RANKING if name in tests)
            + " points."
        )
    hard = [
        seeds.mean(own) for split in SPLIT_TITLES if (own := seeds_of(results, PaperCell(method="hard", split=split)))
    ]
    if len(hard) == 2:
        leak = hard[0]["accuracy"]["mean"] - hard[1]["accuracy"]["mean"]
        lines.append(
            f"- **The leak:** hard labels on ResNet-18 have an accuracy of {number(hard[0]['accuracy']['mean'])} on "
            f"the paper's split and {number(hard[1]['accuracy']['mean'])} by lesion: {100 * leak:.1f} points come from "
            "images of lesions that were trained on, more than any method gains."
        )
    return "\n".join(lines)


def paper_blocks(results: Path, seeds: SeedStatistics | None = None) -> dict[str, dict[str, str]]:
    """The generated blocks of each document, by document and marker."""
    found, seeds = read_results(results), seeds or SeedStatistics(results)
    grids = paper_grids(found, seeds)
    [rivals] = grids["rivals"]
    blocks = {name: markdown(*content) for name, content in grids.items()}
    blocks.setdefault("folds", "Not run yet; `cclnet reproduce complete` runs them.")
    short = markdown(table1_grid(found, seeds, scores=("accuracy", "kappa", "macro_auroc"), backbones=("resnet18",)))
    verdict = {
        "verdict": verdict_text(found, seeds),
        "table1 resnet18": short,
    }
    own = part_of(rivals, ("Split", *rivals.columns[2:-1]), Backbone=BACKBONES["resnet18"], Pair=METHODS["ccl"])
    head = {"table2": blocks.pop("table2")}
    tables = {**blocks, "rivals resnet18": markdown(own), "runs": runs_text(found)}
    return {
        "docs/reproduce.md": verdict,
        "docs/reproduce_head.md": head,
        "docs/tables_paper.md": tables,
        "README.md": {"table1": short},
    }
