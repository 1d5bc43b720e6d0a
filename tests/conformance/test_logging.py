"""Behaviours 8, 9 and 30: logged values are the same on all ranks and as in Lightning."""

import csv

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torchmetrics import MeanSquaredError, MetricCollection, PearsonCorrCoef

from lightning_ptdp.loggers import MLFlowLogger
from tests.conformance.toys import LitNet, Place, loader, make_trainer, metrics

pytestmark = pytest.mark.thorough


class LogsEverything(LitNet):
    """Calls ``self.log`` in every way, and logs a validation loss per loader."""

    def __init__(self):
        super().__init__()
        self.metric, self.val_metric = MeanSquaredError(), MeanSquaredError()
        self.collection = MetricCollection(
            {"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)}
        )
        self.called = MetricCollection(
            {"pearson": PearsonCorrCoef(), "step_rmse": MeanSquaredError(squared=False)}
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        prediction = self.net(x)
        loss = torch.nn.functional.mse_loss(prediction, y)
        self.log("plain", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("bar", loss, True, False)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=len(x), sync_dist=True)
        self.log(
            "most", prediction.max(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True
        )
        self.log(
            "least",
            prediction.min(),
            on_step=False,
            on_epoch=True,
            reduce_fx=torch.min,
            sync_dist=True,
        )
        self.log(
            "weighted_step", loss, on_step=True, on_epoch=True, batch_size=len(x), sync_dist=True
        )
        self.log(
            "count", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True
        )
        self.metric(prediction, y)
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        self.called(prediction, y)
        self.log_dict(self.called, on_step=True, on_epoch=False)
        self.log_dict({"a": loss, "b": 2 * loss}, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.log("from_hook", 3.5)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        prediction = self.net(x)
        self.log(
            "val_loss",
            torch.nn.functional.mse_loss(prediction, y),
            batch_size=len(x),
            sync_dist=True,
        )
        self.val_metric(prediction, y)
        self.log("val_metric", self.val_metric)
        self.collection(prediction, y)
        self.log_dict(self.collection)


class SeenMetrics(L.Callback):
    """Records all metrics after every batch, epoch and validation."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(metrics(trainer))

    def on_train_epoch_end(self, trainer, *_):
        self.seen.append(metrics(trainer))

    def on_validation_end(self, trainer, *_):
        self.seen.append(metrics(trainer))


def log_everything(rank, place):
    seen = SeenMetrics()
    # 29 samples: the last batch is smaller and its microbatches are uneven.
    trainer = make_trainer(place, callbacks=[seen])
    trainer.fit(LogsEverything(), loader(29), loader(11, batch_size=6))
    return seen.seen


@pytest.mark.parametrize("name", ["one", "m3", "d2", "p2"])
def test_every_kind_of_log_call_matches_lightning(name, conformance):
    logged = {
        "both_step",
        "both_epoch",
        "metric_step",
        "pearson",
        "val_loss",
        "rmse",
        "from_hook",
    }
    for _, expected in conformance.check(log_everything, name):
        assert logged <= expected[-1]["callback_metrics"].keys()


class Monitor(ThroughputMonitor):
    """A monitor that has the peak of the device."""

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        self.available_flops = 10**12
        for throughput in self._throughputs.values():
            throughput.available_flops = self.available_flops


class Counted(LitNet):
    flops_per_batch = 1000


def monitor(rank, place):
    callback = Monitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    trainer = make_trainer(place, callbacks=[callback], logger=CSVLogger(place.folder))
    trainer.fit(Counted(), loader())
    logged = metrics(trainer)["logged_metrics"]
    return {
        name.removeprefix("train/"): value
        for name, value in logged.items()
        if name.startswith("train/")
    }


@pytest.mark.parametrize("name", ["one", "d2", "p2"])
def test_throughput_monitor_counts_replicas(name, conformance):
    found, expected = conformance.pairs(monitor, name)[0]
    assert found.keys() == expected.keys() > {"device/samples_per_sec", "device/mfu"}
    if name == "d2":
        assert found["samples_per_sec"] == pytest.approx(2 * found["device/samples_per_sec"])
    assert found["device/flops_per_sec"] == pytest.approx(
        found["device/mfu"] * (2 if name == "p2" else 1) * 1e12
    )


class CountsValidation(L.Callback):
    def __init__(self):
        self.at = []

    def on_validation_start(self, trainer, *_):
        self.at.append((trainer.global_step, trainer.sanity_checking))


def validate_often(rank, place, settings):
    count = CountsValidation()
    trainer = make_trainer(place, callbacks=[count], **settings)
    trainer.fit(LitNet(), loader(), [loader(8), loader(12, batch_size=4)])
    return count.at, metrics(trainer)


@pytest.mark.parametrize("name", ["d2", "p2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"val_check_interval": 0.5, "num_sanity_val_steps": 2},
        {"check_val_every_n_epoch": 2, "max_epochs": 4, "num_sanity_val_steps": 0},
        {"check_val_every_n_epoch": None, "val_check_interval": 3, "num_sanity_val_steps": -1},
    ],
    ids=["twice an epoch", "every second epoch", "every third batch"],
)
def test_validation_interval_with_several_loaders(name, settings, conformance):
    for _, (_, expected) in conformance.check(validate_often, name, settings):
        assert "val_loss/dataloader_idx_1" in expected["callback_metrics"]


def log_to(rank, place, path):
    loggers = [
        CSVLogger(path, name="csv", flush_logs_every_n_steps=1),
        TensorBoardLogger(path, name="tensorboard"),
        MLFlowLogger(save_dir=path, experiment_name="conformance"),
    ]
    trainer = make_trainer(place, logger=loggers, max_epochs=1)
    trainer.fit(LitNet(), loader(), loader())
    return loggers[2].run_id


def test_loggers_write_same_values_once(conformance, tmp_path):
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place = Place(world_size=2, layout={"pipeline_parallel_size": 2, "num_microbatches": 2})
    run_id = conformance.ranks(log_to, place, str(tmp_path))[0]
    (table,) = tmp_path.glob("csv/*/metrics.csv")
    with table.open() as stream:
        rows = [row for row in csv.DictReader(stream) if row["train_loss"]]
    losses = [float(row["train_loss"]) for row in rows]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    (folder,) = tmp_path.glob("tensorboard/version_*")
    events = EventAccumulator(str(folder)).Reload()
    assert [e.value for e in events.Scalars("train_loss")] == pytest.approx(losses)
    history = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_metric_history(
        run_id, "train/loss"
    )
    assert [m.value for m in sorted(history, key=lambda m: m.step)] == pytest.approx(losses)
