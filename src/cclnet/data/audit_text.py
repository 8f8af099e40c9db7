"""An audit as tables in the terminal."""

from __future__ import annotations

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cclnet.data.audit import Audit

# In the order of how much harm they do, each with what to do about it.
ADVICE = {
    "unreadable": "Replace these files or leave them out; training refuses them.",
    "exact duplicate across parts and classes": "Keep one, with the right label.",
    "exact duplicate across parts": "Keep one: the held-out copy is known from training.",
    "exact duplicate across classes": "One image, two labels: keep one, with the right label.",
    "exact duplicate": "Keep one, or give all copies one group.",
    "near duplicate across parts and classes": "Look at them; give them one group and the right label.",
    "near duplicate across parts": "Look at them; give them one group if they show the same.",
    "near duplicate across classes": "Look at them; one label may be wrong.",
    "near duplicate": "Look at them; give them one group if they show the same.",
    "group on two sides": "Split by group: held-out scores look better than they are.",
    "label conflict in a group": "Look at them; one label may be wrong.",
    "no split": "Nothing can be held out before this is mended.",
    "small class": "Too few to learn from or to judge by; collect more or leave it out.",
    "blank image": "Leave these out.",
    "size out of line": "Look at them: thumbnails, strips or scans among photographs.",
}


def audit_tables(audit: Audit, written: str) -> RenderableType:
    """What was found, counted, with an example and advice for each; and how much the split leaks."""
    pieces: list[RenderableType] = []
    if audit.findings.empty:
        pieces.append(Text(f"{audit.images:,} images: nothing found.", style="green"))
    else:
        pieces += [_findings(audit), Text(f"{audit.images:,} images looked at. Every finding is in {written}.")]
    if audit.leaks is not None and audit.leaks["shared"].any():
        for part, class_, images, shared, share in audit.leaks.itertuples(index=False):
            if not class_:
                sentence = f"{share:.0%} of the {part} images ({shared:,} of {images:,}) share a group with train:"
                pieces.append(Text(sentence, style="bold"))
        pieces.append(_leaks_by_class(audit.leaks))
    return Group(*pieces)


def _findings(audit: Audit) -> Table:
    table = Table()
    table.add_column("Finding", style="bold")
    table.add_column("Count", justify="right")
    table.add_column("For example", overflow="fold")
    table.add_column("What to do")
    counts = audit.findings["finding"].value_counts()
    for finding in (name for name in ADVICE if name in counts):
        example = audit.findings[audit.findings["finding"] == finding].iloc[0]
        images = " and ".join(filter(None, (example["other"], example["image"])))
        shown = f"{images}: {example['detail']}" if images else str(example["detail"])
        table.add_row(finding, f"{counts[finding]:,}", Text(shown), ADVICE[finding])
    return table


def _leaks_by_class(found: pd.DataFrame) -> Table:
    table = Table()
    for name in ("Part", "Class"):
        table.add_column(name)
    for name in ("Images", "Shared", "Share"):
        table.add_column(name, justify="right")
    for part, class_, images, shared, share in found.itertuples(index=False):
        if class_ and images:
            table.add_row(part, Text(class_), f"{images:,}", f"{shared:,}", f"{share:.0%}")
    return table
