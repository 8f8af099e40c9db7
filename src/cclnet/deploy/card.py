"""The model card of an exported model. Its text is in ``report/templates/card.md``."""

from __future__ import annotations

from pathlib import Path

from cclnet.evaluation.decision import IN_WORDS
from cclnet.report.html import class_columns, evaluated_on, render, sentences, what_it_is
from cclnet.report.text import NONE
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import Calibration, ExportInfo, ModelDescription
from cclnet.runs.out_of_distribution import REFUSED

# Licences of weights that the Hugging Face Hub knows by these names; any other is "other", and the text says which.
HUB_LICENCES = ("mit", "apache-2.0", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0")
COVERAGES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)


def model_card(run: Path, description: ModelDescription, calibration: Calibration, licence: str = "") -> str:
    """The card of a run as Markdown; ``description`` and ``calibration`` are those of the exported model."""
    scores, settings = RunFolder(run).read_scores(), RunFolder(run).read_settings_table()
    trained = dict(zip(description.classes, description.class_counts or (), strict=False))
    evaluated = dict(zip(scores.classes, scores.split.class_counts, strict=True)) if scores else {}
    curve, rule = calibration.abstention, calibration.decision
    statistics = RunFolder(run).read_feature_statistics()
    return render(
        "card.md",
        name=run.resolve().name,
        description=description,
        export=description.export or ExportInfo(),
        calibration=calibration.map,
        rule=rule,
        sets=calibration.sets,
        unlike=sentences("unlike", statistics, REFUSED) if statistics else [],
        rule_in_words=IN_WORDS[rule.name] if rule else "",
        settings=settings,
        split=settings.get("split") or {},
        scores=scores,
        what=what_it_is(scores) if scores else f"network {description.backbone}",
        in_short=sentences("summary", scores) if scores else [],
        evaluated_on=evaluated_on(scores) if scores else "",
        class_scores=class_columns(scores) if scores else [],
        class_rows=[(name, trained.get(name, NONE), evaluated.get(name, NONE)) for name in description.classes],
        curve=curve,
        points=[curve.at(coverage=coverage) for coverage in COVERAGES] if curve else [],
        licence=licence,
        hub_licence=licence.lower() if licence.lower() in HUB_LICENCES else "other",
    )
