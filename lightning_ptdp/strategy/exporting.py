"""Export of the trained model as a Hugging Face folder."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from lightning_ptdp.callbacks.artifacts import hyperparameters
from lightning_ptdp.checkpoint import (
    CheckpointError,
    LocalRectangle,
    TensorReader,
    files,
    same_outcome,
)
from lightning_ptdp.checkpoint.local_copies import send
from lightning_ptdp.checkpoint.remote_path import Place, RemotePath
from lightning_ptdp.checkpoint.save import write_checkpoint
from lightning_ptdp.checkpoint.save_agreement import from_rank_zero, is_rank_zero
from lightning_ptdp.exchange import (
    Described,
    FolderExport,
    described_by_module,
    described_by_state,
    merged_rectangles,
    models_in,
)
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.shims.quantization import quantized_parameters
from lightning_ptdp.strategy.model_space import MODEL, ModelSpace


def export_model(
    space: ModelSpace,
    target: Place,
    *,
    dtype: torch.dtype | None,
    shard_bytes: int,
    prefix: str | None,
    check_only: bool,
    several_nodes: bool,
) -> None:
    """Write the model, each rank its part; see ``PTDPStrategy.export_huggingface``.

    Raises:
        CheckpointError: The export failed on some rank; raised on all ranks.
    """
    action = f"exporting {target}"
    with space.waiting_in(action):
        with same_outcome(action):
            if space.parallel is None:
                raise CheckpointError(
                    "the model has no values yet. Call export_huggingface after fit has "
                    "set up the strategy"
                )
            for name in quantized_parameters(space.module):
                raise CheckpointError(
                    f"'{name}' is quantized, and exports have plain weights. Leave the export out; "
                    "the checkpoint has the adapters, which peft merges into the original weights"
                )
            merged = merged_rectangles(space.module, space.tensors(to_write=True))
            rectangles = [replace(rectangle, name=MODEL + rectangle.name) for rectangle in merged]
            described, prefix = _described(space.module, prefix)
        with _written_here(target, check_only=check_only) as folder:
            export = FolderExport(
                target=folder,
                described=described,
                prefix=prefix,
                dtype=dtype,
                shard_bytes=shard_bytes,
            )
            if check_only:
                export.check(rectangles)
            elif several_nodes and not isinstance(target, Path):
                with _collected(target, rectangles) as collected:
                    export.write(collected)
            else:
                export.write(rectangles)


@contextlib.contextmanager
def _written_here(target: Place, *, check_only: bool) -> Iterator[Path]:
    """Return a context with the folder to write, which is sent to ``target`` if that is an address.

    Raises:
        CheckpointError: ``target`` is an address where nothing can be written. Raised on all ranks.
    """
    if isinstance(target, Path):
        yield target
        return
    scratch = Path(from_rank_zero(lambda: tempfile.mkdtemp(prefix="ptdp-")))
    try:
        with same_outcome(f"exporting {target}"):
            if is_rank_zero():
                files.check_replaceable(target, marker=files.EXPORT_MARK)
                target.check_writable()
        yield scratch / target.name
        with same_outcome(f"sending {target}"):
            if is_rank_zero() and not check_only:
                send(scratch / target.name, target)
    finally:
        if is_rank_zero():
            files.remove(scratch)


@contextlib.contextmanager
def _collected(
    target: RemotePath, rectangles: list[LocalRectangle]
) -> Iterator[list[LocalRectangle]]:
    """Return a context with all rectangles on rank 0, which reads them, and none elsewhere.

    Nodes share no disk for an export to an address. The ranks save weights in the same place until
    rank 0 has read them.
    """
    spare = target.parent / f"{target.name}.weights"
    write_checkpoint(spare, rectangles=rectangles, state={}, metadata={})
    try:
        reader = TensorReader(spare)
        yield [reader.on_disk(name) for name in reader.tensors] if is_rank_zero() else []
    finally:
        if is_rank_zero():
            files.discard(spare)


def _described(module: LightningModule, prefix: str | None) -> tuple[Described, str | None]:
    """Return the description of the module and the prefix of its names.

    Raises:
        CheckpointError: The module holds several Hugging Face models, or it holds none and is not a
            model of this package.
    """
    state = hyperparameters(module, getattr(module.trainer, "datamodule", None))
    models = models_in(module)
    if not models:
        return described_by_state(state), prefix
    names = [name for name in models if prefix is None or name == prefix.removesuffix(".")]
    if len(names) != 1:
        raise CheckpointError(
            f"{type(module).__name__} has several Hugging Face models {sorted(models)}. "
            f"Name the one to export, such as prefix='{next(iter(models))}.'"
        )
    return described_by_module(models[names[0]], state), f"{names[0]}." * bool(names[0])
