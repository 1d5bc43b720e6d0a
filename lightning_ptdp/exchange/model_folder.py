"""Reader of a Hugging Face folder: ``config.json``, and the weights as safetensors.

The weights are in one file, or in several files with an index.
"""

from __future__ import annotations

import os
from pathlib import Path

from lightning_ptdp.base.checked_json import Json, flag, optional, record, text
from lightning_ptdp.base.errors import listed
from lightning_ptdp.base.untrusted import hub_blobs, read_json, regular_size
from lightning_ptdp.checkpoint import CheckpointError, reading
from lightning_ptdp.checkpoint.remote_path import PathLike, located
from lightning_ptdp.checkpoint.stored_tensor import StoredTensor
from lightning_ptdp.checkpoint.tensor_files import list_safetensors
from lightning_ptdp.models.pretrained_config import check_quantization, check_sizes
from lightning_ptdp.models.pretrained_folder import CONFIG_FILE, INDEX_FILE, ONE_FILE, weight_map

_SHOWN = 3
_ANY_MODEL = record(others=True, model_type=optional(text()), tie_word_embeddings=optional(flag))


def reads_as_huggingface(path: PathLike) -> bool:
    """Return True for a Hugging Face folder: a configuration beside safetensors."""
    place = located(path)
    if not isinstance(place, Path):
        return False
    return (place / CONFIG_FILE).is_file() and any(place.glob("*.safetensors"))


def read_config(path: Path) -> dict[str, Json]:
    """Return the content of a ``config.json``, given as a file or by its folder.

    The fields that every model has are checked.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(
            f"{file} does not exist, but a Hugging Face folder must have a {CONFIG_FILE}"
        )
    with reading(file):
        content: dict[str, Json] = read_json(file, linked=hub_blobs(file.parent))
        _ANY_MODEL(content)
        check_sizes(content)
    return content


def list_huggingface(folder: Path) -> dict[str, StoredTensor]:
    """Return the positions of all tensors of a folder, from the headers of its files alone.

    Raises:
        CheckpointError: Files are missing or damaged, or contradict the index or the configuration.
    """
    tensors = _listed(folder)
    if (folder / CONFIG_FILE).exists():
        content = read_config(folder)
        with reading(folder / CONFIG_FILE, "does not fit the weights"):
            check_quantization(content, {value.entry.dtype for value in tensors.values()})
    return tensors


def _listed(folder: Path) -> dict[str, StoredTensor]:
    if not (folder / INDEX_FILE).is_file():
        if not (folder / ONE_FILE).is_file():
            raise CheckpointError(f"{folder} {_why_no_weights(folder)}")
        return list_safetensors(_checked(folder, ONE_FILE))
    with reading(folder / INDEX_FILE):
        file_of = weight_map(folder)
    if not file_of:
        raise CheckpointError(f"{folder / INDEX_FILE} is damaged: it lists no tensors")
    absent = sorted({name for name in file_of.values() if not os.path.lexists(folder / name)})
    if absent:
        count = len(set(file_of.values()))
        verb = "is" if len(absent) == 1 else "are"
        raise CheckpointError(
            f"{folder} is damaged: of the {count} files in {INDEX_FILE}, {len(absent)} {verb} "
            f"missing ({listed(absent, _SHOWN)}). "
            "Download or copy the folder again"
        )
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(file_of.values())):
        tensors |= list_safetensors(_checked(folder, name))
    missing = sorted(file_of.keys() - tensors.keys())
    if missing:
        raise CheckpointError(
            f"{folder} is damaged: {INDEX_FILE} lists {missing[:_SHOWN]}, but no file has them"
        )
    return {name: tensors[name] for name in file_of}


def _checked(folder: Path, name: str) -> Path:
    with reading(folder / name):
        regular_size(folder / name, linked=hub_blobs(folder))
    return folder / name


def _why_no_weights(folder: Path) -> str:
    pickled = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    )
    reason = f"has neither {ONE_FILE} nor {INDEX_FILE}"
    if not pickled:
        return f"{reason}. Put the weights there, as save_pretrained writes them"
    return (
        f"{reason}, and {pickled[0]} is a pickle, which is not read. If you trust it, convert "
        "it once to safetensors with "
        f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}, "
        "use_safetensors=False).save_pretrained(another folder)"
    )
