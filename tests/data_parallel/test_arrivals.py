"""Parameters read between two steps are those of the last step."""

from __future__ import annotations

from typing import Any

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
    def on_train_batch_end(self, *_: Any) -> None:
        """May read."""


@pytest.mark.parametrize(
    ("callback", "overlaps"),
    [
        (LearningRateMonitor(), True),
        (Looks(), False),
        (LambdaCallback(on_train_batch_end=print), False),
        (EMAWeightAveraging(), False),
    ],
)
def test_parameters_are_waited_for_where_somebody_reads_them(
    callback: Callback, overlaps: bool
) -> None:
    trainer = make_trainer(Place(), callbacks=[callback])
    trainer.strategy.connect(LitNet())
    assert overlaps_gather(trainer, None, lightning_names("lightning.pytorch")) is overlaps
