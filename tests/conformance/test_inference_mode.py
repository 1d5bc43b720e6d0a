"""Evaluation in inference mode, which Lightning uses with every backend except gloo.

Tensors that are made there never reach a training step: they would get no gradient.
"""

from unittest import mock

import pytest
import torch
from lightning.pytorch.loops import utilities

from tests.conformance.blocks import LAYOUTS, LitBlocks, batches
from tests.conformance.toys import Place, assert_weights, make_trainer, weights
from tests.letters import M, R, Z

pytestmark = pytest.mark.thorough


class LitEvaluated(LitBlocks):
    def __init__(self):
        super().__init__()
        self.modes = set()

    def validation_step(self, batch, batch_idx):
        self.modes.add(torch.is_inference_mode_enabled())
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.loss(batch)


def evaluate_and_fit(rank, place, infers):
    # as with another backend than gloo
    with mock.patch.object(utilities, "_distributed_is_initialized", return_value=False):
        trainer = make_trainer(
            place,
            use_distributed_sampler=False,
            precision="bf16-mixed",
            inference_mode=infers,
            num_sanity_val_steps=0,
            limit_train_batches=2,
            limit_val_batches=2,
            limit_test_batches=2,
            limit_predict_batches=2,
        )
        module, data = LitEvaluated(), batches(place, rank)
        losses = [*trainer.validate(module, data, verbose=False)[0].values()]
        assert module.modes == {infers}
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, data)
            losses += trainer.test(module, data, verbose=False)[0].values()
            losses += trainer.predict(module, data)
        return [float(loss) for loss in losses], weights(trainer)


PLACES = {
    **{name: place for name, place in LAYOUTS.items() if place.world_size == 2},
    "d2": Place(world_size=2),
    "m2": Place(layout={M: 2, R: "full"}),
    "d2 in host memory": Place(
        world_size=2, layout={Z: "optimizer", "offload_optimizer": True, R: "offload"}
    ),
    "d2 sharded parameters by step": Place(
        world_size=2, layout={Z: "parameters", M: 2, "reshard_after": "step"}
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_inference_mode_changes_nothing(name, conformance):
    found, expected = (
        conformance.ranks(evaluate_and_fit, PLACES[name], infers) for infers in (True, False)
    )
    for (losses, ours), (others, theirs) in zip(found, expected, strict=True):
        assert losses == pytest.approx(others, rel=1e-6)
        assert_weights(ours, theirs)
