"""Preparation of images, and the engines that run the network: PyTorch, and ONNX Runtime, which needs no torch.

Both take uint8 images and return probabilities."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from cclnet.data.image_io import MAX_PIXELS, grey_to_rgb, read_resized, rgb_of, to_short_side
from cclnet.data.parallel import available_cores
from cclnet.errors import InputError, unknown
from cclnet.files import check_regular
from cclnet.memory import keep_freed_memory
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.checksums import checking

if TYPE_CHECKING:
    from cclnet.deploy.shipped import Ensemble, Shipped
    from cclnet.runs.model import ModelDescription

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Maps = npt.NDArray[np.float32]  # class activation maps
Outputs = tuple[Floats, Maps | None, npt.NDArray[np.float32] | None]  # probabilities, maps, features

MAX_BYTES = 2**31  # of an ONNX file: protobuf reads no more
# The key "location" in an ONNX file: the path of another file that contains the weights of a tensor. Tag 1, length 8,
# also in the longer encodings that protobuf accepts. JSON has no such bytes, so no class name matches.
_EXTERNAL_WEIGHTS = re.compile(rb"(?:\x0a|\x8a\x80*\x00)(?:\x08|\x88\x80*\x00)location")


def prepare(image: Any, short_side: int, crop: tuple[int, int], max_pixels: int = MAX_PIXELS) -> Pixels:
    """uint8 [crop height, crop width, 3] of a path, the bytes of a file, a Pillow image, or uint8 [H, W(, 1 or 3)].

    A file gives exactly the pixels of the run's evaluation: upright, resized to the short side, its centre. A Pillow
    image opened from a large JPEG differs by about one level, because files are scaled down while they are decoded.
    """
    if isinstance(image, (str, Path, bytes)):
        return central(read_resized(image, short_side, max_pixels), crop)
    pixels = rgb_of(image) if isinstance(image, Image.Image) else _checked(image)
    return central(to_short_side(pixels, short_side, max_pixels=max_pixels), crop)


def central(pixels: Pixels, crop: tuple[int, int]) -> Pixels:
    """The central crop, as in the evaluation of a run."""
    height, width = crop
    top, left = (round((have - want) / 2) for have, want in zip(pixels.shape[:2], crop, strict=True))
    return pixels[top : top + height, left : left + width]


def _checked(image: Any) -> Pixels:
    array = np.asarray(image)
    grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    if array.dtype != np.uint8 or array.size == 0 or not (grey or (array.ndim == 3 and array.shape[2] == 3)):
        raise InputError(
            "an image is a path, the bytes of a file, a Pillow image, or uint8 [H, W] or [H, W, 1 or 3] (0 is black, "
            f"255 white); got {type(image).__name__} {array.dtype} {list(array.shape)}."
        )
    return grey_to_rgb(array.reshape(array.shape[:2])) if grey else array


class Engine(Protocol):
    """``run`` returns probabilities [N, K]; with ``maps`` the raw map of each image's top class, [N, h', w']; if
    ``has_features`` the pooled features, [N, F]."""

    name: str
    device: str
    has_features: bool

    def run(self, batch: Pixels, maps: bool) -> Outputs: ...


class OnnxEngine:
    """An exported model.onnx in ONNX Runtime, from its path or its content."""

    name = "onnx"

    def __init__(
        self, model: Path | bytes, description: ModelDescription, calibration: CalibrationMap | None = None,
        device: str = "auto", threads: int | None = None,
    ) -> None:  # fmt: skip
        try:
            import onnxruntime
        except ImportError as error:
            raise InputError("ONNX models need onnxruntime: pip install 'cclnet[export]'") from error
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads or available_cores()
        settings.log_severity_level = 3
        # Idle threads must not spin: the cores are needed to decode the next images.
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers = _providers(device, onnxruntime.get_available_providers())
        self.device = "cuda" if providers[0].startswith("CUDA") else "cpu"
        if isinstance(model, Path):
            check_regular(model, MAX_BYTES)
        name, content = (model, model.read_bytes()) if isinstance(model, Path) else ("the model", model)
        with checking(model, content) if isinstance(model, Path) else nullcontext():
            if _EXTERNAL_WEIGHTS.search(content):  # before ONNX Runtime could read any of them
                raise InputError(f"{name} is refused: it keeps weights in other files, which cclnet never writes.")
            try:
                self.session = onnxruntime.InferenceSession(content, settings, providers=providers)
            except Exception as error:  # onnxruntime's errors have no common base class
                raise InputError(f"{name} is not an ONNX model that can be run: {error}") from error
        self.outputs = [output.name for output in self.session.get_outputs()]
        inputs = self.session.get_inputs()
        if len(inputs) != 1 or inputs[0].type != "tensor(uint8)" or self.outputs[0] != "probabilities":
            raise InputError(
                f"{name} was not exported by cclnet: one input of uint8 images and an output 'probabilities' are "
                f"expected, got {[i.type for i in inputs]} and {self.outputs}."
            )
        self.input, self.has_features = inputs[0].name, "features" in self.outputs
        # Values that are part of the program cannot be changed in model.json or calibration.json alone.
        try:
            baked_in = dict(json.loads(self.session.get_modelmeta().custom_metadata_map.get("cclnet", "{}")))
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{name} is refused: its metadata is not that of cclnet ({error}).") from error
        # What only the program says, such as offsets, differs too; what older programs do not say is its default.
        described = description.baked_in(calibration or CalibrationMap())
        wrong = [key for key in described | baked_in if baked_in.get(key) != described.get(key)]
        if wrong:
            raise InputError(
                f"{name} is refused: it is not the model that the files beside it describe, whose {', '.join(wrong)} "
                "differ. Export them together again."
            )

    def run_all(self, batch: Pixels) -> list[Maps]:
        """All outputs: probabilities [N, K], and if there are any maps of all classes, [N, K, h', w'], and features."""
        return self.session.run(self.outputs, {self.input: batch})

    def run(self, batch: Pixels, maps: bool) -> Outputs:
        if maps and "maps" not in self.outputs:
            raise InputError("this ONNX model has no class activation maps: its network has none in closed form.")
        wanted = [name for name in self.outputs if maps or name != "maps"]  # others are not computed
        found = dict(zip(wanted, self.session.run(wanted, {self.input: batch}), strict=True))
        probabilities, class_maps = found["probabilities"].astype(np.float64), found.get("maps")
        top = None if class_maps is None else class_maps[np.arange(len(batch)), probabilities.argmax(axis=1)]
        return probabilities, top, found.get("features")


class TorchEngine:
    """The shipped network in PyTorch."""

    name = "torch"

    def __init__(self, shipped: Shipped | Ensemble, device: str = "auto") -> None:
        self.device = torch_device(device)
        self.shipped, self.has_features = shipped.to(self.device), shipped.with_features
        if self.device == "cpu":
            keep_freed_memory()

    def run(self, batch: Pixels, maps: bool) -> Outputs:
        import torch

        images = torch.from_numpy(np.ascontiguousarray(batch)).to(self.device)
        probabilities, found, pooled = self.shipped.answer(images, maps)
        return (
            probabilities.cpu().numpy(),
            None if found is None else found.float().cpu().numpy(),
            None if pooled is None else pooled.float().cpu().numpy(),
        )


def torch_device(device: str) -> str:
    """A device by name; "auto" is the GPU if there is one."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device '{device}' cannot be used: {str(error).splitlines()[0]}. Try auto or cpu.") from error
    return device


def _providers(device: str, available: list[str]) -> list[str]:
    if device in ("auto", "cpu"):
        return ["CPUExecutionProvider"]
    if not device.startswith("cuda"):
        raise unknown("device for ONNX Runtime", device, ("auto", "cpu", "cuda"))
    if "CUDAExecutionProvider" not in available:
        raise InputError("this onnxruntime has no CUDA: install onnxruntime-gpu, or use the torch engine on the GPU.")
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]
