"""Hugging Face folders: ``config.json`` and the weights as safetensors, in one file or several with an index.

Tensors go through one at a time: what is read from their files is mapped, and what is written is asked for when it is its turn.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_ptdp.checked_json import FILE_NAME, map_of, record, text
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
from lightning_ptdp.exchange.families import HF_TIED, config_of_json, family_of_config_json, family_of_hyper_parameters
from lightning_ptdp.exchange.plain import common_prefix, weights_only_state
from lightning_ptdp.exchange.safetensors import open_safetensors, write_safetensors
from lightning_ptdp.exchange.tables import Family, Part
from lightning_ptdp.untrusted import read_json, regular_size

__all__ = ["CONFIG_FILE", "Names", "from_huggingface", "is_huggingface_folder", "open_huggingface", "to_huggingface"]

CONFIG_FILE = "config.json"
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 3
_MOST_INDEX = 1 << 26  # bytes

Names = Literal["ptdp", "hf"]


_WEIGHT_MAP = record(others=True, weight_map=map_of(text(FILE_NAME, "the name of a file in this folder"), key=text()))


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One tensor of theirs and where it is stored in ours."""

    stored: str
    part: Part
    entry: TensorEntry


def is_huggingface_folder(path: Path) -> bool:
    """Whether there is a configuration beside safetensors."""
    return (path / CONFIG_FILE).is_file() and any(path.glob("*.safetensors"))


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
    config, tensors = _read_config(folder, ours=names == "ptdp"), open_huggingface(folder)
    if names == "hf":
        tied = HF_TIED.get(config.get("model_type", ""), {}) if config.get("tie_word_embeddings", True) else {}
        aliases = {alias: name for alias, name in tied.items() if alias not in tensors and name in tensors}
        rectangles = [LocalRectangle.whole(f"model/{prefix}{name}", value) for name, value in tensors.items()]
        state = weights_only_state({})
    else:
        family = family_of_config_json(config, folder / CONFIG_FILE)
        ours = _our_config(family, config, folder)
        rectangles = list(_rectangles(family, ours, tensors, f"model/{prefix}"))
        _check_complete(family, ours, rectangles, f"model/{prefix}", folder)
        aliases = family.aliases(ours)
        state = weights_only_state({"config": asdict(ours)})
    metadata = {"aliases": {prefix + alias: prefix + name for alias, name in aliases.items()}, "converted_from": str(folder)}
    write_checkpoint(destination, rectangles=rectangles, state=state, metadata=metadata)


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
            own models it follows from the checkpoint.
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
        description = _read_config(Path(config), ours=False)
        items = {
            name.removeprefix(prefix): _item(reader, name, Part(ours=name, transposed=False), dtype)
            for name in sorted(stored)
            if name.startswith(prefix)
        }
    else:
        family, ours = family_of_hyper_parameters(read_state(source).get("hyper_parameters", {}))
        description = {"architectures": [family.architecture], "model_type": family.model_type, **family.config_to(ours)}
        items = dict(_items(reader, family, ours, prefix, dtype))
    if not items:
        raise CheckpointError(f"{source} holds no tensor whose name begins with {prefix!r}; there are {sorted(stored)[:_SHOWN]}")
    kinds = [item.entry.dtype for item in items.values() if item.entry.dtype.is_floating_point]
    description = description | {"torch_dtype": str(kinds[0]).removeprefix("torch.")} if kinds else description
    _write_folder(Path(os.path.abspath(destination)), reader, items, description, shard_bytes)


