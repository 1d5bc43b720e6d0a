"""Backwards that differ from one call for each batch that completes each gradient once."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

from tests.conformance.toys import (
    LitNet,
    Place,
    assert_weights,
    make_trainer,
    samples,
    weights,
)
from tests.letters import M, Z


class LitOnce(LitNet):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LitGraph(LitOnce):
    """Keeps the graph of the gradients, as optimizers that use the Hessian need it."""

    def backward(self, loss):
        loss.backward(create_graph=True)


class LitTwice(LitOnce):
    """Adds two gradients."""

    def backward(self, loss):
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()


class LitReplaces(LitOnce):
    """Replaces each gradient as soon as it is complete."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(scale)


def scale(parameter):
    parameter.grad = 0.5 * parameter.grad


LAYOUTS = {
    "d2": {},
    "d2 sharded": {Z: "optimizer"},
    "d2 sharded gradients": {Z: "gradients"},
    "d2 sharded parameters": {Z: "parameters"},
}


def fit(rank, place, kind):
    trainer = make_trainer(place, use_distributed_sampler=False)
    own = Subset(samples(), range(rank, 32, place.world_size))
    trainer.fit(kind(), DataLoader(own, batch_size=8 // place.world_size))
    return weights(trainer)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", [LitGraph, LitTwice, LitReplaces])
def test_own_backwards_give_weights_of_single_process(kind, name, conformance):
    place = Place(world_size=2, layout={**LAYOUTS[name], "bucket_mb": 1e-3})
    for found, expected in conformance.pairs(fit, place, kind):
        assert_weights(found, expected)


class LitShares(LitOnce):
    """Runs one layer three times, each time in a checkpoint with a backward of its own."""

    def loss(self, batch):
        x, y = batch
        x = self.net[0](x)
        for _ in range(3):
            x = checkpoint(self.net[2], x.relu(), use_reentrant=True)
        return nn.functional.mse_loss(self.net[6](self.net[4](x)), y)


def refuse(rank, place):
    with pytest.raises(ValueError, match=r"'net\.2\.\w+' arrives after .*use_reentrant=False"):
        fit(rank, place, LitShares)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_that_arrives_during_its_sum_is_refused(name, conformance):
    layout = {**LAYOUTS[name], "bucket_mb": 1e-3}
    conformance.ranks(refuse, Place(world_size=2, layout=layout))


class LitInStep(LitOnce):
    """Runs a backward of its own in the step."""

    def training_step(self, batch, batch_idx):
        self.loss((batch[0] + 1, batch[1])).backward()
        return super().training_step(batch, batch_idx)


class LitInHook(LitOnce):
    """Runs a backward of its own in a hook."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self.run_backward)

    def on_train_batch_start(self, batch, batch_idx):
        self.batch = batch[0] + 1, batch[1]

    def run_backward(self, *_):
        self.loss(self.batch).backward()


def fit_with_backward_in_step(rank, place, accumulate, hook=None):
    trainer = make_trainer(place, use_distributed_sampler=False, accumulate_grad_batches=accumulate)
    own = Subset(samples(), range(rank, 32, place.world_size))
    module = LitInStep() if hook is None else LitInHook(hook)
    trainer.fit(module, DataLoader(own, batch_size=8 // place.world_size))
    return weights(trainer)


IN_STEP = {**LAYOUTS, "d2 m2": {M: 2}, "d2 sharded gradients m2": {Z: "gradients", M: 2}}


@pytest.mark.parametrize("name", IN_STEP)
def test_backward_in_step_leaves_nothing(name, conformance):
    place = Place(world_size=2, layout=IN_STEP[name])
    for found, expected in conformance.pairs(fit_with_backward_in_step, place, 1):
        assert_weights(found, expected)


def refuse_in_step(rank, place):
    with pytest.raises(ValueError, match=r"calls backward\(\) itself .*accumulate_grad_batches=1"):
        fit_with_backward_in_step(rank, place, 2)


@pytest.mark.parametrize(
    "place",
    [Place(layout={M: 2}), *(Place(world_size=2, layout=layout) for layout in IN_STEP.values())],
    ids=["m2", *IN_STEP],
)
def test_backward_in_step_between_accumulated_batches_is_refused(place, conformance):
    conformance.ranks(refuse_in_step, place)


KEEPING = "on_before_backward", "on_after_backward", "on_before_optimizer_step"
DROPPING = "on_before_zero_grad", "on_train_batch_end"


@pytest.mark.parametrize("hook", KEEPING)
def test_backward_in_hook_of_microbatches_adds(hook, conformance):
    for accumulate in (1, 2):
        for found, expected in conformance.pairs(
            fit_with_backward_in_step, Place(layout={M: 2}), accumulate, hook
        ):
            assert_weights(found, expected)


@pytest.mark.parametrize("name", IN_STEP)
@pytest.mark.parametrize("hook", DROPPING)
def test_backward_in_hook_before_clearing_leaves_nothing(hook, name, conformance):
    place = Place(world_size=2, layout=IN_STEP[name])
    for found, expected in conformance.pairs(fit_with_backward_in_step, place, 1, hook):
        assert_weights(found, expected)


def refuse_in_hook(rank, place, accumulate, hook):
    with pytest.raises(ValueError, match=r"calls backward\(\) itself"):
        fit_with_backward_in_step(rank, place, accumulate, hook)


@pytest.mark.parametrize("name", IN_STEP)
@pytest.mark.parametrize(
    ("hook", "accumulate"), [*((hook, 1) for hook in KEEPING), ("on_train_batch_end", 2)]
)
def test_backward_in_hook_whose_gradients_stay_is_refused(hook, accumulate, name, conformance):
    place = Place(world_size=2, layout=IN_STEP[name])
    conformance.ranks(refuse_in_hook, place, accumulate, hook)


def test_backward_in_step_of_single_process_accumulates(conformance):
    pairs = conformance.pairs(fit_with_backward_in_step, Place(), 2)
    for found, expected in pairs:
        assert_weights(found, expected)
