"""Between our checkpoints and Hugging Face folders.

Tensors go through one at a time: what is read from their files is mapped, and what is written is asked for when it is its turn.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from lightning_ptdp.checked_json import Json
from lightning_ptdp.checkpoint import (
    CheckpointError,
    LocalRectangle,
    TensorEntry,
    TensorReader,
    files,
    read_state,
    reading,
    write_checkpoint,
)
from lightning_ptdp.exchange.architecture import check_architecture, verify_huggingface
from lightning_ptdp.exchange.families import HF_TIED, family_of_config_json, model_of_hyper_parameters
from lightning_ptdp.exchange.folder import CONFIG_FILE, INDEX_FILE, ONE_FILE, open_huggingface, read_config
from lightning_ptdp.exchange.plain import common_prefix, converted, weights_only_state
from lightning_ptdp.exchange.safetensors import write_safetensors
from lightning_ptdp.exchange.tables import Model, Part
from lightning_ptdp.exchange.tokenizers import tokenizer_beside, tokenizer_of
from lightning_ptdp.models import GPTConfig

__all__ = ["Names", "from_huggingface", "our_rectangles", "to_huggingface", "verify_export"]

_SHOWN = 3

Names = Literal["ptdp", "hf"]


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One tensor of theirs and where it is stored in ours."""

    stored: str
    part: Part
    entry: TensorEntry


def from_huggingface(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    names: Names = "ptdp",
    prefix: str = "model.",
) -> None:
    """Write a checkpoint of ours from a Hugging Face folder; bit for bit the same values.

    Args:
        source: The folder.
        destination: The checkpoint folder to make. It holds weights and no state of training: start from it with
            ``init_from`` (``ptdp fit --init_from``) or :func:`lightning_ptdp.checkpoint.load_tensors`.
        names: "ptdp" for our own model of that kind (``LitGPT``, ``LitBert``), "hf" to keep their names, for a LightningModule that
            wraps the Hugging Face model; then any architecture will do.
        prefix: Name of the model's attribute in the LightningModule, with a dot.

    Raises:
        CheckpointError: The folder is damaged, lacks tensors, is of an unsupported architecture (lists the supported), or has
            choices that our model does not know. Nothing is left at ``destination``.
    """
    folder = Path(source)
    if names == "hf":
        config, tensors = read_config(folder), open_huggingface(folder)
        tied = HF_TIED.get(config.get("model_type") or "", {}) if config.get("tie_word_embeddings", True) else {}
        aliases = {alias: name for alias, name in tied.items() if alias not in tensors and name in tensors}
        rectangles = [LocalRectangle.whole(f"model/{prefix}{name}", value) for name, value in tensors.items()]
        state = weights_only_state({})
    else:
        model, rectangles = our_rectangles(folder, f"model/{prefix}")
        aliases = model.aliases
        state = weights_only_state({"config": asdict(model.config)})
    metadata = {"aliases": {prefix + alias: prefix + name for alias, name in aliases.items()}, "converted_from": str(folder)}
    write_checkpoint(destination, rectangles=rectangles, state=state, metadata=metadata)


def our_rectangles(folder: Path, prefix: str) -> tuple[Model, list[LocalRectangle]]:
    """The model of ours that a Hugging Face folder holds, and its mapped tensors as parts of ours; names begin with ``prefix``.

    Raises:
        CheckpointError: As of ``from_huggingface``.
    """
    config, tensors = read_config(folder), open_huggingface(folder)
    family = family_of_config_json(config, folder / CONFIG_FILE)
    with reading(folder / CONFIG_FILE, "cannot be one of our models"):
        model = family.read(config)
    rectangles = list(_rectangles(model, tensors, prefix))
    _check_complete(model, rectangles, prefix, folder)
    return model, rectangles


