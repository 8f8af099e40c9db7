"""Export."""

from __future__ import annotations

import io
import logging
import warnings

import torch

from cclnet.deploy.description import Description
from cclnet.deploy.shipped import Shipped
from cclnet.errors import InputError

OPSET = 20


def onnx_program(shipped: Shipped, description: Description) -> bytes:
    """The shipped network as an ONNX model: ``images`` uint8 [batch, h, w, 3] to ``probabilities`` [batch, K] and, where
    they have a closed form, ``maps`` [batch, K, h', w']."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError("exporting to ONNX needs onnx and onnxscript: pip install 'cclnet[export]'") from error
    outputs = ["probabilities", "maps"] if shipped.maps else ["probabilities"]
    example = torch.zeros((2, *description.crop, 3), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            shipped.cpu(),
            (example,),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=["images"],
            output_names=outputs,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        )
    assert program is not None
    file = io.BytesIO()
    program.save(file, external_data=False)
    return file.getvalue()
