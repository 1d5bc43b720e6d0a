"""Validation at time intervals starts after the same batch on all ranks."""

import time
from datetime import timedelta

import lightning.pytorch as L
import pytest

from lightning_ptdp.shims.lightning import set_last_validation
from tests.conformance.toys import P2, LitNet, Place, loader, make_trainer


class Ahead(L.Callback):
    """The interval has passed at batch 2 on rank 1, but only at batch 4 on rank 0."""

    def __init__(self, rank: int) -> None:
        self.rank, self.validated_behind = rank, []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == (4, 2)[self.rank]:
            set_last_validation(trainer, time.monotonic() - 2000)

    def on_validation_start(self, trainer, *_):
        self.validated_behind.append(trainer.fit_loop.epoch_loop.batch_idx)


def validate(rank, place):
    clock = Ahead(rank)
    trainer = make_trainer(
        place,
        max_epochs=1,
        val_check_interval=timedelta(seconds=1000),
        callbacks=[clock],
        num_sanity_val_steps=0,
    )
    trainer.fit(LitNet(), loader(128), loader(16))
    return clock.validated_behind


@pytest.mark.parametrize("layout", [{}, P2], ids=["d2", "p2"])
def test_timed_validation_runs_after_same_batch_on_all_ranks(layout, conformance):
    place = Place(world_size=2, layout={**layout, "timeout_s": 20.0})
    assert conformance.ranks(validate, place) == [[4], [4]]
