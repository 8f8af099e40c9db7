"""What every page must hold to, whoever reads it: checked on the text of the page alone."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br", "img", "hr", "input", "link"}


class Page(HTMLParser):
    """The structure of a page. ``problems`` lists tags left open, doubled ids and parts without their words."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.tags: list[str] = []
        self.problems: list[str] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        self.problems += [f"<{tag}> is never closed" for tag in self.open]
        self.problems += [f"id {name} is doubled" for name in set(self.ids) if self.ids.count(name) > 1]
        self.problems += [f"no target for #{name}" for name in self.targets if name not in self.ids]
        self.problems += [f"{self.tags.count('table')} tables, {self.tags.count('caption')} captions"] * (
            self.tags.count("table") != self.tags.count("caption")
        )

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.targets += [given["href"][1:]] if (given.get("href") or "").startswith("#") else []
        if tag == "th" and given.get("scope") not in ("col", "row", "colgroup"):
            self.problems.append(f"a th without scope: {given}")
        if tag == "img" and not given.get("alt"):
            self.problems.append(f"an img without alt: {given}")
        if tag == "svg" and not (given.get("aria-label") or given.get("aria-hidden")):
            self.problems.append("an svg without words")
        for name in ("src", "href"):
            if not (given.get(name) or "data:").startswith(("data:image/", "data:", "#")):
                self.problems.append(f"{name}={given[name]} leaves the page")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes what was not open")

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))
