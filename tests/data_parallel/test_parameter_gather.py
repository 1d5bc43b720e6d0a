"""Overlap of the parameter gather with callbacks that may read parameters between steps."""

import pytest
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
)

from lightning_ptdp.data_parallel import overlaps_gather
from lightning_ptdp.shims.lightning import lightning_names
from tests.conformance.toys import LitNet, Place, make_trainer


class Looks(Callback):
    def on_train_batch_end(self, *_):
        """May read parameters."""


@pytest.mark.parametrize(
    ("callback", "overlaps"),
    [
        (LearningRateMonitor(), True),
        (Looks(), False),
        (LambdaCallback(on_train_batch_end=print), False),
        (EMAWeightAveraging(), False),
    ],
)
def test_gather_overlaps_unless_callback_reads_parameters(callback, overlaps):
    trainer = make_trainer(Place(), callbacks=[callback])
    trainer.strategy.connect(LitNet())
    assert overlaps_gather(trainer, None, lightning_names("lightning.pytorch")) is overlaps
