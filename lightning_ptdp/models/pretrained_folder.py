"""Folder of a Hugging Face model, possibly downloaded from the hub, and its files."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_ptdp.base.checked_json import FILE_NAME, map_of, record, text
from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.time_limit import in_thread
from lightning_ptdp.base.untrusted import (
    hub_blobs,
    parse_json,
    read_json,
    regular_size,
    small_files,
)
from lightning_ptdp.checkpoint.local_copies import MODEL_FILES, local_copy
from lightning_ptdp.checkpoint.remote_path import is_url
from lightning_ptdp.models.tiny import make_tiny, make_tiny_vision

CONFIG_FILE = "config.json"
ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MOST_INDEX = 1 << 26  # bytes; the library that writes headers has a similar limit
ADAPTER_NAMES = ("*.lora_*",)
"""Patterns of the names that peft's adapters add to a model."""
BASE_WEIGHTS = "base_weights"
"""Key of the base weights' description in a checkpoint of adapters.

The adapters were trained on top of these weights.
"""
TOO_MANY_IDS = (
    "Use the tokenizer of the model, or enlarge the embedding once "
    "(model.resize_token_embeddings({}), then save_pretrained)"
)
_TINY = {"tiny": make_tiny, "tiny-vision": make_tiny_vision}
"""Makers of small models by the prefix of a path."""
_SAMPLES = 64
_SAMPLE = 4096
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_PATIENCE_S = 5
_WEIGHT_MAP = record(
    others=True, weight_map=map_of(text(FILE_NAME, "the name of a file in this folder"), key=text())
)


@dataclass(frozen=True)
class InitialWeights:
    """Source from which the strategy fills a LightningModule.

    The module's ``initial_weights()`` returns it.

    Attributes:
        path: Folder, or name on the hub.
        may_lack: Patterns of the module's names that may be missing in the source. These parameters
            keep their drawn values (``"*.lora_*"``).
        ignores: Regular expressions, searched in the names of stored tensors, of tensors that the
            model does not use.
    """

    path: str
    may_lack: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()


def local_folder(path: str) -> Path:
    """Return the local folder of ``path``.

    For a name on the hub ("Qwen/Qwen3-8B"), it is in huggingface_hub's cache. Missing files are
    downloaded by one process per machine while the rest waits, unless the hub is offline
    (HF_HUB_OFFLINE). For ``tiny:FOLDER``, it is FOLDER with a small model, which is created if it
    does not exist; for ``tiny-vision:FOLDER``, that model is a vision-language model. For an
    address (``s3://bucket/model``), it is a copy on this node.

    Raises:
        ValueError: There is no such folder.
    """
    if is_url(path):
        return local_copy(path, MODEL_FILES)
    name = without_prefix(path)
    if name != path:
        if not os.path.isdir(name):
            _TINY[path.partition(":")[0]](name)
        return Path(name)
    return Path(path) if _is_here(path) else _of_hub(path)


def without_prefix(path: str) -> str:
    """Return the folder in ``tiny:FOLDER``; any other path unchanged."""
    prefix, _, name = path.partition(":")
    return name if name and prefix in _TINY else path


def _is_here(path: str) -> bool:
    """Return True for a folder, False for a possible name on the hub.

    Raises:
        ValueError: It is neither.
    """
    if os.path.isdir(path):
        return True
    if os.path.exists(path):
        raise ValueError(
            f"path={path!r} is a file. Give the folder that contains it, with config.json and "
            "the weights"
        )
    if _HUB_NAME.fullmatch(path) is None:
        raise ValueError(
            f"path={path!r} does not exist. Give a folder with config.json and safetensors, or "
            "a model on the hub"
        )
    return False


def config_folder(path: str) -> Path:
    """Return the local folder with the ``config.json`` of ``path``; nothing else is downloaded.

    Raises:
        ValueError: There is no such folder, or the file cannot be downloaded within a few seconds.
    """
    if is_url(path):
        return local_copy(path, (CONFIG_FILE,))
    return Path(path) if _is_here(path) else _config_of_hub(path)


