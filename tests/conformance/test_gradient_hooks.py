"""The documented calls for norms and clipping in hooks cover the whole model."""

import pytest
from lightning.pytorch.utilities import grad_norm

from tests.conformance.toys import (
    P2,
    LitNet,
    Place,
    loader,
    make_trainer,
    weights,
)

SHARDED = {**P2, "num_microbatches": 1, "shard": "optimizer"}
PLACES = {"p2": Place(world_size=2, layout=P2), "d2p2 sharded": Place(world_size=4, layout=SHARDED)}


class LitClips(LitNet):
    """Logs the gradient norm and clips in Lightning's hooks."""

    def on_before_optimizer_step(self, optimizer):
        strategy = self.trainer.strategy
        norm = (
            strategy.compute_gradient_norm()
            if hasattr(strategy, "compute_gradient_norm")
            else self.plain_norm()
        )
        self.log("norm", norm)

    def plain_norm(self):
        return grad_norm(self, norm_type=2)["grad_2.0_norm_total"]

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


def clip(rank, place):
    trainer = make_trainer(place, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(LitClips(), loader())
    return float(trainer.callback_metrics["norm"]), weights(trainer)


@pytest.mark.parametrize("name", PLACES)
def test_norm_and_clipping_in_hooks_match_single_process(name, conformance):
    conformance.check(clip, PLACES[name])
