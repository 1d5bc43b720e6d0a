"""Parameters without dimensions and without elements, trained, saved and resumed with shards."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.conformance.toys import ONE, LitNet, Place, assert_weights, loader, make_trainer, weights

pytestmark = pytest.mark.thorough

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),  # its constructor makes the states
}


class LitDegenerate(LitNet):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.scale * self.net(x), y) + self.empty.sum()

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


def _train(rank, place, optimizer, folder, epochs, resume=None):
    """Train with the same samples on all replicas; return weights, and shapes of the step count."""
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(
        place, max_epochs=epochs, callbacks=[saver], use_distributed_sampler=False
    )
    trainer.fit(LitDegenerate(optimizer), loader(), ckpt_path=resume)
    states = getattr(trainer.optimizers[0], "_optimizer", trainer.optimizers[0]).state.values()
    return weights(trainer), {tuple(state["step"].shape) for state in states}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_sharded_training_resumes_like_one_process(conformance, shard, optimizer, tmp_path):
    sharded = Place(world_size=2, layout={"shard": shard})
    expected, _ = conformance.expected(_train, ONE, optimizer, str(tmp_path / "expected"), 2)[0]
    conformance.ranks(_train, sharded, optimizer, str(tmp_path / "first"), 1)
    for number, place in enumerate([sharded, Place()]):
        folder = str(tmp_path / str(number))
        resume = str(tmp_path / "first" / "epoch=0.ckpt")
        for found, shapes in conformance.ranks(_train, place, optimizer, folder, 2, resume):
            assert_weights(found, expected)
            assert shapes == {()}
