"""Checks of the settings that need torch or timm, made before images are decoded: method, backbone, weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cclnet.errors import InputError, unknown
from cclnet.memory import large_imports
from cclnet.settings import Settings


def check_settings(settings: Settings) -> None:
    """Refuse an unknown method, setting of the method or backbone, and initial weights that cannot be loaded."""
    check_names(vars(settings))
    check_start(settings)


def check_start(settings: Settings) -> None:
    """Refuse an unknown backbone, a file of weights that is none or of another backbone, and pretrained weights that
    this machine cannot get."""
    if settings.weights and not Path(settings.weights).is_file():
        raise InputError(f"there is no weights file {settings.weights}.")
    with large_imports():
        import timm

    if not timm.is_model(settings.backbone):
        raise unknown("backbone", settings.backbone, timm.list_models())
    if settings.weights:
        check_weights(settings)
    if settings.pretrained:
        check_pretrained(settings.backbone)


def check_weights(settings: Settings) -> None:
    """Refuse a file of weights that cannot be read or does not fit the backbone. The backbone is built for it, which
    takes up to some seconds, but decoding takes minutes."""
    from cclnet.network import TimmClassifier
    from cclnet.training.setup import backbone_settings, fitting_weights

    classifier = TimmClassifier(
        settings.backbone, num_classes=2, backbone_settings=backbone_settings(settings), pooling=settings.pooling
    )
    fitting_weights(classifier, Path(settings.weights))


def check_names(given: Mapping[str, Any]) -> None:
    """Refuse an unknown method, setting of the method or backbone among the settings ``given``, within two seconds."""
    if backbone := given.get("backbone"):
        _check_backbone_without_timm(str(backbone))
    if method := given.get("method"):
        with large_imports():
            from cclnet.methods import check_method_settings

        check_method_settings(method, given.get("method_settings"))


def _check_backbone_without_timm(name: str) -> None:
    """Refuse a backbone whose name does not occur in the source of timm's models. Importing timm takes three seconds.
    Where it is imported already, other packages may have registered models with it, so nothing is refused here."""
    timm = None if "timm" in sys.modules else find_spec("timm")
    if timm is None or timm.origin is None:
        return
    source = "\n".join(
        file.read_text(encoding="utf-8") for file in sorted(Path(timm.origin).with_name("models").glob("*.py"))
    )
    if not re.search(rf"\b{re.escape(name.partition('.')[0])}\b", source):
        raise unknown("backbone", name, re.findall(r"^@register_model\ndef (\w+)", source, re.MULTILINE))


def check_pretrained(backbone: str) -> None:
    """Refuse pretrained weights that are neither in a cache nor can be downloaded now, and name the ways without an
    internet connection. The hub's own client needs more than a minute to give up."""
    from cclnet.pretrained import find_weights, pretrained_config

    _, missing = find_weights(backbone)
    if not missing:
        return
    config = pretrained_config(backbone)
    hub = config.hf_hub_id if config else None
    ways = "Without an internet connection give --weights FILE.safetensors instead of --pretrained"
    if hub:
        ways += (
            f" (the file model.safetensors of {hub}), or fill the cache on another machine (hf download {hub}), copy "
            "it and set HF_HOME to it"
        )
    raise InputError(
        f"the pretrained weights of {backbone} are not available: {missing}. {ways}. From scratch: --preset paper "
        "without --pretrained."
    )
