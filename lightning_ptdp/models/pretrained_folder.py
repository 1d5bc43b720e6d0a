"""Description of a Hugging Face model.

The source is a folder, a name on the hub whose files are in the cache, or sizes alone.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.base.time_limit import in_thread
from lightning_ptdp.base.untrusted import MOST_SETTINGS, parse_json, small_files
from lightning_ptdp.checkpoint.local_copies import MODEL_FILES, local_copy
from lightning_ptdp.checkpoint.remote_path import is_url
from lightning_ptdp.models.checked_config import (
    CONFIG_FILE,
    INDEX_FILE,
    ONE_FILE,
    check_sizes,
    stored_tensors,
    weight_map,
)
from lightning_ptdp.models.tiny import TINY_SIZES, make_tiny, make_tiny_vision

ADAPTER_NAMES = ("*.lora_*",)
"""Patterns of the names that peft's adapters add to a model."""
BASE_WEIGHTS = "base_weights"
"""Key of the base weights' description in a checkpoint of adapters.

These are the weights beside which the adapters were trained.
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
_READ = ("*.json", "*.txt", "*.model", "*.jinja")
_PATIENCE_S = 5
_WORD = re.compile(r"\w+")


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


def config_values(path: str) -> Mapping[str, Any]:
    """Return the content of the ``config.json`` of ``path``.

    Nothing else is downloaded or created. For ``tiny:FOLDER`` without the folder, these are the
    sizes of the model that would be created there.

    Raises:
        ValueError: It is missing, damaged, or cannot be downloaded within a few seconds.
    """
    name = without_prefix(path)
    if name != path and not os.path.isdir(name):
        return TINY_SIZES
    if is_url(name):
        folder = local_copy(name, (CONFIG_FILE,))
    else:
        folder = Path(name) if _is_here(name) else _config_of_hub(name)
    if not os.path.lexists(folder / CONFIG_FILE):
        raise ValueError(
            f"path={path!r}: {folder} has no {CONFIG_FILE}. Give the folder that save_pretrained wrote"
        )
    return _read_config(folder, f"path={path!r}")


def read_model_config(path: str) -> Any:
    """Return the configuration that transformers reads from the folder of ``path``.

    Its numbers are compared with the weights beside it. No code in the folder is run.

    Raises:
        ValueError: It is missing or damaged, belongs to no known model, or does not fit the
            weights.
    """
    transformers = import_optional("transformers")

    folder = local_folder(path)
    if not os.path.lexists(folder / CONFIG_FILE):
        raise ValueError(
            f"path={path!r}: {folder} has no {CONFIG_FILE}. Give the folder that save_pretrained wrote"
        )
    values = _read_config(folder, f"path={path!r}")
    kind = values.get("model_type")
    if values.get("auto_map") and (
        not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING
    ):
        raise ValueError(
            f"path={path!r}: transformers {transformers.__version__} has no "
            f"model_type={kind!r}, and {CONFIG_FILE} refers to code in the model's folder "
            "(auto_map), which is not run. Use the model in your own LightningModule"
        )
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the checks of transformers raise many types
        reason = str(error).strip().partition("\n")[0][:300]
        raise ValueError(
            f"path={path!r}: transformers {transformers.__version__} finds no model "
            f"configuration in {CONFIG_FILE} ({reason})"
        ) from error


def _read_config(folder: Path, label: str) -> dict[str, Any]:
    try:
        small_files(folder, _READ)
        values: dict[str, Any] = parse_json(
            (folder / CONFIG_FILE).read_bytes(), most_values=MOST_SETTINGS
        )
        if not isinstance(values, dict):
            raise ValueError(f"{CONFIG_FILE} must be a JSON object")
        stored = stored_tensors(folder)
    except OSError as error:
        raise ValueError(
            f"{label}: {error.filename or folder} cannot be read: {error.strerror or error}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{label}: a file of {folder} is damaged: {error}") from error
    check_sizes(values, f"{label}: {CONFIG_FILE}: ", stored=stored)
    return values


def config_of_sizes(sizes: Mapping[str, Any]) -> Any:
    """Return the configuration of transformers for the content of a ``config.json``.

    Missing fields have the model's default.

    Raises:
        ValueError: The model type or a field is unknown, or a value is not accepted.
    """
    transformers = import_optional("transformers")

    check_sizes(sizes, "config.")
    values = dict(sizes)
    name = values.pop("model_type", "")
    if name not in transformers.CONFIG_MAPPING:
        known = list(transformers.CONFIG_MAPPING)
        raise ValueError(
            f"config.model_type={name!r} is not a model of transformers "
            f"{transformers.__version__}{nearest(str(name), known)}"
        )
    kind = transformers.CONFIG_MAPPING[name]
    try:
        config = kind(**values)
        known = vars(kind())
    except Exception as error:  # the checks of transformers raise many types
        raise ValueError(
            f"config: {kind.__name__} does not accept these fields: {one_line(error)}"
        ) from error
    if undeclared := [name for name in values if name in vars(config) and name not in known]:
        # Some models read fields that their configuration does not declare (Qwen3-MoE: head_dim).
        model = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
        words = set(_WORD.findall(inspect.getsource(model)))
        if unknown := [name for name in undeclared if name not in words]:
            raise ValueError(
                f"config.{unknown[0]} is not a field of "
                f"{kind.__name__}{nearest(unknown[0], [*known, *kind.attribute_map])}"
            )
    return config


def check_tokenizer(path: str, rows: int) -> None:
    """Check that the embedding has a row for every id of the tokenizer beside the model.

    Only a fast tokenizer is checked.

    Raises:
        ValueError: ``rows`` are too few.
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

    ids = tokenizers.Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values()
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
