"""Buffers and parameters built in ``configure_model`` or later are restored or refused."""

import copy

import pytest
import torch
from torch import nn

from tests.conformance.toys import FEATURES, P2, PLACES, LitNet, Place, loader, make_trainer
from tests.pool import WorkerFailure


class LitStatistics(LitNet):
    """Parameters built in ``__init__``, running statistics in ``configure_model``."""

    def __init__(self):
        super().__init__()
        self.norm = None

    def configure_model(self):
        if self.norm is None:
            self.norm = nn.BatchNorm1d(FEATURES, affine=False)

    def loss(self, batch):
        return super().loss((self.norm(batch[0]), batch[1]))


def test_buffers_built_in_configure_model_are_restored(tmp_path):
    module, path = LitStatistics(), str(tmp_path / "last.ckpt")
    trainer = make_trainer(Place(), max_epochs=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    found = LitStatistics()
    make_trainer(Place()).validate(found, loader(), ckpt_path=path, verbose=False)
    assert torch.equal(
        found.state_dict()["norm.running_mean"], module.state_dict()["norm.running_mean"]
    )
    assert found.state_dict()["norm.running_mean"].abs().sum() > 0


class LitBuffer(LitNet):
    def configure_model(self):
        self.register_buffer("scale", torch.rand(2))


def test_buffer_without_initializer_is_refused():
    with pytest.raises(
        ValueError, match=r"LitBuffer.*meta device.*reset_parameters.*meta_init=False"
    ):
        make_trainer(Place()).fit(LitBuffer(), loader())


def test_buffer_without_initializer_is_refused_before_launch():
    with pytest.raises(
        ValueError, match=r"^LitBuffer.*meta device.*reset_parameters.*meta_init=False"
    ):
        make_trainer(Place(world_size=2, layout=P2)).fit(LitBuffer(), loader())


class LitLate(LitNet):
    """Creates a module in ``configure_optimizers``."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.trains = trains

    def configure_optimizers(self):
        self.teacher = nn.Linear(2, 2).requires_grad_(self.trains)
        return super().configure_optimizers()


def _fit_late(rank, place, trains):
    try:
        make_trainer(place, max_epochs=1).fit(LitLate(trains=trains), loader())
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("name", "trains"), [("one", True), ("p2", False), ("p2", True), ("d2", True), ("one m2", True)]
)
def test_parameter_created_after_distribution_is_refused(name, trains, conformance):
    for told in conformance.ranks(_fit_late, PLACES[name][0], trains):
        assert told.startswith(
            "teacher.weight, teacher.bias: created or replaced after the model was distributed"
        )
        assert "__init__ or configure_model" in told


class LitReplaced(LitNet):
    def __init__(self, hook, *, trains=True):
        super().__init__()
        self.trains = trains
        setattr(self, hook, self.replace_layer)

    def replace_layer(self):
        if self.current_epoch == self.trainer.max_epochs - 1:
            self.net[0] = copy.deepcopy(self.net[0]).requires_grad_(self.trains)


def _fit_replaced(rank, place, hook):
    epochs = 2 if "epoch" in hook else 1
    for trains in (False, True):  # what is frozen needs neither sums nor an optimizer
        make_trainer(place, max_epochs=epochs).fit(LitReplaced(hook, trains=trains), loader())


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_layer_replaced_in_hook_is_refused(hook, conformance):
    with pytest.raises(WorkerFailure, match=r"net\.0\.weight, net\.0\.bias: created or replaced"):
        conformance.ranks(_fit_replaced, PLACES["d2"][0], hook)


def test_frozen_parameter_may_be_created_late():
    assert _fit_late(0, Place(), trains=False) == "trained"
