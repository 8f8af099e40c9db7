"""The package: what its wheel contains, and that its version and dates agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import cclnet

ROOT = Path(__file__).parents[1]
LIGHT = "import sys; sys.modules.update(dict.fromkeys({hidden!r})); import cclnet.api, cclnet.cli.train_command, "
LIGHT += "cclnet.training.loop, cclnet.evaluation.evaluate, cclnet.report"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs setuptools 77 to build the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    build = "import setuptools.build_meta as backend; backend.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_contains_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "cclnet").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == expected
    kinds = {"report/templates/report.html", "deploy/serve/templates/page.js", "methods/ccl.md", "py.typed",
             "presets/paper.preset.toml", "reproduce/recipes/paper.toml"}  # fmt: skip
    for name in (f"cclnet/{kind}" for kind in kinds):
        assert wheel.read(name) == (source / name).read_bytes()


def test_the_wheel_describes_itself(wheel: zipfile.ZipFile) -> None:
    metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    assert f"\nVersion: {cclnet.__version__}\n" in metadata and "\nProject-URL: Paper, https://arxiv.org" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.M)
    assert "torch" in needed and not {"tensorboard", "onnx", "fastapi", "pytest", "mlflow-skinny"} & set(needed)


def test_training_and_evaluation_import_no_extra() -> None:
    hidden = ("tensorboard", "onnx", "onnxruntime", "fastapi", "uvicorn", "pydicom", "pyarrow", "captum", "wandb",
              "mlflow", "monai", "ignite", "medmnist", "simplejpeg", "prometheus_client")  # fmt: skip
    code = LIGHT.format(hidden=hidden)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_changelog_and_citation_name_the_version() -> None:
    citation, changelog = (ROOT / "CITATION.cff").read_text(), (ROOT / "CHANGELOG.md").read_text()
    date = re.search(rf"^## {re.escape(cclnet.__version__)}, (\d{{4}}-\d\d-\d\d)$", changelog, re.M)
    assert date is not None
    assert f"\nversion: {cclnet.__version__}\n" in citation and f'\ndate-released: "{date[1]}"\n' in citation
