"""Manual optimization in one process without microbatches is Lightning's own: two optimizers, toggled, saved and continued."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from tests.conformance.toys import FEATURES, ONE, LitNet, Place, assert_weights, loader, make_trainer, weights


class LitGAN(LitNet):
    """A generator and a critic that share the batch, not the optimizer; closures, schedulers and gradient accumulation by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(FEATURES + 1, 8), nn.Tanh(), nn.Linear(8, 1))

    def judge(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.critic(torch.cat([x, y], -1)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
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

        def closure() -> torch.Tensor:
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

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam(self.net.parameters(), lr=1e-2, eps=1e-5)
        critic = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        return [generator, critic], [torch.optim.lr_scheduler.ExponentialLR(generator, 0.5)]


def fit(place: Place, path: Any, *, epochs: int, resume: bool = False, **settings: Any) -> L.Trainer:
    L.seed_everything(1, verbose=False)
    trainer = make_trainer(place, max_epochs=epochs, **settings)
    trainer.fit(LitGAN(), loader(), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_two_optimizers_train_and_continue_as_lightnings_own(precision: str, tmp_path: Any) -> None:
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