def open_huggingface(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, mapped.

    Raises:
        CheckpointError: Files are missing or damaged, or do not hold what the index says.
    """
    if not (folder / _INDEX).is_file():
        if not (folder / _ONE).is_file():
            raise CheckpointError(f"{folder} has neither {_ONE} nor {_INDEX}: weights in other formats are not read")
        return _open_file(folder, _ONE)
    with reading(folder / _INDEX):
        where = _WEIGHT_MAP(read_json(folder / _INDEX, most_bytes=_MOST_INDEX, linked=_blobs(folder)))["weight_map"]
    if not where:
        raise CheckpointError(f"{folder / _INDEX} is damaged: it names no tensors")
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(where.values())):
        found |= _open_file(folder, name)
    missing = sorted(where.keys() - found.keys())
    if missing:
        raise CheckpointError(f"{folder} is damaged: {_INDEX} names {missing[:_SHOWN]}, which no file holds")
    return {name: found[name] for name in where}


def _open_file(folder: Path, name: str) -> dict[str, torch.Tensor]:
    if not os.path.lexists(folder / name):
        raise CheckpointError(f"{folder} is damaged: {_INDEX} names {name}, which is not there")
    with reading(folder / name):
        regular_size(folder / name, linked=_blobs(folder))
    return open_safetensors(folder / name)


def _blobs(folder: Path) -> list[Path]:
    """Where the files of ``huggingface_hub``'s cache are, whose folders of a model (``snapshots/REVISION``) hold links only."""
    snapshots = Path(os.path.abspath(folder)).parent
    return [snapshots.parent / "blobs"] if snapshots.name == "snapshots" else []


def _our_config(family: Family, config: Mapping[str, Any], folder: Path) -> Any:
    try:
        return family.config_from(config)
    except KeyError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE} has no {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error


def _rectangles(family: Family, config: Any, tensors: Mapping[str, torch.Tensor], prefix: str) -> Iterator[LocalRectangle]:
    """Every tensor of theirs as a rectangle of one of ours."""
    aliases = family.aliases(config)
    bare = not any(name.startswith(family.base) for name in tensors)
    unknown = []
    for name, value in tensors.items():
        if family.is_ignored(name):
            continue
        part = family.place(name, config) or (family.place(family.base + name, config) if bare else None)
        if part is None:
            unknown.append(name)
            continue
        if part.ours in aliases:
            continue
        if value.dim() != 2 if part.transposed else part.rows is not None and not value.dim():
            raise CheckpointError(f"{name!r} has the shape {tuple(value.shape)}, which is not that of a matrix")
        values = value.t() if part.transposed else value
        if part.rows is None:
            yield LocalRectangle.whole(prefix + part.ours, values)
            continue
        if values.shape[0] != part.rows:
            raise CheckpointError(f"{name!r} has {values.shape[0]} rows, but {CONFIG_FILE} says {part.rows}")
        full_rows = sum(other.rows or 0 for other in _siblings(family, part, config))
        offset = (part.start, *(0,) * (values.dim() - 1))
        yield LocalRectangle(name=prefix + part.ours, full_shape=(full_rows, *values.shape[1:]), offset=offset, values=values)
    if unknown:
        raise CheckpointError(f"the table of {family.model_type!r} has no place for {', '.join(map(repr, unknown[:_SHOWN]))}")


def _siblings(family: Family, part: Part, config: Any) -> Iterator[Part]:
    for name in family.names(part.ours, config):
        place = family.place(name, config)
        assert place is not None
        yield place


def _check_complete(family: Family, config: Any, rectangles: list[LocalRectangle], prefix: str, folder: Path) -> None:
    """Compare with the model that the configuration describes."""
    wanted = family.shapes(config, stored=len(rectangles))
    twice = [place for place, count in Counter((one.name, one.offset) for one in rectangles).items() if count > 1]
    if twice:
        raise CheckpointError(f"{folder} has {twice[0][0].removeprefix(prefix)!r} more than once, under different names")
    found = {one.name.removeprefix(prefix): one.full_shape for one in rectangles}
    missing, other = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or other:
        theirs = [next(family.names(name, config), name) for name in missing[:_SHOWN]]
        more = f"has {other[:_SHOWN]} that its {CONFIG_FILE} does not have"
        raise CheckpointError(f"{folder} {f'lacks {theirs}' if missing else more}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(f"{folder}: {name!r} would have the shape {found[name]}, but {CONFIG_FILE} makes it {shape}")


def _items(
    reader: TensorReader, family: Family, config: Any, prefix: str, dtype: torch.dtype | None
) -> Iterator[tuple[str, _Item]]:
    for name in family.shapes(config, stored=len(reader.metadata.tensors)):
        if f"model/{prefix}{name}" not in reader.metadata.tensors:
            raise CheckpointError(f"the checkpoint has no {prefix + name!r}, which its hyperparameters' model has")
        for theirs in family.names(name, config):
            part = family.place(theirs, config)
            assert part is not None
            yield theirs, _item(reader, prefix + name, part, dtype)


def _item(reader: TensorReader, stored: str, part: Part, dtype: torch.dtype | None) -> _Item:
    entry = reader.metadata.tensors[f"model/{stored}"]
    shape = entry.shape if part.rows is None else (part.rows, *entry.shape[1:])
    kind = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
    return _Item(
        stored=f"model/{stored}", part=part, entry=TensorEntry(shape=shape[::-1] if part.transposed else shape, dtype=kind)
    )


def _write_folder(
    target: Path, reader: TensorReader, items: Mapping[str, _Item], config: Mapping[str, Any], shard_bytes: int
) -> None:
    files.check_replaceable(target, marker=CONFIG_FILE)

    def read(name: str) -> torch.Tensor:
        item = items[name]
        shape = item.entry.shape[::-1] if item.part.transposed else item.entry.shape
        value = reader.read(item.stored, offset=(item.part.start, *(0,) * (len(shape) - 1)), shape=shape).to(item.entry.dtype)
        return value.t() if item.part.transposed else value

    shards = _shards(items, shard_bytes)
    names = [_ONE] if len(shards) == 1 else [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(files.part_name(target))
    try:
        part.mkdir()
        for file, shard in zip(names, shards, strict=True):
            write_safetensors(part / file, {name: items[name].entry for name in shard}, read, metadata={"format": "pt"})
        if len(shards) > 1:
            total = sum(_bytes(item) for item in items.values())
            where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            _write_json(part / _INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        _write_json(part / CONFIG_FILE, config)
        files.sync_folder(part)
        files.replace(part, target)
    except OSError as error:
        raise CheckpointError(f"writing {target} failed: {error}") from error
    finally:
        files.remove(part)


def _shards(items: Mapping[str, _Item], limit: int) -> list[list[str]]:
    if limit < 1:
        raise CheckpointError(f"shard_bytes={limit} must be a positive number of bytes")
    shards: list[list[str]] = [[]]
    size = 0
    for name, item in items.items():
        if shards[-1] and size + _bytes(item) > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(item)
    return shards


def _bytes(item: _Item) -> int:
    return math.prod(item.entry.shape) * item.entry.dtype.itemsize


def _read_config(path: Path, *, ours: bool) -> dict[str, Any]:
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: a Hugging Face folder has a {CONFIG_FILE}")
    with reading(file):
        content = read_json(file, linked=_blobs(file.parent))
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return config_of_json(file, content, ours=ours)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    with files.open_synced(file) as stream:
        stream.write((json.dumps(content, indent=2) + "\n").encode())
