"""Division of a batch along time.

The rule by shape, for a sequence of s tokens: a tensor (b, s, ...) is cut along dimension 1. An
attention mask (b, ., s, s) is cut along its queries, while its keys stay whole. All other values
are the same on all ranks. Exceptions to the rule are given by name::

    sequence_dims={"mrope_positions": 2, "class_weights": None}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.attention import check_sequence, shard_sequence
from lightning_ptdp.base.nested import map_named, named_tensors

SequenceDims = Mapping[str, int | None]
_IGNORED_LABEL = -100
_PADDING = ("attention_mask", "key_padding_mask", "src_key_padding_mask", "padding_mask")


def sequence_length(batch: Any, sequence_dims: SequenceDims | None = None) -> int:
    """Return the number of tokens of the sequence in a batch.

    It is the size of a dimension that ``sequence_dims`` names, else dimension 1 of "input_ids" or
    "inputs_embeds", else dimension 1 of the first tensor with several dimensions. With more than
    three, it may be an image or a mask.

    Raises:
        ValueError: There is no such tensor, it has more than three dimensions, or the named
            dimensions disagree.
    """
    tensors = named_tensors(batch)
    dims = sequence_dims or {}
    named = {name: t.size(dim) for name, t in tensors if (dim := dims.get(name)) is not None}
    if len(set(named.values())) > 1:
        raise ValueError(
            f"sequence_dims names dimensions of different lengths: {named}. All of them must "
            "be the same sequence"
        )
    if named:
        return next(iter(named.values()))
    allowed = [(name, t) for name, t in tensors if t.dim() > 1 and name not in dims]
    model_inputs = [t for name, t in allowed if name in ("input_ids", "inputs_embeds")]
    candidates = model_inputs or [t for _, t in allowed]
    if not candidates or candidates[0].dim() > 3:
        shapes = {name: tuple(t.shape) for name, t in tensors}
        raise ValueError(
            f"the batch does not begin with a tensor (batch, sequence, ...), but with {shapes}, and "
            "context parallelism splits the sequence. Change the collate function, name the dimension "
            "with sequence_dims={'name': dim}, or use context_parallel_size=1"
        )
    return candidates[0].size(1)


def shard_batch(
    batch: Any, *, length: int, rank: int, size: int, sequence_dims: SequenceDims | None = None
) -> Any:
    """Return a rank's part of a batch.

    Args:
        batch: Nested mappings, sequences and dataclasses of tensors.
        length: s, tokens of the full sequence (``sequence_length``).
        rank: Rank in the context group.
        size: c.
        sequence_dims: Dimension to cut of the tensors under these keys (at any depth); None: not
            cut.

    Raises:
        ValueError: The length cannot be cut (``check_sequence``), or a named dimension has another
            length.
    """
    check_sequence(length, size)
    dims = sequence_dims or {}

    def cut(name: str, tensor: Tensor) -> Tensor:
        dim = dims[name] if name in dims else _sequence_dim(tensor, length)
        if dim is None:
            return tensor
        if tensor.dim() <= dim or tensor.size(dim) != length:
            raise ValueError(
                f"sequence_dims={{{name!r}: {dim}}} is wrong: dimension {dim} of the tensor of "
                f"shape {tuple(tensor.shape)} is not the sequence of {length} tokens. Name the "
                "correct dimension, or None if it has none"
            )
        return shard_sequence(tensor, dim, rank=rank, size=size)

    return batch if size == 1 else map_named(batch, cut)


def padding_masks(batch: Any) -> list[Tensor]:
    """Return the tensors (b, s) that may mark tokens as padding."""
    return [
        tensor
        for name, tensor in named_tensors(batch)
        if name in _PADDING and tensor.dim() == 2 and tensor.numel()
    ]


def may_hide(mask: Tensor) -> bool:
    """Return True if a padding mask may hide tokens.

    It does so if its values are not all equal; on an accelerator they are not read. All ranks of a
    replica read the same batch, so all get the same answer if the batch has not been cut yet.
    """
    return mask.device.type != "cpu" or bool((mask != mask[:1, :1]).any())


def count_targets(batch: Any, tokens: int) -> Tensor | None:
    """Return the number of labels that are not ignored, () int64, on their device.

    The labels are the integers (b, n, ...) named "labels", else those whose name contains "label"
    or "target", else all of them, of which the others have no ignored labels. Of several, those with
    the fewest labels are counted. None if there are no integers of the n ``tokens`` of a slice. The
    number is the weight of a rank's loss, if the loss is the mean over its labels.
    """
    found = [
        (name, tensor)
        for name, tensor in named_tensors(batch)
        if not tensor.is_floating_point() and tokens in tensor.shape[1:]
    ]
    found = (
        [one for one in found if one[0] == "labels"]
        or [one for one in found if "label" in one[0] or "target" in one[0]]
        or found
    )
    counts = [(tensor != _IGNORED_LABEL).sum() for _, tensor in found]
    return torch.stack(counts).min() if counts else None


def _sequence_dim(tensor: Tensor, length: int) -> int | None:
    if tensor.dim() == 4 and tensor.shape[2:] == (length, length):
        return 2
    return 1 if tensor.dim() > 1 and tensor.size(1) == length else None
