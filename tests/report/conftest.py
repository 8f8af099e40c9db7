from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_run import MakeRun, write_run


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def build(name: str = "ccl-0", **settings: Any) -> Path:
        return write_run(tmp_path / name, **settings)

    return build
