"""Freezing and unfreezing during training gives the weights of a single process."""

from pathlib import Path

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import BackboneFinetuning
from torch.utils.data import DataLoader, Subset

from tests.conformance.toys import (
    PLACES,
    LitBackbone,
    LitNet,
    Losses,
    assert_weights,
    make_trainer,
    samples,
    weights,
)

pytestmark = pytest.mark.thorough


def own(rank, place):
    """Return this replica's part of batches that are the same in all layouts."""
    replicas = 1 if "pipeline_parallel_size" in place.layout else place.world_size
    return DataLoader(
        Subset(samples(), range(rank if replicas > 1 else 0, 32, replicas)),
        batch_size=8 // replicas,
    )


class Turns(L.Callback):
    """Trains the first layer in odd epochs and the last one in even epochs."""

    def on_train_epoch_start(self, trainer, module):
        odd = trainer.current_epoch % 2 == 1
        for name, parameter in module.net.named_parameters():
            if name[0] in "06":
                parameter.requires_grad_((name[0] == "0") == odd)


def in_turns(rank, place, clip, accumulate):
    losses = Losses()
    trainer = make_trainer(
        place,
        max_epochs=3,
        use_distributed_sampler=False,
        callbacks=[Turns(), losses],
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(LitNet(), own(rank, place))
    return losses.values, weights(trainer)


@pytest.mark.parametrize(("clip", "accumulate"), [(0.05, 1), (None, 2)])
@pytest.mark.parametrize("name", ["m3", "d2", "d2 m2", "p2"])
def test_layers_frozen_in_turn_train_like_single_process(name, clip, accumulate, conformance):
    for (other, found), (losses, expected) in conformance.pairs(
        in_turns, PLACES[name][0], clip, accumulate
    ):
        if not name.startswith("d2"):
            assert other == pytest.approx(losses, rel=1e-5)
        assert_weights(found, expected)


class Groups(L.Callback):
    """Records the learning rates and sizes of the parameter groups per step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        groups = trainer.optimizers[0].param_groups
        self.seen.append(
            [(group["lr"], sum(p.numel() for p in group["params"])) for group in groups]
        )


def unfreeze(rank, place, path, stop):
    """Train ``stop`` epochs, and the rest of four in a new Trainer."""
    file = Path(path, place.folder, f"{stop}.ckpt")
    groups = Groups()
    for epochs, resume in ((stop, None), (4, file)):
        trainer = make_trainer(
            place,
            use_distributed_sampler=False,
            max_epochs=epochs,
            callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=2), groups],
        )
        trainer.fit(LitBackbone(), own(rank, place), ckpt_path=resume)
        trainer.save_checkpoint(file)
    return groups.seen, weights(trainer)


@pytest.mark.parametrize(
    ("name", "stop"), [("one", 1), ("one", 2), ("one", 3), ("m3", 3), ("d2", 3), ("d2 m2", 3)]
)
def test_backbone_is_unfrozen_at_its_epoch_after_resume(name, stop, conformance, tmp_path):
    for _, (groups, _) in conformance.check(unfreeze, PLACES[name][0], str(tmp_path), stop):
        assert len(groups[-1]) == 2, "the reference unfroze nothing"