def to_huggingface(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    prefix: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a Hugging Face folder from a checkpoint of ours, of any layout.

    Args:
        source: The checkpoint folder.
        destination: The folder to make; an existing folder of that kind is replaced.
        config: For a LightningModule that wraps a Hugging Face model, that model's ``config.json``, or the folder it is in. For our
            own models it follows from the checkpoint. The tokenizer's files beside it go along, or for a GPT of ours those of the data
            folder that the checkpoint names, as transformers reads them.
        prefix: Name of the model's attribute in the LightningModule, with a dot; tensors of other names are left out. Default: what
            all names begin with.
        dtype: What floating-point tensors are converted to; default: as they are.
        shard_bytes: Most bytes of tensors in one file.

    Raises:
        CheckpointError: The checkpoint is damaged, or holds a model that Hugging Face does not have; nothing is left at
            ``destination``.
    """
    reader = TensorReader(source)
    stored = {name.removeprefix("model/") for name in reader.metadata.names("model/")}
    prefix = common_prefix(stored) if prefix is None else prefix
    if config is not None:
        description, tokenizer = read_config(Path(config)), tokenizer_beside(Path(config))
        items = {
            name.removeprefix(prefix): _item(reader, name, Part(ours=name, transposed=False), dtype)
            for name in sorted(stored)
            if name.startswith(prefix)
        }
    else:
        state = read_state(source)
        model = model_of_hyper_parameters(state.get("hyper_parameters", {}))
        description, tokenizer = model.write(), tokenizer_of(state) if isinstance(model.config, GPTConfig) else {}
        items = dict(_items(reader, model, prefix, dtype))
    if not items:
        raise CheckpointError(f"{source} holds no tensor whose name begins with {prefix!r}; there are {sorted(stored)[:_SHOWN]}")
    # Our own have been compared with their table; for others, who else knows?
    if config is not None or find_spec("transformers") is not None:
        check_architecture(description, {name: item.entry.shape for name, item in items.items()}, str(source))
    kinds = [item.entry.dtype for item in items.values() if item.entry.dtype.is_floating_point]
    description = description | {"torch_dtype": str(kinds[0]).removeprefix("torch.")} if kinds else description
    _write_folder(Path(os.path.abspath(destination)), reader, items, description, shard_bytes, tokenizer)


def verify_export(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    prefix: str | None = None,
) -> str:
    """What ``verify_huggingface`` finds of a folder that ``to_huggingface`` made; the arguments are those that it was given.

    Raises:
        CheckpointError: The folder does not give what the checkpoint gives.
    """
    if prefix is None:
        prefix = common_prefix({name.removeprefix("model/") for name in TensorReader(source).metadata.names("model/")})
    model = None if config is not None else model_of_hyper_parameters(read_state(source).get("hyper_parameters", {}))
    return verify_huggingface(source, folder, prefix=prefix, model=model)


def _rectangles(model: Model, tensors: Mapping[str, torch.Tensor], prefix: str) -> Iterator[LocalRectangle]:
    """Every tensor of theirs as a rectangle of one of ours."""
    family = model.family
    bare = not any(name.startswith(family.base) for name in tensors)
    unknown = []
    for name, value in tensors.items():
        if family.is_ignored(name):
            continue
        part = model.place(name) or (model.place(family.base + name) if bare else None)
        if part is None:
            unknown.append(name)
            continue
        if part.ours in model.aliases:
            continue
        if value.dim() != 2 if part.transposed else part.rows is not None and not value.dim():
            raise CheckpointError(f"{name!r} has the shape {tuple(value.shape)}, which is not that of a matrix")
        values = value.t() if part.transposed else value
        if part.full_rows is None:
            yield LocalRectangle.whole(prefix + part.ours, values)
            continue
        if values.shape[0] != part.rows:
            raise CheckpointError(f"{name!r} has {values.shape[0]} rows, but {CONFIG_FILE} says {part.rows}")
        offset = (part.start, *(0,) * (values.dim() - 1))
        yield LocalRectangle(
            name=prefix + part.ours, full_shape=(part.full_rows, *values.shape[1:]), offset=offset, values=values
        )
    if unknown:
        raise CheckpointError(f"the table of {family.model_type!r} has no place for {', '.join(map(repr, unknown[:_SHOWN]))}")


def _check_complete(model: Model, rectangles: list[LocalRectangle], prefix: str, folder: Path) -> None:
    """Compare with the model that the configuration describes."""
    wanted = model.shapes(stored=len(rectangles))
    twice = [place for place, count in Counter((one.name, one.offset) for one in rectangles).items() if count > 1]
    if twice:
        raise CheckpointError(f"{folder} has {twice[0][0].removeprefix(prefix)!r} more than once, under different names")
    found = {one.name.removeprefix(prefix): one.full_shape for one in rectangles}
    missing, other = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or other:
        theirs = [next(model.parts(name), (name,))[0] for name in missing[:_SHOWN]]
        more = f"has {other[:_SHOWN]} that its {CONFIG_FILE} does not have"
        raise CheckpointError(f"{folder} {f'lacks {theirs}' if missing else more}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(f"{folder}: {name!r} would have the shape {found[name]}, but {CONFIG_FILE} makes it {shape}")


def _items(reader: TensorReader, model: Model, prefix: str, dtype: torch.dtype | None) -> Iterator[tuple[str, _Item]]:
    shapes, tensors = model.shapes(stored=len(reader.metadata.tensors)), reader.metadata.tensors
    wanted = {f"model/{prefix}{name}" for name in (*shapes, *model.aliases)}
    if other := sorted(name for name in tensors if name.startswith(f"model/{prefix}") and name not in wanted):
        raise CheckpointError(
            f"the checkpoint has {other[0].removeprefix('model/')!r}, which its hyperparameters' model has not: merge adapters into the "
            "weights first"
        )
    for name, shape in shapes.items():
        if f"model/{prefix}{name}" not in tensors:
            raise CheckpointError(f"the checkpoint has no {prefix + name!r}, which its hyperparameters' model has")
        if (found := tuple(tensors[f"model/{prefix}{name}"].shape)) != shape:
            raise CheckpointError(f"{prefix + name!r} has the shape {found}, which its hyperparameters make {shape}")
        for theirs, part in model.parts(name):
            yield theirs, _item(reader, prefix + name, part, dtype)


def _item(reader: TensorReader, stored: str, part: Part, dtype: torch.dtype | None) -> _Item:
    entry = reader.metadata.tensors[f"model/{stored}"]
    shape = entry.shape if part.rows is None else (part.rows, *entry.shape[1:])
    theirs = TensorEntry(shape=shape[::-1] if part.transposed else shape, dtype=converted(entry.dtype, dtype))
    return _Item(stored=f"model/{stored}", part=part, entry=theirs)


def _write_folder(
    target: Path,
    reader: TensorReader,
    items: Mapping[str, _Item],
    config: Mapping[str, Json],
    shard_bytes: int,
    tokenizer: Mapping[str, bytes],
) -> None:
    files.check_replaceable(target, marker=CONFIG_FILE)

    def read(name: str) -> torch.Tensor:
        item = items[name]
        shape = item.entry.shape[::-1] if item.part.transposed else item.entry.shape
        value = reader.read(item.stored, offset=(item.part.start, *(0,) * (len(shape) - 1)), shape=shape).to(item.entry.dtype)
        return value.t() if item.part.transposed else value

    shards = _shards(items, shard_bytes)
    names = (
        [ONE_FILE] if len(shards) == 1 else [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    )
    with files.replacing(target) as part:
        part.mkdir()
        for file, shard in zip(names, shards, strict=True):
            write_safetensors(part / file, {name: items[name].entry for name in shard}, read, metadata={"format": "pt"})
        if len(shards) > 1:
            total = sum(item.entry.num_bytes for item in items.values())
            where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            _write_json(part / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": where})
        _write_json(part / CONFIG_FILE, config)
        for name, content in tokenizer.items():
            (part / name).write_bytes(content)
        files.sync_folder(part)


def _shards(items: Mapping[str, _Item], limit: int) -> list[list[str]]:
    if limit < 1:
        raise CheckpointError(f"shard_bytes={limit} must be a positive number of bytes")
    shards: list[list[str]] = [[]]
    size = 0
    for name, item in items.items():
        if shards[-1] and size + item.entry.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += item.entry.num_bytes
    return shards


def _write_json(file: Path, content: Mapping[str, Json]) -> None:
    with files.open_synced(file) as stream:
        stream.write((json.dumps(content, indent=2) + "\n").encode())
