"""State dicts changed by checkpoint hooks or weight averaging are saved and loaded."""

from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_ptdp.checkpoint import CheckpointError, read_full
from tests.conformance.toys import (
    DDP,
    ONE,
    P2,
    PLACES,
    LitNet,
    Losses,
    Place,
    assert_near,
    assert_weights,
    loader,
    make_trainer,
    weights,
)

pytestmark = pytest.mark.thorough

WHOLE = {
    "one": PLACES["one"],
    "m4": (Place(layout={"num_microbatches": 4}), ONE),
    "d2": PLACES["d2"],
    "d2 in the background": (
        Place(world_size=2, layout={"async_save": True}),
        DDP,
    ),
    "d2 sharded": (
        Place(world_size=2, layout={"shard": "optimizer", "overlap_parameter_gather": True}),
        DDP,
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("references")


def pairs(conformance, function, places, tmp_path, shared, *args):
    """Return the results of all ranks with those of the reference, which trains once in a folder of
    its own."""
    ours, reference = places
    names = (function, *args)
    folder = shared / "-".join([str(reference.world_size), *(one.__name__ for one in names)])
    found = conformance.ranks(function, ours, str(tmp_path), *args)
    expected = conformance.expected(function, reference, str(folder), *args)
    return zip(found, expected * (len(found) // len(expected)), strict=True)


def stored(path):
    return read_full(path) if path.is_dir() else torch.load(path, weights_only=False)["state_dict"]


class LitLate(LitNet):
    """Builds its layers in ``configure_model``, on the meta device under our strategy."""

    def __init__(self):
        super().__init__()
        self.late, self.net = self.net, None

    def configure_model(self):
        if self.net is None:
            self.net, self.late = self.late, None


def swa():
    return StochasticWeightAveraging(1e-2, swa_epoch_start=1)


def ema():
    return EMAWeightAveraging(decay=0.7)


def average(rank, place, path, callback):
    """Train three epochs, then repeat the last two from the checkpoint of the first."""
    here, found = Path(path, place.folder), []
    for name, resume in (("whole", None), ("resumed", here / "whole" / "0.ckpt")):
        L.seed_everything(1, verbose=False)
        losses = Losses()
        saver = ModelCheckpoint(
            dirpath=here / name, filename="{epoch}", auto_insert_metric_name=False, save_top_k=-1
        )
        trainer = make_trainer(
            place, callbacks=[losses, callback(), saver], enable_checkpointing=True, max_epochs=3
        )
        trainer.fit(LitNet(), loader(), loader(), ckpt_path=resume)
        trainer.strategy.barrier()
        epochs = sorted(p.name for p in (here / name).iterdir() if p.name != "latest")
        val_loss = float(trainer.callback_metrics["val_loss"])
        found.append(
            (
                losses.values,
                val_loss,
                weights(trainer),
                [stored(here / name / epoch) for epoch in epochs],
            )
        )
    return found


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("callback", [ema, WeightAveraging, swa])
def test_averaged_weights_are_saved_and_resumed(name, callback, conformance, tmp_path, shared):
    for mine, theirs in pairs(conformance, average, WHOLE[name], tmp_path, shared, callback):
        for (losses, val_loss, final, files), (
            other_losses,
            other_val,
            other_final,
            other_files,
        ) in zip(mine, theirs, strict=True):
            # callbacks get the mean loss of their replica, as in DDP
            if name != "m4":
                assert losses == pytest.approx(other_losses, rel=1e-4)
            assert val_loss == pytest.approx(other_val, rel=1e-4)
            assert_weights(final, other_final)
            assert len(files) == len(other_files) > 1
            for file, other in zip(files, other_files, strict=True):
                assert_weights(file, other)
        assert_weights(mine[1][2], mine[0][2])  # the resumed run equals the uninterrupted one
        if callback is not swa:
            assert not torch.equal(mine[0][3][0]["net.0.weight"], mine[0][3][-1]["net.0.weight"])


class LitHooked(LitNet):
    """Removes, adds, renames and scales entries on saving, and reverts this on loading."""

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        del state["net.0.bias"]
        state["net.0.weight"] = state["net.0.weight"] * 2
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in state.items()} | {
            "extra": torch.arange(3)
        }

    def on_load_checkpoint(self, checkpoint):
        state = {
            name.removeprefix("old."): value
            for name, value in checkpoint["state_dict"].items()
            if name != "extra"
        }
        assert torch.equal(checkpoint["state_dict"]["extra"], torch.arange(3))
        state["net.0.weight"] = state["net.0.weight"] / 2
        state["net.0.bias"] = torch.full((16,), 0.25)
        checkpoint["state_dict"] = state


def resume(rank, place, path, saved, loaded):
    """Train an epoch with one module, and another epoch with the other."""
    file = Path(path, place.folder, "saved.ckpt")
    first = make_trainer(place, max_epochs=1)
    first.fit(saved(), loader())
    first.save_checkpoint(file)
    second = make_trainer(place, max_epochs=2)
    second.fit(loaded(), loader(), ckpt_path=file)
    return stored(file), weights(second)


class LitRankZero(LitNet):
    """Changes the state dict differently on rank 0, whose state Lightning saves."""

    def on_save_checkpoint(self, checkpoint):
        if self.trainer.is_global_zero:
            checkpoint["state_dict"]["net.0.bias"] = torch.zeros(16)
        else:
            checkpoint["state_dict"]["net.2.bias"] = torch.zeros(16)
            checkpoint["state_dict"]["other"] = torch.zeros(1)


def test_state_dict_changed_on_rank_zero_is_saved(conformance, tmp_path):
    for (file, _), (other_file, _) in conformance.pairs(
        resume, "d2", str(tmp_path), LitRankZero, LitRankZero
    ):
        assert_weights(file, other_file)
        assert not file["net.0.bias"].any()
        assert file["net.2.bias"].any()


class LitLoads(LitNet):
    """Reads the whole state dict on loading and changes every entry."""

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        mean = sum(float(value.double().sum()) for value in state.values())
        for name in list(state):
            state[name] = state[name] * 0.5 + mean * 1e-3


class LitHalves(LitNet):
    """Saves weights in half precision and an additional entry."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {
            name: value.half() for name, value in checkpoint["state_dict"].items()
        }
        checkpoint["state_dict"]["extra"] = torch.zeros(1)


def change_a_part(rank, place, path):
    trainer = make_trainer(place, max_epochs=1)
    trainer.fit(LitHalves(), loader())
    with pytest.raises(CheckpointError) as error:
        trainer.save_checkpoint(Path(path, "never.ckpt"))
    return str(error.value)


def test_added_state_dict_entry_is_refused_under_pipeline(conformance, tmp_path):
    for message in conformance.ranks(change_a_part, Place(world_size=2, layout=P2), str(tmp_path)):
        assert 'checkpoint["state_dict"]' in message
        assert "'extra' was added" in message
        assert "pipeline_parallel_size=1" in message
    assert not (tmp_path / "never.ckpt").exists()


class LitLateLoads(LitLate, LitLoads):
    pass


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        *((name, LitHooked, LitHooked) for name in WHOLE),
        *(
            (name, LitNet, loaded)
            for name in ("one", "d2", "p2")
            for loaded in (LitLoads, LitLate, LitLateLoads)
        ),
    ],
)
def test_state_dict_changed_by_hooks_is_saved_and_loaded(
    name, saved, loaded, conformance, tmp_path, shared
):
    places = (PLACES | WHOLE)[name]
    for found, expected in pairs(conformance, resume, places, tmp_path, shared, saved, loaded):
        assert_near(found, expected, 1e-5)
