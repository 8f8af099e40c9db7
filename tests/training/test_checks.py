"""Settings that are refused before the data is opened, and pretrained weights without an internet connection."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import timm

from cclnet import InputError
from cclnet.settings import make_settings
from cclnet.training.checks import check_names, check_pretrained, check_settings


@pytest.fixture
def closed_address() -> str:
    """An address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "clc"}, "'ccl'"),
        ({"method_settings": {"temprature": 1}}, "'temperature'"),
        ({"backbone": "resnt18"}, "'resnet18'"),
        ({"weights": "nowhere.safetensors"}, "nowhere.safetensors"),
    ],
)
def test_refused_before_the_data(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        check_settings(make_settings({"data": "no such folder"}, given))


ERRORS = """
import sys
from cclnet import InputError
from cclnet.api import run_settings
for given in ({"backbone": "resnt18"}, {"method": "clc"}, {"method": "lsr", "method_settings": {"epsilom": 1}}):
    try:
        run_settings("data", None, given)
    except InputError as error:
        print(error)
print("timm.models" in sys.modules)
"""


def test_wrong_names_are_reported_before_timm_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", ERRORS], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    for line, named in zip(lines, ("'resnet18'", "'ccl'", "'epsilon'"), strict=False):
        assert named in line
    assert lines[3] == "False"


def test_every_model_of_timm_is_a_backbone() -> None:
    """The quick check reads timm's source; it must not refuse a name that timm knows."""
    names = [*timm.list_models(), *timm.models._registry._deprecated_models, "resnet18.a1_in1k"]
    with mock.patch.dict(sys.modules):
        del sys.modules["timm"]
        for name in names[::40]:
            check_names({"backbone": name})
        with pytest.raises(InputError, match="'resnet18'"):
            check_names({"backbone": "resnt18"})


def test_pretrained_without_a_connection(monkeypatch: pytest.MonkeyPatch, closed_address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", closed_address)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("cclnet.pretrained._is_cached", lambda config: False)
    with pytest.raises(InputError, match=r"(?s)resnet18.*--weights.*HF_HOME.*--preset paper"):
        check_pretrained("resnet18")
    with pytest.raises(InputError, match="no pretrained weights"):
        check_pretrained("coatnet_0_224")
    monkeypatch.setattr("cclnet.pretrained._is_cached", lambda config: True)
    check_pretrained("resnet18")
