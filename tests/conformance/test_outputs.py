"""Behaviours 15, 16, 26 to 29 and 31: outputs, predictions and checkpoints of a Trainer."""

from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn

from lightning_ptdp.checkpoint import read_full, to_lightning_file
from lightning_ptdp.pipeline.crossing import StageError
from lightning_ptdp.pipeline.p2p import PeerError
from tests.conformance.toys import (
    P2,
    LitNet,
    Place,
    assert_near,
    assert_weights,
    layers,
    loader,
    make_trainer,
    samples,
    weights,
)

pytestmark = pytest.mark.thorough

PIPELINE = Place(world_size=2, layout=P2)


def all_stages_of_a_trainer(rank, place):
    trainer = make_trainer(place, max_epochs=1)
    module = LitNet()
    trainer.fit(module, loader(), loader())
    results = [
        trainer.validate(module, loader(20), verbose=False),
        trainer.test(module, loader(12), verbose=False),
    ]
    predictions = trainer.predict(module, loader(20))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader())
    return results, torch.cat(predictions), weights(trainer), trainer.global_step


@pytest.mark.parametrize("name", ["one", "d2", "p2"])
def test_repeated_use_of_trainer_matches_lightning(name, conformance):
    conformance.check(all_stages_of_a_trainer, name)


class Writer(BasePredictionWriter):
    """Writes one file per batch and rank, and keeps the predictions of the epoch."""

    def __init__(self, folder: str) -> None:
        super().__init__(write_interval="batch_and_epoch")
        self.folder, self.epoch, self.indices = Path(folder), [], []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, index, _):
        torch.save(prediction, self.folder / f"{trainer.global_rank}-{index}.pt")
        self.indices.extend(indices)

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.epoch = predictions


class LitPredictsMore(LitNet):
    """Returns nested predictions."""

    def predict_step(self, batch, batch_idx):
        x, y = batch
        prediction = self.net(x)
        return {"prediction": prediction, "pair": (prediction * 2, y), "mean": prediction.mean()}


def predict(rank, place, path):
    here = Path(path, place.folder)
    here.mkdir(exist_ok=True)
    writer = Writer(str(here))
    trainer = make_trainer(place, callbacks=[writer])
    returned = trainer.predict(LitPredictsMore(), loader(21, batch_size=4))
    files = [torch.load(here / f"{trainer.global_rank}-{i}.pt") for i in range(len(returned))]
    return {"returned": returned, "files": files, "epoch": writer.epoch, "indices": writer.indices}


@pytest.mark.parametrize("name", ["d2", "p2"])
def test_predictions_are_complete_and_in_order(name, conformance, tmp_path):
    for found, _ in conformance.check(predict, name, str(tmp_path)):
        for batches in ("files", "epoch"):
            assert_near(found[batches], found["returned"], 0.0)


class LitReturnsMore(LitNet):
    """Returns nested outputs and records those that hooks get."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        prediction = self.net(batch[0])
        loss = nn.functional.mse_loss(prediction, batch[1])
        return {
            "loss": loss,
            "prediction": prediction.detach(),
            "rmse": loss.detach(),
            "names": [f"{x:.3f}" for x in batch[0][:, 0]],
        }

    def validation_step(self, batch, batch_idx):
        prediction = self.net(batch[0])
        return {
            "pair": (prediction, batch[1]),
            "mean": prediction.mean(),
            "part": "val",
            "count": float(prediction.square().mean()),
        }

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append({**outputs, "loss": outputs["loss"].clone()})

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs)


def outputs_of_batches(rank, place):
    module = LitReturnsMore()
    make_trainer(place, max_epochs=1).fit(
        module, loader(20, batch_size=7), loader(11, batch_size=4)
    )
    return module.seen


@pytest.mark.parametrize("name", ["m3", "d2", "p2"])
def test_hooks_get_outputs_of_whole_batch(name, conformance):
    conformance.check(outputs_of_batches, name)


class LitTwoCalls(LitNet):
    """Calls the model twice in one step."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y) + self.net(-x).square().mean()


