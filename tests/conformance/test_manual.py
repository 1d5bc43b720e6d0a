"""Manual optimization without microbatches matches Lightning, also with replicas and on resume."""

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_ptdp.data_parallel import ManualOptimizationError
from tests.conformance.toys import (
    FEATURES,
    ONE,
    LitNet,
    Place,
    assert_weights,
    loader,
    make_trainer,
    weights,
)

pytestmark = pytest.mark.thorough


class LitGAN(LitNet):
    """A generator and a critic with separate optimizers, a closure, a scheduler and manual gradient
    accumulation."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(FEATURES + 1, 8), nn.Tanh(), nn.Linear(8, 1))

    def judge(self, x, y):
        return self.critic(torch.cat([x, y], -1)).mean()

    def training_step(self, batch, batch_idx):
        x, y = batch
        generator, critic = self.optimizers()
        self.toggle_optimizer(generator)
        assert not any(p.requires_grad for p in self.critic.parameters())
        loss = -self.judge(x, self.net(x)) + self.loss(batch)
        generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(generator, gradient_clip_val=0.5)
        generator.step()
        self.untoggle_optimizer(generator)

        def closure():
            loss = self.judge(x, self.net(x).detach()) - self.judge(x, y)
            self.manual_backward(loss / 2)
            return loss

        with critic.toggle_model():
            if batch_idx % 2:
                critic.step(closure=closure)
                critic.zero_grad()
            else:
                closure()
        self.log("loss", loss, prog_bar=True)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        generator = torch.optim.Adam(self.net.parameters(), lr=1e-2, eps=1e-5)
        critic = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        return [generator, critic], [torch.optim.lr_scheduler.ExponentialLR(generator, 0.5)]


def fit(place, path, *, epochs, resume=False, **settings):
    L.seed_everything(1, verbose=False)
    trainer = make_trainer(place, max_epochs=epochs, **settings)
    trainer.fit(LitGAN(), loader(), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_two_optimizers_train_and_resume_like_lightning(precision, tmp_path):
    expected = fit(ONE, tmp_path / "reference.ckpt", epochs=4, precision=precision)
    ours = Place(layout={})
    fit(ours, tmp_path / "half.ckpt", epochs=2, precision=precision)
    found = fit(ours, tmp_path / "half.ckpt", epochs=4, precision=precision, resume=True)
    assert found.global_step == expected.global_step
    assert_weights(weights(found), weights(expected))
    for optimizer, other in zip(found.optimizers, expected.optimizers, strict=True):
        assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
        states, others = list(optimizer.state.values()), list(other.state.values())
        assert len(states) == len(others) > 0
        for state, wanted in zip(states, others, strict=True):
            torch.testing.assert_close(state, wanted, rtol=1e-5, atol=1e-5)


class LitRouted(LitGAN):
    """Accumulates over two batches without toggling; only some replicas use one of its layers."""

    def __init__(self):
        super().__init__()
        self.rare, self.never = nn.Linear(1, 1), nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        generator, critic = self.optimizers()
        loss = self.loss(batch)
        if float(y[0]) > 0.2:
            loss = loss + self.rare(y).square().mean()
        critic_loss = self.judge(x, self.net(x).detach()) - self.judge(x, y)
        self.manual_backward(loss)
        if batch_idx % 2 == 0:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(critic_loss)
            return
        self.manual_backward(critic_loss)
        for optimizer in (generator, critic):
            optimizer.step()
            optimizer.zero_grad()
        assert self.never.weight.grad is None
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self):
        rest = [p for part in (self.net, self.rare, self.never) for p in part.parameters()]
        generator = torch.optim.AdamW(rest, lr=1e-2, eps=1e-5, weight_decay=0.1)
        return [generator, torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)], []


class LitUnseen(LitGAN):
    def training_step(self, batch, batch_idx):
        self.loss(batch).backward()


def fit_replicas(rank, place, module, path, saves):
    """Train with the batches of a single process split over the replicas."""
    trainer = make_trainer(place, max_epochs=3)
    sampler = torch.utils.data.DistributedSampler(
        range(32), num_replicas=place.world_size, rank=rank, shuffle=False
    )
    trainer.fit(module(), loader(batch_size=8 // place.world_size, sampler=sampler))
    if saves:
        trainer.save_checkpoint(path)
    return weights(trainer), {
        name: float(value) for name, value in trainer.callback_metrics.items()
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_train_like_single_process(world_size, conformance, tmp_path):
    args = (LitGAN, str(tmp_path / "a.ckpt"), True)
    ((expected, _),) = conformance.expected(fit_replicas, ONE, *args)
    found = conformance.ranks(fit_replicas, Place(world_size=world_size), *args)
    for one, _ in found:
        assert_weights(one, expected)
        assert_weights(one, found[0][0], tolerance=0)
    assert len(torch.load(tmp_path / "a.ckpt")["optimizer_states"]) == 2


def test_unused_parameters_and_accumulation_match_ddp(conformance):
    places = Place(world_size=2), Place(world_size=2, reference="ddp_find_unused_parameters_true")
    conformance.check(fit_replicas, places, LitRouted, "", False)


def see_nothing(rank):
    try:
        make_trainer(Place(world_size=2), max_steps=1).fit(LitUnseen(), loader())
    except ManualOptimizationError as error:
        return str(error)
    return ""


def test_direct_backward_call_is_refused_with_replicas(pool):
    assert all(
        "Call self.manual_backward(loss) instead" in told
        for told in pool.run(see_nothing, world_size=2)
    )


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        ({"shard": "optimizer"}, "shard='optimizer'"),
        ({"reduce_dtype": "bfloat16"}, "reduce_dtype='bfloat16'"),
    ],
)
def test_unsupported_option_is_refused_before_launch(layout, word):
    trainer = make_trainer(Place(world_size=2, layout=layout | {"start_method": "fork"}))
    with pytest.raises(
        MisconfigurationException, match=rf"manual optimization\) (cannot run with|ignores) {word}"
    ):
        trainer.fit(LitGAN(), loader())
