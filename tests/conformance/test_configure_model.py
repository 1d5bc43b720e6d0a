"""``configure_model`` may build nothing but buffers, which are as much without values as parameters
are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.toys import FEATURES, P2, Conformance, LitNet, Place, loader, make_trainer


class LitStatistics(LitNet):
    """Its parameters are there; the statistics that it keeps are not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: Any = None

    def configure_model(self) -> None:
        if self.norm is None:
            self.norm = nn.BatchNorm1d(FEATURES, affine=False)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((self.norm(batch[0]), batch[1]))


def test_buffers_that_are_built_late_are_restored(tmp_path: Path) -> None:
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
    def configure_model(self) -> None:
        self.register_buffer("scale", torch.rand(2))


def test_what_nothing_gives_a_value_is_the_error_that_is_shown() -> None:
    with pytest.raises(
        ValueError, match=r"LitBuffer.*meta device.*reset_parameters.*meta_init=False"
    ):
        make_trainer(Place()).fit(LitBuffer(), loader())


def test_it_is_known_before_launch_where_the_model_is_cut() -> None:
    with pytest.raises(
        ValueError, match=r"^LitBuffer.*meta device.*reset_parameters.*meta_init=False"
    ):
        make_trainer(Place(world_size=2, layout=P2)).fit(LitBuffer(), loader())


class LitLate(LitNet):
    """Builds something behind ``configure_model``."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.trains = trains

    def configure_optimizers(self) -> Any:
        self.teacher = nn.Linear(2, 2).requires_grad_(self.trains)
        return super().configure_optimizers()


def _fit_late(rank: int, place: Place, trains: bool) -> str:
    try:
        make_trainer(place, max_epochs=1).fit(LitLate(trains=trains), loader())
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("place", "trains"),
    [(Place(), True), (Place(world_size=2, layout=P2), False)],
    ids=["one", "p2"],
)
def test_a_parameter_that_was_not_laid_out_is_named(
    place: Place, trains: bool, conformance: Conformance
) -> None:
    for told in conformance.ranks(_fit_late, place, trains):
        assert told.startswith(
            "teacher.weight, teacher.bias: created or replaced after the model was distributed"
        )


def test_what_is_frozen_and_the_same_everywhere_may_come_late() -> None:
    assert _fit_late(0, Place(), trains=False) == "trained"
