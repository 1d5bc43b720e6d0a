"""Checks of the data against the layout: batches, sequence length and packed samples."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_ptdp.attention import check_sequence
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.models.lit_huggingface import LitHuggingFace
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.strategy.checks.model import full_model
from lightning_ptdp.world.axes import nearest_multiples
from lightning_ptdp.world.layout import ParallelLayout


def check_data(data: object, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Check the sizes of batches and sequences against the layout.

    The batch sizes of a loader or data module must match the microbatches and the schedule. A data
    module's ``batch_plans`` may depend on the number of replicas. Sequence and context parallelism
    must be able to split ``sequence_length``, if the data have this attribute.

    Raises:
        ValueError: A replica's batch is smaller than ``num_microbatches`` or ``micro_batch_size``,
            the schedule does not accept the number of microbatches, or the length is not divisible.
    """
    for size in replica_batches(data, layout.num_replicas):
        _check_batch(size, config)
    length = getattr(data, "sequence_length", None)
    if isinstance(length, int):
        _check_length(length, config)


def replica_batches(data: Any, num_replicas: int) -> list[int]:
    """Return the samples of a replica's batches; empty if the data do not say.

    Raises:
        ValueError: The batches cannot be divided among so many replicas.
    """
    if hasattr(data, "batch_plans"):
        return [plan.replica_batch for plan in data.batch_plans(num_replicas=num_replicas)]
    size = getattr(data, "batch_size", None)
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return [size]
    return []


def check_source(
    module: LightningModule, data: object, config: PTDPConfig, layout: ParallelLayout
) -> None:
    """Check a loader or data module against the layout and against the module.

    Raises:
        ValueError: As for ``check_data`` and ``check_packing``, or the tokens or images of the data
            are not those of the module's Hugging Face model.
    """
    check_data(data, config, layout)
    check_packing(module, data, config)
    if isinstance(module, LitHuggingFace):
        module.check_data(data)


def _check_batch(size: int, config: PTDPConfig) -> None:
    for field, value in (
        ("num_microbatches", config.num_microbatches),
        ("micro_batch_size", config.micro_batch_size),
    ):
        if value is not None and size < value:
            raise ValueError(
                f"{field}={value} is larger than the batch of {size} samples that the train "
                f"dataloader gives each replica. Use {field}={size} or less, or a batch size "
                f"of at least {value}"
            )
    if config.micro_batch_size is not None:
        try:
            config.build_schedule(config.microbatches(size))
        except ValueError as error:
            raise ValueError(
                f"micro_batch_size={config.micro_batch_size} splits a replica's batch of "
                f"{size} samples into {config.microbatches(size)} microbatches, which the "
                f"schedule does not support: {error}"
            ) from None


def _check_length(length: int, config: PTDPConfig) -> None:
    size = config.tensor_parallel_size if config.sequence_parallel else 1
    check_sequence(length, config.context_parallel_size, sequence_parallel_size=size)
    if length % size:
        raise ValueError(
            f"sequence_length={length} is not divisible by tensor_parallel_size={size}, over "
            "which sequence_parallel=True splits it. Use "
            f"sequence_length={nearest_multiples(length, size)}, or sequence_parallel=False"
        )


# ---- Checks of packed samples: whether the model's attention separates them ----------------------


_POSITIONS = "position_ids"
_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers that separate samples.

Other layers (linear attention, convolutions) pass a state from one sample to the next."""
_LIBRARIES = ("lightning", "pytorch_lightning", "torch", "builtins")


def check_packing(module: LightningModule, data: object, config: PTDPConfig) -> None:
    """Refuse a model in which the packed samples of a data module would see each other.

    Raises:
        ValueError: The samples would see each other; gives the reason.
    """
    if getattr(data, "packing", None) is not True:
        return
    reason = why_not_packed(module, full_model(module, config))
    if reason is not None:
        raise ValueError(
            f"packing=True, but {reason}, so packed samples would attend to each other. Use "
            "packing=False"
        )


def why_not_packed(module: nn.Module, full: nn.Module) -> str | None:
    """Return the reason why the model would not separate packed samples; None if it does.

    Packed samples share a sequence, in which the positions of each sample begin at 0 again.

    Args:
        module: The LightningModule.
        full: The LightningModule with its model built.
    """
    return next(_reasons(type(module), full), None)


def _reasons(kind: type, full: nn.Module) -> Iterator[str]:
    # Recognizes a Hugging Face model without importing the library.
    models: list[Any] = [
        child for child in full.modules() if hasattr(type(child), "main_input_name")
    ]
    if not models:
        yield (
            f"the attention of {kind.__name__} may not separate samples by their positions, "
            "unlike that of Hugging Face models"
        )
        return
    source = _written(kind)
    if source and not re.search(rf"{_POSITIONS}|\*\*[a-z]|super\(\)\.training_step", source):
        yield f"{kind.__name__} does not pass the batch's {_POSITIONS} to its model"
    name = type(models[0]).__name__
    settings = getattr(models[0], "config", None)
    stateful = sorted(
        {str(layer) for layer in getattr(settings, "layer_types", None) or ()} - _ATTENTION
    )
    stateful += [
        type(child).__name__
        for child in full.modules()
        if isinstance(child, nn.RNNBase | nn.Conv1d)
    ][:1]
    if stateful or getattr(type(models[0]), "_is_stateful", False):
        yield (
            f"{name} has layers that pass a state from sample to sample "
            f"({', '.join(stateful) or 'a state'})"
        )
    if not any(_masks_by_positions(child) for child in models):
        yield f"{name} creates its attention mask without {_POSITIONS}"
    if getattr(settings, "use_cache", False) and "use_cache" not in source:
        yield (
            f"{name} keeps a key cache, with which it does not separate samples (set its "
            "config.use_cache = False)"
        )


def _masks_by_positions(model: nn.Module) -> bool:
    """Return True if a Hugging Face model passes its positions to its mask functions."""
    tree = ast.parse(textwrap.dedent(_source(inspect.unwrap(type(model).forward))))
    nodes = list(ast.walk(tree))
    collected = any(
        isinstance(node, ast.Dict)
        and any(isinstance(key, ast.Constant) and key.value == _POSITIONS for key in node.keys)
        for node in nodes
    )
    # mask_function = create_causal_mask if ... else create_sliding_window_causal_mask
    names = set(_MASKS)
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
            choices = {getattr(child, "id", "") for child in ast.walk(node.value)}
            if choices & _MASKS:
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]
    keyword_sets = [{keyword.arg for keyword in call.keywords} for call in calls]
    return bool(keyword_sets) and all(
        _POSITIONS in arguments or (None in arguments and collected) for arguments in keyword_sets
    )


def _written(kind: type) -> str:
    """Return the user's source of a LightningModule.

    It contains the methods and string attributes that are not Lightning's own."""
    values = [inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("__")]
    methods = [
        value
        for value in values
        if inspect.isfunction(value) and value.__module__.partition(".")[0] not in _LIBRARIES
    ]
    return "".join(map(_source, methods)) + "".join(
        repr(value) for value in values if isinstance(value, str | tuple | list)
    )


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""
