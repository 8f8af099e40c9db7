from __future__ import annotations

from pathlib import Path

import pytest
from shipped_run import write_run

from cclnet.deploy.export import export


@pytest.fixture(scope="session")
def sound_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, to be read only."""
    return write_run(tmp_path_factory.mktemp("sound") / "run")


@pytest.fixture(scope="session")
def sound_onnx(sound_run: Path) -> Path:
    """Its export to ONNX, which takes seconds, to be read only."""
    pytest.importorskip("onnxruntime")
    return export(sound_run, "onnx", sound_run.parent / "onnx")
