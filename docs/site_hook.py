"""What MkDocs adds to the pages in docs/: generated pages, and the files of the repository that pages link to.

Links are written as GitHub reads them, relative to the file in the repository. A link that leaves docs/ leads to a copy
in the site: Markdown becomes a page, a folder becomes a list of its files, other files are copied.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import reference_pages

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "src" / "cclnet" / "methods"
LINK = re.compile(r"(\]\(|<img src=\")([^)#\s\"]+)(#[^)\s]*)?")
NAME = re.compile(r"<code>(-{0,2}[A-Za-z0-9_]+(?:-[A-Za-z0-9_]+)+)</code>")
INTERVAL = re.compile(r"\[[−+-]?\d[\d.,]*, [−+-]?\d[\d.,]*\]")
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?([^<]*)</code>")  # docstrings are reStructuredText
FIELDS = re.compile(r"<!-- fields of (\S+) -->")
OPTION = re.compile(r"(?<![^ >])--\w[\w-]*(?![^ =<])")
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)

# Files of the repository that are pages of the site, by their place in the site.
PAGES = {
    "index.md": ROOT / "README.md",
    "development/contributing.md": ROOT / "CONTRIBUTING.md",
    "development/security.md": ROOT / "SECURITY.md",
    "development/changelog.md": ROOT / "CHANGELOG.md",
    **{f"methods/{card.stem}.md": card for card in sorted(CARDS.glob("*.md")) if card.stem != "when_to_use"},
}
GENERATED: dict[str, Callable[[], str]] = {
    "reference/cli.md": reference_pages.commands,
    "reference/settings.md": reference_pages.settings,
    "reference/presets.md": reference_pages.presets,
    "reference/run_folder.md": reference_pages.run_folder,
}


def on_config(config: Any) -> Any:
    """Add the cards of all methods to the navigation."""
    methods = next(section["Methods"] for section in config.nav if "Methods" in section)
    if not any("Cards" in entry for entry in methods):
        methods.append({"Cards": [uri for uri in PAGES if uri.startswith("methods/")]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and whatever pages link to outside of docs/."""
    for uri, make in GENERATED.items():
        files.append(File.generated(config, uri, content=make()))
    for uri, path in PAGES.items():
        files.append(File.generated(config, uri, content=path.read_text(encoding="utf-8")))
    places, waiting = _places(files), [file for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for target in _outside_links(page, places):
            file = _copy(target, config)
            files.append(file)
            places[target] = file.src_uri
            if file.src_uri.endswith(".md"):
                waiting.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turn links to files of the repository into links inside the site, and marks into tables of fields. The start
    page, alone in its section, has the width of the list of pages for itself."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
    source, places = _source(page.file), _places(files)
    here = Path(page.file.src_uri).parent
    markdown = FIELDS.sub(_fields_of, markdown)

    def rewritten(match: re.Match[str]) -> str:
        place = places.get(_target(source, match[2])) if source else None
        if place is None:
            return match[0]
        return f"{match[1]}{Path(os.path.relpath(place, here)).as_posix()}{match[3] or ''}"

    parts = CODE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(rewritten, part) for i, part in enumerate(parts))


def _fields_of(mark: re.Match[str]) -> str:
    return f"Fields of `{mark[1].rpartition('.')[2]}`:\n\n{reference_pages.fields(mark[1])}"


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Mark what a line must not end inside of: names in code that have a hyphen, such as ccl-forward, options of a
    command, and intervals. Remove the marks of reStructuredText from the docstrings."""
    html = ROLE.sub(r"<code>\1</code>", html).replace("<p>::</p>", "")
    parts = re.split(r"(<pre.*?</pre>)", NAME.sub(r'<code class="name">\1</code>', html), flags=re.DOTALL)
    marked = (INTERVAL.sub(r'<span class="whole">\g<0></span>', part) for part in parts[::2])
    marked = (re.sub(r"<code>[^<]* [^<]*</code>", _with_whole_options, part) for part in marked)
    return "".join(text + code for text, code in zip(marked, [*parts[1::2], ""], strict=True))


def _with_whole_options(code: re.Match[str]) -> str:
    return OPTION.sub(r'<span class="whole">\g<0></span>', code[0])


def _source(file: File) -> Path | None:
    """The file of the repository that a page shows; None for one that is generated."""
    if file.src_uri in PAGES:
        return PAGES[file.src_uri]
    if file.src_uri.startswith("repository/"):
        return ROOT / file.src_uri.removeprefix("repository/")
    return None if file.generated_by else ROOT / "docs" / file.src_uri


def _places(files: Files) -> dict[Path, str]:
    """Where the files of the repository are in the site."""
    places = {source: file.src_uri for file in files if (source := _source(file)) is not None}
    return places | {path.parent: uri for path, uri in places.items() if uri.endswith("/folder.md")}


def _target(source: Path, link: str) -> Path:
    return Path(os.path.normpath(source.parent / link))


def _outside_links(page: File, places: dict[Path, str]) -> Iterator[Path]:
    """The files that a page links to and that are not in the site yet."""
    source = _source(page)
    if source is None or source.name == "folder.md":
        return
    text = "".join(part for i, part in enumerate(CODE.split(page.content_string)) if i % 2 == 0)
    for match in LINK.finditer(text):
        target = _target(source, match[2])
        if "://" not in match[2] and target not in places and target.exists() and target.is_relative_to(ROOT):
            yield target


def _copy(path: Path, config: Any) -> File:
    """A file of the repository in the site; of a folder, a page that lists it."""
    uri = f"repository/{path.relative_to(ROOT).as_posix()}"
    if path.is_dir():
        names = sorted(child.name + "/" * child.is_dir() for child in path.iterdir() if child.name != "__pycache__")
        listed = "\n".join(f"- `{name}`" for name in names)
        title = path.relative_to(ROOT).as_posix()
        content = f"---\nsearch: {{exclude: true}}\n---\n# {title}\n\nFolder of the repository:\n\n{listed}\n"
        return File.generated(config, f"{uri}/folder.md", content=content)
    if path.suffix != ".md":
        return File.generated(config, uri, abs_src_path=str(path))
    text = path.read_text(encoding="utf-8")
    title = "" if text.startswith("# ") else f"# {path.stem.replace('_', ' ').replace('-', ' ').capitalize()}\n\n"
    return File.generated(config, uri, content=f"---\nsearch: {{exclude: true}}\n---\n{title}{text}")
