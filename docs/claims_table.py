"""Write docs/claims.md from the results: ``python docs/claims_table.py``. Every figure on the page is computed here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from cclnet.evaluation.similarity import agreement_p, inverse_frequency
from cclnet.evaluation.statistics import Spread, detectable
from cclnet.files import read_json_bz2
from cclnet.reproduce.experiments import BACKBONES, METHODS, SPLITS, PaperCell, published
from cclnet.reproduce.seeds import RANKING, PaperResult, SeedStatistics, read_results, seeds_of
from cclnet.reproduce.tables import HEADS, points_field
from cclnet.reproduce.verdict import best_counts

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
SOFT_LABELS = RESULTS / "soft_labels"
PAGE = Path(__file__).with_name("claims.md")
HEAD = """# Claims

Each claim of the README with its figures, their file, the command that made them, and what would refute it.

- Brackets are 95% intervals. A claim with one seed is conditional on that seed.
- Power is the true difference that the design finds in 80% of repetitions at the 5% level. For heads on frozen features
  it is computed from the width of the interval, with one degree of freedom less than seeds.
- `cclnet reproduce verify --results results/isic2018` recomputes the figures of the paper's tables from the kept
  predictions. `python docs/claims_table.py` writes this page from [results](../results), and a test compares the two.

| Claim | Figures | Power | Seeds | File and command | Refuted by |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Claim:
    """One row of the page."""

    claim: str
    figures: str
    seeds: str
    source: str
    refuted_by: str
    power: str = "–"

    def row(self) -> str:
        fields = (self.claim, self.figures, self.power, self.seeds, self.source, self.refuted_by)
        return f"| {' | '.join(fields)} |"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def file_link(name: str, command: str) -> str:
    return f"[{name}](../results/{name})<br>`{command}`"


def paper_claims() -> list[Claim]:
    """The reproduction, and what the soft labels of the paper do."""
    folder = RESULTS / "isic2018"
    results, statistics = read_results(folder), SeedStatistics(folder)
    source = file_link("isic2018", "cclnet reproduce all --data ISIC2018")
    counts = best_counts(results, statistics)
    differences = [
        100 * abs(statistics.mean(own)["accuracy"]["mean"] - published(backbone, method)["accuracy"])
        for backbone in BACKBONES
        for method in ("hard", "ccl")
        if (own := seeds_of(results, PaperCell(backbone, method)))
    ]
    claims = [
        Claim(
            "The paper's scores of hard labels and CCL-Net are reproduced; those of LSR-a1 and LSR-a5 are not",
            f"accuracy of hard labels and CCL-Net within {max(differences):.1f} points on all backbones",
            "1 to 7 per cell",
            source,
            "a cell of hard labels or CCL-Net whose interval over seeds excludes the paper's value",
        ),
        Claim(
            "CCL-Net is not the best method of Table 1",
            f"best on {counts['ccl']} of {sum(counts.values())} numbers (paper: 12 of 12)",
            "1 to 7 per cell",
            source,
            "CCL-Net best on most numbers with eight seeds per cell",
        ),
    ]
    for split, words in (("paper", "the paper's split"), ("lesion", "the split by lesion")):
        pair = rivals(results, statistics, split)
        fields = {name: points_field(pair["metrics"][name]) for name in ("accuracy", *RANKING)}
        shown = "; ".join(f"{HEADS[name]} {' '.join(field[:2])}" for name, field in fields.items())
        power = [f"{HEADS[name]} {100 * pair['metrics'][name]['detectable']:.1f}" for name in fields]
        claims.append(
            Claim(
                f"No evidence that CCL-Net is more accurate than hard labels, and it ranks worse ({words}, ResNet-18)",
                f"{shown} points",
                f"{pair['seeds']['a']}, paired",
                source,
                "an interval of accuracy above zero, or an interval of macro AUC that includes zero",
                f"{'; '.join(power)} points",
            )
        )
    hard = {k: statistics.mean(seeds_of(results, PaperCell(method="hard", split=k)))["accuracy"] for k in SPLITS}
    accuracies = {k: f"{own['mean']:.3f} [{own['low']:.3f}, {own['high']:.3f}]" for k, own in hard.items()}
    claims.append(
        Claim(
            "The paper's split leaks lesions",
            f"accuracy of hard labels {accuracies['paper']} on the paper's split, {accuracies['lesion']} by lesion",
            f"{len(hard['paper']['values'])} and {len(hard['lesion']['values'])}",
            source,
            "equal accuracy on both splits",
        )
    )
    return claims + matrix_claims(results)


