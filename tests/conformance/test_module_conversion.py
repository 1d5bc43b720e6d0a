"""Precision plugins that replace modules and parameters, as float8 and quantization plugins do."""

import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_ptdp import ParallelPlan
from tests.conformance.toys import (
    PLACES,
    LitNet,
    Losses,
    Place,
    assert_weights,
    layers,
    loader,
    make_trainer,
    weights,
)

pytestmark = pytest.mark.thorough


class Scaled(nn.Linear):
    """``nn.Linear`` with an additional parameter."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__(old.in_features, old.out_features, device=old.weight.device)
        self.weight, self.bias = (
            nn.Parameter(old.weight.detach().clone()),
            nn.Parameter(old.bias.detach().clone()),
        )
        self.scale = nn.Parameter(torch.full_like(self.bias, 0.5))

    def forward(self, x):
        return super().forward(x) * (self.scale + 0.5)


class Fresh(nn.Linear):
    """``nn.Linear`` with new parameters."""


class Converts(Precision):
    """Replaces every ``nn.Linear``."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.kind = kind

    def convert_module(self, module):
        for name, child in list(module.named_modules()):
            if type(child) is nn.Linear:
                module.set_submodule(name, Scaled(child) if self.kind is Scaled else fresh(child))
        return module


class Copies(Converts):
    """Allocates new layers and copies the values, like Transformer Engine's plugin."""

    def convert_module(self, module):
        for name, child in list(module.named_modules()):
            if type(child) is nn.Linear:
                new = Fresh(child.in_features, child.out_features)
                new.weight.data, new.bias.data = child.weight.data.clone(), child.bias.data.clone()
                module.set_submodule(name, new)
        return module


def fresh(old):
    new = Fresh(old.in_features, old.out_features, device=old.weight.device)
    new.weight, new.bias = (
        nn.Parameter(old.weight.detach().clone()),
        nn.Parameter(old.bias.detach().clone()),
    )
    return new


class LitSplit(LitNet):
    def configure_parallel(self):
        return ParallelPlan(tensor={"net.2": "column", "net.4": "row"})


T2 = Place(world_size=2, layout={"tensor_parallel_size": 2})


def run(rank, place, kind):
    losses = Losses()
    trainer = make_trainer(place, plugins=[Converts(kind)], callbacks=[losses])
    module = LitSplit()
    trainer.fit(module, loader())
    assert not any(type(child) is nn.Linear for child in module.modules())
    return weights(trainer)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(
            (kind, name)
            for kind in (Scaled, Fresh)
            for name in ("d2", "d2 sharded", "p2", "one m2")
        ),
        (Fresh, "t2"),
    ],
)
def test_replaced_parameters_train_like_single_process(kind, name, conformance):
    for found, _ in conformance.check(run, T2 if name == "t2" else name, kind):
        assert any(key.endswith("scale") for key in found) is (kind is Scaled)


@pytest.mark.usefixtures("nothing_starts")
def test_unsplittable_converted_layer_is_refused_before_launch():
    place = Place(world_size=2, layout={**T2.layout, "start_method": "fork"})
    with pytest.raises(
        ValueError, match=r"'net.2' is a Scaled.* its forward is not that of nn.Linear"
    ):
        make_trainer(place, plugins=[Converts(Scaled)]).fit(LitSplit(), loader())


class LitLate(LitSplit):
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = layers()


def run_late(rank, place, plugin, module=LitLate):
    trainer = make_trainer(place, plugins=[plugin(Fresh)] if plugin is not None else None)
    trainer.fit(module(), loader())
    return weights(trainer)


@pytest.mark.parametrize("place", [PLACES["p2"][0], T2], ids=["p2", "t2"])
def test_module_on_meta_device_is_converted(place, conformance):
    (expected,) = conformance.expected(run_late, Place(), None)
    for found in conformance.ranks(run_late, place, Converts):
        assert_weights(found, expected)


@pytest.mark.parametrize("name", ["one", "d2", "one m2"])
def test_copying_plugin_gets_initialized_module(name, conformance):
    place, _ = PLACES[name]
    expected = conformance.expected(run_late, place, None)[0]
    for found in conformance.ranks(run_late, place, Copies):
        assert_weights(found, expected)


def test_initialized_module_is_converted_on_every_stage(conformance):
    conformance.check(run_late, "p2", Copies, LitSplit)


@pytest.mark.parametrize(
    ("place", "module", "way"),
    [(PLACES["p2"][0], LitLate, r"meta_init=False"), (T2, LitSplit, r"tensor_parallel_size=1")],
    ids=["p2", "t2"],
)
@pytest.mark.usefixtures("nothing_starts")
def test_copying_plugin_without_values_is_refused_before_launch(place, module, way):
    place = Place(world_size=2, layout={**place.layout, "start_method": "fork"})
    with pytest.raises(ValueError, match=rf"Copies\.convert_module.*{way}"):
        make_trainer(place, plugins=[Copies(Fresh)]).fit(module(), loader())
