"""``trainer.fit(torch.compile(module))`` trains whole models and is refused if they are split."""

import pytest
import torch

from tests.conformance.toys import (
    P2,
    LitNet,
    Place,
    assert_weights,
    loader,
    make_trainer,
    weights,
)

pytestmark = pytest.mark.thorough


class LitSilent(LitNet):
    """Logs nothing, because compiling Lightning's logging takes a minute."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def test_step(self, batch, batch_idx):
        assert torch.compiler.is_compiling() is self.given_compiled


def fit(rank, place):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    module = LitSilent()
    module.given_compiled = place.folder == "ours"
    given = torch.compile(module, backend="aot_eager") if module.given_compiled else module
    trainer = make_trainer(place, max_epochs=1)
    trainer.fit(given, loader())
    trainer.test(given, loader(), verbose=False)
    return weights(trainer), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ["one", "one m2", "d2"])
def test_compiled_module_trains_like_eager_module(name, conformance):
    for (found, graphs), (expected, _) in conformance.pairs(fit, name):
        assert_weights(found, expected)
        assert graphs == 1


LAYOUTS = {"p2": P2, "t2": {"tensor_parallel_size": 2}, "c2": {"context_parallel_size": 2}}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.usefixtures("nothing_starts")
def test_compiled_module_is_refused_if_layout_splits_it(name):
    trainer = make_trainer(Place(world_size=2, layout={**LAYOUTS[name], "start_method": "fork"}))
    with pytest.raises(Exception, match=r"given torch.compile\(module\).*compile='blocks'"):
        trainer.fit(torch.compile(LitNet(), backend="aot_eager"), loader())
