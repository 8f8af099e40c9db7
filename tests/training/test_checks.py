"""Settings that are refused before the data is opened, and pretrained weights without an internet connection."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from cclnet import InputError
from cclnet.settings import make_settings
from cclnet.training.checks import check_pretrained, check_settings


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
