"""Freezing and unfreezing during training gives the weights of a single process."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import BackboneFinetuning
from torch.utils.data import DataLoader, Subset

from tests.conformance.toys import (
    PLACES,
    LitBackbone,
    LitNet,
    Losses,
    Place,
    assert_weights,
    make_trainer,
    samples,
    weights,
)

pytestmark = pytest.mark.thorough


def own(rank: int, place: Place) -> DataLoader:
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


def in_turns(rank: int, place: Place, clip: float | None, accumulate: int) -> Any:
    L.seed_everything(1, verbose=False)
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


def unfreeze(rank: int, place: Place, path: str) -> Any:
    file = Path(path, place.folder, "half.ckpt")
    L.seed_everything(1, verbose=False)
    first = make_trainer(
        place,
        use_distributed_sampler=False,
        max_epochs=2,
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)],
    )
    first.fit(LitBackbone(), own(rank, place))
    first.save_checkpoint(file)
    second = make_trainer(
        place,
        use_distributed_sampler=False,
        max_epochs=3,
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)],
    )
    second.fit(LitBackbone(), own(rank, place), ckpt_path=file)
    sizes = [sum(p.numel() for p in group["params"]) for group in second.optimizers[0].param_groups]
    return sizes, weights(second)


@pytest.mark.parametrize("name", ["m3", "d2", "d2 m2"])
def test_unfrozen_backbone_trains_after_resume(name, conformance, tmp_path):
    for (sizes, found), (groups, expected) in conformance.pairs(
        unfreeze, PLACES[name][0], str(tmp_path)
    ):
        assert sizes == groups
        assert len(sizes) == 2
        assert_weights(found, expected)
