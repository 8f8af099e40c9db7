"""Text in CSV files that a spreadsheet must not run as a formula.

Spreadsheets evaluate a cell that begins with ``=``, ``+``, ``-`` or ``@``, also after a tab or a carriage return, which
they drop. A class or a file may be called so, and the name may come from a stranger. Such a text is written with an
apostrophe before it, which spreadsheets take as the mark of a text. Apostrophes before one of these signs count as part
of the mark, so that every text is read as it was: ``'=x`` is written as ``''=x``, and ``'t Hooft`` as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_MARKED = re.compile(r"'+[=+\-@\t\r]")
_FIRST = frozenset("=+-@\t\r'")


def mark_texts(texts: Iterable[str]) -> list[str]:
    """The texts as cells.

    >>> mark_texts(["=1+1", "-", "nevus", "'=x", "'t Hooft"])
    ["'=1+1", "'-", 'nevus', "''=x", "'t Hooft"]
    """
    return [f"'{text}" if text[:1] in _FIRST and _FORMULA.match(text) else text for text in texts]


def unmark_texts(cells: Iterable[str]) -> list[str]:
    """The texts of cells; cells without a mark, as in files of other programs, are left as they are.

    >>> unmark_texts(["'=1+1", "=1+1", "''=x", "'t Hooft"])
    ['=1+1', '=1+1', "'=x", "'t Hooft"]
    """
    return [cell[1:] if cell[:1] == "'" and _MARKED.match(cell) else cell for cell in cells]
