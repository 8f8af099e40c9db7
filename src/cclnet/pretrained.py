"""Whether timm's pretrained weights of a backbone are available on this machine, and for which input they were made."""

from __future__ import annotations

import http.client
import os
import threading
import urllib.request
from pathlib import Path
from typing import Any

from cclnet.memory import large_imports

SECONDS = 4.0  # to wait for the hub


def pretrained_config(backbone: str) -> Any:
    """timm's description of the pretrained weights of a backbone; None for a name that timm does not know."""
    with large_imports():
        import timm

    return timm.get_pretrained_cfg(backbone) if timm.is_model(backbone) else None


def input_settings(backbone: str, crop: int | None = None) -> dict[str, Any]:
    """The settings ``augment.crop`` and ``short_side`` for the input the backbone was pretrained with; empty for an
    unknown backbone. With ``crop``, the short side in the same proportion.

    >>> input_settings("tf_efficientnet_lite0"), input_settings("tf_efficientnet_lite0", 112)
    ({'augment': {'crop': 224}, 'short_side': 256}, {'augment': {'crop': 112}, 'short_side': 128})
    """
    config = pretrained_config(backbone)
    if config is None:
        return {}
    side = crop or int(config.input_size[-1])
    return {"augment": {"crop": side}, "short_side": max(side, round(side / config.crop_pct))}


def find_weights(backbone: str) -> tuple[str, str]:
    """Where timm finds the pretrained weights of a backbone, and why nowhere: one of the two texts is empty."""
    config = pretrained_config(backbone)
    if config is None or not config.has_weights:
        return "", f"timm has no pretrained weights of {backbone}"
    if _is_cached(config):
        return "from the local cache of timm", ""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "", "they are not in the local cache, and HF_HUB_OFFLINE is set"
    reason = _reach(_address(config), SECONDS)
    return (
        ("", f"they are not in the local cache, and the hub does not answer: {reason}")
        if reason
        else ("from the hub", "")
    )


def _is_cached(config: Any) -> bool:
    if config.hf_hub_id:
        from huggingface_hub import try_to_load_from_cache

        names = [config.hf_hub_filename] if config.hf_hub_filename else ["model.safetensors", "pytorch_model.bin"]
        repository, _, revision = config.hf_hub_id.partition("@")
        found = [try_to_load_from_cache(repository, name, revision=revision or None) for name in names]
        if any(isinstance(path, str) for path in found):
            return True
    if not config.url:
        return False
    import torch

    return (Path(torch.hub.get_dir()) / "checkpoints" / config.url.rsplit("/", 1)[-1]).is_file()


def _address(config: Any) -> str:
    if not config.hf_hub_id:
        return str(config.url)
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    repository, _, revision = config.hf_hub_id.partition("@")
    return f"{hub}/{repository}/resolve/{revision or 'main'}/{config.hf_hub_filename or 'config.json'}"


def _reach(address: str, seconds: float) -> str:
    """Why an address does not answer; empty if it does."""
    reasons = [f"no answer within {seconds:g} s"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=seconds):
                reasons[:] = [""]
        except (OSError, ValueError, http.client.HTTPException) as error:
            reasons[:] = [str(getattr(error, "reason", error)) or type(error).__name__]

    # In a thread, because the timeout does not cover the resolution of the host name.
    thread = threading.Thread(target=ask, name="reach the hub", daemon=True)
    thread.start()
    thread.join(seconds)
    return reasons[0]
