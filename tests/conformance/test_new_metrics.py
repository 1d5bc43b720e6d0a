"""Metrics that hooks make during a fit: their values are those of one process on all ranks."""

import pytest
import torch
from torchmetrics import MeanMetric, MetricTracker, SumMetric

from tests.conformance.blocks import LAYOUTS, T2, LitBlocks, batches
from tests.conformance.toys import ONE, Place, make_trainer

pytestmark = pytest.mark.thorough

PLACES = {
    **{name: LAYOUTS[name] for name in ("p2", "t2", "d2p2 sharded")},
    "d2t2": Place(world_size=4, layout=T2),
}


NAMES = ("samples", "most", "last", "best")


class LitTracked(LitBlocks):
    """Tracks a metric over epochs, which copies it, and makes another one for each epoch."""

    def __init__(self):
        super().__init__()
        self.tracker = MetricTracker(MeanMetric(), maximize=False)
        self.train_tracker = MetricTracker(SumMetric(), maximize=True)

    def on_train_epoch_start(self):
        self.train_tracker.increment()
        self.samples = SumMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.samples.update(len(batch))
        self.train_tracker.update(len(batch))
        return loss

    def on_train_epoch_end(self):
        self.log("samples", self.samples.compute())
        self.log("most", self.train_tracker.best_metric())

    def on_validation_epoch_start(self):
        self.tracker.increment()

    def validation_step(self, batch, batch_idx):
        self.tracker.update(self.loss(batch), weight=len(batch))

    def on_validation_epoch_end(self):
        self.log("last", self.tracker.compute())
        self.log("best", self.tracker.best_metric())


def logged(rank, place):
    torch.manual_seed(1)
    trainer = make_trainer(place, use_distributed_sampler=False, max_epochs=2)
    trainer.fit(LitTracked(), batches(place, rank), batches(place, rank))
    return {name: trainer.callback_metrics[name].item() for name in NAMES}


@pytest.mark.parametrize("name", PLACES)
def test_metrics_of_hooks_equal_one_process(name, conformance):
    (expected,) = conformance.expected(logged, ONE)
    assert expected["samples"] == expected["most"] == 32
    for found in conformance.ranks(logged, PLACES[name]):
        assert found == pytest.approx(expected, rel=1e-5)
