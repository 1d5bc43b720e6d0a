"""Steps with microbatches that run a backward of their own, or clear gradients."""

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_ptdp.strategy import PTDPStrategy
from tests.errors import raises_with
from tests.parity import make_trainer


class LitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class LitAdversarial(LitClassifier):
    """Learns from samples that the gradient of the loss has changed (FGSM)."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.clone().requires_grad_()
        F.cross_entropy(self.net(x), y).backward()
        changed = (x + 0.1 * x.grad.sign()).detach()
        return F.cross_entropy(self.net(changed), y)


class LitClearing(LitClassifier):
    """Clears the gradients as a loop without Lightning does."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.optimizers().zero_grad(set_to_none=batch_idx % 2 == 0)
        return F.cross_entropy(self.net(x), y)


class LitClearsModule(LitClassifier):
    def training_step(self, batch, batch_idx):
        self.zero_grad()
        return F.cross_entropy(self.net(batch[0]), batch[1])


class LitClearsOther(LitClassifier):
    """Trains a vector of its own in the step."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        shift = nn.Parameter(torch.zeros(4))
        inner = torch.optim.SGD([shift], lr=0.1)
        inner.zero_grad()
        (shift.grad,) = torch.autograd.grad(F.cross_entropy(self.net(x + shift), y), [shift])
        inner.step()
        return F.cross_entropy(self.net(x + shift.detach()), y)


class LitWeighted(LitClassifier):
    """Weighs the parts of a batch; its gradients are accumulated."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        weight = torch.tensor([1.0, 2.0, 4.0])
        loss = F.cross_entropy(self.net(x), y, weight=weight)
        return {"loss": loss, "num_tokens": weight[y].sum()}


def _trained(rank, kind, layout, size):
    L.seed_everything(3, verbose=False)
    data = TensorDataset(torch.randn(24, 4), torch.randint(3, (24,)))
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=False)
    module = kind()
    options = {"max_steps": 1, "accumulate_grad_batches": 3} if kind is LitWeighted else {}
    trainer = make_trainer(PTDPStrategy(**layout), size, **{"max_steps": 3, **options})
    trainer.fit(module, DataLoader(data, batch_size=8 // size, sampler=sampler))
    return trainer.strategy.gather_state_dict()


@pytest.mark.parametrize("kind", [LitAdversarial, LitClearing, LitWeighted])
def test_gradients_of_earlier_microbatches_are_kept(kind, pool):
    (expected,) = pool.run(_trained, world_size=1, args=(kind, {}, 1))
    (alone,) = pool.run(_trained, world_size=1, args=(kind, {"num_microbatches": 2}, 1))
    torch.testing.assert_close(alone, expected)
    for shard in ("none", "optimizer", "gradients", "parameters"):
        layout = {"num_microbatches": 2, "shard": shard}
        replicas = pool.run(_trained, world_size=2, args=(kind, layout, 2))
        torch.testing.assert_close(replicas[0], expected)


@pytest.mark.parametrize("kind", [LitClearing, LitClearsModule])
@pytest.mark.parametrize("layout", [{"num_microbatches": 2}, {"shard": "optimizer"}])
def test_clearing_between_accumulated_batches_is_refused(layout, kind):
    trainer = make_trainer(PTDPStrategy(**layout), 2, accumulate_grad_batches=2)
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8).long()), batch_size=4)
    with raises_with(
        ["calls zero_grad", "accumulate_grad_batches=2", "Remove"], MisconfigurationException
    ):
        trainer.fit(kind(), data)


def test_other_gradients_may_be_cleared_between_accumulated_batches():
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8).long()), batch_size=4)
    strategy = PTDPStrategy(num_microbatches=2)
    trainer = make_trainer(strategy, accumulate_grad_batches=2, max_epochs=1)
    trainer.fit(LitClearsOther(), data)
