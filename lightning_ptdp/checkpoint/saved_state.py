"""``state.pt``: all of a Lightning checkpoint that is not a sharded tensor, safe to load.

``torch.load(..., weights_only=True)`` refuses arbitrary classes, because unpickling them executes
code. Values that it would refuse are detected when they are written, not when they are needed.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.base.checked_json import (
    Misfit,
    integer,
    list_of,
    map_of,
    optional,
    record,
    text,
)
from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError, reading
from lightning_ptdp.checkpoint.metadata import (
    STATE_FILE,
    CheckpointMetadata,
    read_metadata,
    read_verified,
)
from lightning_ptdp.checkpoint.opaque_objects import separate_objects
from lightning_ptdp.checkpoint.plain_types import TYPES, Note, plain_value, with_types
from lightning_ptdp.checkpoint.torch_file import check_saved, why_unread

__all__ = ["dump_state", "portable", "read_state", "read_state_file"]


def portable(value: object, key: str = "state") -> Any:
    """Return a copy of ``value`` in types that ``weights_only=True`` reads.

    Tensors become plain ones on the CPU. ``dump_state`` stores notes on the types of paths, enum
    members, named tuples, other containers, and NumPy's numbers and arrays, and ``read_state``
    restores these types. Objects of classes registered with
    ``torch.serialization.add_safe_globals`` are kept.

    Raises:
        CheckpointError: A value has another type. The message names its key.
    """
    return plain_value(value, key, [])


def dump_state(state: dict[str, Any]) -> bytes:
    """Return the bytes of ``state.pt``, after they have been read back once.

    Raises:
        CheckpointError: A value cannot be stored. The message names its key.
    """
    # Notes on classes that were not imported when this state was read.
    unread: dict[str, list[Note]] = state.get(TYPES, {})
    content, types = {}, {}
    for key, value in separate_objects(
        {key: value for key, value in state.items() if key != TYPES}
    ).items():
        notes = list(unread.get(key, ()))
        content[key] = plain_value(value, f"state[{key!r}]", notes)
        if notes:
            types[key] = notes
    if types:
        content[TYPES] = types
    for key, value in content.items():
        # An object of a registered class may hold values that ``weights_only`` refuses.
        try:
            dumped = _dump(value)
            check_saved(io.BytesIO(dumped))
            _load(dumped)
        except Exception as error:
            raise CheckpointError(
                f"state[{key!r}] cannot be written so that it can be read back: {error}"
            ) from error
    try:
        _STATE(content)
    except Misfit as error:
        raise CheckpointError(f"state: {error}") from error
    return _dump(content)


def read_state(path: str | os.PathLike[str], *, map_location: Any = "cpu") -> dict[str, Any]:
    """Return the Lightning state of a checkpoint; needs no process group.

    Args:
        path: The checkpoint folder.
        map_location: Devices of the tensors, as for ``torch.load``.

    Raises:
        CheckpointError: ``path`` is not a whole checkpoint, or its state is damaged or refused.
    """
    folder = Path(path)
    content = read_state_file(folder, read_metadata(folder))
    try:
        state = _load(content, map_location)
        _STATE(state)
        return with_types(state, folder)
    except Exception as error:
        raise CheckpointError(
            f"{folder / STATE_FILE} cannot be read: {why_unread(error)}"
        ) from error


def read_state_file(folder: Path, metadata: CheckpointMetadata) -> bytes:
    """Return the checked bytes of ``state.pt``.

    Raises:
        CheckpointError: The file is missing or damaged, or would be larger in memory than on disk.
    """
    if STATE_FILE in metadata.files:
        with reading(folder / STATE_FILE), open(folder / STATE_FILE, "rb") as stream:
            check_saved(stream)
    return read_verified(folder, metadata, STATE_FILE, most=None)


_OBJECTS = optional(map_of(lambda value: value))
_GROUP = record(others=True, params=list_of(text()))
_STATE = record(
    others=True,
    epoch=optional(integer()),
    global_step=optional(integer()),
    loops=_OBJECTS,
    callbacks=_OBJECTS,
    hyper_parameters=_OBJECTS,
    lightning_ptdp_types=optional(map_of(list_of(lambda note: note))),
    optimizer_states=optional(list_of(record(others=True, groups=optional(list_of(_GROUP))))),
    lr_schedulers=optional(list_of(lambda value: value)),
    **{
        "pytorch-lightning_version": optional(
            text(r"\d{1,4}(\.\d{1,4})*[\w.+-]{0,40}", "a version")
        )
    },
)


def _dump(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _load(content: bytes, map_location: Any = "cpu") -> Any:
    return torch.load(io.BytesIO(content), map_location=map_location, weights_only=True)
