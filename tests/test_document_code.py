"""The code of the README runs, and every command line in the documents is one that the command line accepts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer

from cclnet.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CARDS = sorted((ROOT / "src" / "cclnet" / "methods").glob("*.md"))


def python_block(word: str) -> str:
    """The only block of Python in the README that contains a word."""
    [found] = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if word in block]
    return found


def test_the_python_interface_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = python_block("cclnet.train(")
    for shown, small in {'"DATA"': '"synthetic:images=80"', "resnet18": "test_resnet", "epochs=20": "epochs=1"}.items():
        assert shown in code
        code = code.replace(shown, small)
    code = code.replace('method="hard"', 'method="hard", preset="paper", augment={"crop": 32}, short_side=32')
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert 0 <= names["scores"].overall["accuracy"].value <= 1
    assert names["model"].predict(torch.zeros(40, 40, 3, dtype=torch.uint8).numpy()).label in names["model"].classes


def test_the_loop_of_the_readme_trains_network_and_head() -> None:
    torch.manual_seed(0)
    backbone, classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 512)), torch.nn.Linear(512, 7)
    labels = torch.arange(14) % 7
    loader = [(torch.randn(7, 12)[labels] + 0.1 * torch.randn(14, 12), labels)]
    before = [p.clone() for p in (classifier.weight, backbone[1].weight)]
    names = {"backbone": backbone, "classifier": classifier, "loader": loader, "epochs": 12}
    code = python_block("head.end_epoch()")
    assert len([line for line in code.splitlines() if line.strip()]) <= 16
    exec(compile(code, "README.md", "exec"), names)
    assert all(not torch.equal(a, b) for a, b in zip(before, (classifier.weight, backbone[1].weight), strict=True))
    assert classifier(backbone(loader[0][0])).argmax(1).equal(labels)
    assert names["head"].soft_labels().sum(1).allclose(torch.ones(7))


def command_lines(path: Path) -> Iterator[str]:
    """Every line of a shell block that runs cclnet, without its comment; lines that end in a backslash are joined."""
    for block in re.findall(r"^```sh\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|\s|&& )(?:python -m |-m )?cclnet (?!=)(.*)", line.partition(" #")[0])
            if found and not line.lstrip().startswith("#") and "pip " not in line:
                yield found[1].strip()


def check_command(line: str) -> None:
    """Parse a command line as typer does, up to the point where the command would run."""
    words = shlex.split(line)
    command = typer.main.get_command(app)
    name = "cclnet"
    while hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, f"there is no command {name}: cclnet {line}"
        command = command.commands[name]
    command.make_context(name, words).close()


@pytest.mark.parametrize("page", [*PAGES, *CARDS], ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_are_accepted(page: Path) -> None:
    for line in command_lines(page):
        check_command(line)


def test_a_wrong_command_line_is_refused() -> None:
    with pytest.raises(Exception, match="No such option"):
        check_command("train DATA --no-such-option 3")
    with pytest.raises(AssertionError, match="no command trian"):
        check_command("trian DATA")
    assert len(list(command_lines(ROOT / "README.md"))) >= 6
