"""Checks of a foreign model's configuration, before the model is built."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_ptdp.base.checked_json import FILE_NAME, map_of, record, text
from lightning_ptdp.base.untrusted import hub_blobs, parse_json, read_json, regular_size

CONFIG_FILE = "config.json"
ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MOST_INDEX = 1 << 26  # bytes; the library that writes headers has a similar limit
_SIZE = re.compile(
    r"(hidden|intermediate|vocab|embedding)_size|_(heads|experts|embd|inner)|head_dim|d_model|d_ff|ffn_dim|n_head"
)
_BLOCKS = re.compile(r"(?<!feature)_(layers?|experts)")
_EPSILON = re.compile(r"(^|_)eps(ilon)?")
_MOST_SIZE = 2**31 - 1
_MOST_BLOCKS = 4096
_FEW_BLOCKS = 256
"""Layers that are built in a second.

Models whose layers share one layer's tensors may have this many without more tensors.
"""
_WEIGHT_MAP = record(
    others=True, weight_map=map_of(text(FILE_NAME, "the name of a file in this folder"), key=text())
)
_FLOATING = ("float16", "bfloat16", "float32", "float64")


def check_sizes(config: Mapping[str, Any], where: str = "", *, stored: int | None = None) -> None:
    """Check the numbers of a ``config.json``, including those of inner configurations.

    Args:
        config: Content of the file.
        where: Prefix of a field in messages.
        stored: Number of tensors beside it, if there are weights. Every layer has at least one.

    Raises:
        ValueError: A size is negative or not a whole number, a number is NaN, or there are more
            layers than tensors.
    """
    most_blocks = _MOST_BLOCKS if stored is None else max(stored, _FEW_BLOCKS)
    for name, value in _numbers(config):
        key = name.rpartition(".")[2]
        if math.isnan(value) or (_ends(_EPSILON, key) and not 0 <= value < 1):
            raise ValueError(
                f"{where}{name}={value} is not a valid value. Give the number with which the "
                "model was trained"
            )
        is_size = _ends(_SIZE, key) or _ends(_BLOCKS, key)
        if is_size and (not 0 <= value <= _MOST_SIZE or value != int(value)):
            raise ValueError(
                f"{where}{name}={value} is not a valid size. Give an integer from 0 to {_MOST_SIZE}"
            )
        if _ends(_BLOCKS, key) and value > most_blocks:
            suffix = "" if stored is None else f", but there are only {stored} tensors of weights"
            raise ValueError(
                f"{where}{name}={value} is more than {most_blocks}{suffix}. Give the number of "
                "the model"
            )


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
    files: dict[str, str] = _WEIGHT_MAP(index)["weight_map"]
    return files


def check_quantization(config: Mapping[str, Any], dtypes: Iterable[object]) -> None:
    """Check that weights are quantized if their ``config.json`` says so.

    Raises:
        ValueError: All dtypes are ordinary floating-point types.
    """
    entry = config.get("quantization_config")
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    if entry and names and names <= {*_FLOATING}:
        method = entry.get("quant_method") if isinstance(entry, Mapping) else entry
        raise ValueError(
            f"it has quantization_config ({method!s:.40}), but the dtypes are "
            f"{', '.join(sorted(names))}. Remove this entry, or use the quantized weights"
        )


def _numbers(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


def _ends(pattern: re.Pattern[str], key: str) -> bool:
    return re.search(rf"(?:{pattern.pattern})$", key) is not None
