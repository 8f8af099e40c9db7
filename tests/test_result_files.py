"""Every result says where it comes from."""

from __future__ import annotations

import bz2
import json
import re
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[1] / "results"
OLDER = [line for line in (RESULTS / "older.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
OLDER_AT_MOST = 110  # a limit that only falls: older results are replaced, none is added
# Beside a run, or made from runs that have their own.
PARTS = (".course.json.bz2", ".soft_labels.json.bz2", "comparisons.json.bz2")
ALL = sorted([*RESULTS.rglob("*.json"), *(p for p in RESULTS.rglob("*.json.bz2") if not p.name.endswith(PARTS))])
FILES = [path for path in ALL if str(path.relative_to(RESULTS)) not in OLDER]
MAX_BYTES = 12 * 2**20


def missing(name: str, content: Any) -> list[str]:
    """What a result does not say of its origin."""
    if not isinstance(content, dict):
        return ["an object"]
    commit = content.get("commit")
    found = [key for key in ("versions", "device") if not content.get(key)]
    if not (isinstance(commit, dict) and re.fullmatch("[0-9a-f]{7,40}", commit.get("sha", "")) and "clean" in commit):
        found.append("commit")
    if re.search(r"-seed\d+\.json$", name):  # a run
        found += [key for key in ("settings_hash", "fingerprint") if not content.get(key)]
    return found


def read(path: Path) -> Any:
    content = path.read_bytes()
    return json.loads(bz2.decompress(content) if path.suffix == ".bz2" else content)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_result_has_its_provenance(path: Path) -> None:
    assert missing(path.name, read(path)) == []


def test_older_results_are_listed_and_none_is_added() -> None:
    assert len(OLDER) <= OLDER_AT_MOST
    assert all((RESULTS / name).is_file() for name in OLDER)
    with_provenance = [name for name in OLDER if not missing(name, read(RESULTS / name))]
    assert with_provenance == []


def test_a_result_without_provenance_is_refused() -> None:
    complete = {"versions": {"torch": "2"}, "device": "CPU", "commit": {"sha": "0893f9d", "clean": True}}
    assert missing("speed.json", complete) == []
    assert missing("x-seed0.json", complete) == ["settings_hash", "fingerprint"]
    assert missing("speed.json", {**complete, "commit": {"sha": "main", "clean": True}}) == ["commit"]
    assert missing("speed.json", {"device": ""}) == ["versions", "device", "commit"]


def test_results_stay_small() -> None:
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) <= MAX_BYTES
