"""Options generated from settings, the shared helpers, and the errors of the command line."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

import cclnet.presets
from cclnet import InputError, __version__
from cclnet.cli import app, main, parse_seeds
from cclnet.cli.compare_command import compare_methods
from cclnet.cli.train_command import train
from cclnet.errors import show_warnings_as_notes
from cclnet.runs.checksums import write_covered
from cclnet.schema import rules
from cclnet.settings import DataOptions, Settings, read_settings

TINY = ["--short-side", "32", "--backbone", "test_resnet", "--epochs", "1", "--batch-size", "16", "--set",
        "augment.crop=28", "--accelerator", "cpu", "--quiet"]  # fmt: skip


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def refused(*words: object) -> str:
    """What a command refuses its arguments with."""
    error = invoke(*words).exception
    assert isinstance(error, InputError), error
    return str(error)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """40 images of two classes in a folder of their own, and a table with a column for the split."""
    rows = ["photo,kind,who,when"]
    (tmp_path / "pictures").mkdir()
    for number in range(40):
        Image.new("RGB", (32, 32), (6 * number, 90 * (number % 2), 0)).save(tmp_path / "pictures" / f"{number}.png")
        rows.append(f"{number}.png,{'ab'[number % 2]},P{number},{'val' if number % 5 == 0 else 'train'}")
    (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
    return tmp_path / "list.csv"


def options(manifest: Path, split_option: str = "--split-column") -> list[object]:
    return ["--image-column", "photo", "--label-column", "kind", "--group-column", "who", split_option, "when",
            "--image-folder", manifest.parent / "pictures", "--strict"]  # fmt: skip


def test_data_and_set(tmp_path: Path) -> None:
    """``--set data=...`` is the same as DATA; options that are not settings cannot be set."""
    assert "nowhere" in refused("train", "--set", f"data={tmp_path / 'nowhere'}", "--out", tmp_path / "run", *TINY)
    assert "unknown setting 'resume'" in refused("train", "--set", "resume=run", *TINY)


@pytest.mark.parametrize("text", ["zero", "", "0,1.5"])
def test_seeds_are_whole_numbers(text: str) -> None:
    with pytest.raises(InputError, match="seeds are whole numbers separated by commas"):
        parse_seeds(text)


def test_each_seed_is_given_once() -> None:
    with pytest.raises(InputError, match="got '0,0'"):
        parse_seeds("0,0")
    assert parse_seeds("0, 1,2,") == (0, 1, 2)


def test_versions() -> None:
    shown = invoke("--version")
    assert shown.exit_code == 0
    assert f"cclnet {__version__}," in shown.output
    assert f"torch {torch.__version__.split('+')[0]}" in shown.output


def test_train_has_an_option_for_every_plain_setting() -> None:
    parameters = set(inspect.signature(train).parameters)
    plain = {f.name for f in dataclasses.fields(Settings) if isinstance(f.default, (str, int, float))}
    assert plain | {"compile", "resident", "overrides"} <= parameters
    help_text = invoke("train", "--help").output
    assert "--lr-ccl" in help_text and rules(Settings)["lr"].help in help_text
    assert "--part-column" not in help_text  # accepted, but hidden


def test_help_shows_the_defaults_of_the_command_and_not_of_the_preset_paper() -> None:
    probe: Any = typer.main.get_command(app).commands["probe"]  # type: ignore[attr-defined]
    own = {parameter.name: getattr(parameter, "help", "") for parameter in probe.params}
    preset = read_settings(Path(cclnet.presets.__file__).with_name("probe.preset.toml"))
    shown = {name: value for name, value in preset.items() if name in own and not isinstance(value, bool)}
    assert len(shown) >= 5 and all(f"Default: {value}" in own[name] for name, value in shown.items())
    assert "else balanced." in own["decision"] and "accuracy." not in own["decision"].partition("Default")[2]
    for command in ("predict", "serve", "export", "evaluate"):
        assert "that of the run." in " ".join(invoke(command, "--help").output.replace("│", "").split())
    assert "the defaults are those of the preset paper" in invoke("train", "--help").output


def test_commands_share_the_data_options() -> None:
    assert set(rules(DataOptions)) <= set(inspect.signature(compare_methods).parameters)
    for command in (["train"], ["compare-methods"], ["data", "show"], ["data", "audit"]):
        help_text = invoke(*command, "--help").output
        assert all(f"--{name.replace('_', '-')}" in help_text for name in rules(DataOptions)), command


@pytest.mark.parametrize("split_option", ["--split-column", "--part-column"])
def test_data_options_reach_the_data(manifest: Path, split_option: str) -> None:
    shown = invoke("data", "show", manifest, *options(manifest, split_option))
    assert shown.exit_code == 0, shown.output
    assert "40 images, 2 classes" in shown.output and "train" in shown.output
    assert "image from photo, label from kind, group from who, split from when" in shown.output
    audited = invoke("data", "audit", manifest, *options(manifest, split_option), "--out", manifest.parent / "audit",
                     "--cache-dir", manifest.parent / "cache", "--quiet")  # fmt: skip
    assert audited.exit_code == 0, audited.output


def test_train_with_data_options_then_resume_with_its_cache(manifest: Path) -> None:
    folder = manifest.parent
    new = invoke("train", manifest, *options(manifest), *TINY, "--cache-dir", folder / "cache", "--out", folder / "run")
    assert new.exit_code == 0, new.output
    assert (folder / "run" / "report.html").exists() and "accuracy" in new.output
    assert any((folder / "cache").rglob("shard-*.bin"))
    text = (folder / "run" / "settings.toml").read_text()
    assert f'cache_dir = "{folder / "cache"}"' in text and 'split_column = "when"' in text
    (folder / "cache").rename(folder / "moved")
    again = invoke("train", "--resume", folder / "run", "--accelerator", "cpu", "--quiet")
    assert again.exit_code == 0, again.output
    assert any((folder / "cache").rglob("shard-*.bin"))  # decoded into the folder the run was started with
    other = invoke("train", "--resume", folder / "run", "--accelerator", "cpu", "--cache-dir", folder / "other")
    loud = invoke("train", manifest, *options(manifest), *TINY[:-1], "--out", folder / "loud")
    assert "40 images, 2 classes (a 20, b 20), 40 groups; train 32, val 8; columns: image from photo" in loud.output
    assert other.exit_code == 0 and any((folder / "other").rglob("shard-*.bin"))


@pytest.mark.usefixtures("forked_sweep")
def test_compare_methods_with_data_options(manifest: Path) -> None:
    out, cache = manifest.parent / "out", manifest.parent / "cache"
    tiny = [*TINY[:-1], "--methods", "hard,lsr", "--seeds", "0", "--draws", "20"]  # without --quiet
    done = invoke("compare-methods", manifest, *options(manifest), *tiny, "--out", out, "--cache-dir", cache)
    assert done.exit_code == 0, done.output
    assert (out / "comparison.html").exists()
    assert any(cache.rglob("shard-*.bin"))


def test_resume_takes_no_other_settings(tmp_path: Path) -> None:
    for words in (["--lr", "0.5"], ["--out", tmp_path / "b"], ["--set", "clip=2"], ["--recipe", "a.toml"]):
        assert "resume" in refused("train", "--resume", tmp_path, *words)


def test_names_and_values_that_do_not_fit(tmp_path: Path) -> None:
    assert "did you mean 'lr'" in refused("train", "synthetic", "--set", "learning_rate=0.1")
    assert "clip" in refused("train", "synthetic", "--clip", "-1")
    assert "adam'; did you mean 'adamw'" in refused("train", "synthetic", "--optimizer", "adam")
    assert "split_column" in refused("data", "show", tmp_path, "--split-column", "a", "--part-column", "b")
    assert invoke("train", "synthetic", "--lr", "oops").exit_code == 2  # click's own error


def test_verify_names_each_file_and_fails_on_a_fault(tmp_path: Path) -> None:
    write_covered(tmp_path / "model.json", "{}")
    (tmp_path / "checkpoints").mkdir()
    write_covered(tmp_path / "checkpoints" / "epoch-000001-step-00000000.pt", b"state")
    (tmp_path / "[red].txt").write_text("mine")
    done = invoke("verify", tmp_path)
    assert done.exit_code == 0 and "ok  model.json" in done.output and "not covered  [red].txt" in done.output
    (tmp_path / "model.json").write_text("{ }")
    (tmp_path / "checkpoints" / "epoch-000001-step-00000000.pt").unlink()
    done = invoke("verify", tmp_path)
    assert done.exit_code == 1 and "changed  model.json" in done.output and "missing  checkpoints/epoch" in done.output
    done = invoke("verify", tmp_path, "--accept")
    assert done.exit_code == 0 and "ok  model.json" in done.output and "missing" not in done.output
    folds = tmp_path / "runs" / "fold-0"  # as of cross-validation: at any depth
    (folds / "checkpoints").mkdir(parents=True)
    write_covered(folds / "checkpoints" / "epoch-000001-step-00000000.pt", b"state")
    assert invoke("verify", tmp_path).exit_code == 0
    (folds / "checkpoints" / "epoch-000001-step-00000000.pt").write_bytes(b"stale")
    done = invoke("verify", tmp_path)
    assert done.exit_code == 1 and "changed  runs/fold-0/checkpoints/epoch-000001" in done.output
    assert "not a folder" in refused("verify", tmp_path / "nothing")
    (tmp_path / "images").mkdir()
    assert "images holds no file of a run" in refused("verify", tmp_path / "images")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr("sys.argv", ["cclnet", "train", "--out", str(out), "--accelerator", "cuda"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert "'cuda'" in shown and "Traceback" not in shown and not out.exists()
    assert "did you mean 'cuda'" in refused("train", "--out", out, "--accelerator", "cud")


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--help"], 0), (["train", "--help"], 0), (["train", "DATA", "--set", "lr=oops"], 2)],
)
def test_help_and_settings_errors_do_not_import_torch(words: list[str], code: int) -> None:
    """In a process whose import of torch fails."""
    script = (
        f"import sys; sys.modules['torch'] = None; sys.argv = ['cclnet', *{words}]; from cclnet.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if code:
        assert "setting lr must be a number, got 'oops'" in done.stderr


def test_a_synonym_as_an_option_names_the_setting() -> None:
    assert "did you mean 'lr'" in refused("train", "synthetic", "--learning-rate", "0.1")
    assert "did you mean 'epochs'" in refused("compare-methods", "synthetic", "--num-epochs", "3")


def test_options_may_be_written_as_the_settings_are() -> None:
    assert "did you mean 'lr'" in refused("train", "synthetic", "--learning_rate", "0.1")
    assert "batch_size must be at least" in refused("compare_methods", "synthetic", "--batch_size", "0")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nosuch"], "nosuch does not exist"),
        (["synthetic:images=999999999999"], "Make fewer or smaller ones"),
        (["synthetic", "--group-regex", "("], "not a regular expression"),
        (["synthetic", "--merge-labels", "nosuch.csv"], "no table of classes to merge at nosuch.csv"),
        (["synthetic", "--source", "folder"], "did you mean 'folders'"),
        (["wide.csv"], "20,001 columns"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare-methods"])
def test_data_is_refused_before_torch_is_imported(tmp_path: Path, command: str, words: list[str], reason: str) -> None:
    """Torch, timm and the question to the hub take seconds."""
    (tmp_path / "wide.csv").write_text(",".join(f"c{i}" for i in range(20_001)) + "\n")
    script = (
        f"import sys; sys.argv = ['cclnet', {command!r}, *{words}]\n"
        "from cclnet.cli import main\n"
        "try: main()\n"
        "finally: print({'torch', 'timm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and reason in done.stderr, done.stderr
    assert done.stdout.strip() == "set()"


def test_settings_errors_come_before_heavy_imports() -> None:
    code = (
        "import sys; from cclnet.cli import app\n"
        "try: app(['train', 'X', '--set', 'foo=1'])\n"
        "except ValueError as e: print('foo' in str(e), {'torch', 'pandas', 'timm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True set()"


def test_warnings_are_notes_without_paths(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show_warnings_as_notes()
        warnings.warn("few images:\n  8", stacklevel=1)
    assert capsys.readouterr().err == "note: few images: 8\n"


def test_names_cannot_write_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An escape sequence in a name would change the title or the clipboard, or what was printed before."""
    for label in ("a\x1b]0;title\x07\x9b2J", "b"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (8, 8)).save(tmp_path / "set" / label / f"{i}\x1b[31m.png")
    monkeypatch.setattr("sys.argv", ["cclnet", "data", "show", "set"])
    monkeypatch.chdir(tmp_path)
    with suppress(SystemExit):
        main()
    printed = "".join(capsys.readouterr())
    assert "]0;title" in printed and not set(printed) & {"\x1b", "\x07", "\x9b"}
