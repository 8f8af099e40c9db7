"""Checks of the settings that need torch or timm, made before the data is opened: method, backbone, weights."""

from __future__ import annotations

from pathlib import Path

from cclnet.errors import InputError, unknown
from cclnet.settings import Settings


def check_settings(settings: Settings) -> None:
    """Refuse an unknown method, setting of the method or backbone, and weights that cannot be had on this machine."""
    from cclnet.methods import check_method_settings

    check_method_settings(settings.method, settings.method_settings)
    if settings.weights and not Path(settings.weights).is_file():
        raise InputError(f"there is no weights file {settings.weights}.")
    import timm

    if not timm.is_model(settings.backbone):
        raise unknown("backbone", settings.backbone, timm.list_models())
    if settings.pretrained:
        check_pretrained(settings.backbone)


def check_pretrained(backbone: str) -> None:
    """Refuse pretrained weights that are neither in a cache nor can be downloaded now, and name the ways without an
    internet connection. The hub's own client needs more than a minute to give up."""
    import timm

    from cclnet.pretrained import find_weights

    _, missing = find_weights(backbone)
    if not missing:
        return
    config = timm.get_pretrained_cfg(backbone)
    hub = config.hf_hub_id if config else None
    ways = "Without an internet connection give --weights FILE.safetensors instead of --pretrained"
    if hub:
        ways += (
            f" (the file model.safetensors of {hub}), or fill the cache on another machine (hf download {hub}), copy "
            "it and set HF_HOME to it"
        )
    raise InputError(
        f"the pretrained weights of {backbone} cannot be had: {missing}. {ways}. From scratch: --preset paper."
    )