def two_calls(rank, place):
    try:
        make_trainer(place, max_steps=1).fit(LitTwoCalls(), loader())
    except (StageError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_two_forward_calls_in_one_step_are_refused(pool, conformance):
    # The other rank waits for a message until its timeout, because the workers of a pool do not
    # end.
    messages = conformance.ranks(two_calls, Place(world_size=2, layout={**P2, "timeout_s": 6}))
    assert messages[0].startswith("PeerError")
    assert messages[1].startswith("StageError")
    assert "calls the repeated blocks more than once" in messages[1]
    assert "pipeline_parallel_size=1" in messages[1], "the message does not name a working option"


class LitLate(LitNet):
    """Builds its layers in ``configure_model`` and counts the calls."""

    def __init__(self):
        super().__init__()
        self.net, self.built, self.configured = None, 0, 0

    def configure_model(self):
        self.configured += 1
        if self.net is None:
            self.built += 1
            self.net = layers()


def configure_twice(rank, place):
    trainer, module = make_trainer(place), LitLate()
    trainer.fit(module, loader())
    before = weights(trainer)
    trainer.validate(module, loader(), verbose=False)
    return module.configured, module.built, before, weights(trainer)


def test_second_configure_model_call_keeps_weights(conformance):
    for configured, built, before, after in conformance.ranks(configure_twice, PIPELINE):
        assert (configured, built) == (2, 1)
        assert_weights(after, before, tolerance=0)


def load_before_fit(rank, place):
    L.seed_everything(1 + rank, verbose=False)
    module = LitNet()
    generator = torch.Generator().manual_seed(11)
    module.load_state_dict(
        {k: torch.randn(v.shape, generator=generator) * 0.2 for k, v in module.state_dict().items()}
    )
    trainer = make_trainer(place, max_epochs=1)
    trainer.fit(module, loader())
    return weights(trainer)


def test_weights_loaded_before_fit_are_trained(conformance):
    conformance.check(load_before_fit, "p2")


def save_around_fit(rank, place, path):
    here = Path(path)
    trainer, module = make_trainer(place), LitNet()
    trainer.strategy.connect(module)
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.fit(module, loader(), loader())
    trained = weights(trainer)
    trainer.save_checkpoint(here / "all.ckpt")
    trainer.save_checkpoint(here / "weights.ckpt", weights_only=True)
    other = make_trainer(place)
    result = other.validate(LitNet(), loader(), ckpt_path=here / "weights.ckpt", verbose=False)
    return (
        initial,
        trained,
        float(trainer.callback_metrics["val_loss"]),
        result[0]["val_loss"],
        weights(other),
    )


def test_checkpoint_saved_after_fit_loads_on_one_device(conformance, tmp_path):
    for initial, trained, val_loss, loaded_val_loss, loaded in conformance.ranks(
        save_around_fit, PIPELINE, str(tmp_path)
    ):
        assert not torch.equal(initial["net.0.weight"], trained["net.0.weight"])
        assert loaded_val_loss == pytest.approx(val_loss, rel=1e-6)
        assert_weights(loaded, trained, tolerance=0)
    to_lightning_file(tmp_path / "all.ckpt", tmp_path / "single.ckpt")
    module = LitNet.load_from_checkpoint(tmp_path / "single.ckpt")
    assert_weights(module.state_dict(), trained, tolerance=0)
    loss = nn.functional.mse_loss(module.net(samples(32).tensors[0]), samples(32).tensors[1])
    assert loss.item() == pytest.approx(val_loss, rel=1e-5)
    assert_weights(read_full(tmp_path / "weights.ckpt"), trained, tolerance=0)


def save_before_fit(rank, place, path):
    here = Path(path)
    module = LitNet()
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = make_trainer(place)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(here / "before.ckpt", weights_only=True)
    L.seed_everything(2, verbose=False)
    other = make_trainer(place)
    other.validate(LitNet(), loader(), ckpt_path=here / "before.ckpt", verbose=False)
    return initial, weights(other)


def test_checkpoint_saved_before_fit_has_initial_weights(conformance, tmp_path):
    for initial, loaded in conformance.ranks(save_before_fit, PIPELINE, str(tmp_path)):
        assert_weights(loaded, initial, tolerance=0)
