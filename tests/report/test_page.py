from __future__ import annotations

import re
from importlib.resources import files

import pytest
from jinja2 import UndefinedError

from cclnet.report.html import markdown_text, render

STYLE = files("cclnet.report").joinpath("templates/page.css").read_text(encoding="utf-8")
LIGHT, DARK = (dict(re.findall(r"--([\w-]+): ([^;]+);", block)) for block in re.findall(r":root {(.*?)}", STYLE, re.S))


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it, of ``#rrggbb`` or ``r g b``."""
    numbers = [int(colour[i : i + 2], 16) for i in (1, 3, 5)] if colour[0] == "#" else map(int, colour.split())
    linear = [c / 12.92 if (c := n / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for n in numbers]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_contrast(theme: dict[str, str]) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for text in ("ink", "muted", "link"):
        for ground in ("paper", "card"):
            assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
    for ground in ("hit", "miss", "warn"):  # cells at full strength; weaker ones are nearer to the paper
        assert contrast(theme["ink"], theme[ground]) >= 4.5, ground
    for mark in ("s1", "s2", "s3", "s4", "s5", "s6", "warn-edge"):
        assert contrast(theme[mark], theme["paper"]) >= 3, mark
        assert contrast(theme[mark], theme["card"]) >= 3, mark


def test_both_themes_define_the_same_colours() -> None:
    assert LIGHT.keys() - {"color-scheme"} == DARK.keys() and len(DARK) > 10


def test_the_style_sheet_fetches_nothing() -> None:
    assert not re.search(r"url\(|@import|https?:", STYLE)


def test_markdown_shows_names_as_they_are() -> None:
    assert markdown_text("ISIC_0024306") == "ISIC_0024306"
    assert markdown_text("_a_ [x](y) `c`\t\n<b>&") == r"\_a\_ \[x\](y) \`c\` &lt;b&gt;&amp;"


def test_a_template_that_misses_something_does_not_pass_over_it() -> None:
    with pytest.raises(UndefinedError):
        render("report.md")
