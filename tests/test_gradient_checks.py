"""Reports of NaN losses, parameters without gradients and parameters frozen late."""

import warnings

import lightning.pytorch as L
import pytest
import torch

from lightning_ptdp.checkpoint.save_agreement import own_rank
from lightning_ptdp.engine.optimization import NonFiniteError
from lightning_ptdp.strategy import PTDPStrategy
from tests.conformance.toys import LitNet, loader
from tests.letters import M, P, Z
from tests.parity import make_trainer

pytestmark = pytest.mark.thorough


class LitPoisoned(LitNet):
    """Module whose fourth loss on the last rank is NaN."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.calls = getattr(self, "calls", 0) + 1
        poisoned = own_rank() == self.trainer.world_size - 1 and self.calls == 4
        loss = output["loss"] if isinstance(output, dict) else output
        return loss * float("nan") if poisoned else loss


class LitUncounted(LitNet):
    """Module whose first batch on the last rank has no tokens, so its mean loss is NaN."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        keep = torch.full(
            (len(y),), self.trainer.global_rank < self.trainer.world_size - 1 or batch_idx > 0
        )
        return {
            "loss": torch.nn.functional.mse_loss(self.net(x)[keep], y[keep]),
            "num_tokens": keep.sum(),
        }


class LitRow(LitNet):
    """Module whose loss is a row of one element."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return (output["loss"] if isinstance(output, dict) else output).view(1)


class LitUnused(LitNet):
    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)


class LitFreezes(LitNet):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            next(self.parameters()).requires_grad_(False)


class LitFreezesInStep(LitNet):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            next(self.parameters()).requires_grad_(False)
        return super().training_step(batch, batch_idx)


def _fit(rank, module, world_size, layout, accumulate=1):
    """Train and return the error, the warnings and whether all weights are finite."""
    L.seed_everything(1, verbose=False)
    trainer = make_trainer(
        PTDPStrategy(**layout), world_size, max_epochs=1, accumulate_grad_batches=accumulate
    )
    raised = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module(), loader())
        except (NonFiniteError, ValueError) as error:
            raised = f"{type(error).__name__}: {error}"
    finite = all(value.isfinite().all() for value in trainer.lightning_module.state_dict().values())
    return raised, [str(warning.message) for warning in caught], bool(finite)


@pytest.mark.parametrize(
    "layout", [{}, {M: 2}, {Z: "optimizer"}], ids=["d2", "d2 m2", "d2 sharded"]
)
def test_nan_loss_with_zero_tokens_is_accepted(layout, pool):
    for raised, _, finite in pool.run(
        _fit, world_size=2, args=(LitUncounted, 2, {**layout, "check_finite": "raise"})
    ):
        assert (raised, finite) == ("", True)


@pytest.mark.parametrize("layout", [{}, {M: 2}])
def test_loss_in_row_is_checked(layout, pool):
    ((raised, _, finite),) = pool.run(
        _fit, world_size=1, args=(LitRow, 1, {**layout, "check_finite": "raise"})
    )
    assert (raised, finite) == ("", True)


@pytest.mark.parametrize("layout", [{}, {P: 2, M: 2, "schedule": "zb_h1"}], ids=["one", "zb_h1"])
def test_parameters_with_gradients_are_not_reported(layout, pool):
    size = layout.get(P, 1)
    for _, texts, _ in pool.run(
        _fit, world_size=size, args=(LitNet, size, {**layout, "check_finite": "raise"}, 2)
    ):
        assert not [text for text in texts if "no loss depends" in text]


def test_nan_is_found_in_single_process_without_microbatches(pool):
    ((raised, _, finite),) = pool.run(
        _fit, world_size=1, args=(LitPoisoned, 1, {"check_finite": "raise"})
    )
    assert "the loss of microbatch 0 on rank 0" in raised
    assert finite


PLACES = {
    "one": (1, {M: 2}),
    "d2": (2, {M: 2}),
    "d2 sharded": (2, {M: 2, Z: "optimizer"}),
    "p2": (2, {P: 2, M: 2}),
}


@pytest.mark.parametrize("name", PLACES)
def test_nan_is_traced_to_rank_and_microbatch(name, pool):
    world_size, layout = PLACES[name]
    ranks = pool.run(
        _fit,
        world_size=world_size,
        args=(LitPoisoned, world_size, {**layout, "check_finite": "raise"}),
    )
    for raised, _, finite in ranks:
        assert raised.startswith("NonFiniteError: the gradient of '")
        assert f"the loss of microbatch 1 on rank {world_size - 1}" in raised
        assert finite
    ranks = pool.run(
        _fit,
        world_size=world_size,
        args=(LitPoisoned, world_size, {**layout, "check_finite": "skip"}),
    )
    assert all(finite and not raised for raised, _, finite in ranks)
    assert any("a step was skipped: the gradient of '" in text for text in ranks[0][1])


@pytest.mark.parametrize("name", ["d2", "d2 sharded"])
def test_parameters_without_gradient_are_named_once(name, pool):
    told = [
        text
        for _, texts, _ in pool.run(_fit, world_size=2, args=(LitUnused, 2, PLACES[name][1]))
        for text in texts
    ]
    assert [text.split(" (")[0] for text in told if "no loss depends" in text] == [
        "no loss depends on spare.bias, spare.weight"
    ]


@pytest.mark.parametrize("name", ["one", "d2", "p2"])
def test_parameter_frozen_in_step_of_microbatches_is_refused(name, pool):
    size, layout = PLACES[name]
    ranks = pool.run(_fit, world_size=size, args=(LitFreezesInStep, size, layout))
    for raised, _, _ in ranks:
        assert raised.startswith("ValueError: requires_grad of '")
        assert "has become False in training_step" in raised
        assert "on_train_batch_start" in raised


def test_parameter_frozen_after_setup_is_refused(pool):
    for raised, _, _ in pool.run(_fit, world_size=2, args=(LitFreezes, 2, {Z: "optimizer"})):
        assert raised.startswith("ValueError: requires_grad of '")
        assert "has become False" in raised
