"""A part of the hostile corpus; `make chaos` runs more of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = 150


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_hostile_inputs_are_answered_without_a_traceback_in_time_and_memory(tmp_path: Path) -> None:
    """In a process of its own: each case is a fork of it, and this one may have threads."""
    for package in ("onnxscript", "onnxruntime", "pydicom", "pyarrow", "huggingface_hub"):
        pytest.importorskip(package)
    out = tmp_path / "chaos.json"
    campaign = Path(__file__).with_name("campaign.py")
    done = subprocess.run(
        [sys.executable, campaign, "--cases", str(CASES), "--out", out], capture_output=True, text=True, check=False
    )
    assert out.exists(), done.stderr
    found = json.loads(out.read_text())
    assert found["failed"] == [], json.dumps(found["failed"], indent=1)
    assert found["corpus"]["cases"] == CASES and min(found["corpus"]["kinds"].values()) >= 5
    # Not everything is refused: some mutations leave a good file.
    assert {"0", "1", "2"} <= found["corpus"]["exit_codes"].keys()