def fingerprint(folder: Path) -> str:
    """Return a hash that detects changed weights of a folder.

    It covers names, shapes and sizes, and some values of each file.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with open(file, "rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            for start, length in (
                (0, header + 8),
                *((size * part // _SAMPLES, _SAMPLE) for part in range(_SAMPLES)),
            ):
                stream.seek(start)
                digest.update(stream.read(length))
    return digest.hexdigest()


def check_tokenizer(path: str, rows: int) -> None:
    """Check that the embedding has a row for every id of the tokenizer in the model's folder.

    Only a fast tokenizer is checked.

    Raises:
        ValueError: ``rows`` are too few, or the tokenizer's file is damaged.
    """
    folder = local_folder(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    import tokenizers

    try:
        small_files(folder, [file.name])
    except (OSError, ValueError) as error:
        raise ValueError(f"path={path!r}: {error}") from error

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises this type
        raise ValueError(
            f"path={path!r}: {file.name} cannot be read ({one_line(error)}). Copy it again"
        ) from error
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if (needed := max(ids, default=-1) + 1) > rows:
        raise ValueError(
            f"path={path!r}: the tokenizer has ids up to {needed - 1}, but the model's "
            f"embedding has {rows} rows. {TOO_MANY_IDS.format(needed)}"
        )


def _of_hub(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(name, allow_patterns=list(MODEL_FILES), local_files_only=True)
        )
        if _is_complete(folder) or constants.is_offline_mode():
            return folder
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        offline = (
            "transformers is offline (HF_HUB_OFFLINE)"
            if constants.is_offline_mode()
            else f"it could not be downloaded ({type(error).__name__})"
        )
        raise ValueError(
            f"path={name!r} is neither an existing folder nor a model in the hub's cache "
            f"{constants.HF_HUB_CACHE}, and {offline}. Run hf download {name} on a machine "
            "with a connection (and copy the folder that it prints), or give a folder"
        ) from error


def _config_of_hub(name: str) -> Path:
    """Return the folder of a cached ``config.json``, which is downloaded if that is quick."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, CONFIG_FILE, local_files_only=True)).parent
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    # In a thread, because the name resolution of the host cannot be interrupted.
    download = in_thread(partial(_download_config, name), name="ptdp download")
    try:
        return Path(download.result(_PATIENCE_S)).parent
    except Exception as error:
        why = "offline, HF_HUB_OFFLINE" if constants.is_offline_mode() else type(error).__name__
        raise ValueError(
            f"path={name!r} is not a folder, and the {CONFIG_FILE} of this model on the hub is not "
            f"in the cache and could not be downloaded ({why}). Run hf download {name} "
            f"{CONFIG_FILE} on a machine with a connection, or give a folder"
        ) from error


def _download_config(name: str) -> str:
    """Return the path of the file."""
    from huggingface_hub import hf_hub_download

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it reports each of its attempts
    try:
        return hf_hub_download(name, CONFIG_FILE, etag_timeout=_PATIENCE_S)
    finally:
        log.setLevel(level)


def _is_complete(snapshot: Path) -> bool:
    if not (snapshot / CONFIG_FILE).is_file():
        return False
    if (snapshot / INDEX_FILE).is_file():
        return all((snapshot / name).is_file() for name in weight_map(snapshot).values())
    return (snapshot / ONE_FILE).is_file()


def stored_tensors(folder: Path) -> int | None:
    """Return the number of tensors in the safetensors files of a folder.

    The number comes from their index or header; None if there are no such files.

    Raises:
        OSError: A file cannot be read, or is a link to another folder.
        ValueError: A file is damaged.
    """
    if (folder / INDEX_FILE).is_file():
        return len(weight_map(folder))
    file = folder / ONE_FILE
    if not file.is_file():
        return None
    size = regular_size(file, linked=hub_blobs(folder))
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size - 8, _MOST_INDEX):
            raise ValueError(f"{ONE_FILE} is truncated, or is not a safetensors file")
        return len(parse_json(stream.read(length)))


def weight_map(folder: Path) -> dict[str, str]:
    """Return the name of the file of each tensor by the index in a folder.

    Raises:
        OSError: The index cannot be read, or is a link to another folder.
        ValueError: It is damaged.
    """
    index = read_json(folder / INDEX_FILE, most_bytes=_MOST_INDEX, linked=hub_blobs(folder))
    return _WEIGHT_MAP(index)["weight_map"]
