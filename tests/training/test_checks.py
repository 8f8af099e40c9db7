"""Settings that are refused before images are decoded, and pretrained weights without an internet connection."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from safetensors.torch import save_file

import cclnet
from cclnet import CCLNet, InputError
from cclnet.api import run_settings
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


@pytest.fixture
def nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("images were decoded")

    for name in ("cclnet.data.cache.decode", "cclnet.training.setup.decode", "cclnet.training.setup.screen"):
        monkeypatch.setattr(name, refuse)


@pytest.mark.usefixtures("nothing_is_decoded")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("text.safetensors", "text.safetensors is refused: it is not a .safetensors file or plain state dict"),
        ("list.pt", "list.pt holds no state dict"),
        ("other.safetensors", r"(?s)other.safetensors does not fit the backbone.*Not used: nothing \[2\]"),
    ],
)
@pytest.mark.parametrize("given", [{}, {"preset": "paper"}])
def test_a_file_that_is_no_weights_is_refused_before_images_are_decoded(
    tmp_path: Path, kind: str, expected: str, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.safetensors").write_text("not weights")
    torch.save([1, 2], tmp_path / "list.pt")
    save_file({"nothing": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=expected):
        cclnet.train(
            "synthetic",
            tmp_path / "run",
            backbone="test_resnet",
            weights=str(tmp_path / kind),
            accelerator="cpu",
            **given,
        )
    assert not (tmp_path / "run").exists() and capsys.readouterr().err == ""


@pytest.mark.usefixtures("nothing_is_decoded")
def test_a_probe_and_a_recipe_refuse_such_a_file_as_early(tmp_path: Path) -> None:
    weights = tmp_path / "text.safetensors"
    weights.write_text("not weights")
    with pytest.raises(InputError, match="is refused"):
        cclnet.probe("synthetic", tmp_path / "run", backbone="test_resnet", weights=str(weights))
    (tmp_path / "recipe.toml").write_text(f"backbone = 'test_resnet'\nweights = '{weights}'\n")
    with pytest.raises(InputError, match="is refused"):
        cclnet.train("synthetic", tmp_path / "run", recipe=tmp_path / "recipe.toml")


@pytest.mark.parametrize(
    ("backbone", "other"),
    [("test_resnet", {"pooling": "stages"}), ("test_vit", {"augment": {"crop": 32}, "drop_path_rate": 0.1})],
)
def test_weights_for_other_classes_pass(tmp_path: Path, backbone: str, other: dict[str, Any]) -> None:
    size = {"img_size": 32} if backbone == "test_vit" else None
    state = CCLNet(backbone, 10, "hard", backbone_settings=size).export_state()
    save_file(state, tmp_path / "weights.safetensors")
    given = {"data": "x", "backbone": backbone, "weights": str(tmp_path / "weights.safetensors")}
    check_settings(make_settings({}, given | other))


@pytest.mark.parametrize(
    ("preset", "backbone"), [("", "tf_efficientnet_lite0"), ("paper", "resnet18"), ("quick", None), ("best", None)]
)
def test_pretrained_without_a_connection_is_one_error_and_nothing_else(
    preset: str,
    backbone: str | None,
    monkeypatch: pytest.MonkeyPatch,
    closed_address: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", closed_address)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("cclnet.pretrained._is_cached", lambda config: False)
    named = backbone or "tf_efficientnet"
    with pytest.raises(InputError, match=f"the pretrained weights of {named}.* are not available.*--weights"):
        run_settings("synthetic", None, {"pretrained": True}, preset, announce=True, check=True)
    assert capsys.readouterr().err == ""
