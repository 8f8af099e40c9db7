"""The pages, and what they fetch: that on which a person drops an image, and the one that asks for the token."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from cclnet import __version__
from cclnet.deploy.serve.words import NOTICE

KINDS = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


def render(template: str, **content: Any) -> str:
    """A template of this package filled in, every text escaped."""
    return _templates().get_template(template).render(version=__version__, notice=NOTICE, **content)


def sign_in_page(wrong: str = "") -> str:
    return render("sign_in.html", wrong=wrong)


@cache
def static_files() -> dict[str, tuple[bytes, str]]:
    """Content and type of all that the pages fetch, by name. The style sheet begins with that of the reports."""
    package = files("cclnet")
    own = package / "deploy" / "serve" / "templates"
    found = {item.name: item.read_bytes() for item in own.iterdir() if item.name.endswith((".css", ".js"))}
    found["page.css"] = (package / "report" / "templates" / "page.css").read_bytes() + found["page.css"]
    return {name: (content, KINDS[name.rpartition(".")[2]]) for name, content in found.items()}


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("cclnet.deploy.serve"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
