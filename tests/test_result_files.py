"""Every result says where it comes from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[1] / "results"
OLDER = [line for line in (RESULTS / "older.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
OLDER_AT_MOST = 107  # a limit that only falls: older results are replaced, none is added
FILES = [path for path in sorted(RESULTS.rglob("*.json")) if str(path.relative_to(RESULTS)) not in OLDER]


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_result_has_its_provenance(path: Path) -> None:
    assert missing(path.name, json.loads(path.read_text(encoding="utf-8"))) == []


def test_older_results_are_listed_and_none_is_added() -> None:
    assert len(OLDER) <= OLDER_AT_MOST
    assert all((RESULTS / name).is_file() for name in OLDER)
    with_provenance = [name for name in OLDER if not missing(name, json.loads((RESULTS / name).read_text()))]
    assert with_provenance == []


def test_a_result_without_provenance_is_refused() -> None:
    complete = {"versions": {"torch": "2"}, "device": "CPU", "commit": {"sha": "0893f9d", "clean": True}}
    assert missing("speed.json", complete) == []
    assert missing("x-seed0.json", complete) == ["settings_hash", "fingerprint"]
    assert missing("speed.json", {**complete, "commit": {"sha": "main", "clean": True}}) == ["commit"]
    assert missing("speed.json", {"device": ""}) == ["versions", "device", "commit"]
