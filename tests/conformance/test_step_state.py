"""State and metrics that steps collect are, on every rank, those of one device."""

from collections import defaultdict, deque
from typing import ClassVar

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import (
    CatMetric,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    MinMaxMetric,
    PearsonCorrCoef,
)

from tests.conformance.toys import DDP, ONE, LitNet, Place, loader, make_trainer

pytestmark = pytest.mark.thorough

LAYOUTS = {
    "p2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "p2 one microbatch": (2, {"pipeline_parallel_size": 2, "num_microbatches": 1}),
    "p2v2": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "num_microbatches": 2}),
    "d2p2": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
}


class Average:
    """A running mean, as in many training scripts."""

    def __init__(self):
        self.sum, self.count = 0.0, 0

    def add(self, values):
        self.sum += float(values.sum())
        self.count += len(values)


class Collects(LitNet):
    """Every documented way of collecting values in a step for a hook at the end of the epoch."""

    total: Tensor
    of_the_class: ClassVar[list[Tensor]] = []

    def __init__(self):
        super().__init__()
        self.train_error, self.errors = (
            MeanSquaredError(),
            nn.ModuleDict({"val": MeanSquaredError()}),
        )
        self.collection = MetricCollection(
            {"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)}
        )
        self.pearson, self.range, self.cat = (
            PearsonCorrCoef(),
            MinMaxMetric(MeanMetric()),
            CatMetric(),
        )
        self.losses = []
        self.by_loader = defaultdict(list)
        self.seen, self.seen_before, self.recent = 0, 0, deque[int](maxlen=3)
        self.average, self.greatest = Average(), None
        self.register_buffer("total", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        prediction = self.net(x)
        self.train_error.update(prediction, y)
        self.losses.append((prediction - y).square().detach())
        self.total += len(x)
        self.of_the_class.append(prediction.detach())
        return nn.functional.mse_loss(prediction, y)

    def on_train_epoch_end(self):
        self.log("train_error", self.train_error.compute())
        self.train_error.reset()
        self.log("train_mean", torch.cat(self.losses).mean(), sync_dist=True)
        self.log("train_total", self.total, sync_dist=True)
        self.log("train_count", float(sum(map(len, self.of_the_class))), sync_dist=True)
        self.losses.clear()
        self.of_the_class.clear()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.seen_before += len(x)
        prediction = self.net(x)
        errors = (prediction - y).square()[:, 0]
        self.errors["val"].update(prediction, y)
        self.collection.update(prediction, y)
        self.pearson.update(prediction[:, 0], y[:, 0])
        self.cat.update(prediction)
        self.range.update(errors)
        self.by_loader[dataloader_idx].append(errors)
        self.average.add(errors)
        self.seen += len(x)
        self.recent.append(float(x[-1, 0]))
        self.greatest = (
            errors.max() if self.greatest is None else torch.maximum(self.greatest, errors.max())
        )

    def on_validation_epoch_end(self):
        values = {
            "seen": self.seen,
            "seen_before": self.seen_before,
            "mean": self.average.sum / self.average.count,
        }
        self.log_dict(
            {**values, "recent": self.recent[-1], "greatest": self.greatest}, sync_dist=True
        )
        self.log_dict(
            {f"loader{key}": torch.cat(found).mean() for key, found in self.by_loader.items()},
            sync_dist=True,
        )
        self.log("val_error", self.errors["val"].compute())
        self.log_dict(self.collection.compute())
        self.log("spread", self.cat.compute().std())
        self.log("pearson", self.pearson.compute())
        self.log_dict({f"range_{name}": value for name, value in self.range.compute().items()})
        for metric in (self.errors["val"], self.collection, self.pearson, self.cat, self.range):
            metric.reset()
        self.by_loader.clear()
        self.seen = self.seen_before = 0
        self.average, self.greatest = Average(), None


class Values(L.Callback):
    def __init__(self):
        self.seen = []

    def on_train_epoch_end(self, trainer, *_):
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def collect(rank, place):
    values, module = Values(), Collects()
    trainer = make_trainer(place, callbacks=[values])
    trainer.fit(
        module, loader(28, batch_size=4), [loader(24, batch_size=6), loader(14, batch_size=4)]
    )
    return values.seen, len(module.losses)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_collected_in_steps_are_on_every_rank(name, conformance):
    expected, _ = conformance.expected(collect, DDP if name.startswith("d2") else ONE)[0]
    world_size, layout = LAYOUTS[name]
    place = Place(world_size=world_size, layout=layout)
    for found, left in conformance.ranks(collect, place):
        assert left == 0
        for epoch, there in zip(found, expected, strict=True):
            assert epoch.keys() == there.keys()
            for key, value in there.items():
                assert epoch[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key
