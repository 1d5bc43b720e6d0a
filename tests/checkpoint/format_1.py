"""Generator of the checkpoint ``tests/checkpoint/format-1``.

Every later version must read that checkpoint. Version 0.1.0 wrote it on two replicas with a sharded
optimizer, bfloat16 weights and float32 masters. ``python -m tests.checkpoint.format_1 FOLDER``
writes a checkpoint of the same training with the present code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptdp.strategy import PTDPStrategy

STORED = Path(__file__).parent / "format-1"
STEPS = 4  # an epoch


class LitStored(L.LightningModule):
    """A tied model whose weights need no random numbers, and hyperparameters of several types."""

    def __init__(self, width: int = 4, names: tuple[str, ...] = ("a", "b")) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(2, width, bias=False)
        self.blocks = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
        self.last = nn.Linear(2, width, bias=False)
        self.last.weight = self.first.weight
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(
                    torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter).roll(index)
                    / (index + 1)
                )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.blocks(self.first(batch[0]).tanh())
        return nn.functional.linear(hidden, self.last.weight.T).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)


class SaveAtTheEnd(L.Callback):
    def __init__(self, path: str | None) -> None:
        self._path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._path is not None:
            trainer.save_checkpoint(self._path)


def train(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    steps: int,
    save: str | None,
    resume: str | None,
) -> dict[str, Tensor]:
    """Train to ``steps`` and return the whole model."""
    trainer = L.Trainer(
        strategy=PTDPStrategy(**options.get("layout", {})),
        accelerator="cpu",
        devices=world_size,
        precision=options.get("precision", "32-true"),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[SaveAtTheEnd(save)],
    )
    data = TensorDataset(torch.linspace(-1, 1, 2 * 4 * STEPS).view(-1, 2).sin())
    sampler = torch.utils.data.DistributedSampler(
        data, **trainer.strategy.distributed_sampler_kwargs, shuffle=False
    )
    replicas = trainer.strategy.layout.data_parallel_size
    trainer.fit(
        LitStored(width=4),
        DataLoader(data, batch_size=4 // replicas, sampler=sampler),
        ckpt_path=resume,
    )
    return trainer.strategy.gather_state_dict()


if __name__ == "__main__":
    from tests.pool import Pool

    pool = Pool()
    pool.run(
        train,
        world_size=2,
        args=(
            2,
            {"layout": {"shard_optimizer": True}, "precision": "bf16-true"},
            STEPS,
            sys.argv[1],
            None,
        ),
    )
    pool.close()
