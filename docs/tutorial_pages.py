"""Run the tutorials: ``python docs/tutorial_pages.py [NAME …]`` runs the pages and writes what they print into them.

The blocks of a page are run from top to bottom in an empty folder: ``python`` in one namespace, ``sh`` line by line,
``toml`` is written to the file that its first line names. A block of ``text`` after them shows lines of their output,
in order; a line ``…`` stands for lines that are left out. Numbers differ between machines, so lines are compared
without them. A block after ``<!-- not run -->`` is not run.
tests/test_tutorials.py runs the same pages and changes none.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parent / "tutorials"
PAGES = sorted(path for path in TUTORIALS.glob("*.md") if path.name != "index.md")
BLOCK = re.compile(r"(<!-- not run -->\n)?^```(python|sh|toml|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LEFT_OUT = "…"


def run_page(path: Path) -> str:
    """Run a page in the current folder; return its text with the output of this run. The results of the repository are
    in ``results``, as in a clone of it."""
    if not Path("results").exists():
        Path("results").symlink_to(Path(__file__).parents[1] / "results")
    return _Runner(path).run()


def skeleton(line: str) -> str:
    """A line without what differs between machines: numbers, and the spaces that align them.

    >>> skeleton("accuracy   0.871 [0.80, 0.93]  12 images") == skeleton("accuracy  0.9 [0.8, 1.00] 7 images")
    True
    """
    return " ".join(re.sub(r"[−+-]?\d[\d,]*(\.\d+)?(e-\d+)?", "#", line).split())


def shown_lines(shown: str, printed: str) -> list[str]:
    """The printed lines that a block shows. ValueError for a line that was not printed, or not in this order."""
    left, found = iter(printed.splitlines()), []
    for line in shown.splitlines():
        if line.strip() == LEFT_OUT or not line.strip():
            found.append(line)
            continue
        match = next((own for own in left if skeleton(own) == skeleton(line)), None)
        if match is None:
            raise ValueError(f"the output has no line like\n  {line}\nafter the lines before it. Output:\n{printed}")
        found.append(match.rstrip())
    return found


class _Runner:
    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text(encoding="utf-8")
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.printed = ""

    def run(self) -> str:
        with contextlib.ExitStack() as servers:
            return BLOCK.sub(lambda block: self._block(block, servers), self.text)

    def _block(self, block: re.Match[str], servers: contextlib.ExitStack) -> str:
        skipped, language, content = block.groups()
        if skipped:
            return block[0]
        where = f"{self.path.name}, line {self.text.count(chr(10), 0, block.start()) + 1}"
        if language == "text":
            try:
                lines = shown_lines(content, self.printed)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            return "\n".join(["```text", *lines, "```"])
        if language == "toml":
            Path(content.splitlines()[0].removeprefix("#").strip()).write_text(content, encoding="utf-8")
            return block[0]
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                if language == "python":
                    exec(compile(content, where, "exec"), self.names)
                else:
                    for line in content.replace("\\\n", " ").splitlines():
                        run_line(line.partition(" #")[0].strip(), servers)
        except Exception as error:
            raise RuntimeError(f"{where} failed after printing:\n{output.getvalue()}") from error
        self.printed = output.getvalue()
        return block[0]


def run_line(line: str, servers: contextlib.ExitStack) -> None:
    """Run a line of shell. ``cclnet`` runs in this process, which has already imported torch, except for commands that
    start processes themselves; a server runs until the page is over."""
    if not line or line.startswith("#"):
        return
    if line.startswith("cclnet serve"):
        servers.enter_context(_server(shlex.split(line)[1:]))
    elif line.startswith("cclnet ") and not line.startswith("cclnet compare-methods"):
        from cclnet.cli import app

        words = [name for word in shlex.split(line)[1:] for name in (sorted(_matches(word)) or [word])]
        if code := app(words, prog_name="cclnet", standalone_mode=False):
            raise RuntimeError(f"{line} ended with {code}")
    else:
        done = subprocess.run(["bash", "-c", line], env=_environment(), capture_output=True, text=True, check=False)
        print(done.stdout, end="")
        if done.returncode:
            raise RuntimeError(f"{line} ended with {done.returncode}: {done.stderr[-3000:]}")


def _matches(word: str) -> list[str]:
    return [str(path) for path in Path().glob(word)] if "*" in word and not word.startswith("-") else []


@contextlib.contextmanager
def _server(words: list[str]) -> Iterator[None]:
    port = words[words.index("--port") + 1]
    started = subprocess.Popen([sys.executable, "-m", "cclnet", *words], env=_environment(), stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):  # five minutes: the machine may be busy
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
                break
            time.sleep(0.25)
        else:
            raise RuntimeError("cclnet serve does not answer")
        yield
    finally:
        started.terminate()
        started.wait(timeout=30)


def _environment() -> dict[str, str]:
    """That of a user who has installed cclnet: the same Python first in the path, this source tree."""
    binaries, source = Path(sys.executable).parent, Path(__file__).parents[1] / "src"
    paths = {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(source)}
    return os.environ | paths | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def main(names: list[str]) -> None:
    for page in PAGES:
        if names and page.stem not in names:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            os.environ.update(XDG_CACHE_HOME=folder, COLUMNS="100")
            text = run_page(page)
        page.write_text(text, encoding="utf-8")
        print(f"{page.name}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
