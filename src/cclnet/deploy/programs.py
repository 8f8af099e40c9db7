"""The shipped network as a program that needs none of its Python code: ONNX, or torch.export."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cclnet.deploy.description import Description
from cclnet.deploy.shipped import Shipped
from cclnet.errors import InputError, first_line


def onnx_program(shipped: Shipped, description: Description) -> bytes:
    """The network as ONNX: ``images`` uint8 [batch, h, w, 3] to ``probabilities`` [batch, K] and, where they have a
    closed form, ``maps`` [batch, K, h', w']."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError("exporting to ONNX needs onnx and onnxscript: pip install 'cclnet[export]'") from error
    with _quietly(), _named_failure(description, "ONNX"):
        program = torch.onnx.export(
            shipped.cpu(),
            (_example(description),),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["probabilities", "maps"] if shipped.maps else ["probabilities"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        )
        assert program is not None  # only without dynamo
        proto = program.model_proto
        entry = proto.metadata_props.add()
        entry.key, entry.value = "cclnet", json.dumps(description.baked_in(), ensure_ascii=False)
        onnx.checker.check_model(proto)
        return proto.SerializeToString()


def torch_program(shipped: Shipped, description: Description) -> tuple[bytes, Callable[..., Any]]:
    """The network as a torch.export program: the content of its file, and the program to call.

    The example inputs, which torch would pickle, are left out: what remains is JSON and raw numbers.
    """
    with _quietly(), _named_failure(description, "torch.export"), torch.no_grad():
        program = torch.export.export(
            shipped.cpu(), (_example(description),), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)
        )
        program.example_inputs = None
        file = io.BytesIO()
        torch.export.save(program, file)
        return file.getvalue(), program.module()


def _example(description: Description) -> torch.Tensor:
    return torch.zeros((2, *description.crop, 3), dtype=torch.uint8)  # a batch of one would be taken as fixed


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporters' notes to their own developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _named_failure(description: Description, kind: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        raise InputError(f"{description.backbone} cannot be exported to {kind}: {first_line(error)}.") from error
