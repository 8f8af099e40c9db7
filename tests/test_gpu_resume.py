"""benchmarks/gpu_resume.py, as far as it goes on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_small_killed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    """The measurement itself: kills, resumes, comparison and provenance."""
    out = tmp_path / "gpu_resume.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_resume.py"), "--smoke", "--accelerator", "cpu"]
    done = subprocess.run([*command, "--kills", "1", "--out", str(out)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert content["versions"] and content["device"] and "commit" in content
    (run,) = content["runs"]
    assert run["kills"] == len(run["fell"]) == 1 and run["passed"]
    assert run["resumed"].pop("same_sha256").keys() == {"model.safetensors", "predictions.csv", "soft_labels.csv"}
    assert run["resumed"] == {"identical": True, "weights": 0.0, "losses": 0.0}
