"""Statistics and tables of the study, from the predictions of its cells."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from cclnet.evaluation.bootstrap import Units, units_of
from cclnet.evaluation.compare import difference_test
from cclnet.evaluation.metrics import compute, find
from cclnet.evaluation.statistics import holm
from cclnet.files import write_json_bz2, write_whole
from cclnet.runs.predictions import Floats, Predictions
from cclnet.runs.provenance import source_commit, versions
from noisy_tasks import CLASSES

DRAWS = 200
METRICS = ("accuracy", "balanced_accuracy", "macro_auroc", "auroc", "aurc", "quadratic_weighted_kappa")
BALANCED = "balanced_accuracy_prior_divided_out"
PRIMARY = {"clean": "macro_auroc", "noise20": BALANCED, "noise40": BALANCED, "few20": BALANCED, "few80": BALANCED}
TITLES = {
    "clean": "clean labels", "noise20": "20% of the training labels wrong",
    "noise40": "40% of the training labels wrong", "few20": "20 images per class", "few80": "80 images per class",
}  # fmt: skip
DATA_TITLES = {"isic2018": "ISIC 2018", "aptos": "APTOS 2019"}
FIRST_BACKBONE = "tf_efficientnet_lite0"
OURS, FIRST_FORM, ORACLE = "ccl-forward", "ccl-forward:softness=0.7,align=0", "forward true (oracle)"
COLUMNS = {
    "isic2018": {
        "accuracy": "Accuracy", "balanced_accuracy": "Balanced accuracy", BALANCED: "… prior divided out",
        "macro_auroc": "Macro AUC", "auroc:MEL": "Melanoma AUC", "aurc": "AURC",
    },
    "aptos": {
        "accuracy": "Accuracy", "balanced_accuracy": "Balanced accuracy", BALANCED: "… prior divided out",
        "macro_auroc": "Macro AUC", "quadratic_weighted_kappa": "Quadratic kappa", "aurc": "AURC",
    },
}  # fmt: skip
Samples = dict[str, tuple[float, Floats]]  # by metric: value, and draws [D]
Add = Callable[[str, str, tuple[str, str, str], bool, str], None]  # name, words, task, whether it held, figures


def samples_of(cell: Mapping[str, Any], units: Units) -> Samples:
    """Every metric of a cell with its draws over groups, the same draws for all cells."""
    p, data = cell["probabilities"].astype(np.float64), cell["data"]
    own = Predictions(cell["images"], cell["labels"], p / p.sum(axis=1, keepdims=True), CLASSES[data], cell["groups"])
    prior = np.ones(p.shape[1]) if "logit_adjustment" in cell["method"] else np.maximum(cell["train_mean"], 1e-6)
    divided = p / prior
    balanced = Predictions(
        own.images, own.labels, divided / divided.sum(axis=1, keepdims=True), own.classes, own.groups
    )
    metrics = [find(name) for name in METRICS]
    plain, corrected = compute([(own, metrics), (balanced, [find("balanced_accuracy")])], units, DRAWS, 0)
    found: Samples = {}
    for name, sample in plain.items():
        if name == "auroc":
            found |= {f"auroc:{c}": (float(sample.value[k]), sample.draws[:, k]) for k, c in enumerate(own.classes)}
        else:
            found[name] = (float(sample.value), sample.draws)
    found[BALANCED] = (float(corrected["balanced_accuracy"].value), corrected["balanced_accuracy"].draws)
    return found


def read_cell(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        content = {name: file[name] for name in file.files}
    about = json.loads(str(content.pop("about")))
    content["groups"] = content["groups"].astype(np.str_)
    return content | about


def order_correlation(matrix: npt.NDArray[np.float64]) -> float | None:
    """Rank correlation of the off-diagonal with closeness of the grades, −|i − j|; None where it is constant."""
    size = len(matrix)
    off = ~np.eye(size, dtype=bool)
    if np.ptp(matrix[off]) == 0:
        return None
    distance = np.abs(np.arange(size)[:, None] - np.arange(size)[None])
    return float(stats.spearmanr(matrix[off], -distance[off]).statistic)


def seriation_correlation(matrix: npt.NDArray[np.float64]) -> float | None:
    """Rank correlation of the grades with the order in which the matrix puts the classes, in either direction.

    That order is the one of the Fiedler vector of the symmetric off-diagonal: similar classes are close to each other
    on a line. None where all classes are equally similar.

    >>> chain = np.array([[0.0, 9.0, 1.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    >>> seriation_correlation(chain)
    1.0
    """
    similar = (matrix + matrix.T) / 2 * ~np.eye(len(matrix), dtype=bool)
    if np.ptp(similar[~np.eye(len(matrix), dtype=bool)]) == 0:
        return None
    line = np.linalg.eigh(np.diag(similar.sum(axis=1)) - similar)[1][:, 1]
    return round(abs(float(stats.spearmanr(line, np.arange(len(matrix))).statistic)), 12)


def study(out: Path) -> list[dict[str, Any]]:
    """For each data set, backbone and regime: values of every seed, and tests against hard labels, ours against the
    rest."""
    by_task: dict[tuple[str, str, str], dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(out.glob("*.npz")):
        if ".tmp" not in path.name:
            cell = read_cell(path)
            by_task[cell["data"], cell["backbone"], cell["regime"]][cell["method"]][cell["seed"]] = cell
    order = sorted(by_task, key=lambda task: (task[0], task[1] != FIRST_BACKBONE, task[2]))
    return [task_result(*task, by_task[task]) for task in order]


def task_result(data: str, backbone: str, regime: str, methods: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    first = next(iter(next(iter(methods.values())).values()))
    units = units_of(Predictions(
        first["images"], first["labels"], first["probabilities"] / first["probabilities"].sum(axis=1, keepdims=True),
        CLASSES[data], first["groups"],
    ))  # fmt: skip
    sampled = {m: {s: samples_of(cell, units) for s, cell in sorted(own.items())} for m, own in methods.items()}
    result: dict[str, Any] = {
        "data": data, "backbone": backbone, "regime": regime, "primary": PRIMARY[regime], "methods": {}, "tests": {},
    }  # fmt: skip
    for method, own in sampled.items():
        cells = methods[method]
        result["methods"][method] = {
            "seeds": sorted(own),
            "values": {metric: [own[s][metric][0] for s in sorted(own)] for metric in next(iter(own.values()))},
            "cpu_seconds": [round(cells[s]["seconds"], 2) for s in sorted(own)],
            "commits": sorted({str(cell["commit"]) for cell in cells.values()}),
            "matrices": [np.round(cells[s]["matrix"], 4).tolist() for s in sorted(own)],
        }
        if data == "aptos" and method.startswith("ccl-forward"):
            found = [order_correlation(cells[s]["matrix"]) for s in sorted(own)]
            result["methods"][method]["order_correlation"] = found
            lines = [seriation_correlation(cells[s]["matrix"]) for s in sorted(own)]
            result["methods"][method]["seriation_correlation"] = lines
    for reference in ("hard", OURS, "ordinal"):
        if reference in sampled:
            result["tests"][reference] = tests_against(reference, sampled, units)
    result["versions"] = first["versions"]
    result["device"] = first["device"]
    return result


def tests_against(
    reference: str, sampled: Mapping[str, Mapping[int, Samples]], units: Units
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Tests of every other method minus the reference, paired by the seeds both have; Holm over the methods."""
    metrics = list(next(iter(sampled[reference].values())))
    found: dict[str, dict[str, dict[str, float | None]]] = defaultdict(dict)
    for metric in metrics:
        names, raw = [], []
        for method, own in sampled.items():
            seeds = sorted(set(own) & set(sampled[reference]))
            if method == reference or len(seeds) < 2:
                continue
            a, b = (_stacked(runs, seeds, metric) for runs in (own, sampled[reference]))
            test = difference_test(a, b, True, units, 0)
            found[method][metric] = {"difference": test.difference, "low": test.low, "high": test.high, "p": test.p}
            found[method][metric]["seeds"] = len(seeds)
            names.append(method)
            raw.append(np.nan if test.p is None else test.p)
        for method, p in zip(names, holm(raw), strict=True):
            found[method][metric]["p_holm"] = None if np.isnan(p) else p
    return dict(found)


def _stacked(runs: Mapping[int, Samples], seeds: list[int], metric: str) -> tuple[Floats, Floats]:
    return np.array([runs[s][metric][0] for s in seeds]), np.stack([runs[s][metric][1] for s in seeds])


def markdown(result: Mapping[str, Any]) -> str:
    """One table: means over seeds ± standard deviation, and the primary metric against hard labels."""
    data, regime, primary = result["data"], result["regime"], result["primary"]
    columns, tests = COLUMNS[data], result["tests"].get("hard", {})
    primary_title = "Balanced accuracy, prior divided out," if primary == BALANCED else columns[primary]
    title = f"**{DATA_TITLES[data]}, {result['backbone']}: {TITLES[regime]}.** Mean ± standard deviation, best first."
    header = ["Method", "Seeds", *columns.values(), f"{primary_title} against hard"]
    lines = [title, "", "| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1)]
    methods = result["methods"]
    for method in sorted(methods, key=lambda m: -np.mean(methods[m]["values"][primary])):
        own = methods[method]
        cells = [_mean(own["values"][metric]) for metric in columns]
        test = tests.get(method, {}).get(primary)
        versus = "–" if test is None else _difference(test)
        lines.append("| " + " | ".join([f"`{method}`", str(len(own["seeds"])), *cells, versus]) + " |")
    for method, own in methods.items():
        if "order_correlation" in own:
            defined = [value for value in own["order_correlation"] if value is not None]
            without = len(own["order_correlation"]) - len(defined)
            shown = f"{_mean(defined)}" if defined else "–"
            shown += f" (undefined for {without} seeds, whose matrix is the identity)" if without else ""
            lines += ["", f"Rank correlation of the matrix of `{method}` with the order of the grades: {shown}."]
    return "\n".join(lines) + "\n"


def _mean(values: list[float]) -> str:
    spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def _difference(test: Mapping[str, float | None]) -> str:
    """A difference in points with its interval, and p after Holm's correction.

    >>> _difference({"difference": 0.031, "low": 0.02, "high": 0.042, "p_holm": 0.0041})
    '+3.1 [+2.0, +4.2], p 0.0041'
    """
    difference, low, high, p = (test[name] for name in ("difference", "low", "high", "p_holm"))
    assert difference is not None
    if low is None or high is None:  # every seed has the same difference: the two methods are the same here
        return f"{100 * difference:+.1f}, equal for every seed"
    shown = "–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.2g}"
    return f"{100 * difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}], p {shown}"


def summary(results: list[dict[str, Any]]) -> str:
    """One row per task: balanced accuracy (prior divided out) and macro AUC of hard labels, ours and the best rival."""
    lines = [
        "| Labels | Data, backbone | Balanced accuracy: `hard` | Best rival | `ccl-forward` "
        "| Macro AUC: `hard` | Best rival | `ccl-forward` |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for regime in ("noise40", "noise20", "clean", "few20", "few80"):
        for own in (r for r in results if r["regime"] == regime and {"hard", OURS} <= set(r["methods"])):
            values = {name: method["values"] for name, method in own["methods"].items()}
            rivals = [m for m in values if m not in ("hard", ORACLE) and not m.startswith(OURS)]
            fields = [TITLES[regime], f"{DATA_TITLES[own['data']]}, {own['backbone']}"]
            for metric in (BALANCED, "macro_auroc"):
                means = {name: float(np.mean(found[metric])) for name, found in values.items()}
                best = max(rivals, key=means.__getitem__, default=None)
                shown = "–" if best is None else f"{means[best]:.3f} (`{best}`)"
                fields += [f"{means['hard']:.3f}", shown, f"{means[OURS]:.3f}"]
            lines.append("| " + " | ".join(fields) + " |")
    return "\n".join(lines) + "\n"


def third_verdicts(results: list[dict[str, Any]]) -> str:
    """The table of the hypotheses of the third plan."""
    rows: list[str] = []

    def add(name: str, words: str, result: Mapping[str, Any], held: bool, figures: str) -> None:
        where = f"{DATA_TITLES[result['data']]}, {result['backbone']}"
        rows.append(f"| {name} | {words} | {where} | {'held' if held else '**failed**'} | {figures} |")

    for result in results:
        correlation = result["methods"].get(OURS, {}).get("seriation_correlation")
        if correlation:
            known = [value for value in correlation if value is not None]
            words = f"{TITLES[result['regime']]}: the line of the classes has the order of the grades, at least 0.9"
            held = len(known) == len(correlation) and bool(np.mean(known) >= 0.9)
            figures = f"mean {np.mean(known):.3f}, smallest {min(known):.1f}, " if known else "no line, "
            figures += f"{len(known)} of {len(correlation)} seeds"
            add("T3", words, result, held, figures)
        if result["regime"] != "noise40":
            continue
        tests = result["tests"]["hard"][OURS]
        gain, auc = tests[BALANCED], points(tests["macro_auroc"])
        held = points(gain) >= 3 and at_most(gain["p_holm"], 0.01) and auc >= -0.3
        add("T1", "40% wrong: balanced accuracy above `hard` by 3 points, macro AUC not below", result, held,
            f"{_difference(gain)}; macro AUC {_difference(tests['macro_auroc'])}")  # fmt: skip
        for name, test in rival_tests(result).items():
            if name != "hard":
                held = points(test) < 0 and at_most(test["p_holm"], 0.01)
                add("T2", f"40% wrong: above `{name}`", result, held, _difference(reverse(test)))
        means = {name: float(np.mean(own["values"][BALANCED])) for name, own in result["methods"].items()}
        rivals = [name for name in means if name not in ("hard", ORACLE) and not name.startswith(OURS)]
        best = max(rivals, key=means.__getitem__)
        lead = 100 * (means[ORACLE] - means[best])
        add("T4", "40% wrong: the true matrix is less than 3 points above the best rival", result, lead < 3,
            f"{lead:+.1f} (`{best}`)")  # fmt: skip
    lines = ["| | hypothesis | data, backbone | result | |", "|---|---|---|---|---|", *sorted(rows)]
    return "\n".join(lines) + "\n"


def points(test: Mapping[str, float | None]) -> float:
    """The difference of a test, in points."""
    assert test["difference"] is not None
    return 100 * test["difference"]


def at_most(p: float | None, level: float) -> bool:
    return p is not None and p < level


def verdicts(results: list[dict[str, Any]]) -> str:
    """The table of the hypotheses of the second plan, each with its figures; see PLAN.md for what they mean."""
    found = {(r["data"], r["backbone"], r["regime"]): r for r in results}
    lines = ["| | hypothesis | data, backbone | result | |", "|---|---|---|---|---|"]

    def add(name: str, words: str, key: tuple[str, str, str], held: bool, figures: str) -> None:
        where = f"{DATA_TITLES[key[0]]}, {key[1]}"
        lines.append(f"| {name} | {words} | {where} | {'held' if held else '**failed**'} | {figures} |")

    for key, result in found.items():
        tests = result["tests"].get("hard", {}).get(OURS)
        if tests is None:
            continue
        if key[2] == "noise40":
            gain, auc = tests[BALANCED], points(tests["macro_auroc"])
            held = points(gain) >= 3 and at_most(gain["p_holm"], 0.01) and auc >= -0.3
            add("S1", "40% wrong: balanced accuracy above `hard` by 3 points, macro AUC not below", key, held,
                f"{_difference(gain)}; macro AUC {auc:+.1f}")  # fmt: skip
            rivals = rival_tests(result)
            name, least = min(rivals.items(), key=lambda item: -points(item[1]))
            held = all(points(own) <= -3 and at_most(own["p_holm"], 0.01) for own in rivals.values())
            add("S2", "40% wrong: above each of the rivals by 3 points", key, held,
                f"{len(rivals)} rivals; closest `{name}`: {_difference(reverse(least))}")  # fmt: skip
        if key[2] == "noise20":
            gain = tests[BALANCED]
            held = points(gain) >= 1 and at_most(gain["p_holm"], 0.05)
            add("S4", "20% wrong: balanced accuracy above `hard` by 1 point", key, held, _difference(gain))
        if key[2] == "clean":
            ranked = {"macro AUC": "macro_auroc", "area under risk-coverage": "aurc"}
            if key[0] == "isic2018":
                ranked["melanoma AUC"] = "auroc:MEL"
            shown = {title: points(tests[metric]) for title, metric in ranked.items()}
            held = all((-v if "risk" in title else v) >= -0.3 for title, v in shown.items())
            intervals = "; ".join(f"{title} {_difference(tests[metric])}" for title, metric in ranked.items())
            add("S3", "clean: ranking within 0.3 points of `hard`", key, held, intervals)
    add_further_verdicts(found, add)
    head, rows = lines[:2], sorted(lines[2:])
    return "\n".join([*head, *rows]) + "\n"


def add_further_verdicts(found: Mapping[tuple[str, str, str], dict[str, Any]], add: Add) -> None:
    """S5 to S7."""
    for key, result in found.items():
        own = result["tests"].get(OURS, {})
        if key[2] == "noise40" and FIRST_FORM in own:
            test = own[FIRST_FORM][BALANCED]
            add("S5", "40% wrong: above its first form (diagonal of 0.7, no alignment)", key,
                points(test) < 0 and at_most(test["p_holm"], 0.05), _difference(reverse(test)))  # fmt: skip
        correlation = result["methods"].get(OURS, {}).get("order_correlation")
        if correlation and key[2] in ("clean", "noise40"):
            add("S6", f"{TITLES[key[2]]}: rank correlation of the matrix with the order at least 0.9", key,
                bool(np.mean(correlation) >= 0.9), f"{_mean(correlation)}; bound 0.950")  # fmt: skip
        if key[2] == "noise40" and key[0] == "aptos" and "ordinal" in result["methods"]:
            kappa = "quadratic_weighted_kappa"
            against = result["tests"]["hard"][OURS][kappa]
            means = {m: float(np.mean(result["methods"][m]["values"][kappa])) for m in (OURS, "ordinal")}
            held = at_most(against["p_holm"], 0.05) and points(against) > 0 and means[OURS] >= means["ordinal"]
            figures = f"{_difference(against)} against `hard`; {means[OURS]:.3f}, `ordinal` {means['ordinal']:.3f}"
            add("S7", "40% wrong: quadratic kappa above `hard`, not below `ordinal`", key, held, figures)


def rival_tests(result: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Every rival minus ours, in balanced accuracy; forms of ours and the oracle are no rivals."""
    own = result["tests"][OURS]
    return {name: tests[BALANCED] for name, tests in own.items() if not name.startswith(OURS) and name != ORACLE}


def reverse(test: Mapping[str, float | None]) -> dict[str, float | None]:
    """The test with the two methods exchanged."""
    low, high, difference = (test[name] for name in ("low", "high", "difference"))
    assert low is not None and high is not None and difference is not None
    return {**test, "difference": -difference, "low": -high, "high": -low}


def show_in(document: Path, results: Path, marker: str = "soft labels") -> None:
    """Put every table of ``results`` between its markers in a document, ``<!-- soft labels NAME -->``."""
    text = document.read_text(encoding="utf-8")
    for table in sorted(results.glob("*.md")):
        begin, end = (f"<!-- {slash}{marker} {table.stem} -->" for slash in ("", "/"))
        before, found, after = text.partition(begin)
        if found:
            text = f"{before}{begin}\n{table.read_text(encoding='utf-8').strip()}\n{end}{after.partition(end)[2]}"
    write_whole(document, text)


def write_tables(out: Path, results: Path, plan: str = "second") -> None:
    """Write DATA.json.bz2 (values, tests, matrices, provenance) and the tables REGIME.md of all cells."""
    found, commit = study(out), source_commit()
    results.mkdir(parents=True, exist_ok=True)
    for data in CLASSES:
        if own := [result for result in found if result["data"] == data]:
            about = {"commit": None if commit is None else vars(commit), "versions": versions(), "device": "cpu"}
            write_json_bz2(results / f"{data}.json.bz2", about | {"results": own})
    for regime in TITLES:
        if own := [markdown(result) for result in found if result["regime"] == regime]:
            write_whole(results / f"{regime}.md", "\n".join(own))
    table_of = {"second": verdicts, "third": third_verdicts}
    for name, table in (("hypotheses", table_of[plan](found)), ("summary", summary(found))):
        write_whole(results / f"{name}.md", table)
        print(table)
    print("\n".join(markdown(result) for result in found))
