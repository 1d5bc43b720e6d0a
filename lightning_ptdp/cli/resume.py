"""``--resume auto``: where a configuration's runs leave their checkpoints, and the newest there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp.checkpoint import complete_checkpoints, read_metadata

__all__ = ["find_newest"]


def find_newest(trainer: Trainer) -> Path | None:
    """The newest complete checkpoint with a state of training, of any earlier run with the same folders; None if there is none.

    A damaged one is left to the strategy, which reads every byte of what it continues from (``on_damage``).
    """
    found = {path.resolve() for root in set(_roots(trainer)) for path in complete_checkpoints(root, recursive=True)}
    whole = [path for path in found if any(name.startswith("optimizer/") for name in read_metadata(path).tensors)]
    return max(whole, key=lambda path: read_metadata(path).created, default=None)


def _roots(trainer: Trainer) -> Iterator[Path]:
    yield Path(trainer.default_root_dir).resolve()
    for logger in trainer.loggers:
        if logger.save_dir is not None:
            yield Path(logger.save_dir).resolve()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            yield Path(callback.dirpath).resolve()
