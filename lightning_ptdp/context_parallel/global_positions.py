"""Values that a model would otherwise derive wrongly from its slice of the sequence.

- *Positions.* A module whose forward takes ``position_ids`` counts positions from 0 if it is not
  given any. It is given the positions in the full sequence, (1, s/c) int64. The package's GPT and
  Hugging Face's models take them.
- *Positions after the padding index.* RoBERTa and similar models number the tokens that are not
  padding from ``padding_idx + 1``. The count covers the full sequence.
- *A mask of ones.* Without a mask, Hugging Face's models interpret a jump in the positions, such as
  the one between a rank's two chunks, as a boundary between two documents. A mask without padding
  prevents this.
- *A placeholder for the mask*, from the second forward on, if the model would build its own mask
  from a padding mask. Hugging Face's models do this, and read the padding mask on the host. The
  first forward shows whether the attention is causal.
- *The mask of documents*, if the batch's own positions restart: (b, 1, s/c, s), with this rank's
  queries and all keys.
- *Shifted labels.* Hugging Face's causal language models compare each token with the label of the
  next one, which at the end of a chunk is on another rank. They are given ``shift_labels``, which
  their loss accepts.

Forward hooks supply the values; they are attached for the duration of one forward.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.attention import (
    ContextParallelError,
    document_mask,
    gather_sequence,
    shard_sequence,
)
from lightning_ptdp.world.mesh import Group

_POSITIONS = "position_ids"
_MASK = "attention_mask"
_TOKENS = "input_ids"
_IGNORED_LABEL = -100
_MAKERS = {"create_causal_mask", "create_bidirectional_mask"}


@dataclass(frozen=True, kw_only=True)
class PositionConsumer:
    """A module that accepts supplied values.

    Attributes:
        module: The module.
        parameters: Names of its forward's parameters, in order.
        reads_documents: True if it derives documents from its positions.
        makes_mask: True if its forward makes the mask of its attention from a padding mask.
        shifts_labels: True if its loss compares each token with the label of the next one.
        padding_index: Token id of padding, if its positions count the tokens that are not padding,
            from ``padding_index + 1``; else None.
    """

    module: nn.Module
    parameters: tuple[str, ...]
    reads_documents: bool
    makes_mask: bool
    shifts_labels: bool
    padding_index: int | None = None

    @property
    def takes_positions(self) -> bool:
        """Return True if the forward takes ``position_ids``."""
        return _POSITIONS in self.parameters


def find_consumers(module: nn.Module) -> list[PositionConsumer]:
    """Return the modules inside ``module`` that take positions, or shift labels."""
    consumers = []
    for child in module.modules():
        names = _parameters(child)
        shifts = "labels" in names and _shifts_labels(child)
        if _POSITIONS in names or shifts:
            # Recognizes a Hugging Face model without importing the library.
            documents = (
                hasattr(type(child), "main_input_name") and _POSITIONS in names and _MASK in names
            )
            consumers.append(
                PositionConsumer(
                    module=child,
                    parameters=names,
                    reads_documents=documents,
                    makes_mask=documents and not _MAKERS.isdisjoint(names_in_forward(child)),
                    shifts_labels=shifts,
                    padding_index=_padding_index(child),
                )
            )
    return consumers


def _padding_index(module: nn.Module) -> int | None:
    """Return the padding index of the embeddings inside that count positions from tokens."""
    for child in module.modules():
        index = vars(child).get("padding_idx")
        if isinstance(index, int) and "create_position_ids_from_input_ids" in names_in_forward(
            child
        ):
            return index
    return None


def _parameters(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(type(module).forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()  # compiled or scripted: no signature available


def _shifts_labels(module: nn.Module) -> bool:
    """Return True if the module's forward calls Hugging Face's loss that shifts.

    Some models have that loss as a default and never call it.
    """
    calls = "loss_function" in names_in_forward(module)
    return (
        calls
        and getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    )


@dataclass(kw_only=True)
class SliceInputs:
    """Values that are supplied in one forward.

    Attributes:
        consumers: Modules that receive them.
        positions: (1, s/c) int64.
        length: s, tokens of the full sequence.
        group: The context group.
        documents: Document index of each token, (b, s) int64; None: one document.
        padding: This rank's part of the batch's padding mask, or the mask that was supplied
            because there is none.
        known: Mask to give to a model that makes its own of ``padding``; None: not yet.
        used: True if positions were supplied, or were already given.
        shifted_targets: After the forward, this rank's number of labels that are not ignored, ()
            int64, if the model shifts labels itself; else None. A count of the batch's own labels
            would miss the labels that other ranks' tokens predict.
    """

    consumers: Sequence[PositionConsumer]
    positions: Tensor
    length: int
    group: Group
    documents: Tensor | None = None
    padding: object = None
    known: Tensor | None = None
    used: bool = False
    shifted_targets: Tensor | None = None

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Supply the values inside the context."""
        with contextlib.ExitStack() as hooks:
            for consumer in self.consumers:
                before = partial(self._before, consumer)
                hooks.enter_context(
                    consumer.module.register_forward_pre_hook(
                        before, prepend=True, with_kwargs=True
                    )
                )
            yield

    def _before(
        self,
        consumer: PositionConsumer,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        named = consumer.parameters[: len(args)]
        arguments = {**dict(zip(named, args, strict=False)), **kwargs}
        added: dict[str, object] = {}
        if consumer.takes_positions:
            self._check_length(module)
            self.used = True
            if arguments.get(_POSITIONS) is None:
                added[_POSITIONS] = self._positions_of(consumer, arguments.get(_TOKENS))
        mask = arguments.get(_MASK)
        is_known = self.known is not None and self.documents is None
        if consumer.makes_mask and is_known and mask is self.padding:
            added[_MASK] = self.known
        elif consumer.reads_documents and mask is None:
            samples = next(
                x.size(0) for x in arguments.values() if isinstance(x, Tensor) and x.dim() > 1
            )
            if self.documents is not None:
                added[_MASK] = document_mask(self.documents, self.positions[0])
            else:
                ones = added[_MASK] = self.positions.new_ones(samples, self.positions.size(1))
                self.padding = ones if self.padding is None else self.padding
        if consumer.shifts_labels and isinstance(labels := arguments.get("labels"), Tensor):
            shifted = arguments.get("shift_labels")
            if not isinstance(shifted, Tensor):
                shifted = added["shift_labels"] = self._shift(labels)
            # Otherwise the loss is divided by a number that the step has counted in its own slice.
            if arguments.get("num_items_in_batch") is None:
                self.shifted_targets = (shifted != _IGNORED_LABEL).sum()
        # A positional argument is replaced in place; all other values become keywords.
        places = tuple(added.pop(name, value) for name, value in zip(named, args, strict=False))
        return (*places, *args[len(named) :]), {**kwargs, **added}

    def _positions_of(self, consumer: PositionConsumer, tokens: object) -> Tensor:
        """Return positions (1, s/c), or (b, s/c) if they depend on the tokens.

        Collective if they depend on the tokens.
        """
        if consumer.padding_index is None:
            return self.positions
        if not isinstance(tokens, Tensor):
            return self.positions + consumer.padding_index + 1
        is_token = gather_sequence((tokens != consumer.padding_index).long(), 1, group=self.group)
        full_positions = is_token.cumsum(1) * is_token + consumer.padding_index
        return shard_sequence(full_positions, 1, rank=self.group.rank, size=self.group.size)

    def _shift(self, labels: Tensor) -> Tensor:
        full_labels = gather_sequence(labels, 1, group=self.group)
        return shard_sequence(
            F.pad(full_labels[:, 1:], (0, 1), value=_IGNORED_LABEL),
            1,
            rank=self.group.rank,
            size=self.group.size,
        )

    def _check_length(self, module: nn.Module) -> None:
        check = getattr(module, "check_sequence_length", None)
        if callable(check):
            check(self.length)
        config = getattr(module, "config", None)
        for name in ("sliding_window", "attention_chunk_size"):
            window = getattr(config, name, None)
            if (
                isinstance(window, int)
                and window < self.length
                and getattr(config, "use_sliding_window", True)
            ):
                raise ContextParallelError(
                    f"{type(module).__name__} has {name}={window}, less than the sequence of "
                    f"{self.length} tokens, and a slice cannot represent attention within a "
                    f"window. Set config.{name}=None, use sequences of at most {window} "
                    "tokens, or context_parallel_size=1"
                )


# ---- Static checks of a model for operations that a slice of the sequence does not support -------


def why_not(model: nn.Module) -> str | None:
    """Return why context parallelism would change the model's result.

    None if no such operation is found.
    """
    return next(_reasons(model), None)


def _reasons(model: nn.Module) -> Iterator[str]:
    hf_models: list[Any] = [
        module for module in model.modules() if hasattr(type(module), "main_input_name")
    ]
    for module in hf_models:
        if (reason := _why_not_cut(module)) is not None:
            yield f"{type(module).__name__} {reason}"
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) or (
            isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
        ):
            yield (
                f"'{name}' ({type(module).__name__}) mixes tokens along the sequence outside of "
                "attention, as state-space layers do, but a rank has only a slice of the sequence"
            )
    for module in hf_models:
        if (reason := _why_not_attend(module) or _why_not_compare(module)) is not None:
            yield f"{type(module).__name__} {reason}"


