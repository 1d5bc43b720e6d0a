"""Conversion of any supported file or folder to another kind.

The source's kind follows from its content, and the result's kind from names unless it is given.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from lightning_ptdp.checkpoint import (
    PARAMETER_NAMES,
    CheckpointError,
    files,
    read_state,
    to_lightning_file,
)
from lightning_ptdp.checkpoint.local_copies import readable, send
from lightning_ptdp.checkpoint.metadata import METADATA_FILE
from lightning_ptdp.checkpoint.remote_path import PathLike, RemotePath, located
from lightning_ptdp.exchange.adapter_weights import base_of_adapters, merge_adapters, to_adapters
from lightning_ptdp.exchange.export import SHARD_BYTES, to_huggingface
from lightning_ptdp.exchange.model_folder import reads_as_huggingface
from lightning_ptdp.exchange.native_models import Names, from_huggingface
from lightning_ptdp.exchange.state_dict_files import (
    as_folder,
    from_state_dict,
    open_state_dict,
    to_state_dict,
)

Kind = Literal["checkpoint", "huggingface", "adapter", "state_dict", "lightning"]
_MARKERS: Mapping[Kind, str] = {
    "checkpoint": METADATA_FILE,
    "huggingface": files.EXPORT_MARK,
    "adapter": files.EXPORT_MARK,
}
"""Name of the file that identifies a folder of this kind, so that it may be replaced."""
_STATE_DICTS = (".pt", ".pth", ".bin", ".safetensors")


def kind_of(path: PathLike) -> Kind:
    """Return the kind of the file or folder at ``path``.

    Raises:
        CheckpointError: Nothing is at ``path``, or nothing that can be converted.
    """
    place = located(path)
    if (place / METADATA_FILE).is_file():
        return "checkpoint"
    if reads_as_huggingface(place):
        return "huggingface"
    if place.is_file() and place.suffix == ".ckpt":
        return "lightning"
    if place.is_file() and place.suffix in _STATE_DICTS:
        return "state_dict"
    if not place.exists():
        raise CheckpointError(f"{place} does not exist")
    raise CheckpointError(
        f"{place} is not a checkpoint folder ({METADATA_FILE}), not a Hugging Face folder "
        f"(config.json and *.safetensors), and not a {', '.join(_STATE_DICTS)} or .ckpt file"
    )


def kind_of_result(
    source: PathLike,
    destination: PathLike,
    *,
    to: Kind | None = None,
    merge: bool = False,
) -> Kind:
    """Return the kind of the result of ``convert`` with these arguments.

    Raises:
        CheckpointError: ``source`` cannot be converted to this kind, or ``destination`` has content
            that may not be replaced.
    """
    source = readable(source)
    kind = kind_of(source)
    state: Mapping[str, Any] = {}
    if kind == "checkpoint":
        state = read_state(source)
    elif kind == "lightning":
        state = open_state_dict(source)[1]
    target_kind = to or _wanted(kind, Path(destination), PARAMETER_NAMES in state)
    if target_kind not in get_args(Kind):
        raise CheckpointError(f"to={target_kind!r} must be one of {list(get_args(Kind))}")
    holds_adapters = base_of_adapters(state) is not None
    if holds_adapters and target_kind == "huggingface" and not merge:
        target_kind = "adapter"
    if merge and holds_adapters and target_kind != "huggingface":
        raise CheckpointError(
            f"--merge creates a Hugging Face folder, but the target {destination} is a "
            f"{target_kind}. Leave one of them out"
        )
    if (target_kind == "adapter" or merge) and not holds_adapters:
        raise CheckpointError(
            f"{source} has no adapters beside the weights of a folder. Leave out --merge and "
            "--to adapter"
        )
    targets = {
        "checkpoint": get_args(Kind)[1:],
        "lightning": [target for target in get_args(Kind) if target != "lightning"],
    }
    if target_kind not in targets.get(kind, ["checkpoint"]):
        hint = (
            "there is nothing to convert"
            if kind == target_kind
            else "first convert to a checkpoint, and then convert that"
        )
        raise CheckpointError(
            f"{source} is a {kind}, and the target {destination} is a {target_kind}: {hint}"
        )
    files.check_apart(destination, [source])
    if target_kind not in _MARKERS and located(destination).is_dir():
        raise CheckpointError(f"{destination} is a folder. Give the path of the file to write")
    if target_kind in _MARKERS:
        # ``torch.save`` writes zip files.
        files.check_replaceable(
            destination,
            marker=_MARKERS[target_kind],
            or_file=zipfile.is_zipfile(located(destination)),
        )
    return target_kind


def convert(  # noqa: PLR0913
    source: PathLike,
    destination: PathLike,
    *,
    to: Kind | None = None,
    names: Names = "ptdp",
    prefix: str | None = None,
    config: PathLike | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    merge: bool = False,
) -> Kind:
    """Convert between this package's checkpoints and the formats of other libraries.

    The formats are Hugging Face folders, peft's adapter folders, state dicts and Lightning's single
    file.

    Args:
        source: A checkpoint folder, a Hugging Face folder, or a file (``.pt``, ``.pth``, ``.bin``,
            ``.safetensors``, ``.ckpt``). A ``.ckpt`` file converts to the same formats as a
            checkpoint folder.
        destination: The file or folder to write. A file, a checkpoint or an earlier export there is
            replaced.
        to: Kind of the result. Default for a checkpoint: a state dict or Lightning's file if the
            destination has the suffix of one, else a Hugging Face folder. Default for a ``.ckpt``
            file: a state dict if the destination has the suffix of one; else a Hugging Face folder
            if training under this strategy has written the file and the destination does not end
            with ``.ckpt``; else a checkpoint. Default for every other source: a checkpoint; a
            destination with the suffix of a state dict is refused.
        names: Names of the tensors read from a Hugging Face folder: "ptdp" for the native model,
            "hf" for a LightningModule that wraps a Hugging Face model.
        prefix: Attribute of the model in the LightningModule, with a dot. Default: "model." when
            reading a Hugging Face folder, the common prefix of all names when writing one, none for
            state dicts.
        config: See :func:`to_huggingface`. With ``merge``: current folder of the base weights.
        dtype: Dtype of the floating-point tensors in an export; default: as stored.
        shard_bytes: Maximum number of bytes in one file of a Hugging Face folder.
        merge: Merge a checkpoint's adapters into the weights and write the whole model, instead of
            a peft folder.

    Returns:
        The kind of the result.

    Raises:
        CheckpointError: The conversion failed. Nothing is left at ``destination``.
    """
    source = readable(source)
    kind = kind_of(source)
    target_kind = kind_of_result(source, destination, to=to, merge=merge)
    files.check_apart(destination, [] if config is None else [config])
    convert_again = partial(
        convert,
        to=target_kind,
        names=names,
        prefix=prefix,
        config=config,
        dtype=dtype,
        shard_bytes=shard_bytes,
        merge=merge,
    )
    target = located(destination)
    if isinstance(target, RemotePath) and target_kind != "checkpoint":
        with tempfile.TemporaryDirectory(prefix="ptdp-") as scratch:
            convert_again(source, Path(scratch) / target.name)
            send(Path(scratch) / target.name, target)
        return target_kind
    if kind == "lightning" and target_kind != "checkpoint":
        with as_folder(source, target=destination) as folder:
            return convert_again(folder, destination)
    if kind == "huggingface":
        from_huggingface(
            source, destination, names=names, prefix="model." if prefix is None else prefix
        )
    elif kind != "checkpoint":
        from_state_dict(source, destination, prefix=prefix or "")
    elif target_kind == "adapter":
        to_adapters(source, destination, dtype=dtype)
    elif merge:
        merge_adapters(source, destination, base=config, dtype=dtype, shard_bytes=shard_bytes)
    elif target_kind == "huggingface":
        to_huggingface(
            source, destination, config=config, prefix=prefix, dtype=dtype, shard_bytes=shard_bytes
        )
    elif target_kind == "state_dict":
        to_state_dict(source, destination, prefix=prefix or "", dtype=dtype)
    else:
        to_lightning_file(source, destination)
    return target_kind


def _wanted(kind: Kind, destination: Path, is_trained: bool) -> Kind:
    if destination.suffix in _STATE_DICTS:
        return "state_dict"
    if kind != "checkpoint" and (not is_trained or destination.suffix == ".ckpt"):
        return "checkpoint"
    return "lightning" if destination.suffix == ".ckpt" else "huggingface"