def rivals(results: list[PaperResult], statistics: SeedStatistics, split: str) -> dict[str, Any]:
    """CCL-Net against hard labels on ResNet-18."""
    own = [r for m in METHODS for r in seeds_of(results, PaperCell(method=m, split=split))]
    found = statistics.compare_all(own)
    assert found is not None
    return next(pair for pair in found["pairs"] if pair["b"] == METHODS["hard"])


def matrix_claims(results: list[PaperResult]) -> list[Claim]:
    """What the matrix of CCL-Net follows."""
    own = seeds_of(results, PaperCell(split="lesion"))
    frequency = [r.inverse_frequency_agreement for r in own]
    p = max(agreement_p(r.matrix, inverse_frequency(r.class_counts)) for r in own)
    return [
        Claim(
            "The soft labels of CCL-Net follow class frequency",
            f"rank correlation with inverse class frequency {sum(frequency) / len(own):.2f} (largest exact p {p:.2g})",
            str(len(own)),
            file_link("isic2018/similarity.md", "python experiments/similarity/run.py all --data ISIC2018"),
            "a correlation near zero on imbalanced data",
            "exact permutation of the classes",
        )
    ]


def checked_claims() -> list[Claim]:
    """Claims that a test or a command checks."""
    return [
        Claim(
            "One backward pass gives, bit for bit, the weights of the paper's alternating update",
            "equal weights after several steps",
            "–",
            "[tests/test_network.py](../tests/test_network.py)<br>`pytest tests/test_network.py`",
            "a step after which one weight differs",
        ),
        Claim(
            "Every figure of the paper's tables can be recomputed without a GPU",
            "n of n figures agree",
            "–",
            file_link("isic2018", "cclnet reproduce verify --results results/isic2018 --documents"),
            "a figure that disagrees, or more than five minutes on two cores",
        ),
    ]


def speed_claims() -> list[Claim]:
    rows = {row["backbone"]: row for row in read("benchmark_h200.json")["rows"]}
    own = rows["resnet18"]
    return [
        Claim(
            "Training runs near the speed of the network alone",
            f"ResNet-18, hard labels, {own['of_ceiling']:.2f} of the ceiling; CCL-Net {own['ccl_over_hard']:.3f} × the "
            "time",
            "1 measurement",
            file_link("benchmark_h200.json", "cclnet benchmark"),
            "a paired measurement on one H200",
        )
    ]


def soft_label_test(data: str, regime: str, score: str, method: str = "ccl-forward", against: str = "hard") -> Any:
    results = read_json_bz2(SOFT_LABELS / "third_plan" / f"{data}.json.bz2")["results"]
    return next(own for own in results if own["regime"] == regime)["tests"][against][method][score]


def soft_label_figures(regime: str, score: str, against: str = "hard") -> tuple[str, str]:
    """`ccl-forward` minus another method on both data sets with interval and p, and the power of each."""
    figures, power = [], []
    for data, title in (("isic2018", "ISIC 2018"), ("aptos", "APTOS 2019")):
        if against == "hard":
            test = soft_label_test(data, regime, score)
            difference, low, high = (100 * test[name] for name in ("difference", "low", "high"))
        else:  # tested the other way round, with the correction over all that `ccl-forward` is compared with
            test = soft_label_test(data, regime, score, against, "ccl-forward")
            difference, low, high = (-100 * test[name] for name in ("difference", "high", "low"))
        figures.append(f"{title} {difference:+.1f} points [{low:.1f}, {high:.1f}], p {test['p_holm']:.2g}")
        freedom = test["seeds"] - 1
        error = (high - low) / 2 / stats.t.ppf(0.975, freedom)
        power.append(f"{detectable([Spread(error**2, freedom)]):.1f}")
    return "; ".join(figures), " and ".join(power) + " points"


