"""Tests of values that a model's loop or its forward hooks collect over the blocks.

They are complete on the last stage, or their use is refused.
"""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_ptdp.pipeline.crossing import StageError
from tests.pipeline.crossing_models import (
    RANGES,
    WIDTH,
    Base,
    Block,
    Emulated,
    as_the_whole,
    build,
    ids,
)


class AllHidden(Base):
    """Sums the outputs of all blocks."""

    def run_blocks(self, x, ids):
        hidden = ()
        for layer in self.layers:
            x = layer(x)
            hidden += (x,)
        return sum(h * (k + 1) for k, h in enumerate(hidden))


class RouterBlock(Block):
    def forward(self, x, other=None):
        logits = self.other(x)
        return self.mix(x, x), {
            "loss": logits.square().mean(),
            "chosen": logits.argmax(-1),
            "kept": None,
        }


class Routers(Base):
    """Each block returns a router loss and integer indices."""

    def __init__(self):
        super().__init__(RouterBlock)

    def run_blocks(self, x, ids):
        losses, chosen = 0, []
        for layer in self.layers:
            x, router = layer(x)
            losses = losses + router["loss"]
            chosen.append(router["chosen"])
        return x + losses + sum((k + 1) * c for k, c in enumerate(chosen)).unsqueeze(-1)


class Repeated(AllHidden):
    """Each module is two layers, both of one stage."""

    def __init__(self):
        super().__init__()
        first, *_, last = self.layers
        self.layers = nn.ModuleList([first, first, last, last])


def test_module_that_is_several_layers_has_an_output_for_each():
    as_the_whole(Repeated, collects=True, ranges=((0, 2), (2, 4)))


class Hooked(Base):
    """Hooks on the blocks, their submodules and the embedding; one changes the output."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.embedding.register_forward_hook(self.keep)
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(
                self.keep_with_kwargs if index % 2 else self.keep, with_kwargs=bool(index % 2)
            )
            layer.own.register_forward_hook(self.keep)
            layer.register_forward_hook(self.halve)
            layer.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.seen.append(output)

    def keep_with_kwargs(self, module, args, kwargs, output):
        self.seen.append(output)
        return output

    def halve(self, module, args, output):
        return output / 2

    def run_blocks(self, x, ids):
        x = self.chain(x)
        seen, self.seen = self.seen, []
        assert len(seen) == 13
        return x + sum(s * (k + 1) for k, s in enumerate(seen))

    def forward(self, ids):
        self.seen = []
        return super().forward(ids)


@pytest.mark.parametrize("ranges", [RANGES, ((0, 2), (2, 4)), ((0, 3), (3, 4))])
@pytest.mark.parametrize("model", [AllHidden, Routers])
def test_collected_block_outputs_match_whole_model(model, ranges):
    as_the_whole(model, collects=True, ranges=ranges)


@pytest.mark.parametrize("collects", [False, True])
def test_forward_hooks_run_on_blocks_of_all_stages(collects):
    as_the_whole(Hooked, collects=collects)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("model", [AllHidden, Routers])
def test_collecting_outputs_without_collects_is_refused(model, training):
    stages = Emulated(build(model))
    with (
        torch.set_grad_enabled(training),
        pytest.raises(StageError, match=r"ParallelPlan\(collects=True\)"),
    ):
        stages.forward(ids(), training=training)


def test_collected_output_is_sent_once():
    stages = as_the_whole(AllHidden, collects=True)
    stages.forward(ids(), training=True)
    assert [len(crossing.tensors) for crossing in stages.crossings] == [1, 3]
    assert all(
        tensor.shape == (2, 5, WIDTH)
        for crossing in stages.crossings
        for tensor in crossing.tensors
    )


class KeepingBlock(Block):
    def __init__(self):
        super().__init__()
        self.loss = 0.0

    def forward(self, x, other=None):
        self.loss = self.other(x).square().mean()
        return self.mix(x, x)


class Keeping(Base):
    """Each block stores a loss in an attribute; the model sums it over all modules."""

    def __init__(self):
        super().__init__(KeepingBlock)

    def run_blocks(self, x, ids):
        return self.chain(x) + sum(
            module.loss for module in self.modules() if hasattr(module, "loss")
        )


class DeeplyKept(Block):
    def forward(self, x, other=None):
        self.own.seen = [x.detach()]
        return self.mix(x, x)


class Read(Base):
    """Model that reads attributes set by its blocks in forward."""

    def __init__(self):
        super().__init__(DeeplyKept)
        for layer in self.layers:
            layer.own.seen = []

    def run_blocks(self, x, ids):
        return self.chain(x) + sum(sum(layer.own.seen) for layer in self.layers)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Keeping, r"'layers.0.loss' is a number with a gradient|'loss' of a block on"),
        (Read, "'own.seen' of a block on another"),
    ],
)
def test_reading_attributes_set_by_blocks_is_refused(model, words, training):
    with torch.set_grad_enabled(training), pytest.raises(StageError, match=words):
        Emulated(build(model)).forward(ids(), training=training)


class Timed(Base):
    """Model whose forward hooks need state stored by their pre-hooks."""

    def __init__(self):
        super().__init__()
        self.open = set()
        for name, module in [
            (n, m) for layer in self.layers for n, m in layer.named_modules(prefix=str(id(layer)))
        ]:
            module.register_forward_pre_hook(partial(self.begin, name))
            module.register_forward_hook(partial(self.end, name))

    def begin(self, name, module, args):
        self.open.add(name)

    def end(self, name, module, args, output):
        self.open.remove(name)


def test_forward_hook_runs_only_after_its_pre_hook():
    as_the_whole(Timed, collects=False)


def test_removed_hook_is_not_called_on_other_stages():
    whole = build(Base)
    handles = [
        layer.register_forward_hook(lambda *_: pytest.fail("it was removed"))
        for layer in whole.layers
    ]
    stages = Emulated(whole)
    for part in stages.parts:
        for layer in part.layers:
            layer._forward_hooks.clear()
    stages.forward(ids(), training=True)
    assert [len(crossing.tensors) for crossing in stages.crossings] == [1, 1]
    assert len(handles) == 4