def names_in_forward(module: nn.Module) -> Collection[str]:
    """Return the names (functions, attributes) that the module's forward uses.

    Empty if its code is not available.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code.co_names if code is not None else ()


def _why_not_cut(module: Any) -> str | None:
    if module.main_input_name != "input_ids":
        return (
            f"creates its sequence from {module.main_input_name}, but only sequences of the "
            "batch can be split"
        )
    if hasattr(getattr(module, "config", None), "vision_config"):
        return "merges images into its sequence, but a rank has only a slice of the sequence"
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return "has cross-attention between two sequences, but only self-attention can be split"
    return None


def _why_not_attend(module: Any) -> str | None:
    config = getattr(module, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    if getattr(type(module), "_supports_sdpa", None) is False:
        return (
            "computes its attention without torch.nn.functional.scaled_dot_product_attention, "
            "which context parallelism replaces"
        )
    if isinstance(attention, str) and attention != "sdpa":
        return (
            f"was built with attn_implementation={attention!r}, but context parallelism replaces "
            "only scaled_dot_product_attention. Build it with attn_implementation='sdpa'"
        )
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        return (
            "has layers of linear attention, which pass a state along the sequence, but a "
            "rank has only a slice of the sequence"
        )
    if getattr(config, "alibi", False):
        return (
            "adds position biases to its attention scores (alibi=True), but a rank has only "
            "those of its slice"
        )
    return None


def _why_not_compare(module: Any) -> str | None:
    if "start_positions" in inspect.signature(type(module).forward).parameters:
        return (
            "compares all tokens of a sequence in its loss (start_positions), but a rank has "
            "only a slice of the sequence"
        )
    if "argmax" in names_in_forward(module):
        return (
            "selects the last token of each sample that is not padding, but a rank has only a "
            "slice of the sequence"
        )
    return None
