"""Data parallelism compared with torch's DistributedDataParallel on equal batches."""

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_ptdp.strategy import PTDPStrategy
from tests.parity import make_trainer
from tests.tiny_gpt import LitTiny, PaddedTokens, Run

pytestmark = pytest.mark.thorough

MODES = {
    "d2 flat": (2, {}),
    "d2 sharded": (2, {"shard": "optimizer"}),
    "d2 sharded gradients": (2, {"shard": "gradients"}),
    "d4 flat": (4, {}),
    "d4 sharded": (4, {"shard": "optimizer"}),
    "d4 two levels": (4, {"data_parallel_replicas": 2}),
    "d4 sharded in two levels": (4, {"data_parallel_replicas": 2, "shard": "optimizer"}),
}
GLOBAL_BATCH = 8


class LitWithUnused(LitTiny):
    """A module with an unused parameter, which weight decay does not change."""

    def __init__(self):
        super().__init__(Run(count_tokens=False, ignore_padding=False, eager=True))
        self.unused = nn.Parameter(torch.ones(5))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


def train(rank, world_size, layout):
    """Return this replica's losses and the final weights; without a layout, use torch's DDP."""
    L.seed_everything(3, verbose=False)
    module, losses = LitWithUnused(), []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, *_):
            losses.append(float(outputs["loss"]))

    trainer = make_trainer(
        "ddp_find_unused_parameters_true"
        if layout is None
        else PTDPStrategy(**layout, bucket_mb=1e-2),
        world_size,
        max_steps=4,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        callbacks=[Losses()],
    )
    data = PaddedTokens(64, ignore_padding=False)
    sampler = torch.utils.data.DistributedSampler(
        data, num_replicas=world_size, rank=rank, shuffle=False
    )
    trainer.fit(
        module,
        torch.utils.data.DataLoader(data, batch_size=GLOBAL_BATCH // world_size, sampler=sampler),
    )
    return {
        "losses": losses,
        "final": {name: value.clone() for name, value in module.state_dict().items()},
    }


@pytest.mark.parametrize("name", MODES)
def test_losses_and_weights_equal_ddp(name, pool):
    world_size, layout = MODES[name]
    expected = pool.run(train, world_size=world_size, args=(world_size, None))
    assert len({tuple(rank["losses"]) for rank in expected}) == world_size, (
        "replicas must have different losses"
    )
    for found, peer in zip(
        pool.run(train, world_size=world_size, args=(world_size, layout)), expected, strict=True
    ):
        torch.testing.assert_close(
            torch.tensor(found["losses"]), torch.tensor(peer["losses"]), rtol=1e-5, atol=0
        )
        torch.testing.assert_close(found["final"], peer["final"], rtol=1e-5, atol=1e-6)
