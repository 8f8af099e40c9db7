"""benchmarks/gpu_speed.py, as far as it goes on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = [
    "ceiling paper test_resnet hard",
    "epochs paper test_resnet ccl",
    "parts paper test_resnet ccl",
    "epochs finetune test_efficientnet hard",
    "prediction finetune test_efficientnet hard",
]


def measure(out: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_speed.py"), "--smoke", "--accelerator", "cpu"]
    done = subprocess.run([*command, "--out", str(out), *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["entries"] if out.exists() else []


def test_everything_is_measured_and_a_second_call_measures_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "gpu_speed.json"
    entries = measure(out)
    assert [entry["name"] for entry in entries] == NAMES
    assert all(entry["device"] and entry["versions"] and "commit" in entry and entry["crop"] == 28 for entry in entries)
    values = {entry["name"]: entry["measured"] for entry in entries}
    assert all(value > 0 for name in (*NAMES[:2], *NAMES[3:]) for turns in values[name].values() for value in turns)
    assert {method: len(turns) for method, turns in values[NAMES[1]].items()} == {"hard": 5, "ccl": 5}
    assert list(values[NAMES[4]]) == ["none, decoded", "none, files", "flips, decoded", "flips, files"]
    parts = {part: value for part, (value,) in values[NAMES[2]].items()}
    assert parts["steps"] > 0 and abs(2 * parts["epoch"] - sum(parts.values())) < 1e-3 * parts["epoch"]

    content = json.loads(out.read_text())
    out.write_text(json.dumps(content | {"entries": entries[:-1]}))
    again = measure(out)
    assert again[:-1] == entries[:-1]
    assert again[-1]["name"] == NAMES[-1] and again[-1]["measured"] != entries[-1]["measured"]


def test_what_is_not_ready_in_time_is_left_out(tmp_path: Path) -> None:
    assert measure(tmp_path / "gpu_speed.json", "--max-minutes", "0.001") == []
