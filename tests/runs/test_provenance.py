"""The provenance of results: commit, versions, settings hash."""

from __future__ import annotations

import pytest

from cclnet.runs import provenance
from cclnet.runs.provenance import Commit, settings_hash, source_commit, versions


@pytest.fixture(autouse=True)
def fresh():
    source_commit.cache_clear()
    yield
    source_commit.cache_clear()


@pytest.mark.parametrize(
    ("given", "expected"), [("abc123", Commit("abc123", True)), ("abc123-dirty", Commit("abc123", False))]
)
def test_the_environment_names_the_commit_of_a_tree_without_history(monkeypatch, given, expected):
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, given)
    assert source_commit() == expected


def test_an_installed_package_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "a" / "b" / "c" / "provenance.py"))
    assert source_commit() is None


def test_the_hash_of_settings_changes_with_any_nested_value():
    settings = {"lr": 0.1, "augment": {"crop": 224}}
    assert settings_hash(settings) != settings_hash({"lr": 0.1, "augment": {"crop": 192}})
    assert len(settings_hash(settings)) == 16


def test_versions_name_python_cclnet_and_torch():
    assert {"python", "cclnet", "torch"} <= set(versions())


def test_the_origin_of_a_result(monkeypatch):
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, "abc123-dirty")
    found = provenance.origin()
    assert found["commit"] == {"sha": "abc123", "clean": False} and found["versions"] == versions()
    assert found["device"].startswith("CPU, ") and provenance.origin("NVIDIA H200")["device"] == "NVIDIA H200"
