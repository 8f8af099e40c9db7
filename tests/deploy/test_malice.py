"""Model folders from strangers: nothing in them runs, leads away or eats memory; each is refused, with the reason."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shipped_run import write_images

import cclnet
from cclnet import InputError
from cclnet.deploy.export import export
from cclnet.runs.folder import RunFolder
from cclnet.training.checkpoint import load_latest


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.canary}'",)


@pytest.fixture
def run(sound_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound_run, tmp_path / "run"))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "the code has run"


def saved(content: object, path: Path) -> None:
    torch.save(content, path)


def pickled(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def saved_as_before_zip(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("write", [saved, pickled, saved_as_before_zip])
def test_weights_that_are_a_pickle(write: Callable[[object, Path], None], run: Path, canary: Path) -> None:
    write({"weight": Evil(canary)}, run / "model.safetensors")
    for use in (lambda: cclnet.load(run), lambda: cclnet.load(run / "model.safetensors"), lambda: export(run, "onnx")):
        with pytest.raises(InputError, match=r"refused: despite its name it is a pickle .* can run code"):
            use()
    assert not canary.exists()


def test_the_canary_sings_when_it_should(tmp_path: Path, canary: Path) -> None:
    """The attack is a real one: plain unpickling runs it."""
    pickle.loads(pickle.dumps(Evil(canary)))  # noqa: S301
    assert canary.exists()


def test_an_evil_checkpoint_is_not_looked_at_and_cannot_be_resumed(run: Path, canary: Path, tmp_path: Path) -> None:
    (run / "checkpoints").mkdir()
    saved({"network": Evil(canary)}, run / "checkpoints" / "epoch-000009-step-00000000.pt")
    assert cclnet.load(run).predict(write_images(tmp_path / "images", 1)[0]).label  # the model itself is sound
    with pytest.raises(InputError, match="refused: it is damaged, or holds pickled objects, which could run code"):
        load_latest(run / "checkpoints")
    (run / "model.safetensors").unlink()
    with pytest.raises(InputError, match="holds no model"):
        cclnet.load(run)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "last.ckpt", "model.pkl", "pytorch_model.bin", "model.pt2"])
def test_files_of_other_kinds(name: str, run: Path, canary: Path) -> None:
    saved(Evil(canary), run / name)
    with pytest.raises(InputError, match=r"is refused: models are loaded only from model.safetensors and model.onnx"):
        cclnet.load(run / name)
    assert not canary.exists()


def test_a_torch_program_is_not_loaded(tmp_path: Path, canary: Path) -> None:
    """torch.export.load unpickles parts of a .pt2 and evaluates expressions in it."""
    saved(Evil(canary), tmp_path / "model.pt2")
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(
        InputError, match=r"torch.export program \(.pt2\) is for torch.export.load, in a program that trusts"
    ):
        cclnet.load(tmp_path)
    assert not canary.exists()


def test_an_onnx_file_that_is_something_else(run: Path, canary: Path) -> None:
    pytest.importorskip("onnxruntime")
    (run / "model.safetensors").unlink()
    for content in (pickle.dumps(Evil(canary)), b"", b"no model at all"):
        (run / "model.onnx").write_bytes(content)
        with pytest.raises(InputError, match=r"model.onnx is not an ONNX model that can be run"):
            cclnet.load(run)
    assert not canary.exists()


def test_an_onnx_model_of_another_program(run: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    (run / "model.safetensors").unlink()
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [value("x", 1, [2])], [value("y", 1, [2])]
    )
    opset = onnx.helper.make_opsetid("", 20)
    (run / "model.onnx").write_bytes(
        onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()
    )
    with pytest.raises(InputError, match=r"was not exported by cclnet: one input of uint8 images"):
        cclnet.load(run)


def test_an_onnx_model_that_reads_other_files(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    (tmp_path / "secret").write_bytes(bytes(8))
    (run / "model.safetensors").unlink()
    for where in ("../secret", str(tmp_path / "secret"), "secret"):
        weight = onnx.TensorProto(name="w", data_type=1, dims=[2], data_location=onnx.TensorProto.EXTERNAL)
        weight.external_data.add(key="location", value=where)
        value = onnx.helper.make_tensor_value_info
        node = onnx.helper.make_node("Add", ["x", "w"], ["y"])
        graph = onnx.helper.make_graph([node], "g", [value("x", 1, [2])], [value("y", 1, [2])], [weight])
        (run / "model.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
        with pytest.raises(InputError, match=r"keeps weights in other files"):
            cclnet.load(run)


def test_a_path_in_an_onnx_model_is_found_however_it_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same entry with its value before its key, and with numbers written in more bytes than they need."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    monkeypatch.chdir(run)
    (run / "secret.bin").write_bytes(bytes(8))
    (run / "model.safetensors").unlink()
    name = b"secret.bin"
    usual = b"\n\x08location\x12" + bytes([len(name)]) + name
    for other in (
        b"\x12" + bytes([len(name)]) + name + b"\n\x08location",
        b"\n\x88\x00location\x12" + bytes([len(name)]) + name,
        b"\x8a\x80\x00\x08location\x12" + bytes([len(name)]) + name,
    ):
        weight = onnx.TensorProto(name="w", data_type=1, dims=[2], data_location=onnx.TensorProto.EXTERNAL)
        weight.external_data.add(key="location", value=name.decode())
        tensor = weight.SerializeToString().replace(bytes([len(usual)]) + usual, bytes([len(other)]) + other)
        assert other in tensor
        again = onnx.TensorProto.FromString(tensor)
        assert again.external_data[0].key == "location"  # a reader of ONNX understands it
        value = onnx.helper.make_tensor_value_info
        nodes = [onnx.helper.make_node("Cast", ["image"], ["x"], to=1),
                 onnx.helper.make_node("Add", ["x", "w"], ["probabilities"])]  # fmt: skip
        graph = onnx.helper.make_graph(nodes, "g", [value("image", 2, [2])], [value("probabilities", 1, [2])])
        opset = onnx.helper.make_opsetid("", 20)
        content = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()
        packed = graph.SerializeToString()
        larger = packed + b"\x2a" + bytes([len(tensor)]) + tensor  # field 5 of a graph: an initializer
        content = content.replace(_prefixed(packed), _prefixed(larger))
        (run / "model.onnx").write_bytes(content)
        with pytest.raises(InputError, match=r"keeps weights in other files"):
            cclnet.load(run)


def _prefixed(message: bytes) -> bytes:
    """A message behind its length, as protobuf writes it: seven bits a byte."""
    size, prefix = len(message), b""
    while size > 127:
        prefix, size = prefix + bytes([size % 128 + 128]), size // 128
    return prefix + bytes([size]) + message


def changed(run: Path, **values: Any) -> Path:
    info = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(info | values))
    return run


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"crop": [10**9, 10**9]}, r"crop\[0\] must be .*at most 2048, got 1000000000"),
        ({"crop": [8192, 8192], "short_side": 8192}, r"crop\[0\] must be .*at most 2048, got 8192"),
        ({"crop": [0, 32]}, r"crop\[0\] must be .*got 0"),
        ({"crop": [32.0, 32]}, r"crop\[0\] must be a whole number, got 32.0"),
        ({"crop": [True, 32]}, r"crop\[0\] must be a whole number, got True"),
        ({"crop": [32]}, r"crop must be .*got \[32\]"),
        ({"crop": [64, 64]}, "does not fit into images with a short side of 36"),
        ({"short_side": 10**12}, "short_side must be .*at least 1 and at most 8192, got 1000000000000"),
        ({"short_side": "36"}, "short_side must be a whole number, got '36'"),
        ({"classes": ["ant"]}, "classes must be 2 to 100,000 different names"),
        ({"classes": ["ant", "ant", "bee", "cat"]}, "different names"),
        ({"classes": [str(i) for i in range(100_001)]}, r"classes must be .* got 100,001: \('0', '1'"),
        ({"classes": ["a" * 1001, "b", "c", "d"]}, r"classes\[0\] must be at most 1,000 characters"),
        ({"classes": [1, 2, 3, 4]}, r"classes\[0\] must be text"),
        ({"classes": ["", "b", "c", "d"]}, "different names"),
        ({"mean": [0, 0]}, "mean must be a list of 3 numbers"),
        ({"mean": [0, 0, 1e9]}, r"mean\[2\] must be .*at most 1000, got 1000000000"),
        ({"mean": [0, 0, 10**400]}, r"mean\[2\] must be a number"),
        ({"std": [0, 1, 1]}, r"std\[0\] must be .*at least 1e-06.*got 0"),
        ({"temperature": 0}, r"temperature\.value must be .*at least 0\.001 and at most 1000, got 0"),
        ({"temperature": "hot"}, r"temperature\.value must be .*got 'hot'"),
        ({"backbone": ["resnet18"]}, r"backbone must be text.*got \[\'resnet18\'\]"),
        ({"backbone": ""}, "backbone must be the name of a timm model"),
        ({"multilabel": "no"}, "multilabel must be true or false"),
        ({"class_counts": [1, 2]}, "class_counts must be 4 counts, one per class, got 2"),
        ({"class_counts": [1, 2, 3, -1]}, r"class_counts\[3\] must be .*at least 0, got -1"),
        ({"collapse_softness": 2}, "collapse_softness must be .*at most 1, got 2"),
        ({"method_settings": [1]}, "method_settings must be a table"),
        ({"trained": "yesterday"}, "trained must be a table"),
        ({"trained": {"images": "many"}}, r"trained\.images must be a whole number"),
        ({"trained": {"versions": ["torch"]}}, r"trained\.versions must be a table"),
        ({"trained": {"commit": "abc"}}, r"trained\.commit must be a table"),
        ({"exported": {"checked": 3}}, r"exported\.checked must be a table"),
        ({"format": 3}, "has format 3; this version of cclnet reads format 1 and 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_absurd_values_in_model_json(values: dict[str, Any], reason: str, run: Path) -> None:
    with pytest.raises(InputError, match=reason):
        cclnet.load(changed(run, **values))


def test_everything_wrong_is_named_at_once(run: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)is refused:.*short_side must.*std must"):
        cclnet.load(changed(run, short_side=-1, std=None))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{", "is not JSON"), (b"\xff\xfe\x00", "is not JSON"), (b"[1]", "expected an object, got list"),
     (b"[" * 100_000, "is not JSON"), (b'{"format": 1, "mean": [NaN, 0, 0]}', r"mean\[0\] must be .* got nan"),
     (b'{"format": ' + b"1" * 5000 + b"}", "is not JSON")],
    ids=["cut off", "no text", "list", "nested", "NaN", "thousands of digits"],
)  # fmt: skip
def test_broken_model_json(content: bytes, reason: str, run: Path) -> None:
    (run / "model.json").write_bytes(content)
    with pytest.raises(InputError, match=reason):
        cclnet.load(run)


def test_no_model_json_and_too_much_of_it(run: Path) -> None:
    with (run / "model.json").open("r+b") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(InputError, match=r"bytes; at most 67,108,864 are read"):
        cclnet.load(run)
    (run / "model.json").unlink()
    with pytest.raises(InputError, match=r"there is no model.json in"):
        cclnet.load(run)


@pytest.mark.parametrize("backbone", ["resnet1888", "hf-hub:someone/evil", "local-dir:/tmp/evil", "../../evil"])
def test_backbones_that_are_no_names(backbone: str, run: Path) -> None:
    """timm would fetch some of these from a network or a folder."""
    with pytest.raises(InputError, match="unknown backbone"):
        cclnet.load(changed(run, backbone=backbone))


def test_a_small_file_that_claims_a_huge_network_costs_no_memory(run: Path) -> None:
    with pytest.raises(InputError, match=r"does not fit vit_giant_patch14_224 with 4 classes"):
        cclnet.load(changed(run, backbone="vit_giant_patch14_224"))


def test_more_classes_than_weights(run: Path) -> None:
    (run / "soft_labels.csv").unlink()
    with pytest.raises(InputError, match=r"does not fit test_resnet with 5 classes.*Expected: fc.weight \[5, "):
        cclnet.load(changed(run, classes=["a", "b", "c", "d", "e"], class_counts=None))


def test_names_of_files_in_model_json_are_not_followed(run: Path, canary: Path, tmp_path: Path) -> None:
    saved(Evil(canary), tmp_path / "evil.pt")
    leading_away = {"weights": "../evil.pt", "file": str(tmp_path / "evil.pt"), "exported": {"file": "../evil.pt"}}
    assert cclnet.load(changed(run, **leading_away)).predict(write_images(tmp_path / "images", 1)[0]).label
    assert not canary.exists()


def test_a_damaged_weights_file(run: Path) -> None:
    whole = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"is refused: it is not a whole .safetensors file"):
        cclnet.load(run)
    (run / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + whole[8:])  # a header longer than any memory
    with pytest.raises(InputError, match=r"is refused: it is not a whole .safetensors file"):
        cclnet.load(run)


def test_a_header_whose_length_looks_like_a_pickle_is_none(run: Path) -> None:
    """The first byte of a .safetensors file is part of a length, and 0x80 is where pickles begin."""
    state = load_file(run / "model.safetensors")
    for padding in range(4096):
        save_file(state, run / "model.safetensors", {"padding": "x" * 8 * padding})
        if (run / "model.safetensors").read_bytes()[:1] == b"\x80":
            break
    else:
        pytest.fail("no such header was made")
    assert cclnet.load(run).classes


def test_the_description_of_a_sound_run(sound_run: Path) -> None:
    run = RunFolder(sound_run)
    assert (run.read_model().crop, run.read_model().short_side) == ((32, 32), 36)
    assert run.read_calibration().temperature.value == 1.5
