"""From dictionaries to pages: the templates, their filters, and how they are filled."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cclnet import __version__
from cclnet.correlation_file import tells_classes_apart
from cclnet.report import words


def render(template: str, **content: Any) -> str:
    """A template of this package filled in. In HTML every text is escaped, in Markdown those marked ``| md``."""
    return _templates().get_template(template).render(
        version=__version__, style=_style(), none_sign=words.NONE, **content
    )  # fmt: skip


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("cclnet.report"),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "tells_apart": tells_classes_apart,
        "score": words.score,
        "value": words.value_text,
        "interval": words.interval_text,
        "with_interval": words.with_interval,
        "difference": words.difference_text,
        "difference_interval": words.difference_interval_text,
        "p": words.p_text,
        "signed": words.signed_text,
        "md": markdown_text,
    }
    return environment


def _style() -> Markup:
    """Our own style sheet, which is no text of a user's."""
    return Markup(files("cclnet.report").joinpath("templates/page.css").read_text(encoding="utf-8"))


def markdown_text(text: object) -> str:
    r"""Text that Markdown shows as it is: on one line, no cell ends early, no tag or emphasis begins.

    >>> print(markdown_text("a|b <script> *x*\n2"))
    a\|b &lt;script&gt; \*x\* 2
    """
    line = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*|\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", line)
