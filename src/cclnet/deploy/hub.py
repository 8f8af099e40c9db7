"""Upload of an exported model with its card to the Hugging Face Hub."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from cclnet.deploy.export import export
from cclnet.errors import InputError, first_line
from cclnet.runs.checksums import FILE_NAME, check_file, is_there
from cclnet.runs.folder import RunFolder

# Nothing else leaves the machine: neither predictions nor names of images nor pictures.
SENT = (
    "README.md", "config.json", "model.json", "calibration.json", "soft_labels.csv", "model.safetensors", "model.onnx",
    "model.pt2", "features.safetensors", FILE_NAME,
)  # fmt: skip
_MODELS = {"model.safetensors", "model.onnx", "model.pt2"}
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)


def push(
    folder: str | Path, repository: str, private: bool = True, licence: str = "", endpoint: str | None = None
) -> str:
    """Upload an export, or a run (which is exported to timm's format first); returns the address of the commit.

    The token is that of ``hf auth login`` or HF_TOKEN, and never an argument.

    Args:
        repository: "owner/name". It is created if it does not exist.
        private: whether a new repository is private; one that exists is left as it is.
        endpoint: address of another hub. Default: HF_ENDPOINT, else huggingface.co.
    """
    folder = Path(folder).expanduser()
    if not _REPOSITORY.fullmatch(repository):
        raise InputError(f"a repository is named owner/name, such as me/skin-lesions; got '{repository}'.")
    if RunFolder(folder).read_model().export is not None:
        return _upload(folder, repository, private, endpoint)
    with tempfile.TemporaryDirectory() as scratch:
        return _upload(export(folder, "timm", Path(scratch) / "export", licence), repository, private, endpoint)


def _upload(folder: Path, repository: str, private: bool, endpoint: str | None) -> str:
    from huggingface_hub import HfApi

    names = [name for name in SENT if is_there(folder / name)]
    for name in names:
        check_file(folder / name)  # a changed file is refused here, not by those who download it
        if (folder / name).resolve().parent != folder.resolve():
            raise InputError(f"{folder / name} is a link out of the folder, which is not followed.")
    if not _MODELS & set(names):
        raise InputError(f"{folder} holds no model: none of {', '.join(sorted(_MODELS))}. Export it again.")
    try:
        api = HfApi(endpoint=endpoint, library_name="cclnet")
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=names, commit_message="Model exported by cclnet"
        )
    except Exception as error:  # no token, refused, no network, no address: their classes have no common base
        raise InputError(
            f"{repository} could not be written at {endpoint or 'the hub'}: {first_line(error)}. Sign in with `hf auth "
            "login` or set HF_TOKEN to a token that may write there."
        ) from error
    return str(commit.commit_url)