def soft_label_claims() -> list[Claim]:
    """Forward CCL under label noise and on clean labels, and the ranking of doubtful labels."""
    command = "python experiments/soft_labels/bench.py run --plan third"
    source = file_link("soft_labels/third_plan/noise40.md", command)
    clean = file_link("soft_labels/third_plan/clean.md", command)
    cells = [c for c in read("soft_labels/doubts.json")["cells"] if (c["data"], c["noise"]) == ("isic2018", 0.2)]
    first, margin = ([c["precision_at_100"] for c in cells if c["ranking"] == name] for name in ("doubt", "margin"))
    balanced = "balanced_accuracy_prior_divided_out"
    noisy, noisy_power = soft_label_figures("noise40", balanced)
    ranking, ranking_power = soft_label_figures("noise40", "macro_auroc")
    short, short_power = soft_label_figures("noise40", balanced, "hard, 10 epochs")
    trusted, trusted_power = soft_label_figures("clean", "macro_auroc")
    risk, risk_power = soft_label_figures("clean", "aurc")
    return [
        Claim(
            "`ccl-forward` helps where training labels are wrong",
            f"40% look-alike noise, balanced accuracy with the prior divided out, minus hard labels: {noisy}; macro "
            f"AUC: {ranking}; heads on frozen features",
            "24, paired",
            source,
            "whole networks without that gain; so far, fine-tuned with two seeds, there is none",
            f"balanced accuracy {noisy_power}; macro AUC {ranking_power}",
        ),
        Claim(
            "`ccl-forward` against stopping early",
            f"the same, minus hard labels for ten epochs: {short}",
            "24, paired",
            source,
            "an interval that includes zero",
            short_power,
        ),
        Claim(
            "On clean labels `ccl-forward` keeps the ranking of hard labels",
            f"macro AUC minus hard labels: {trusted}; area under risk-coverage: {risk}",
            "24, paired",
            clean,
            "a macro AUC more than 0.3 points below",
            f"macro AUC {trusted_power}; area {risk_power}",
        ),
        Claim(
            "`cclnet doubts` finds wrong labels",
            f"ISIC 2018, 20% noise: {100 * sum(first) / len(first):.1f} of the first 100 are wrong; by a "
            f"plain margin {100 * sum(margin) / len(margin):.1f}",
            str(len(first)),
            file_link("soft_labels/doubts.md", "python experiments/soft_labels/bench.py tables"),
            "a plain margin that is better; it is at 40% noise on ISIC 2018",
        ),
    ]


def uncertainty_claims() -> list[Claim]:
    """Prediction sets and unlike images."""
    found = read("uncertainty.json")
    gaps = [
        100 * abs(row["coverage"] - row["level"]) for name in ("isic2018", "aptos") for row in found[name]["coverage"]
    ]
    unlike = {row["against"]: row["auroc"] for row in found["unlike"]["rows"] if row["score"] == "used"}
    unknown = sorted(row["auroc"] for row in found["unlike"]["left_out_classes"])
    source = file_link("uncertainty.json", "python experiments/uncertainty/uncertainty_study.py")
    return [
        Claim(
            "Prediction sets keep their coverage",
            f"ISIC 2018 and APTOS 2019, APS and RAPS, three levels: within {max(gaps):.1f} points of nominal",
            "200 divisions by patient or lesion",
            source,
            "a gap of more than one point",
        ),
        Claim(
            "Images of another kind are recognised",
            f"AUROC of skin lesions against APTOS {unlike['APTOS 2019']:.3f}, brain MRI {unlike['brain MRI']:.3f}",
            "1",
            source,
            "an AUROC below 0.95; an unknown class of skin lesion is *not* recognised "
            f"({unknown[0]:.2f} to {unknown[-1]:.2f})",
        ),
    ]


def page() -> str:
    claims = [*paper_claims(), *soft_label_claims(), *uncertainty_claims(), *checked_claims(), *speed_claims()]
    return HEAD + "\n".join(claim.row() for claim in claims) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
